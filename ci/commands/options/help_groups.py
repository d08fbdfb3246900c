"""Options of a command, and the commands themselves, in groups in `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from ci.commands.options.name_lists import similar_names


class GroupedCommand(click.Command):
    """A command whose `--help` has its options in groups.

    groups: heading -> names of options, in the order of the page. The last one also has what none names.
    """

    def __init__(self, *arguments: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.groups = groups

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, each under its heading."""
        records = {
            next(name for name in parameter.opts if name.startswith("--")): record
            for parameter in self.get_params(context)
            if (record := parameter.get_help_record(context)) is not None
        }
        grouped_names = {name for names in self.groups.values() for name in names}
        assert grouped_names <= records.keys(), grouped_names - records.keys()
        others = [record for name, record in records.items() if name not in grouped_names]
        *_, last = self.groups
        for heading, names in self.groups.items():
            rows = [records[name] for name in names] + (others if heading == last else [])
            with formatter.section(heading):
                formatter.write_dl(rows)


class GroupedCommands(click.Group):
    """A group whose `--help` has its commands in groups. Of an unknown command it says which are near.

    groups: heading -> names of commands, in the order of the page.
    """

    def __init__(self, *arguments: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.groups = groups

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, each under its heading. Names stand in columns of one width."""
        grouped_names = {name for names in self.groups.values() for name in names}
        assert grouped_names == {*self.commands}, grouped_names ^ {*self.commands}
        width = max(map(len, grouped_names))
        limit = formatter.width - width - 6
        for heading, names in self.groups.items():
            rows = [
                (f"{name:{width}}", self.commands[name].get_short_help_str(limit)) for name in names
            ]
            with formatter.section(heading):
                formatter.write_dl(rows)

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Raises click.UsageError for a name of no command."""
        name = arguments[0]
        if not name.startswith("-") and name not in self.commands:
            meant = similar_names(name, self.commands) or "; `kvspec --help` lists them"
            raise click.UsageError(f"No such command {name!r:.40}{meant}", context)
        return super().resolve_command(context, arguments)


COMMANDS = {
    "Check": ("check", "replay", "shrink", "export", "run-test", "tree"),
    "Look up": ("bugs", "clauses", "driven", "spec"),
    "Servers": ("validate", "setup-server", "serve-check"),
    "Write": ("new-trace", "init-adapter", "new-fixture", "upgrade"),
    "Explore and prove": ("explore", "tour", "prove"),
}
CHECK_OPTIONS = {
    "What is driven": ("--impl", "--sglang-path", "--device", "--machine", "--preset", "--mode"),
    "What it is compared with": ("--base", "--since"),
    "How much": ("--tier", "--examples", "--steps", "--seed", "--time-limit"),
    "Processes": ("--jobs", "--ray", "--timeout", "--memory", "--in-process"),
    "Reports": ("--verbose", "--save", "--html", "--json", "--junit"),
}
