"""Random runs in volume, as `kvspec check` does them, and fixtures of their findings. `ci` prints the report.

campaign: a check, from its plan (check_plans) to its findings.
plan_order, run_batches, run_driver, corpus: the runs of a plan.
finder, caught_violations, finding_order: findings, the violations behind them, their order in a report.
trees: changes in a checkout, and their consequences for the plan.
known_faults: violations that are not reported as new.
run_counts, undriven_parts: evidence against a verdict.
executors: the processes in which the work is done.
"""
