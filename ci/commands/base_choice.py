"""The base of a check: what the user names, or else the checkout's own history, or else a release."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ci.commands.shared import SystemSelector, Unusable, note, unusable
from impl.adapter import AnySystem
from impl.system_spec import ENGINES, SystemSpec, system_spec

if TYPE_CHECKING:
    from impl.process.remote_system import WorkerSystem
    from stateful_tests.check.known_faults.masks import Mask
    from stateful_tests.check.trees.base_selection import Base, BaseKind
    from stateful_tests.check.trees.changed_functions import Changes
    from stateful_tests.check.trees.tree_history import Revision
    from stateful_tests.lockstep.known_faults import KnownFault
    from stateful_tests.lockstep.run_results import Run

OF_HISTORY = "git:"  # before a revision


def with_system(
    base_name: str | None, selector: SystemSelector, since: str | None, opened: ExitStack
) -> tuple[Base | None, AnySystem]:
    """Yield the base of a check, None without one, and the system that `selector` names.

    base_name: the value of --base.
    opened: keeps both until the check ends.
    """
    from stateful_tests.check.trees.base_selection import BaseKind

    if base_name is not None and not base_name.startswith(
        OF_HISTORY
    ):  # refused before anything is resolved
        before = opened.enter_context(closing(named_base(base_name, selector)))
        system = opened.enter_context(closing(selector.resolve()))
        return _with_distance(before, system), system
    system = opened.enter_context(closing(selector.resolve()))
    if base_name is not None:
        revision = _revision(base_name.removeprefix(OF_HISTORY), "--base", selector, system)
        with unusable(f"--base {base_name:.80}: ", Unusable):
            return _base_in_history(revision, BaseKind.STATED, selector, system, opened), system
    return default_base(selector, since, system, opened), system


def default_base(
    selector: SystemSelector, since: str | None, system: AnySystem, opened: ExitStack
) -> Base | None:
    """Return the base of a system where the user names none. A checkout has its own history, or else a
    release. Other systems have none.

    opened: keeps the base.
    """
    from stateful_tests.check.trees.base_selection import BaseKind

    if selector.checkout is None:
        return None
    if (own_revision := _own_revision(system, since)) is not None:
        try:
            base = _base_in_history(own_revision, BaseKind.HISTORY, selector, system, opened)
        except Unusable as error:
            note(f"{own_revision.name} ({own_revision.why}) cannot be driven: {error}. The base is a release")
        else:
            if since is not None or own_revision.is_head or not _is_far(base, system):
                return base
    return _nearest_release(selector, system, opened)


def _is_far(base: Base, system: AnySystem) -> bool:
    """Return whether a release is twice as near to a checkout as the merge base: more than half of the
    changes are upstream's then, as where the known branch is an old one. A note says so."""
    from impl.loading.nearest import differing, nearest

    engine = system_spec(system).engine
    near = nearest(engine, _checkout_root(system))
    if base.lines is None or base.lines <= 2 * near.lines:
        return False
    note(
        f"{base.text}; {engine}=={near.release} is nearer ({differing(near.lines)}): the base is that"
        f" release. --base {base.name} compares with the commit"
    )
    return True


@dataclass
class KnownFaults:
    """Names the known faults of traces that are replayed on a system, with the base that a check of it
    has.

    stated: the base that the user has named.
    opened: keeps the base of a checkout, which is loaded at the first violation.
    """

    selector: SystemSelector
    system: AnySystem
    opened: ExitStack
    stated: Base | None = None

    @cached_property
    def _base(self) -> Base | None:
        return self.stated or default_base(self.selector, None, self.system, self.opened)

    @cached_property
    def _masks(self) -> list[Mask]:
        from stateful_tests.check.known_faults.masks import masks

        return [*masks(self.system, self._base and self._base.system)]

    def changes(self, run: Run) -> Changes | None:
        """Return the functions that a violating run calls and that differ from the base; None without a
        base."""
        from stateful_tests.check.trees.changed_functions import differences_from_base

        if run.violation is None or self._base is None:
            return None
        return differences_from_base(self._base, self.system, chain(*run.called))

    def of(self, run: Run) -> KnownFault | None:
        """Return the known fault that explains the violation of a trace, if there is one."""
        from stateful_tests.check.known_faults.explanation import known_fault, known_fault_beside

        if run.violation is None or self._base is None:
            return known_fault(self.system, run)
        return known_fault_beside(self._base.system, self._masks, self.system, run)


def named_base(name: str, selector: SystemSelector) -> AnySystem:
    """Load a base by its name, or a checkout; driven in the same ways as `selector`."""
    from stateful_tests.lockstep import system_names

    folder = name if Path(name).is_dir() else None
    of_folder = selector.spec.engine if selector.spec.engine in ENGINES else "sglang"
    base = SystemSpec.parse(name) if folder is None else SystemSpec(of_folder)
    with unusable(f"--base {name:.80}: ", Unusable):
        spec = system_names.as_base(base, selector.spec)
        system: AnySystem = SystemSelector(spec, folder, selector.device).resolve()
        if folder is not None:
            _start_once(system)
            _has_files(system).name = _folder_name(folder)
    return system


def _folder_name(folder: str) -> str:
    """Return the name of a folder with the commit that is checked out there, if it has one."""
    from stateful_tests.check.trees.tree_history import git

    with suppress(ValueError):
        return f"{folder} at {git(Path(folder), 'rev-parse', '--short=9', 'HEAD').strip()}"
    return folder


