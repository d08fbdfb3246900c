"""Actions for the events of a log, on the reference that follows it (stateful_tests.watched.log_follower).

sessions: sessions and waiting requests. prefill: admission, prefill, the tree. batch_rounds: steps and their
results. request_ends: finish, abort, retract. snapshots: a state to compare with, or to start from.
host_tier: a host tier. transfers: one server of a pair.
"""
