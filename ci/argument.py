"""One sentence on why the state at a violation is impossible, made from facts of the run.

For each kind of clause: which page, cursor or node is at stake, since which command it is as it is, who
else has it, and what the rules say. Where nothing better is known, expected and observed in words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ci.past import Claim, Past, pages_text, some, troubled
from ci.report import describe, say
from ci.snapshot import CURSORS, POOL, reference_side, system_side, wrong_reads
from ci.tree_argument import TREE
from reference.clauses.checks import miscounted
from reference.clauses.contents import stamp_text
from reference.commands import Admit, Done, EvictSwa, Outcome, Reason, Refused, Submit
from reference.cursors import lost_below, sweep_limit, window_start
from reference.facts import Facts
from reference.ledger import IN_BATCH, ZERO, Cursors, holders, text_tokens
from stateful_tests.results import Moment, Run


class Argument(NamedTuple):
    """text: the sentence. claims: what it says of the past."""

    text: str
    claims: tuple[Claim, ...] = ()


def argue(run: Run) -> Argument | None:
    """The argument of a run's violation; None if there is none to make."""
    violation = run.violation
    if violation is None or len(run.history) < 2:
        return None
    step = run.history[-1].step
    if violation.clause == "BROKEN" or step is None:
        if violation.clause != "BROKEN":
            return None
        row = run.rows[violation.step]
        told = f"command {violation.step} ({describe(row.command)}) makes the system fail"
        return Argument(f"{told}, {violation.observed.rstrip('.')}; by the rules it is {say(row.outcome)}.")
    past = Past(run, violation, step)
    kind = violation.clause.split("-")[0]
    rule = _RULES.get(violation.clause) or _RULES.get(kind) or TREE.get(violation.clause)
    try:
        text = rule(past) if rule is not None else None
    except (LookupError, AssertionError, StopIteration):
        text = None  # a view that is odd in more ways than the clause says: expected and observed remain
    return Argument(past.words(f"{text or _fallback(past)}."), tuple(past.claims))


def _fallback(past: Past) -> str:
    expected, observed = past.violation.expected, past.violation.observed.replace("\n", "; ")
    return f"after {past.here} the rules want: {expected}; the system shows: {observed}"


# Pages.


def _pages(past: Past) -> str | None:
    """OWN-1 to OWN-3: the page that is not free or owned, once."""
    kinds = {
        "OWN-2": lambda m, pool, page: list(m.facts.pools[pool].free).count(page) > 1 or page < 1,
        "OWN-1": lambda m, pool, page: any(o.page == page for o in m.facts.pools[pool].owned),
        "OWN-3": lambda m, pool, page: page >= 1 and page not in m.facts.pools[pool].free,
    }
    fits = kinds[past.violation.clause]
    for pool, page in troubled(past.now):
        if fits(past.now, pool, page):
            return past.page(pool, page)
    return None


def _lost(past: Past) -> str | None:
    """END-1: what is not given back although nobody holds anything."""
    if past.violation.expected.startswith("all "):
        return _rows(past)
    for pool, page in troubled(past.now):
        return f"nobody holds anything after {past.here}, but {past.page(pool, page)}"
    for pool, facts in past.now.facts.pools.items():
        for owned in facts.owned:
            if not owned.holder.startswith("tree "):
                having = past.having(pool, owned)
                page = f"{POOL[pool]} page {owned.page}"
                return f"nobody holds anything after {past.here}, but {page} is not free: {having}"
    return None


def _rows(past: Past) -> str | None:
    """OWN-4: a row of req_to_token that is not free or held, once."""

    def held(m: Moment, row: int) -> list[str]:
        return [name for name, h in m.facts.holders.items() if h.row == row]

    facts = past.now.facts
    for row in sorted({*facts.free_rows, *range(facts.rows), *(h.row for h in facts.holders.values())}):
        names, times = held(past.now, row), list(facts.free_rows).count(row)
        if len(names) + times == 1:
            continue
        having = [
            f"{n} holds it {past.since(f'row {row}: {n}', lambda m, n=n: n in held(m, row))}"  # type: ignore[misc]
            for n in names
        ]
        if not having and not times:
            since = past.since(f"row {row} is lost", lambda m: not held(m, row) and row not in m.facts.free_rows)
            was = past.last_before(lambda m: bool(held(m, row)))
            then = f"; until then {held(was, row)[0]} held it" if was is not None else ""
            return f"row {row} is neither free nor held {since}{then}"
        if times:
            free = past.since(f"row {row} is free", lambda m: list(m.facts.free_rows).count(row) >= times)
            often = f" {times} times" if times > 1 else ""
            return ", and ".join([f"row {row} is in the list of free rows{often} {free}", *having])
        return f"row {row} is held {len(names)} times: {' and '.join(having)}"
    return None


