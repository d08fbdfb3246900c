"""The registry that the modules beside this one fill."""

from functools import partial

from reference.clauses.registry import Clause, register

REGISTERED: dict[str, Clause] = {}
clause = partial(register, REGISTERED)
