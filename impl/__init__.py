"""The systems under test, and the adapter that each of them offers.

adapter.py: the interface of every system.
engines.py: the engines whose releases are driven.
sglang, vllm, lmdeploy, transformers_paging: their adapters.
torch_kv: the built-in system.
bugs: faults that can be put into it.
examples: whole adapters of toy engines, to start yours from.
self_scheduling: what adapters of engines share that schedule by themselves.
loading: the files of a release.
process: the worker that drives a system.

Takes from `reference` only the vocabulary (geometry, commands, outcomes), never its rules.
"""

from pathlib import Path

# The folder that this package is imported from: a checkout, or, where it is `kvspec.impl`, site-packages.
HOME = Path(__file__).resolve().parents[1 + __name__.count(".")]