def _torn(past: Past) -> str | None:
    """OWN-5, MAP-1: slots of a page that are not in order."""
    for name in ("torn", "torn_swa") if past.violation.clause == "OWN-5" else ("torn_swa",):
        for told in getattr(past.now.facts, name):
            since = past.since(told, lambda m, t=told, n=name: t in getattr(m.facts, n))  # type: ignore[misc]
            size = past.page_size
            slots = told.replace("swa slots", "SWA slots").replace(": [", " are [")
            return f"a page is {size} slots in a row, but the {slots} {since}"
    return None


def _freed(past: Past) -> str | None:
    """FREE: pages that were owed and not freed, or freed and not owed."""
    pool = "full" if past.violation.clause == "FREE-1" else "swa"
    step, size = past.step, past.page_size
    owed, freed = step.owed(pool), step.freed(pool)
    if step.own_shape and step.now.tree is not None:
        return None
    for holder in sorted({*owed, *freed}):
        want, got = set(owed.get(holder, ())), set(freed.get(holder, ()))
        if want == got:
            continue
        tree = holder.removeprefix("tree ")
        whose = f"of the tree at the end of {tree}" if tree != holder else f"of {holder}"
        must = f"the {POOL[pool]} pages {whose} at {pages_text(want, size)}" if want else f"no {POOL[pool]} page {whose}"
        at = min(want ^ got)
        page = next(o.page for o in past.before.facts.pools[pool].owned if (o.holder, o.at) == (holder, at))
        return (
            f"{past.here} must free {must} and frees {pages_text(got, size)}: {_now(past, pool, page)}"
        )
    return None


def _now(past: Past, pool: str, page: int) -> str:
    """Where a page is now; that something is wrong with it first."""
    if (pool, page) in troubled(past.now):
        return past.page(pool, page)
    name = f"{POOL[pool]} page {page}"
    for owned in past.now.facts.pools[pool].owned:
        if owned.page == page:
            who, at = past.place(owned)
            return f"{name} stays with {who} at {at}, {past.having(pool, owned).split(f'{at} ', 1)[1]}"
    since = past.since(f"{name} is free", lambda m: page in m.facts.pools[pool].free)
    return f"{name} is in the free list {since}"


# Mapping and reads.


def _slot(m: Moment, holder: str, position: int) -> int:
    """The full slot that a row names; 0 for none."""
    facts = m.facts.holders.get(holder)
    cells = m.view.rows.get(facts.row, ()) if facts is not None else ()
    return cells[position] if position < len(cells) else 0


def _mapped(m: Moment, slot: int) -> int:
    return m.view.full_to_swa[slot] if 0 <= slot < len(m.view.full_to_swa) else 0


def _shared(past: Past) -> str | None:
    """MAP-1: an SWA slot that several positions lead to."""
    if past.now.facts.torn_swa:
        return _torn(past)
    for swa in past.now.facts.shared:
        slots = [s for s, to in enumerate(past.now.view.full_to_swa) if to == swa]
        each = [
            f"full slot {s} {past.since(f'{s} to {swa}', lambda m, s=s: _mapped(m, s) == swa)}"  # type: ignore[misc]
            for s in slots
        ]
        return f"two tokens write to SWA slot {swa}: it is mapped from {' and from '.join(each)}"
    return None


def _unmapped(past: Past) -> str | None:
    """MAP-2: a live position without an SWA slot."""
    for holder, position in past.now.facts.unmapped:
        slot = _slot(past.now, holder, position)
        names = past.since(f"{holder} has slot {slot}", lambda m: _slot(m, holder, position) == slot)
        entry = past.since(f"entry {slot} is 0", lambda m: _mapped(m, slot) == 0)
        frontier = past.now.facts.holders[holder].cursors.swa_evicted_seqlen
        return (
            f"{holder} has full slot {slot} at position {position} {names}, whose mapping entry is 0 {entry}: the"
            f" position has no SWA slot, and \0E\0 is {frontier}, so nothing there counts as swept"
        )
    return None