def _has_files(system: AnySystem) -> WorkerSystem:
    """Return whether a system is a release or a checkout, whose files a worker drives."""
    return cast("WorkerSystem", system)


def _checkout_root(system: AnySystem) -> Path:
    """Return the folder of a checkout's files."""
    root = _has_files(system).root
    assert root is not None
    return root


def _start_once(system: AnySystem) -> None:
    """Start a system once, to test that it loads. A base that breaks then shows it in its runs."""
    from impl.process.failures import SystemFailed
    from stateful_tests.check.check_plans import sizes_for
    from stateful_tests.lockstep.driven_kinds import lockstep_of

    kind = system.capabilities.system_kind
    smallest, *_ = lockstep_of(kind).presets_for(system.capabilities)
    with unusable("it does not load: "), suppress(SystemFailed):
        system.reset(sizes_for(kind.machine or "sessions", smallest))


def _revision(base: str, option: str, selector: SystemSelector, system: AnySystem) -> Revision:
    from stateful_tests.check.trees import tree_history

    if selector.checkout is None:
        raise Unusable(
            f"{option} {OF_HISTORY}{base:.80}: goes with a checkout, such as --sglang-path"
        )
    with unusable(f"{option} {OF_HISTORY}{base:.80}: ", ValueError):
        return tree_history.named_revision(_checkout_root(system), base)


def _own_revision(system: AnySystem, since: str | None) -> Revision | None:
    """Return the commit since which the changes of a checkout are its own, if its history shows one."""
    from stateful_tests.check.trees import tree_history

    spec = system_spec(system)
    if not spec.checkout or not tree_history.has_history(_checkout_root(system), spec.engine):
        return None
    if since is not None:
        with unusable(f"--since {since:.80}: ", ValueError):
            tree_history.named_revision(_checkout_root(system), since)
    try:
        return tree_history.own_base(_checkout_root(system), since)
    except ValueError as error:
        note(f"{error}. The base is a release")
        return None


def _base_in_history(
    revision: Revision, kind: BaseKind, selector: SystemSelector, system: AnySystem, opened: ExitStack
) -> Base:
    """Load a commit of the checkout's history, driven in the same ways. Raises Unusable."""
    folder = _folder_of(revision, selector, system, opened)
    past = SystemSelector(selector.spec, str(folder), selector.device)
    before: AnySystem = past.resolve(quiet=True)
    opened.enter_context(closing(before))
    _start_once(before)
    _has_files(before).name = revision.name
    return _with_distance(before, system)._replace(kind=kind, why=revision.why, commit=revision.commit)


def _folder_of(
    revision: Revision, selector: SystemSelector, system: AnySystem, opened: ExitStack
) -> Path:
    """Return a folder with the driven files of a commit of the checkout `system`. Raises Unusable.

    opened: keeps the folder.
    """
    from stateful_tests.check.trees import tree_history

    assert selector.checkout is not None
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvspec-base-")))
    root = _checkout_root(system)
    with unusable("", ValueError):
        below = root.relative_to(Path(selector.checkout).expanduser().resolve())
        tree_history.extract(root, revision.commit, selector.spec.engine, folder / below)
    return folder


def commit_folder(
    named: str, option: str, selector: SystemSelector, system: AnySystem, opened: ExitStack
) -> tuple[str, str]:
    """Return a folder with the driven files of `git:REV` of the checkout `system`, and the name of that
    commit.

    option: the option that names it.
    opened: keeps the folder. Raises Unusable.
    """
    revision = _revision(named.removeprefix(OF_HISTORY), option, selector, system)
    with unusable(f"{option} {named:.80}: ", Unusable):
        return str(_folder_of(revision, selector, system, opened)), revision.name


def _nearest_release(selector: SystemSelector, system: AnySystem, opened: ExitStack) -> Base | None:
    """Return the release that a checkout was taken for, driven in the same ways; the nearest that can be
    driven so where that one cannot. None where none is available."""
    from impl.loading.nearest import distances
    from stateful_tests.check.trees.base_selection import BaseKind

    spec = system_spec(system)
    if not spec.checkout:
        return None
    taken_for = _has_files(system).release
    lines = distances(spec.engine, _checkout_root(system))
    reasons: list[Unusable] = []
    for version in (taken_for, *sorted(lines.keys() - {taken_for}, key=lines.__getitem__)):
        try:
            release = SystemSelector(spec.of_version(version), None, selector.device)
            before = opened.enter_context(closing(release.resolve(quiet=bool(reasons))))
        except Unusable as error:
            reasons.append(error)
            if not spec.ways:  # every release is driven so: this one is unavailable
                break
            continue
        if reasons:
            note(f"{taken_for} is not driven in this way: the base is {version}, the nearest that is")
            _has_files(system).release = version  # whose known faults it may have
        return _with_distance(before, system)._replace(kind=BaseKind.RELEASE)
    note(f"without a base: {reasons[0]}")
    return None


def _with_distance(before: AnySystem, system: AnySystem) -> Base:
    """Return the base with the number of lines by which it differs from the system."""
    from stateful_tests.check.trees.base_selection import Base, BaseKind, lines_between

    return Base(before, BaseKind.STATED, lines=lines_between(system, before))
