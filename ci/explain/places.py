"""What is so of a page, a cursor, a node, ... at one moment, and since when: the same for all clauses.

Each kind of place has a case in `called` and one in `facts_at`. `story` dates the facts; it knows no clause.
"""

from functools import partial
from typing import NamedTuple

from ci.compare.differences import CURSORS, POOL, spans
from ci.explain.history import Past, cursors_of, some
from reference.clauses.facts import Facts
from reference.failures import (
    AtCursor, AtEntry, AtLock, AtNamed, AtNode, AtPage, AtPosition, AtRow, AtTreePage, Place,
)  # fmt: skip
from reference.prefix_cache import path_text
from stateful_tests.lockstep.results import Moment


class Fact(NamedTuple):
    """owner: who has the thing; empty where the fact is about the thing itself, such as "is free".

    was: the same of the past; empty where a reader gains nothing from it.
    """

    owner: str
    now: str
    was: str = ""


def called(place: Place, m: Moment) -> str:
    """A place by its name; a page that no pool has with what is odd about it."""
    match place:
        case AtPage(pool, page):
            odd = ", the padding page," if page == 0 else ", which does not exist,"
            exists = 1 <= page <= m.facts.pools[pool].size
            return f"{POOL[pool]} page {page}{'' if exists else odd}"
        case AtRow(row):
            return f"row {row}"
        case AtEntry(slot):
            return f"full slot {slot}"
        case AtCursor(owner, field):
            letter = next(letter for letter, name in CURSORS.items() if name == field)
            return f"\0{letter}\0 of {'the ' * owner.startswith('slot')}{owner}"
        case AtPosition(owner, _, position):
            return f"position {position} of {owner}"
        case AtNode(path):
            return f"the node that ends {path_text(path)}"
        case AtTreePage(path, start):
            return f"[{start}, {len(path)}) of {path_text(path)}"
        case AtLock(owner):
            return f"the lock of {owner}"
        case AtNamed(kind, name):
            return f"the slot of {name}" if kind == "slot" else f"{kind} {name}"
    return ""


def facts_at(place: Place, m: Moment) -> list[Fact]:
    """What is so of a place: of itself first, then a fact for each owner."""
    match place:
        case AtPage(pool, page):
            owners = [_owner(m, o.holder, o.at) for o in m.facts.pools[pool].owned if o.page == page]
            times = list(m.facts.pools[pool].free).count(page)
            free = _free(times, "in the free list")
            return free + owners or [Fact("", "is neither free nor owned")]
        case AtRow(row):
            owners = [Fact(name, "has it", "had it") for name in _holding(m.facts, row)]
            free = _free(list(m.facts.free_rows).count(row), "in the list of free rows")
            return free + owners or [Fact("", "is neither free nor held")]
        case AtEntry(slot):
            swa = entry(m, slot)
            return [Fact("", f"is mapped to SWA slot {swa}" if swa else "is mapped to no SWA slot")]
        case AtCursor(owner, field):
            cursors = cursors_of(m, owner)
            return [Fact("", f"is {getattr(cursors, field)}" if cursors is not None else "is not there")]
        case AtPosition(owner, pool, position):
            slot = slot_of(m, owner, position)
            if not slot:
                return [Fact("", "has no slot")]
            slot = slot if pool == "full" else entry(m, slot)
            return [Fact("", f"has {POOL[pool]} slot {slot}" if slot else f"has no {POOL[pool]} slot")]
        case AtNode() | AtTreePage() | AtLock():
            return [Fact("", _in_tree(place, m))]
        case AtNamed("slot", name):
            session = m.facts.sessions.get(name)
            return [Fact("", _there(session is not None and session.slot is not None))]
        case AtNamed(kind, name):
            return [Fact("", _there(name in getattr(m.facts, f"{kind}s")))]
    return []


def _there(is_there: bool) -> str:
    return "is there" if is_there else "is not there"