def _stale(past: Past) -> str | None:
    """MAP-3, MAP-4: an entry that should be 0."""
    swept = past.violation.clause == "MAP-3"
    for full, swa in past.now.facts.swept_mapped if swept else past.now.facts.unused_mapped:
        leads = past.since(f"{full} leads to {swa}", lambda m: _mapped(m, full) == swa)
        page, size = swa // past.page_size, past.page_size
        at = f"full slot {full} is mapped to SWA slot {swa} {leads}"
        whose = [o for o in past.now.facts.pools["swa"].owned if o.page == page]
        if whose:
            then = f"; of SWA page {page}, {past.having('swa', whose[0])}"
        elif page in past.now.facts.pools["swa"].free:
            since = past.since(f"SWA page {page} is free", lambda m: page in m.facts.pools["swa"].free)
            then = f", though SWA page {page} is free {since}"
        else:
            then = ""
        if swept:
            return at + then
        if full // size in past.now.facts.pools["full"].free:
            free = past.since(
                f"full page {full // size} is free", lambda m: full // size in m.facts.pools["full"].free
            )
            return f"full page {full // size} is free {free}, but {at}{then}"
        return f"full slot {full} is past kv_allocated_len, but {at}{then}"
    return None


def _reads(past: Past) -> str | None:
    """READ: a position that reads what is not its token's."""
    pool = "full" if past.violation.clause == "READ-1" else "swa"
    for holder, wrong in wrong_reads(past.now.state, past.now.facts).items():
        if not wrong[pool]:
            continue
        position = wrong[pool][0]
        full = _slot(past.now, holder, position)
        slot = full if pool == "full" else _mapped(past.now, full)
        names = past.since(
            f"{holder} reads slot {slot}",
            lambda m: (s := _slot(m, holder, position)) == full and slot in (s, _mapped(m, s)),
        )
        if not slot:
            return f"{holder} must read {POOL[pool]} KV at position {position} and finds no slot there {names}"

        def stamp(m: Moment) -> int:
            return (m.view.full_stamps if pool == "full" else m.view.swa_stamps)[slot]

        is_now = stamp(past.now)
        holds = past.since(f"slot {slot} holds {is_now}", lambda m: stamp(m) == is_now)
        what = stamp_text(is_now) if is_now else "no committed token"
        text = next(h.text for h in holders(past.now.state) if h.name == holder)
        must = stamp_text(text_tokens(text, position + 1)[position])
        told = (
            f"{holder} reads position {position} in {POOL[pool]} slot {slot} {names}, which holds {what}, {holds};"
            f" it must be {must}"
        )
        if (pool, slot // past.page_size) in troubled(past.now, (pool,)):
            told += f"; {past.page(pool, slot // past.page_size)}"
        return told
    return None


# Cursors.


def _row_cursors(m: Moment, name: str) -> Cursors | None:
    """Of "r1" or "slot of s1"; a slot that is lent has those of its turn."""
    session = name.removeprefix("slot of ")
    if session == name:
        facts = m.facts.requests.get(name)
        return facts.cursors if facts is not None else None
    here, kept = m.state.session(session), m.facts.sessions.get(session)
    turn = m.state.request(here.turn or "") if here is not None else None
    if turn is not None and turn.phase in IN_BATCH:
        return _row_cursors(m, turn.name)
    return kept.slot if kept is not None else None


def _off(past: Past) -> Iterator[tuple[str, str, int, int]]:
    """(name, letter, by the rules, in the system) of every cursor that differs."""
    ref, got = reference_side(past.now)["cursors"], system_side(past.now)["cursors"]
    for name, want in ref.items():
        have = got.get(name)
        if isinstance(want, dict) and isinstance(have, dict):
            yield from ((name, k, want[k], have[k]) for k in CURSORS if want[k] != have[k])


def _must_be(past: Past, off: list[tuple[str, str, int, int]]) -> str:
    """What cursors are, since when, and what they must be: those of one fate together."""
    fates: dict[tuple[int, int, int], dict[str, list[str]]] = {}
    for name, letter, want, got in off:
        index = past.first(f"{letter} of {name} is {got}", _has_cursor(name, letter, got))
        fates.setdefault((index, want, got), {}).setdefault(name, []).append(f"\0{letter}\0")
    said = []
    for (index, want, got), whose in fates.items():
        who = ", ".join(f"{' and '.join(k)} of {'the ' * (' ' in n)}{n}" for n, k in whose.items())
        several = sum(map(len, whose.values())) > 1
        if index == past.violation.step:
            verb = f"{'become' if several else 'becomes'} {got}"
        else:
            verb = f"{'are' if several else 'is'} {got} {_since(past, index)}"
        said.append(f"{who} {verb} and must be {want}")
    return "; ".join(said)


def _has_cursor(name: str, letter: str, value: int) -> Callable[[Moment], bool]:
    at = list(CURSORS).index(letter)

    def holds(m: Moment) -> bool:
        cursors = _row_cursors(m, name)
        return cursors is not None and cursors[at] == value

    return holds


def _since(past: Past, index: int) -> str:
    return "from the start" if index < 0 else f"since {past.command(index)}"


def _lengths(past: Past) -> str | None:
    """LEN-2 to LEN-4, REF-1: cursors that differ, and the rule that gives the right ones."""
    step, off = past.step, list(_off(past))
    if not off:
        return None
    head, request = f"after {past.here} ", step.acted
    if step.cut_at is not None and request is not None:
        target = step.cut_at[2]
        session = step.was.session(request.session)
        if not isinstance(step.command, Admit):
            told = f"{some(request.origin, 'token')} of input, {target - request.origin} of output"
            head = f"{past.here} ends the turn at target {target} ({told}): "
        elif past.violation.clause == "LEN-3" and session is not None and session.slot is not None:
            c, tokens = session.slot.kv_committed_len, request.origin + request.output
            key = f"a key of {tokens - 1} ({some(tokens, 'token')} of input less the last)"
            head = f"{past.here} resumes at {min(c, tokens - 1)}, the smaller of C {c} and {key}: "
    return head + _must_be(past, off[:6])


def _order(past: Past) -> str | None:
    """LEN-1: two cursors that have passed each other."""
    geometry = past.step.scope.geometry
    facts = past.now.facts
    shown = [(n, r.cursors) for n, r in facts.requests.items()]
    shown += [(f"slot of {n}", s.slot) for n, s in facts.sessions.items()]
    for name, c in shown:
        if c is None:
            continue
        values = dict(zip(CURSORS, c))
        if c.cache_protected_len % geometry.page_size:
            since = past.since(f"R of {name}", _has_cursor(name, "R", values["R"]))
            return f"\0R\0 of {name} is {values['R']} {since}, inside a page of {geometry.page_size} tokens"
        for low, high in (("R", "C"), ("C", "A"), ("E", "A")):
            if values[low] > values[high]:
                both = [
                    f"{k} of {name} is {values[k]} {past.since(f'{k} of {name}', _has_cursor(name, k, values[k]))}"
                    for k in (low, high)
                ]
                return f"\0{low}\0 may not pass \0{high}\0, but {', and '.join(both)}"
    return None


def _sweep(past: Past) -> str | None:
    """SWA-1: a frontier past what a later token still reads."""
    geometry, command = past.step.scope.geometry, past.step.command
    assert geometry.window is not None
    for was in past.step.was.requests:
        facts = past.now.facts.requests.get(was.name)
        if was.cursors is None or facts is None or facts.cursors is None:
            continue
        c, got = was.cursors, facts.cursors.swa_evicted_seqlen
        length = command.length if isinstance(command, EvictSwa) and command.request == was.name else c.kv_committed_len
        limit = max(c.swa_evicted_seqlen, c.cache_protected_len, sweep_limit(length, geometry.window, geometry.page_size))
        if got > limit:
            start = window_start(length, geometry.window)
            return (
                f"{past.here} sweeps {was.name} up to {got}, and a token at {length} still reads [{start}, {length}),"
                f" a window of {geometry.window} back: no sweep may pass {limit}"
            )
    return None


def _window(past: Past) -> str | None:
    """SWA-2: a token that would be computed without its window."""
    window = past.step.scope.geometry.window
    assert window is not None
    for request in past.now.state.requests:
        facts = past.now.facts.requests.get(request.name)
        seen = past.now.facts.holders.get(request.holder)
        if facts is None or facts.cursors is None or seen is None or request.cursors is None:
            continue
        p = facts.cursors.kv_committed_len
        dead = [q for q in range(window_start(p, window), p) if q < len(seen.swa_read) and seen.swa_read[q] is None]
        if dead:

            def gone(m: Moment, holder: str = request.holder, at: int = dead[0]) -> bool:
                h = m.facts.holders.get(holder)
                return h is not None and at < len(h.swa_read) and h.swa_read[at] is None

            since = past.since(f"SWA KV of {request.holder} at {dead[0]} is gone", gone)
            return (
                f"{request.name} goes on at position {p}, whose window starts at {window_start(p, window)}, but it has"
                f" no SWA KV at position {dead[0]} {since}; by the rules it resumes at"
                f" {request.cursors.kv_committed_len}"
            )
    return None


# Outcomes, checks, sessions.


def _outcome(past: Past) -> str | None:
    """OUT-1: a command that is done or refused, and should not be."""
    step = past.step
    told = f"{_does(step.outcome)} {past.here}; by the rules it is {say(step.expected)}"
    why = _why(past)
    return f"the system {told}{why}"


def _does(outcome: Outcome) -> str:
    return f"refuses ({outcome.reason.value})" if isinstance(outcome, Refused) else "carries out"


def _why(past: Past) -> str:
    """The fact behind a refusal: the reference's, or what the system says."""
    step, was = past.step, past.before.state
    ours = isinstance(step.expected, Refused)
    refusal = step.expected if ours else step.outcome
    if not isinstance(refusal, Refused):
        return ""
    reason, request = refusal.reason, step.acted
    if reason is Reason.TURN_IN_FLIGHT and isinstance(step.command, Submit):
        session = was.session(step.command.session)
        if session is not None and session.turn is not None:
            name, turn = session.name, session.turn
            since = past.since(
                f"{turn} is the turn of {name}", lambda m: (s := m.state.session(name)) is not None and s.turn == turn
            )
            return f", for {turn} is in flight in {name} {since}"
    if reason is Reason.WINDOW_LOST:
        return _window_lost(past, ours)
    if reason in (Reason.OUT_OF_FULL, Reason.OUT_OF_SWA) and not ours:
        pool = "full" if reason is Reason.OUT_OF_FULL else "swa"
        side = reference_side(past.before)
        left = side["free"][pool]
        unlocked = sum(
            (n["end"] - n["start"]) // past.page_size
            for n in side["nodes"].values()
            if not n[f"{pool}_locks"] and (pool == "full" or n["live"])
        )
        return f", for {some(left, f'{POOL[pool]} page')} can be had at once and {unlocked} more from the tree"
    if reason is Reason.UNKNOWN_REQUEST and not ours and request is not None:
        return f", for {request.name} is {request.phase.value}"
    if reason is Reason.WRONG_PHASE and request is not None:
        name, phase = request.name, request.phase

        def same(m: Moment) -> bool:
            r = m.state.request(name)
            return r is not None and r.phase is phase

        if ours:
            return f", for {name} is {phase.value} {past.since(f'{name} is {phase.value}', same)}"
    return ""


def _window_lost(past: Past, ours: bool) -> str:
    window = past.step.scope.geometry.window
    command = past.step.command
    lanes = getattr(command, "requests", ()) or [lane.request for lane in getattr(command, "lanes", ())]
    names = [command.request] if hasattr(command, "request") else lanes
    for name in names:
        was = past.before.state.request(name)
        if was is None or was.cursors is None or window is None:
            continue
        c = was.cursors
        start = window_start(c.kv_committed_len, window)
        if ours and lost_below(c) > start:
            since = past.since(f"E of {name}", _has_cursor(name, "E", c.swa_evicted_seqlen))
            return (
                f", for the window of {name} at {c.kv_committed_len} starts at {start} and its SWA KV below"
                f" {c.swa_evicted_seqlen} is gone {since}"
            )
        if not ours:
            return f", for the window of {name} at {c.kv_committed_len} is there: it starts at {start}"
    return ""


def _unchanged(past: Past) -> str | None:
    """OUT-2, CHK-3, SES-3: something changed that may not."""
    step = past.step
    if past.violation.clause == "OUT-2":
        head = f"{past.here} is refused and must change nothing, but "
    elif past.violation.clause == "CHK-3":
        head = f"{past.here} is a check and must change nothing, but "
    else:
        head = f"{past.here} admits again and must change nothing, but "
    moved = [
        f"\0{letter}\0 of {name} goes from {a} to {b}"
        for name in sorted(step.after.requests)
        for letter, a, b in zip(CURSORS, _cursors(step.before, name), _cursors(step.after, name))
        if a != b
    ]
    return head + (", ".join(moved[:3]) or past.violation.observed)


def _cursors(facts: Facts, name: str) -> Cursors:
    request = facts.requests.get(name)
    return (request.cursors if request is not None else None) or ZERO


def _alarm(past: Past) -> str | None:
    """CHK-1: an account that does not add up although every page has its one owner."""
    outcome = past.step.outcome
    report = outcome.report if isinstance(outcome, Done) else None
    for account in report.accounts if report is not None else ():
        if account.balances:
            continue
        unit = "rows" if account.pool == "rows" else f"{POOL[account.pool]} tokens"
        lines = miscounted(past.step, report, account) if report is not None else []
        told = f"every page has its one owner, but {past.here} counts {account.counted} {unit} of {account.total}"
        off = lines[0].replace("swa page", "SWA page") if lines else _terms_off(past, account.pool)
        since = past.violation.since
        then = f"; the check fails from {past.command(since)} on" if since is not None else ""
        return f"{told}: {off}{then}" if off else told + then
    return None


def _terms_off(past: Past, pool: str) -> str:
    """The terms of an account that are not what the reference counts."""
    want = reference_side(past.now)["accounts"].get(pool, {})
    got = system_side(past.now)["accounts"].get(pool, {})
    return ", ".join(f"{term} is {got[term]}, not {want[term]}" for term in want if got.get(term) != want[term])


def _terms(past: Past) -> str | None:
    """CHK-2: terms that balance and are wrong."""
    for pool in reference_side(past.now)["accounts"]:
        if off := _terms_off(past, pool):
            unit = "rows" if pool == "rows" else f"{POOL[pool]} tokens"
            return f"the sums of {past.here} add up, but not their terms: of the {unit}, {off}"
    return None


def _life(past: Past) -> str | None:
    """SES-2: a session, slot or request that is there and should not be, or the other way round."""
    state, facts = past.now.state, past.now.facts
    for kind, ours, theirs in (
        ("request", {r.name for r in state.requests}, set(facts.requests)),
        ("session", {s.name for s in state.sessions}, set(facts.sessions)),
    ):
        for name in sorted(ours ^ theirs):
            if name in theirs:
                since = past.since(f"{kind} {name} is there", lambda m: name in getattr(m.facts, f"{kind}s"))
                return f"{kind} {name} is there {since}; by the rules it ends with {past.here}"
            session = state.session(name)
            turn = f": its turn {session.turn} is in flight" if session is not None and session.turn else ""
            return f"{past.here} ends {kind} {name}, which goes on by the rules{turn}"
    for session in state.sessions:
        slot = facts.sessions[session.name].slot
        if (slot is None) != (session.slot is None):
            if slot is None:
                return f"{past.here} leaves {session.name} without a slot; by the rules it keeps one"

            def same(m: Moment, name: str = session.name, cursors: Cursors = slot) -> bool:
                kept = m.facts.sessions.get(name)
                return kept is not None and kept.slot == cursors

            since = past.since(f"slot of {session.name}", same)
            history = some(len(facts.sessions[session.name].history), "token")
            return (
                f"the slot of {session.name} keeps {some(slot.kv_committed_len, 'committed token')} {since}; by the"
                f" rules {past.here} leaves none, and the history of {session.name} has {history}"
            )
    return _lengths(past)


def _history(past: Past) -> str | None:
    """SES-1: text that the client did not see."""
    ref, got = reference_side(past.now), system_side(past.now)
    for name, mine in ref["sessions"].items():
        tokens = got["sessions"][name]["history"]
        if tokens != mine["history"]:

            def long(m: Moment, name: str = name) -> bool:
                s = m.facts.sessions.get(name)
                return s is not None and len(s.history) == tokens

            since = past.since(f"history of {name}", long)
            return (
                f"the history of {name} has {tokens} tokens {since}; the client saw {mine['history']}, with which"
                " the next turn starts"
            )
    for name, mine in ref["requests"].items():
        theirs = got["requests"][name]
        if theirs["tokens"] != mine["tokens"]:
            return f"after {past.here} {name} has {theirs['tokens']} tokens of text; the rules give it {mine['tokens']}"
    return None


def _choice(past: Past) -> str:
    return f"{past.here} leaves the bounds of a choice, {past.violation.observed}"


_RULES: dict[str, Callable[[Past], str | None]] = {
    "OWN-1": _pages, "OWN-2": _pages, "OWN-3": _pages, "OWN-4": _rows, "OWN-5": _torn,
    "FREE": _freed, "END-1": _lost,
    "MAP-1": _shared, "MAP-2": _unmapped, "MAP-3": _stale, "MAP-4": _stale,
    "READ": _reads, "LEN-1": _order, "LEN": _lengths, "REF": _lengths, "SWA-1": _sweep, "SWA-2": _window,
    "OUT-1": _outcome, "OUT-2": _unchanged, "OUT-3": _choice,
    "CHK-1": _alarm, "CHK-2": _terms, "CHK-3": _unchanged,
    "SES-1": _history, "SES-2": _life, "SES-3": _unchanged,
}  # fmt: skip
