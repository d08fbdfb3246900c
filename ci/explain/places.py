"""Facts about a page, a cursor, a node, ... at one moment: a case for each kind of place.

`place_name` names a place, `facts_at` lists its facts, and place_history.py dates them. Neither knows a
clause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ci.compare.differences import CURSORS, POOL, page_spans
from reference.clauses.attention_reads import stamp_text
from reference.clauses.facts import Facts, NodeFacts
from reference.clauses.tree_evictions import COUNTERS
from reference.commands import CheckBusy, CheckIdle
from reference.failures import (
    AtCounter, AtEntry, AtLock, AtNamed, AtNode, AtPage, AtPosition, AtRow, AtState, AtText, AtTreePage,
    Place, count_text,
)  # fmt: skip
from reference.prefix_cache import path_text
from reference.recurrent_states import EMPTY, chained
from stateful_tests.lockstep.run_moments import Moment


class Fact(NamedTuple):
    """A fact about a place.

    owner: the owner of the thing; empty where the fact is about the thing itself, such as "is free".
    was: the fact in the past tense; empty where a reader gains nothing from it.
    """

    owner: str
    now: str
    was: str = ""


def place_name(place: Place, m: Moment) -> str:
    """Return a place by its name; a page that no pool has with its fault."""
    match place:
        case AtPage(pool, page):
            odd = ", the padding page," if page == 0 else ", which does not exist,"
            exists = 1 <= page <= m.facts.pools[pool].size
            return f"{POOL[pool]} page {page}{'' if exists else odd}"
        case AtRow(row):
            return f"row {row}"
        case AtEntry(slot):
            return f"full slot {slot}"
        case AtPosition(owner, _, position):
            return f"position {position} of {owner}"
        case AtNode(path):
            node = _node_at(m, path)
            start = f"[{node.start}, {len(path)}) of " if node is not None else "that ends "
            return f"node {start}{path_text(path)}"
        case AtTreePage(path, start):
            return f"[{start}, {len(path)}) of {path_text(path)}"
        case AtLock(owner):
            return f"the lock of {owner}"
        case AtNamed(kind, name):
            return f"the slot of {name}" if kind == "slot" else f"{kind} {name}"
        case AtText(owner):
            return f"the {'history' if owner in m.facts.sessions else 'text'} of {owner}"
        case AtState(slot):
            return f"state slot {slot}"
        case AtCounter(pool, name):
            return f"the counter of {POOL.get(pool, pool)} {name} tokens"
    return ""


def letter(field: str) -> str:
    """Return a cursor by its letter, for Past.words."""
    return next(f"\0{letter}\0" for letter, name in CURSORS.items() if name == field)


def facts_at(place: Place, m: Moment) -> list[Fact]:
    """Return the facts about a place: its own first, then one for each owner."""
    match place:
        case AtPage(pool, page):
            owners = [
                _owner_fact(m, o.holder, o.at) for o in m.facts.pools[pool].owned if o.page == page
            ]
            times = list(m.facts.pools[pool].free).count(page)
            free = _free_fact(times, "in the free list")
            return free + owners or [Fact("", "is neither free nor owned")]
        case AtRow(row):
            owners = [Fact(name, "has it", "had it") for name in _row_holders(m.facts, row)]
            free = _free_fact(list(m.facts.free_rows).count(row), "in the list of free rows")
            return free + owners or [Fact("", "is neither free nor held")]
        case AtEntry(slot):
            swa = entry(m, slot)
            return [Fact("", f"is mapped to SWA slot {swa}" if swa else "is mapped to no SWA slot")]
        case AtPosition():
            return _read_facts(place, m)
        case AtNode() | AtTreePage() | AtLock() | AtCounter():
            return _tree_page_facts(place, m)
        case AtState(slot):
            return _state_slot_facts(slot, m)
        case AtText(owner, at):
            return _token_list_text(_text_tokens(m, owner), at)
        case AtNamed():
            return _existence_facts(place, m)
    return []


def _state_slot_facts(slot: int, m: Moment) -> list[Fact]:
    """Return the owners of a slot of recurrent state, and the text that it holds."""
    states = m.facts.states
    if states is None:
        return []
    owners = [Fact(name, "has it", "had it") for name, has in states.holders.items() if has == slot]
    holders = ((name, slots) for name, slots in states.buffers.items() if slot in slots)
    owners += [Fact(f"a buffer of {name}", "has it", "had it") for name, _ in holders]
    owners += [
        Fact("the tree", f"has it for {path_text(path)}", f"had it for {path_text(path)}")
        for path, has in states.nodes.items()
        if has == slot
    ]
    free = _free_fact(list(states.free).count(slot), "in the free list")
    held = states.stamp(slot)
    holds = "holds an empty state" if held == EMPTY else f"holds the state after {_state_text(held, m)}"
    return [
        *(free or ([] if owners else [Fact("", "is neither free nor owned")])),
        Fact("", holds),
        *owners,
    ]


def _state_text(stamp: int, m: Moment) -> str:
    """Return the text whose recurrent state has the stamp, and its length, in words."""
    texts = {name: request.text for name, request in m.facts.requests.items()}
    texts |= {
        f"the history of {name}": session.history for name, session in m.facts.sessions.items()
    }
    for name, text in texts.items():
        stamps = chained(text)
        if stamp in stamps:
            return f"{count_text(stamps.index(stamp) + 1, 'token')} of {name}"
    if m.facts.states is not None:
        for path in m.facts.states.nodes:
            stamps = chained(path)
            if stamp in stamps:
                return path_text(path[: stamps.index(stamp) + 1])
    return "a text that is gone"


def _existence_facts(place: AtNamed, m: Moment) -> list[Fact]:
    name = place.name
    session = m.facts.sessions.get(place.name)
    match place.kind:
        case "slot" if session is not None and session.slot is not None:
            return [Fact("", f"keeps {count_text(session.slot.kv_committed_len, 'committed token')}")]
        case "session" if session is not None:
            return [Fact("", "is closing" if session.closing else "is there")]
        case "request" if name in m.facts.requests:
            return [Fact("", "is there")]
    return [Fact("", "is not there")]


def _text_tokens(m: Moment, owner: str) -> Sequence[int] | None:
    """Return the history of a session, or the text of a request."""
    session = m.facts.sessions.get(owner)
    request = m.facts.requests.get(owner)
    if session is not None:
        return session.history
    return request.text if request is not None else None


def _token_list_text(tokens: Sequence[int] | None, position: int | None) -> list[Fact]:
    if tokens is None:
        return [Fact("", "is not there")]
    fact = f"has {count_text(len(tokens), 'token')}"
    if position is not None and position < len(tokens):
        fact += f", {token_text(tokens[position])} at position {position},"
    return [Fact("", fact)]


def token_text(token: int) -> str:
    return stamp_text(token) if token else "a token that nobody sent"


def _read_facts(place: AtPosition, m: Moment) -> list[Fact]:
    """Return the slots that attention goes through, and the content of the last."""
    full = slot_of(m, place.owner, place.position)
    if not full:
        return [Fact("", "has no slot")]
    facts = [Fact("", f"has full slot {full}")]
    stamps = m.view.full_stamps
    slot = full
    if place.pool == "swa":
        slot = entry(m, full)
        stamps = m.view.swa_stamps
        facts.append(Fact("", f"has SWA slot {slot}" if slot else "has no SWA slot"))
    if slot < len(stamps) and place.must is not None:
        held = stamp_text(stamps[slot]) if stamps[slot] else "no committed token"
        facts += [Fact("", f"finds {held}")] if slot else []
    return facts


def _tree_page_facts(place: AtNode | AtTreePage | AtLock | AtCounter, m: Moment) -> list[Fact]:
    """Return the facts of a moment about a place in the tree: a node, a page, a lock or a counter. Empty for
    a counter that the moment does not show."""
    tree = m.facts.tree
    match place:
        case AtNode(path, pool, must):
            node = _node_at(m, path)
            return [Fact("", "is not there")] if node is None else _node_facts(node, pool, must, m)
        case AtTreePage(path):
            page = tree.pages.get(path) if tree is not None else None
            if page is None:
                return [Fact("", "is not in the tree")]
            slots = slots_text(page.slots)
            facts = [Fact("", f"has {slots}", f"had {slots}")]
            if "swa" in m.facts.pools and not page.has_swa:
                facts.append(Fact("", "is a tombstone"))
            return facts
        case AtLock(owner):
            lock = m.locks.get(owner)
            if lock is None:
                return [Fact("", "is not there")]
            window = m.state.config.geometry.window is not None
            swa = (
                f", its SWA KV from {lock.pinned_from} on,"
                if window and lock.pinned_from > 0
                else ""
            )
            where = f"[0, {len(lock.key)}) of {path_text(lock.key)}{swa}"
            return [Fact("", f"pins {where}", f"pinned {where}")]
        case AtCounter(pool, name):
            if tree is None or tree.sizes is None or _is_check(m):
                return []  # the terms of a check are of that moment alone
            counter = COUNTERS.index((pool, name))
            return [Fact("", f"is {tree.sizes[counter]}")]


def _is_check(m: Moment) -> bool:
    return m.step is not None and isinstance(m.step.command, (CheckBusy, CheckIdle))


def _node_facts(node: NodeFacts, pool: str, must: int | None, m: Moment) -> list[Fact]:
    if must is not None:
        counts = {"full": node.full_locks, "swa": node.swa_locks, "state": node.state_locks}
        called = {**POOL, "state": "state"}[pool]
        return [Fact("", "is there"), Fact("", f"counts {count_text(counts[pool], f'{called} lock')}")]
    if pool == "state":
        has = "no state" if node.state is None else f"state slot {node.state}"
        return [Fact("", f"has {has}", f"had {has}")]
    if "swa" not in m.facts.pools:
        return [Fact("", "is there")]
    if not node.live:
        return [Fact("", "is a tombstone", "was a tombstone")]
    have = sum(1 for slot in node.swa_slots if slot)
    tokens = count_text(len(node.slots), "token")
    return [Fact("", "is live"), Fact("", f"has {count_text(have, 'SWA slot')} for its {tokens}")]


def _node_at(m: Moment, path: tuple[int, ...]) -> NodeFacts | None:
    tree = m.facts.tree
    return next((n for n in tree.nodes if n.path == path), None) if tree is not None else None


def slots_text(slots: Sequence[int]) -> str:
    """Return slots as text, such as "full slots 4 to 7"."""
    if len(slots) > 2 and list(slots) == list(range(slots[0], slots[-1] + 1)):
        return f"full slots {slots[0]} to {slots[-1]}"
    return f"{'full slots' if len(slots) > 1 else 'full slot'} {', '.join(map(str, slots))}"


def _free_fact(times: int, where: str) -> list[Fact]:
    if times == 0:
        return []
    if times == 1:
        return [Fact("", f"is {where}", "was free")]
    return [Fact("", f"is {where} {times} times", "")]


def _owner_fact(m: Moment, holder: str, index: int) -> Fact:
    """Return the owner of a page, and its positions (tokens)."""
    tokens = page_spans([index], m.state.config.geometry.page_size)
    tree = holder.removeprefix("tree ")
    if tree != holder:
        return Fact("the tree", f"has it at {tokens} of {tree}", f"had it at {tokens} of {tree}")
    return Fact(holder, f"has it at {tokens}", f"had it at {tokens}")


def _row_holders(facts: Facts, row: int) -> list[str]:
    return [name for name, holder in facts.holders.items() if holder.row == row]


def entry(m: Moment, slot: int) -> int:
    """Return the SWA slot that a full slot is mapped to; 0 for none."""
    return m.view.full_to_swa[slot] if 0 <= slot < len(m.view.full_to_swa) else 0


def slot_of(m: Moment, holder: str, position: int) -> int:
    """Return the full slot that a row, or a lock owner's prefix, names at a position; 0 for none."""
    facts = m.facts.holders.get(holder)
    tree = m.facts.tree
    cells: Sequence[int] = m.view.rows.get(facts.row, ()) if facts is not None else ()
    if facts is None and tree is not None:
        cells = tree.lock_holders.get(holder, ())
    return cells[position] if position < len(cells) else 0


def leads_to(place: Place, m: Moment) -> list[Place]:
    """Return a place, and the page behind a position that does not have one owner."""
    if not isinstance(place, AtPosition):
        return [place]
    slot = slot_of(m, place.owner, place.position)
    if place.pool != "full":
        slot = entry(m, slot)
    page = AtPage(place.pool, slot // m.state.config.geometry.page_size)
    return [place, page] if slot and _lacks_one_owner(page, m) else [place]


def _lacks_one_owner(page: AtPage, m: Moment) -> bool:
    """Return whether a page has not exactly one owner, and is not free once."""
    facts = facts_at(page, m)
    exists = 1 <= page.page <= m.facts.pools[page.pool].size
    return not exists or len(facts) != 1 or not facts[0].was
