"""Known faults of a release in a check: a violation that they explain is not reported as new.

causes: the parts of a trace that its violation needs.
trace_reductions, pair_reductions: the trace without them.
masks: the known faults that a tree still has. explanation: those that explain a violation.
lookup: a finding that the base lacks, looked up in releases.
stateful_tests.lockstep.known_faults reads the faults.
"""
