"""Actions of the events in a log, each beside the reference (stateful_tests.watched.beside).

turns: sessions, and requests that wait. prefill: admission, prefill, the tree. rounds: steps and
their results. ends: finish, abort, retract. snapshots: a state to compare with, or to begin with.
tier: a host tier. transfers: one side of a pair.
"""
