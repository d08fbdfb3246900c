"""kvspec init-adapter: an adapter to start from, and its test."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ci.commands.shared import Unusable, force_option, target_file
from stateful_tests.lockstep.endings import Ending

HEAD = '''"""The adapter that connects {title} to kvspec: `kvspec check --impl {name}:make`.

It is a whole toy engine: one paged pool, requests without sessions, window or radix tree. Replace its methods
with calls of yours. Keep the stamps: they show which token's KV each slot holds. What your engine cannot do
stays out of `commands`. Lengths are tokens.
"""
'''
TEST = '''"""Checks {title} against the specification: `pytest {test}`."""

import kvspec

from {name} import make

Test{title} = kvspec.machine(make).TestCase


def test_it_conforms() -> None:
    """Raises where a clause is violated, and where commands that `Capabilities` has are always refused."""
    kvspec.check(make, examples=20)
'''


@click.command("init-adapter")
@click.argument("name", metavar="MODULE")
@force_option
def init_adapter(name: str, force: bool) -> int:
    """Write an adapter for your engine, and its test.

    MODULE.py runs at once: it is a toy engine, whose methods yours replace. test_MODULE.py is a Hypothesis
    state machine.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise Unusable(f"{name!r:.40}: a module's name has lower-case letters, digits and _ alone")
    from impl import example_engine

    title = "".join(part.capitalize() for part in name.split("_"))
    source = Path(example_engine.__file__).read_text(encoding="utf-8")
    _, _, body = source.split('"""', 2)
    body = re.sub(r"from (kvspec\.)?(impl|reference)\.\w+ import", "from kvspec import", body)
    body = body.replace("ExampleEngine", title).replace('"example"', f'"{name}"')
    made = {
        f"{name}.py": HEAD.format(name=name, title=title) + body,
        f"test_{name}.py": TEST.format(name=name, title=title, test=f"test_{name}.py"),
    }
    files = [target_file(Path(file), force, "init-adapter") for file in made]
    for file, text in zip(files, made.values()):
        file.write_text(text, encoding="utf-8")
        click.echo(f"wrote   {file}")
    click.echo(f"check   kvspec check --impl {name}:make")
    click.echo(f"test    pytest test_{name}.py")
    return Ending.CONFORMS
