"""Trees that are checked: what differs from a base, and what of a check follows from that.

bases: the base that a check compares a system with. tree_history: the git history of a checkout.
changes: functions that have changed since a revision. way_map: which functions run in which ways (ways.json).
other_ways: the ways in which changed functions run besides the one that is checked.
"""
