"""The git history of a checkout: the state that its changes are compared with, and the files of that."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_DIGITS = 9  # of a commit's hash in reports
# What a checkout may have grown from. A fork's clone has two remotes, and its own main may be far behind.
_UPSTREAM = ("@{upstream}", "origin/HEAD", "origin/main", "origin/master")
_OF_FORK = ("upstream/HEAD", "upstream/main", "upstream/master")
_LOCAL = ("main", "master")  # what a clone without any of these has grown from
# Files that a build makes, so git does not have them: what states the version.
_BUILT = ("_version.py", "version.py")


class Revision(NamedTuple):
    """A commit of a checkout's history.

    why: its relation to the checkout, in words.
    is_head: it is HEAD, and the differences are not committed.
    """

    commit: str
    why: str
    is_head: bool = False

    @property
    def name(self) -> str:
        """The commit as `--base` takes it."""
        return f"git:{self.commit[:_DIGITS]}"


def git(root: Path, *arguments: str) -> str:
    """Return what git prints. Raises ValueError with git's first line where it fails."""
    return git_bytes(root, *arguments).decode(errors="replace")


def git_bytes(root: Path, *arguments: str) -> bytes:
    """Return what git prints, as bytes. Raises ValueError with git's first line where it fails."""
    command = ["git", "-C", str(root), *arguments]
    try:
        process = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        raise ValueError(f"git: {error.strerror}") from None
    if process.returncode:
        words = process.stderr.decode(errors="replace").strip().splitlines() or ["git failed"]
        raise ValueError(words[0].removeprefix("fatal: "))
    return process.stdout


def has_history(root: Path, package: str) -> bool:
    """Return whether the folder of the package under `root` is part of a commit. A folder in a clone of
    something else is not."""
    with suppress(ValueError):
        return bool(git(root, "rev-parse", "--verify", "--quiet", f"HEAD:./{package}"))
    return False


def edited_files(root: Path) -> list[str]:
    """Return the Python files under `root` with changes that are not committed; none where git cannot
    tell."""
    with suppress(ValueError):
        return git(root, "diff", "--relative", "--name-only", "HEAD", "--", "*.py").splitlines()
    return []


def new_files(root: Path) -> list[str]:
    """Return the Python files under `root` that git neither tracks nor ignores. Raises ValueError."""
    return git(root, "ls-files", "--others", "--exclude-standard", "--", "*.py").splitlines()


def named_revision(root: Path, revision: str) -> Revision:
    """Return the commit that `revision` names. Raises ValueError where there is none."""
    commit = _commit_hash(root, revision)
    if not commit:
        raise ValueError(f"bad revision {revision!r:.80}")
    return Revision(commit, "" if commit.startswith(revision) else revision)


def own_base(root: Path, since: str | None = None) -> Revision | None:
    """Return the commit since which the changes of the checkout are its own; None where it has none of
    its own.

    That is the merge base of HEAD with `since`, or else with the upstream branch, or else, in a
    repository that has none, with its own main; of several such branches the latest. Where HEAD is in
    that branch: HEAD, if something is not committed. Raises ValueError where no merge base is known, as
    in a shallow clone.
    """
    head = _commit_hash(root, "HEAD")
    dirty = bool(edited_files(root) or new_files(root))
    upstream = _existing_branches(root, _UPSTREAM + _OF_FORK) or _existing_branches(root, _LOCAL)
    branches = upstream if since is None else _existing_branches(root, (since,))
    points = _merge_bases(root, branches)
    lost = [branch for branch in branches if branch not in points]
    if dirty and head and (head in points.values() or not branches):
        return Revision(head, "HEAD, before what is not committed", is_head=True)
    if any(points.get(branch) == head for branch in _OF_FORK):
        return None
    # A branch that was pushed as it is says nothing.
    before = {branch: commit for branch, commit in points.items() if commit != head}
    if not before and lost:
        raise ValueError(f"no merge base with {lost[0]} (a shallow clone? git fetch --unshallow)")
    if not before:
        return None
    branch = min(before, key=lambda name: _commits_since(root, before[name]))
    return Revision(before[branch], f"merge base with {_full_name(root, branch)}")


def _merge_bases(root: Path, branches: Sequence[str]) -> dict[str, str]:
    """Return the merge base of HEAD with each of these branches; a branch without one is left out."""
    points: dict[str, str] = {}
    for branch in branches:
        with suppress(ValueError):
            points[branch] = git(root, "merge-base", "HEAD", branch).strip()
    return points


def _commits_since(root: Path, commit: str) -> int:
    """Return how many commits HEAD has that `commit` lacks."""
    return int(git(root, "rev-list", "--count", f"{commit}..HEAD"))


def extract(root: Path, commit: str, package: str, folder: Path) -> None:
    """Write the package's Python files of a commit into `folder`, as they lie under `root`, and
    compiled cores that were committed. Build outputs under `root` are added: the stated version, and
    compiled cores where no Rust file changed since.

    Raises ValueError.
    """
    archive = git_bytes(root, "archive", "--format=tar", commit, package)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        chosen = [file for file in files if file.isfile() and file.name.endswith((".py", ".so"))]
        files.extractall(folder, chosen, filter="data")
    for built in (*_build_outputs(root, package), *_compiled_cores(root, commit, package)):
        target = folder / built.relative_to(root)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(built, target)


def _build_outputs(root: Path, package: str) -> Iterator[Path]:
    yield from (file for name in _BUILT if (file := root / package / name).is_file())


def _compiled_cores(root: Path, commit: str, package: str) -> Iterator[Path]:
    if git(root, "diff", "--name-only", commit, "--", ":(top)*.rs").strip():
        return
    for name in git(root, "ls-files", "--others", "--", f"{package}/*.so").splitlines():
        yield root / name


def _commit_hash(root: Path, revision: str) -> str:
    """Return the hash of the commit that a revision names; "" where there is none."""
    with suppress(ValueError):
        return git(root, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
    return ""


def _existing_branches(root: Path, branches: Iterable[str]) -> list[str]:
    return [branch for branch in branches if _commit_hash(root, branch)]


def _full_name(root: Path, branch: str) -> str:
    """Return the name of `@{upstream}`, such as origin/main."""
    with suppress(ValueError):
        name = git(root, "rev-parse", "--abbrev-ref", branch).strip()
        return name or branch
    return branch
