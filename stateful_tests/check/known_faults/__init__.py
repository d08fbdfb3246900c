"""Known faults of a release in a check: what they explain is not reported as new.

causes: what a trace needs to violate its clause; leaving_out: the same trace without it.
masks: which known faults a tree still has. explanation: which of them explain a violation.
lookup: whether a release shows what is new against a base.
The faults themselves are read in stateful_tests.lockstep.known_faults.
"""
