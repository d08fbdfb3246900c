"""Runs each transcript beside this file, in an empty folder, and compares what the commands print.

    # A remark, for the reader.
    $ kvspec replay @a_trim_frees_the_tail
    what is printed; a line of stderr begins with "! "
    (exit 1)

`kvspec` runs in this process, anything else in a shell. The exit code stands there unless it is 0.
KVSPEC/ is the root of the repository. Seconds, speeds and absolute paths are replaced: runs differ in them.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ci import cli

HERE = Path(__file__).parent
ROOT = Path(cli.__file__).parents[1]
INSIDE = cli.__name__.removesuffix("ci.cli")  # "kvspec.", where the wheel is tested
VOLATILE = (
    (r"\b\d+(\.\d+)? (s|ms|us)\b", "N \\2"),
    (r"\b\d+\.\d+s\b( \(\d+:\d\d:\d\d\))?", "N s"),
    (r"\(?\b[\d,]+ commands/s\)?", "N commands/s"),
    (r'"(seconds|\w+_s|commands_per_s)": [\d.]+', '"\\1": N'),
    (r"(?m)^((?:sessions|tree|both|all) .*?) +\d+$", "\1 N"),  # commands/s of a row
    (r"(?m)^(machine .*) +(commands/s)$", "\1 \2"),
    (r"(?m)^─+$", "───"),  # as wide as the table
    (r"\b\d+ of \d+ clauses reached", "N clauses reached"),  # whatever clauses there are
)
# a slow machine prints some
PROGRESS = re.compile(r"\d+ s: .*; \d+ commands, \d+ clauses? violated$")


def steady(text: str, folder: Path) -> str:
    """Return the text without what differs between two runs."""
    text = (
        text.replace(str(folder), ".")
        .replace(str(ROOT), "KVSPEC")
        .replace(f"{INSIDE}impl.", "impl.")
    )
    for pattern, becomes in VOLATILE:
        text = re.sub(pattern, becomes, text)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def type_command(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run one line. Returns its exit code, stdout and stderr."""
    name, _, rest = line.partition(" ")
    if name != "kvspec":
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", "-c", line.replace("KVSPEC/", f"{ROOT}/")]
        env = {**os.environ, "PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        return done.returncode, done.stdout, done.stderr
    rest = rest.replace("KVSPEC/", f"{ROOT}/").replace(" impl.", f" {INSIDE}impl.")
    code = cli.run(shlex.split(rest))
    captured = capsys.readouterr()
    for text in captured:
        assert text.replace("\n", "").isprintable(), "control characters in a pipe"
        assert "Traceback" not in text
    return code, captured.out, captured.err


def play_transcript(script: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the transcript with what its commands print now."""
    blocks = []
    for block in re.split(r"^(?=\$ )", script, flags=re.MULTILINE):
        if not block.startswith("$ "):
            blocks.append(block)
            continue
        line = block.partition("\n")[0]
        remarks = re.search(r"\n\n((?:# \S.*\n)+)\Z", block)
        code, out, err = type_command(line.removeprefix("$ "), capsys)
        marked = "".join(f"! {text}\n" for text in err.splitlines() if not PROGRESS.match(text))
        ended = f"(exit {code})\n" if code else ""
        blocks.append(
            f"{line}\n{steady(out + marked, folder)}{ended}\n{remarks[1] if remarks else ''}"
        )
    return "".join(blocks).rstrip() + "\n"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_transcript(path, tmp_path, capsys, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    expected = path.read_text(encoding="utf-8")
    seen = play_transcript(expected, tmp_path, capsys)
    if request.config.getoption("accept"):
        path.write_text(seen, encoding="utf-8")
    assert seen == expected, f"accept what is right: pytest {Path(__file__).parent} --accept"
