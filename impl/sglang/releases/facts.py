"""Facts of a release's API: what may differ alone, and the class of a tree that lies between two releases.

A release's class is a set of facts. A tree is driven by what it has: for each fact the release whose lines of
the API (api.py) it has, the nearest release first. `FACTS` names for each fact the members of a release's
class that say it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from impl.loading import probe
from impl.loading.nearest import Nearest
from impl.sglang.releases.v0_5_10_to_14 import Release0510

FACTS: dict[str, tuple[str, ...]] = {
    "chunks": ("set_chunk", "_mark_prefilled", "chunk_ends", "keeps_slots", "prefix"),
    "chunk counter": ("chunks",),
    "finish check": ("looks",),
    "token ids": ("ids",),
    "cursors": ("places", "cells", "mark_computed", "set_eviction_cursor"),
    "checkpoints": ("checkpoints", "checkpoint"),
    "release": ("keeping", "keeps"),
    "retraction": ("retract", "retract_decode"),
    "checks": ("checker", "observer", "scheduler", "_import_checks"),
    "session modules": ("session_cache", "session_controller"),
    "session slots": ("slot",),
    "deferred close": ("closing",),
    "history": ("committed_len",),
    "allocation": ("_load_allocation",),
    "allocators": ("paged_allocator",),
    "SWA allocators": ("swa_allocators",),
    "spare pages": ("spare_page_per_lane",),
    "free pages": ("free_pages",),
    "caches": ("_modules", "is_unified", "make_cache", "make_tree", "shown_tree"),
    "locks": ("tree", "hold"),
    "hand-ins": ("hand_in", "drop"),
    "component kinds": (),
    "tree nodes": (),
    "match results": (),
    "namespaces": (),
    "rounds": ("spec_file", "spec_prepare", "prepare_spec"),
    "round ends": ("spec_end",),
    "claims": ("claimed", "commit", "skip_round"),
    "received prompts": ("swa_tail", "received_tail", "_load_received"),
    "states": ("recurrent", "has_states", "make_state_rows", "make_tracker", "verify", "_load_states"),
    "aborts": (),
    "batch plan": ("planned_batch",),
    "prefill results": ("groups_prefill",),
    "window evictions": ("eviction_limit",),
    # What a release does that no name tells: as in the nearest release.
    "policy": ("uncounted", "counts_in_flight", "waived", "watches_pairs"),
}

_AROUND = 3  # releases on either side that a checkout may have facts of
# A checkout that differs from its release by so many lines may be from before a fact that the release added;
# it has it then as one of so many releases before.
_FAR = 150
_NEIGHBOURS = 2
R = TypeVar("R", bound=Release0510)


def compose_release(
    kinds: Mapping[str, type[R]], nearest: str, others: Mapping[str, str]
) -> type[Release0510]:
    """Return the class of the release `nearest`, with some facts as other releases have them.

    kinds: all classes by version, from old to new.
    others: name of a fact -> version. A fact of a release that is not among `kinds` is as in the last one
        before it.
    """
    if not others:
        return kinds[nearest]
    *_, newest = kinds
    members: dict[str, Any] = {"version": nearest, "facts": dict(others), "__doc__": None}
    for fact, names in FACTS.items():
        version = others.get(fact, nearest)
        source = kinds[version if version in kinds else newest]
        for name in names:
            if hasattr(source, name):
                members[name] = inspect.getattr_static(source, name)
    # Methods call those of older classes by super(): the newest class has all of them as its bases.
    return type(f"Between{kinds[nearest].__name__}", (kinds[newest],), members)


def facts_of(
    checkout: probe.Checkout, order: list[str], near: Nearest
) -> tuple[dict[str, str], list[probe.Missing]]:
    """Return the facts that a checkout has as another release than the nearest one, and what it lacks of
    every release.

    order: all versions, from old to new.
    """
    nearest = near.release
    others: dict[str, str] = {}
    missing: list[probe.Missing] = []
    nearest_index = order.index(nearest)
    around = order[max(0, nearest_index - _AROUND) : nearest_index + _AROUND + 1]
    by_distance = sorted(around, key=lambda version: abs(order.index(version) - nearest_index))
    for fact in ("all", *FACTS):
        lacks = checkout.missing(nearest, order, fact)
        if not lacks:
            continue
        candidates = by_distance if fact != "all" else []
        fitting = next(_releases_that_fit(checkout, order, near, fact, candidates), None)
        if fitting is None:
            missing += lacks
        else:
            others[fact] = fitting
    return others, missing


def _releases_that_fit(
    checkout: probe.Checkout, order: list[str], near: Nearest, fact: str, candidates: list[str]
) -> Iterator[str]:
    """Return the releases as which the checkout has a fact: it has all that the fact is there.

    Something must show that release and not the nearest one, for a name that is gone may have been renamed.
    Where nothing shows either, the nearest one has added the fact: a checkout from before that is far from
    it, and has the fact as a neighbour. A release that something shows comes first.
    """
    nearest_uses = checkout.uses(near.release, order, fact)
    nearest_index = order.index(near.release)
    before_fact = []
    for version in candidates:
        uses = checkout.uses(version, order, fact)
        if checkout.missing(version, order, fact):
            continue
        shows_nearest = any(checkout.can_be_used(use) for use in nearest_uses - uses)
        is_neighbour = abs(order.index(version) - nearest_index) <= _NEIGHBOURS
        if uses - nearest_uses:
            yield version
        elif is_neighbour and near.lines >= _FAR and not shows_nearest:
            before_fact.append(version)
    yield from before_fact
