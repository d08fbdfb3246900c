"""The settings that change a release's bookkeeping: environment variables that its server reads.

A release is driven with its own defaults; a run may have others of these (Geometry.settings). What is not
in here a run cannot set: a trace may come from a stranger.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# Name, the first release that reads it, the first that does not, the values that a check tries besides the
# default. Not in here: RADIX_FORCE_MISS and RETRACT_DECODE_STEPS pick what is cached, and who goes.
_ALL = (
    # tokens (0.5.14 to 0.5.17: batches)
    ("SGLANG_SWA_EVICTION_INTERVAL", "0.5.14", "", ("1", "4")),
    ("SGLANG_SWA_EVICTION_INTERVAL_MULTIPLIER", "0.5.11", "0.5.14", ("0", "2")),  # of a window
    ("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS", "0.5.14", "0.5.18", ("1",)),
    ("SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS", "0.5.18", "", ("0",)),
    ("SGLANG_OPT_SWA_RELEASE_LEAF_LOCK_AFTER_WINDOW", "0.5.12", "0.5.22", ("1",)),
    ("SGLANG_OPT_RELEASE_PREFILL_SWA", "0.5.22", "", ("1",)),
    ("SGLANG_OPT_SWA_SPLIT_LEAF_ON_INSERT", "0.5.12", "0.5.16", ("1",)),
    ("SGLANG_OPT_SWA_RADIX_CACHE_COMPACT", "0.5.12", "0.5.16", ("1",)),
    ("SGLANG_OPT_SWA_EVICT_DROP_PAGE_MARGIN", "0.5.13", "0.5.15", ("1",)),
    # No variable: an allocator's argument, which a server of disaggregated prefill or decode sets. Freed
    # pages wait in a list of their own until an allocation runs short; then all are merged and sorted.
    ("need_sort", "0.5.10", "", ("1",)),
    # No variable: fields of a request (parts/namespaces.py).
    # "extra_key-or-lora_id" is left to its trace: in every release so far the two share a path of the tree.
    ("namespaces", "0.5.10", "0.5.18", ("extra_key", "lora_id")),
    ("namespaces", "0.5.18", "", ("extra_key", "cache_salt", "lora_id", "extra_key-or-cache_salt")),
)

# Our word for fields of a request: no release reads it, and whether its files have the word says nothing.
OUR_WORDS = frozenset({"namespaces"})


def settings_of(version: str, order: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Return the settings of a release, each with the values that a check tries.

    order: all releases.
    """
    version_index = order.index(version)
    return {
        name: values
        for name, first, end, values in _ALL
        if order.index(first) <= version_index and (not end or version_index < order.index(end))
    }
