"""Options of a command in groups, in its `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class GroupedCommand(click.Command):
    """A command whose `--help` has its options in groups.

    groups: heading -> names of options, in the order of the page. The last one also has what none names.
    """

    def __init__(self, *given: Any, groups: Mapping[str, Sequence[str]], **options: Any) -> None:
        super().__init__(*given, **options)
        self.groups = groups

    def format_options(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, each under its heading."""
        records = {
            next(name for name in parameter.opts if name.startswith("--")): record
            for parameter in self.get_params(context)
            if (record := parameter.get_help_record(context)) is not None
        }
        named = {name for names in self.groups.values() for name in names}
        assert named <= records.keys(), named - records.keys()
        others = [record for name, record in records.items() if name not in named]
        *_, last = self.groups
        for heading, names in self.groups.items():
            rows = [records[name] for name in names] + (others if heading == last else [])
            with formatter.section(heading):
                formatter.write_dl(rows)


CHECK_OPTIONS = {
    "What is driven": ("--impl", "--sglang-path", "--device", "--machine", "--preset", "--mode"),
    "What it is compared with": ("--base", "--since"),
    "How much": ("--tier", "--examples", "--steps", "--seed", "--time-limit"),
    "Processes": ("--jobs", "--ray", "--timeout", "--memory", "--in-process"),
    "Reports": ("--verbose", "--save", "--html", "--json", "--junit"),
}