def _in_tree(place: AtNode | AtTreePage | AtLock, m: Moment) -> str:
    tree = m.facts.tree
    match place:
        case AtNode(path, pool, must):
            node = next((n for n in tree.nodes if n.path == path), None) if tree is not None else None
            if node is None or must is None:
                return _there(node is not None)
            count = node.full_locks if pool == "full" else node.swa_locks
            return f"counts {some(count, f'{POOL[pool]} lock')}"
        case AtTreePage(path):
            page = tree.pages.get(path) if tree is not None else None
            if page is None:
                return "is not in the tree"
            return "is in the tree" if page[1] or "swa" not in m.facts.pools else "is a tombstone"
        case AtLock(owner):
            lock = m.locks.get(owner)
            return f"pins [0, {len(lock.key)}) of {path_text(lock.key)}" if lock else _there(False)


def _free(times: int, where: str) -> list[Fact]:
    often = f" {times} times" if times > 1 else ""
    return [Fact("", f"is {where}{often}", "was free" if times == 1 else "")] if times else []


def _owner(m: Moment, holder: str, at: int) -> Fact:
    """Who has a page, for which positions (tokens)."""
    tokens = spans([at], m.state.config.geometry.page_size)
    tree = holder.removeprefix("tree ")
    if tree != holder:
        return Fact("the tree", f"has it at {tokens} of {tree}", f"had it at {tokens} of {tree}")
    return Fact(holder, f"has it at {tokens}", f"had it at {tokens}")


def _holding(facts: Facts, row: int) -> list[str]:
    return [name for name, holder in facts.holders.items() if holder.row == row]


def entry(m: Moment, slot: int) -> int:
    """The SWA slot that a full slot is mapped to; 0 for none."""
    return m.view.full_to_swa[slot] if 0 <= slot < len(m.view.full_to_swa) else 0


def slot_of(m: Moment, holder: str, position: int) -> int:
    """The full slot that a row names at a position; 0 for none."""
    facts = m.facts.holders.get(holder)
    cells = m.view.rows.get(facts.row, ()) if facts is not None else ()
    return cells[position] if position < len(cells) else 0


def story(past: Past, place: Place) -> str:
    """What is so of a place now, each fact since when; what was so until then, of a thing that nobody has.
    Empty for a kind of place that has no case here."""
    name, facts = called(place, past.now), facts_at(place, past.now)
    if not facts:
        return ""
    own = [fact for fact in facts if not fact.owner]
    having = [f"{f.owner} {_since(past, place, f)}" for f in facts if f.owner]
    if not own:
        count = len(having)
        what = f"has {some(count, 'owner')}" if count > 1 else "is not free"
        return f"{name} {what}: {' and '.join(having)}"
    told = [f"{name} {_since(past, place, fact)}" for fact in own]
    if having:
        return ", and ".join([*told, *having])
    return f"{told[0]}{_until_then(past, place, own[0])}"


def _since(past: Past, place: Place, fact: Fact) -> str:
    return f"{fact.now} {past.first_since(f'{place}: {fact.now}', partial(_is_so, place, fact))}"


def _is_so(place: Place, fact: Fact, m: Moment) -> bool:
    return fact in facts_at(place, m)


def _until_then(past: Past, place: Place, fact: Fact) -> str:
    before = past.last_before(lambda m: not _is_so(place, fact, m))
    was = [f for f in facts_at(place, before) if f.was] if before is not None else []
    told = " and ".join(f"{f.owner or 'it'} {f.was}" for f in was)
    return f"; until then {told}" if told else ""


def is_odd(place: Place, m: Moment) -> bool:
    """A page or a row that does not have one owner, and is not free once."""
    facts = facts_at(place, m)
    exists = not isinstance(place, AtPage) or 1 <= place.page <= m.facts.pools[place.pool].size
    return not exists or len(facts) != 1 or not facts[0].was
