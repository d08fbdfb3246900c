"""The rules: in each file what a command is refused for, its table of cases, and the function that does it.

Every module of this folder is imported, so a new command is a new file. What several commands share is in
`rule_definition` and `batch`; arithmetic, the state and the tree are outside.
"""

from importlib import import_module
from pkgutil import iter_modules

from reference.rules.rule_definition import RULES as RULES

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
