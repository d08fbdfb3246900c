"""A contract for import-linter: a package that imports the standard library alone.

import-linter's own `forbidden` contract would need a list of every package in the world.
"""

from __future__ import annotations

import sys

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class StdlibOnly(Contract):
    """`package` may import itself and the standard library, nothing else."""

    type_name = "stdlib_only"
    package = fields.StringField()

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002
        """Collect every import that leaves the package for something not in the standard library."""
        root = str(self.package)
        offences = sorted(
            (module, imported)
            for module in {root} | graph.find_descendants(root)
            for imported in graph.find_modules_directly_imported_by(module)
            if imported.split(".")[0] not in sys.stdlib_module_names | {root}
        )
        return ContractCheck(kept=not offences, metadata={"offences": offences})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line for each offending import."""
        for module, imported in check.metadata["offences"]:
            output.print_error(f"{module} imports {imported}", bold=False)
        output.new_line()
