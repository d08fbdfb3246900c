"""Trees that are checked: how they differ from a base, and what a check does about it.

base_selection: the base that a check compares a system with.
tree_history: the git history of a checkout.
changed_functions: functions that have changed since a revision.
way_map: functions by way (ways.json).
way_measurement: how that is measured.
other_ways: further ways in which changed functions run.
"""
