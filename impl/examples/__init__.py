"""Whole adapters of toy engines, to start yours from (`kvspec init-adapter`).

example_engine: one paged pool, given each batch. windowed_engine: that with a sliding window.
own_tree_engine: a radix tree of its own. block_engine: shared blocks; it schedules by itself.
"""
