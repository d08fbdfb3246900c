"""Assertions of an exported test about a tree with a host tier, for each kind of place in it."""

from ci.export.recorded_run import (
    Asserts,
    NotExportable,
    RecordedRun,
    in_tree,
    not_raising,
    tokens_of_release,
    namespace_argument,
)
from impl.sglang.scheduler.call_log import ids_text
from reference.failures import AtCount, AtSlot, AtTreeNode, Place
from reference.geometry import Geometry
from reference.tiers.config import TierConfig
from reference.tiers.step import TierStep


HOOK = "impl.sglang.process.testing:import_tiered"


def device_sizes(config: TierConfig) -> Geometry:
    """Return the sizes of the server's device memory."""
    return config.device


def is_unified(*_: object) -> bool:
    """Return True: the tree that has a host tier is the one for all kinds of KV."""
    return True


def host_arguments(config: TierConfig) -> list[str]:
    """Return the host tier as arguments of the server. Raises NotExportable."""
    others = {
        "a storage": config.storage, "a server that only decodes": config.decode,
        "a server that only prefills": config.prefill,
    }  # fmt: skip
    for what, is_there in others.items():
        if is_there:
            raise NotExportable(f"{what} is no part of the exported tests")
    slots = {pool: config.host_slots(pool) for pool in config.pools}
    return [f"host={slots}, policy={config.policy!r}".replace("'", '"')]


def assert_violation(run: RecordedRun) -> Asserts:
    """Return the assertion that shows the violated clause. Raises NotExportable where no object of the
    release shows it."""
    step = run.now.step
    assert isinstance(step, TierStep)
    for place in run.at:
        if (assertions := _place_assertions(run, step, place)) is not None:
            return assertions
    raise NotExportable(f"{run.clause} shows in nothing that the release's classes offer")


def _place_assertions(run: RecordedRun, step: TierStep, place: Place) -> Asserts | None:
    match place:
        case AtSlot():
            return _slot_assertions(run, step, place)
        case AtTreeNode():
            return _node_assertions(run, step, place)
        case AtCount("tree", "check"):
            return Asserts(not_raising(["server.cache.sanity_check()"]))
        case AtCount("tree", what, count):
            pool = what.removesuffix(" evictable")
            free = f"server.allocator.{f'{pool}_' if step.config.window else ''}available_size()"
            must = min(count or 0, getattr(step.command, pool))
            line = f"self.assertGreaterEqual({free} - before, {must})"
            return Asserts([line], [f"before = {free}"], "evicted = ")
        case AtCount("host", "hashes"):
            return Asserts(["self.assertEqual(nodes(server.cache), [])"])
    return None


def _slot_assertions(run: RecordedRun, step: TierStep, place: AtSlot) -> Asserts | None:
    """Assert a slot whose KV is of another text, or that has not one owner."""
    pool, slot, host = place
    if run.clause in ("HOST-2", "LOAD-1"):
        for node in step.after.nodes:
            if slot in (node.host if host else node.device)[pool]:
                text = (*step.texts[node.node], *node.following)
                text_line = f"text = {ids_text(tokens_of_release(run.geometry, text))}"
                start = node.start or ""
                end = "-1" if node.following else ""
                own_text = f"text[{start}:{end}]" if start or end else "text"
                lookup = f"node_at(server.cache, text{namespace_argument(run.geometry, text)})"
                kv = f'kv_of(server, {lookup}, {own_text}, "{pool}", {host=})'
                return Asserts([text_line, f"self.assertEqual({kv}, {own_text})"])
        return None
    sources = [source.owned for source in step.sources() if source.at == place]
    if run.clause == "XFER-1" and not any(sources):
        return None  # it was written
    owned = f'owners(server, "{pool}", {slot}, {host=})'
    if run.clause.startswith("XFER") and step.free[host, pool, slot]:
        return Asserts([f'self.assertNotIn("free", {owned})'])
    return Asserts([f"self.assertEqual(len({owned}), 1)"])


def _node_assertions(run: RecordedRun, step: TierStep, place: AtTreeNode) -> Asserts | None:
    """Assert a node that counts other locks than it has users, has no KV, or has another mark than
    records have."""
    if run.clause == "XFER-3" and step.after.records:
        records = (f"server.cache.ongoing_{name}" for name in ("write_through", "load_back"))
        return Asserts([f"self.assertEqual({record}, {{}})" for record in records])
    if (node := step.nodes.get(place.node)) is None:
        return None
    text = (*step.texts[place.node], *node.following)
    lines = [f"node = node_at(server.cache, {in_tree(run.geometry, text)})"]
    part = f"node.component_data[ComponentType.{place.pool.upper()}]"
    match run.clause:
        case "HOST-3":
            count = f"{part}.{'host_lock_ref' if place.host else 'lock_ref'}"
            must = step.wanted_counts[place.host, place.pool, place.node]
            return Asserts([*lines, f"self.assertEqual({count}, {must})"])
        case "HOST-5":
            where = "value" if node.host[place.pool] else "host_value"
            return Asserts([*lines, f"self.assertIsNotNone({part}.{where})"])
        case "TREE-16" if not node.device[place.pool]:
            return Asserts([*lines, f"self.assertIsNotNone({part}.value)"])
        case "XFER-4":
            marked = "node.write_through_pending_id is not None"
            condition = "node.id in named_by_stores(server)"
            return Asserts([*lines, f"self.assertEqual({marked}, {condition})"])
        case "XFER-3" if node.storing >= 0:
            return Asserts([*lines, "self.assertIsNone(node.write_through_pending_id)"])
    return None
