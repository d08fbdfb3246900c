"""Harnesses: how each command is drawn, with which arguments `explore` runs it, which cases its rule has.

A file here has the harnesses of the commands whose rules are in the file of that name in reference/rules.
Every module of this folder is imported, so a new command is a new file. What several share is in `harness`,
`shared_arguments` and `shared_cases`.
"""

from importlib import import_module
from pkgutil import iter_modules

from stateful_tests.generate.commands.harness import HARNESSES as HARNESSES

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
