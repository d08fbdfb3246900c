"""Settings that avoid a known fault, and faults of the same cause."""

from __future__ import annotations

import re
from functools import cache

from stateful_tests.lockstep.known_faults import KnownFault, known_faults

# (engine, way) that alone has a fault -> how to start a server without that way.
_WAYS = {
    ("sglang", "overlap"): "with --disable-overlap-schedule",
    ("sglang", "hicache"): "without --enable-hierarchical-cache",
    ("vllm", "async"): "with --no-async-scheduling",
    ("vllm", "offload"): "without the OffloadingConnector",
}
_DECODES = "a server that only decodes"  # driven as +hicache, whether it has a host tier or not
_NO_TREE = "without --disaggregation-decode-enable-radix-cache"
# A condition in a fault's `only` -> the setting that rules it out. Other conditions depend on the model
# or on clients.
_CONDITIONS = {
    "EAGLE": "without EAGLE",
    "drafts": "without speculative decoding",
    "mixed batches": "without --enable-mixed-chunk",
    "policy priority": "without --scheduling-policy priority",
    "priority scheduling": "without --scheduling-policy priority",
    "hits within a block": "without --prefix-match-unit",
    "a storage": "without --hicache-storage-backend",
    "use_async_batching": "without use_async_batching",
    "`+async`": "with --no-async-scheduling",
    "async scheduling": "with --no-async-scheduling",
    "with a radix tree": _NO_TREE,
    "with a radix cache": _NO_TREE,
    "with a radix tree and a window": _NO_TREE,
    "with a radix cache and a window": _NO_TREE,
    "write_back": "with another --hicache-write-policy than write_back",
}
_OPTION = re.compile(r"(--[a-z][\w-]+|[A-Z][A-Z_]+=1)$")
# ", or" joins alternatives, which stay one part; "write_back and ..." is the one condition with an "and".
_BETWEEN_CONDITIONS = re.compile(r"[,;] (?!or )|(?<=write_back) and ")


def avoiding_settings(fault: KnownFault) -> list[str]:
    """Return the settings, each of which avoids a fault by itself. A condition with an "or" gives none:
    its other parts would have to be avoided as well."""
    way_setting = _WAYS.get((fault.engine, fault.way))
    settings = [way_setting] if way_setting and not fault.only.startswith(_DECODES) else []
    parts = _BETWEEN_CONDITIONS.split(fault.only)
    for part in (part for part in parts if not re.search(r"\bor\b", part)):
        if _OPTION.match(part):
            settings.append(f"without {part.removesuffix('=1')}")
        elif part in _CONDITIONS:
            settings.append(_CONDITIONS[part])
    return list(dict.fromkeys(settings))


def avoidance_text(fault: KnownFault) -> str:
    """Return the settings that avoid a fault in words, "" for none."""
    return ", or ".join(avoiding_settings(fault))


@cache
def related_faults(name: str) -> tuple[str, ...]:
    """Return the faults that share the cause of one: the text of either names the other, or a number that
    upstream gives to the cause of one is a cause or a report of the other, or one test shows both."""
    faults = known_faults()
    fault = faults[name]
    return tuple(
        other.id
        for other in faults.values()
        if other.id != name and other.engine == fault.engine and _are_related(fault, other)
    )


def _are_related(fault: KnownFault, other: KnownFault) -> bool:
    same_cause = {*fault.cause} & {*other.cause}
    cause_is_report = {*fault.cause} & {*other.reports} or {*fault.reports} & {*other.cause}
    same_test = fault.test is not None and fault.test == other.test
    is_named = _names_other(fault, other.id) or _names_other(other, fault.id)
    return bool(same_cause or cause_is_report) or same_test or is_named


def _names_other(fault: KnownFault, other: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(other)}(?![\w-])", f"{fault.says} {fault.note}") is not None
