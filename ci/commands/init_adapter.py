"""kvspec init-adapter: an adapter to start from, and its test."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ci.commands.shared import Unusable, force_option, target_file
from stateful_tests.lockstep.exit_codes import Ending

HEAD = '''"""The adapter that connects {title} to kvspec: `kvspec check --impl {name}:make`.

It is a whole toy engine: {about}
"""
'''
_GIVEN_BATCHES = """\
one paged pool, requests without sessions, window or radix tree. Replace its methods
with calls of yours. Keep the stamps: they show which token's KV each slot holds. What your engine cannot do
stays out of `commands`. Lengths are tokens."""
_BY_ITSELF = """\
it picks its batches, preempts, and shares blocks by their hashes, in full and window
groups. Replace its methods with calls of yours. Keep the stamps: they show which token's KV each slot holds.
What your engine cannot do `reset` refuses. Lengths are tokens."""
_TEST_HEAD = '''"""Checks {title} against the specification: `pytest {test}`."""

import kvspec

from {name} import make
'''
_MACHINE = """
Test{title} = kvspec.machine(make).TestCase
"""
_CHECK = '''

def test_it_conforms() -> None:
    """Raises where a clause is violated, and where commands that `Capabilities` has are always refused."""
    kvspec.check(make, examples=20)
'''


@click.command("init-adapter")
@click.argument("name", metavar="MODULE")
@click.option(
    "--kind",
    type=click.Choice(["rows", "blocks"]),
    default="rows",
    show_default=True,
    help="rows: an engine that is given each batch. blocks: one that schedules by itself, as vLLM does.",
)
@force_option
def init_adapter(name: str, kind: str, force: bool) -> int:
    """Write an adapter for your engine, and its test.

    MODULE.py runs at once: it is a toy engine, whose methods yours replace. test_MODULE.py checks it in your
    test suite.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Unusable(f"{name!r:.40}: a module's name has lower-case letters, digits and _ alone")
    title = "".join(part.capitalize() for part in name.split("_"))
    about, body = _toy_engine(kind, name, title)
    test = _TEST_HEAD + (_MACHINE if kind == "rows" else "") + _CHECK
    written_files = {
        f"{name}.py": HEAD.format(name=name, title=title, about=about) + body,
        f"test_{name}.py": test.format(name=name, title=title, test=f"test_{name}.py"),
    }
    files = [target_file(Path(file), force, "init-adapter") for file in written_files]
    for file, text in zip(files, written_files.values()):
        file.write_text(text, encoding="utf-8")
        click.echo(f"wrote   {file}")
    click.echo(f"check   kvspec check --impl {name}:make")
    click.echo(f"test    pytest test_{name}.py")
    if kind == "rows":
        click.echo("else    --kind blocks, if your engine schedules by itself")
    return Ending.CONFORMS


def _toy_engine(kind: str, name: str, title: str) -> tuple[str, str]:
    """Return the description of a toy engine of a kind, and its source as a module of the user's."""
    from impl.examples import block_engine, example_engine

    file, engine, called, about = {
        "rows": (example_engine.__file__, "ExampleEngine", "example", _GIVEN_BATCHES),
        "blocks": (block_engine.__file__, "BlockEngine", "block-engine", _BY_ITSELF),
    }[kind]
    _, _, body = Path(file).read_text(encoding="utf-8").split('"""', 2)
    imported = r"from (kvspec\.)?(impl|reference)(\.\w+)+ import"
    body = re.sub(imported, "from kvspec import", body)
    return about, body.replace(engine, title).replace(f'"{called}"', f'"{name}"')
