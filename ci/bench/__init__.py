"""Benchmarks: side by side in one process, as ratios."""
