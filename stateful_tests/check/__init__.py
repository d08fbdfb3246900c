"""Random runs in volume, as `kvspec check` does them, and fixtures made of what they find. How a report
looks is for `ci` to say.

campaign: a check, from its plan (tiers) to its findings. turns, driving, corpus: the runs of a plan.
finder, caught, finding_order: findings, what they are made of, their order in a report.
trees: what has changed in a checkout, and what follows. known_faults: what is not reported as new.
counted, left_out: what speaks against a verdict. executors: where the work is done.
"""
