"""A storage behind the host: what is written to it, and under which hashes (STORE)."""

from __future__ import annotations

from reference.failures import AtNamed, AtSlot, AtTreeNode, Failure, failure
from reference.prefix_cache import path_text
from reference.tiers.clauses.registry import clause
from reference.tiers.config import WAIT_BASE_S
from reference.tiers.step import TierStep
from reference.token_ids import POSITION_BITS, token_of


@clause(
    "STORE-1",
    "a stored page is that of its hash",
    "What is written to a storage under the hash of a page holds KV of the tokens that the hash stands for,"
    " in the namespace that it stands for.",
    why="Whoever has the hash, on any server, reads that KV as its own.",
    rule="tiers.facts",
    source="sglang HiCacheController._page_backup, sglang#38480, sglang#38577",
    scope="With a storage.",
    trigger=lambda s: bool(s.after.stored),
)
def _page_matches_hash(step: TierStep) -> Failure | None:
    for page in step.after.stored:
        first_wrong = next((i for i, (a, b) in enumerate(zip(page.found, page.wanted)) if a != b), None)
        if first_wrong is None and len(page.found) == len(page.wanted):
            continue
        expected = f"hash {page.key} is that of the {page.pool} KV that is stored under it"
        if first_wrong is None:
            observed = f"it is of {len(page.wanted)} tokens, and {len(page.found)} are stored"
            return failure(expected, observed)
        host_slot = page.slots[first_wrong]
        kv = f"KV of {_token_text(page.found[first_wrong])}" if page.found[first_wrong] else "nothing"
        wanted = _token_text(page.wanted[first_wrong])
        observed = f"it stands for {wanted}; host slot {host_slot} holds {kv}"
        return failure(expected, observed, AtSlot(page.pool, host_slot, host=True))
    return None


def _token_text(stamp: int) -> str:
    """Return the token of a stamp, such as "a1 at 2"."""
    return f"{path_text((stamp,))} at {token_of(stamp) & (1 << POSITION_BITS) - 1}"


@clause(
    "STORE-2",
    "a node is hashed by its text",
    "The hashes of a node, one for each of its pages, stand for its text from the root on.",
    why="What is stored under them is taken for its KV.",
    rule="tiers.facts",
    source="sglang compute_node_hash_values, split_node_hash_value, UnifiedTreeCore.insert_host",
    scope="With a storage.",
    trigger=lambda s: any(node.hashed is not None for node in s.after.nodes),
)
def _node_hash_is_its_text(step: TierStep) -> Failure | None:
    for node in step.after.nodes:
        text = step.texts[node.node]
        if node.hashed is not None and node.hashed != text:
            got = f"they stand for {path_text(node.hashed) or 'nothing'}"
            want = f"the hashes of node {node.node} stand for {path_text(text)}"
            return failure(want, got, AtTreeNode(node.node))
    return None


@clause(
    "STORE-3",
    "a wait for the storage ends in time",
    "Where waits end in time, a request whose prefetch is in progress is not admitted in the first second. It"
    " is admitted once it has been held back for a second, and one more for each page of its prompt, with the"
    " pages that were read until then.",
    why="A slow storage would hold a request up that can compute its prompt; one that is not waited for would"
    " give nothing.",
    concerns="outcomes, choices and order",
    rule="tiers.storage_waits",
    source="sglang UnifiedRadixCache._can_terminate_prefetch",
    scope="With a storage whose policy is `timeout`, of these seconds.",
    trigger=lambda s: s.admission_attempt is not None,
)
def _wait_ends_in_time(step: TierStep) -> Failure | None:
    attempt = step.admission_attempt
    if attempt is None:
        return None
    place = AtNamed("request", attempt.name)
    if step.refused and attempt.pages_due and attempt.blocked > attempt.most:
        want = f"{attempt.name} is held back for {attempt.most} s at most, then admitted with what was read"
        return failure(want, f"it is held back after {attempt.blocked} s", place)
    if not step.refused and attempt.pages_due and attempt.waited <= WAIT_BASE_S:
        want = f"{attempt.name} waits for pages of the storage: its prefetch is in progress"
        return failure(want, f"it is admitted without them after {attempt.waited} s", place)
    return None
