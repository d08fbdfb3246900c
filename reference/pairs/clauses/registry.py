"""The registry of the clauses of a pair."""

from __future__ import annotations

from functools import partial

from reference.clauses.registry import Clause, register

REGISTERED: dict[str, Clause] = {}
clause = partial(register, REGISTERED, rule="pairs.pair_record")
