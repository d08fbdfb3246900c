"""Both sides at one moment as plain data, by role and position: what the page draws and `--json` gives.

Positions and lengths are tokens.
"""

from collections import Counter
from dataclasses import asdict

from ci import Data
from ci.compare.differences import CURSORS, by_place, difference, differences
from reference import radix_tree as radix
from reference.clauses.attention_reads import reads
from reference.clauses.facts import Facts, TreeFacts
from reference.clauses.tree_evictions import SIZES
from reference.commands import Broken, Done, Outcome
from reference.geometry import Geometry
from reference.state import IN_BATCH, ZERO, Cursors, Request, State, free, full_pages, holders, swa_pages
from reference.prefix_cache import lock_holders, path_text
from stateful_tests.lockstep.run_moments import Moment
from stateful_tests.lockstep.run_results import Run
from stateful_tests.traces.notation import format_command as describe
from stateful_tests.traces.notation import format_outcome as say


def snapshots(run: Run, last: int) -> list[Data]:
    """Return a snapshot for each row whose moment is known, for the `last` ones at most."""
    return [
        _snapshot(run, index)
        for index in range(max(0, run.history_start, len(run.rows) - last), len(run.rows))
    ]


def moment_of(run: Run, index: int) -> Moment | None:
    """Return the moment after a row (-1: the start), if it was kept."""
    at = index - run.history_start
    return run.moments(Moment)[at] if 0 <= at < len(run.history) else None


def _snapshot(run: Run, index: int) -> Data:
    """Return both sides after the step `index` of a run, and their differences by place."""
    moment = moment_of(run, index)
    row = run.rows[index]
    assert moment is not None
    outcome: Outcome | None = moment.step.outcome if moment.step is not None else None
    if (
        run.violation is not None
        and "BROKEN" in run.violation.clauses
        and run.violation.step == index
    ):
        outcome = Broken(run.violation.failure_of("BROKEN").observed)
    reference = reference_side(moment)
    system = system_side(moment)
    snapshot: Data = {
        "step": index,
        "command": describe(row.command),
        "reference": {"outcome": say(row.outcome), **reference},
        "system": {"outcome": say(outcome) if outcome is not None else "not asked", **system},
    }
    if isinstance(outcome, Broken) and moment.step is None:
        snapshot["differences"] = [difference(("outcome",), "outcome", say(row.outcome), say(outcome))]
    else:
        shown_differences = [*differences(moment, reference, system, run.waived)]
        violation = run.violation
        places = violation.failure.at if violation is not None and violation.step == index else ()
        if violation is not None and places and not shown_differences:  # both sides have it, and neither may
            about = difference(
                ("clause",), violation.clause, violation.expected, violation.observed
            )
            shown_differences.append(about)
        snapshot["differences"] = by_place(shown_differences, places, moment)
    return snapshot


# -- the two sides --------------------------------------------------------------------------------


def _free_pages(full: int, swa: int, window: int | None) -> dict[str, int | None]:
    """Return the free pages by pool; None where row and tree, each with pages of its own, would need
    more than exist (a system's tree was adopted that shares pages with a row)."""
    pools = {"full": full} | ({"swa": swa} if window else {})
    return {pool: None if min(pools.values()) < 0 else pages for pool, pages in pools.items()}


def reference_side(moment: Moment) -> Data:
    """Return the reference's side: the owners of pages, and what is free."""
    state = moment.state
    geometry = state.config.geometry
    free_sizes = free(state)
    holders_data = {
        h.name: {
            "who": _request_record(_turn_of_holder(state, h.name)),
            "target": _target_length(_turn_of_holder(state, h.name)),
            "cursors": _cursors(h.cursors),
            "full": dict.fromkeys(full_pages(h.cursors, geometry.page_size)),
            "swa": dict.fromkeys(swa_pages(h.cursors, geometry.page_size))
            if geometry.window
            else {},
        }
        for h in holders(state)
    }
    return {
        "holders": holders_data,
        "cursors": _named_cursors(
            state,
            {r.name: r.cursors for r in state.requests},
            {s.name: s.slot for s in state.sessions},
        ),
        "requests": {
            r.name: {
                "session": r.session,
                "origin": r.origin,
                "tokens": r.origin + r.output,
                "phase": r.phase.value,
            }
            for r in state.requests
        },
        "sessions": {
            s.name: {"history": s.history[-1][1] if s.history else 0, "closing": s.closing}
            for s in state.sessions
        },
        "free": _free_pages(free_sizes.full, free_sizes.swa, geometry.window) | {"rows": free_sizes.rows},
        "nodes": _reference_nodes(state),
        "lock_holders": {name: len(key) for name, key in lock_holders(state).items()},
        "counters": None,
        "accounts": _accounts(moment.step.expected if moment.step is not None else None),
    }


def system_side(moment: Moment) -> Data:
    """Return the physical view by role: the same facts, with their pages and rows."""
    facts = moment.facts
    view = moment.view
    state = moment.state
    geometry = state.config.geometry
    owned: dict[tuple[str, str], dict[int, int]] = {}
    for pool, pages in facts.pools.items():
        for own in pages.owned:
            owned.setdefault((pool, own.holder), {})[own.at] = own.page
    holders_data: dict[str, Data] = {
        name: {
            "who": _request_record(_turn_of_holder(state, name)),
            "target": _target_length(_turn_of_holder(state, name)),
            "cursors": _cursors(h.cursors),
            "row": h.row,
            "full": owned.get(("full", name), {}),
            "swa": owned.get(("swa", name), {}),
            "prefix": [s // geometry.page_size for s in h.prefix[:: geometry.page_size]],
        }
        for name, h in facts.holders.items()
    }
    for name, wrong in wrong_reads(state, facts).items():
        holders_data[name]["wrong"] = wrong
    return {
        "holders": holders_data,
        "cursors": _named_cursors(
            state,
            {n: r.cursors for n, r in facts.requests.items()},
            {n: s.slot for n, s in facts.sessions.items()},
        ),
        "requests": {
            n: {"session": r.session, "origin": r.origin, "tokens": len(r.text)}
            for n, r in facts.requests.items()
        },
        "sessions": {
            n: {"history": len(s.history), "closing": s.closing} for n, s in facts.sessions.items()
        },
        "free": {name: len(pool.free) for name, pool in facts.pools.items()}
        | {"rows": len(facts.free_rows)},
        "nodes": _system_nodes(facts.tree, geometry),
        "lock_holders": {n: len(slots) for n, slots in facts.tree.lock_holders.items()}
        if facts.tree
        else {},
        "counters": dict(zip(SIZES, facts.tree.sizes)) if facts.tree and facts.tree.sizes else None,
        "accounts": _accounts(moment.step.outcome if moment.step is not None else None),
        "pools": {name: _pool_pages(facts, name) for name in facts.pools},
        "free_rows": sorted(view.free_rows),
    }


def _cursors(c: Cursors) -> dict[str, int]:
    return dict(zip(CURSORS, c))


def _request_record(request: Request | None) -> str:
    return f"{request.name} {request.phase.value}" if request is not None else "idle"


def _turn_of_holder(state: State, holder: str) -> Request | None:
    """Return the request that has a row, or the turn of a session, queued or not."""
    session = state.session(holder)
    return state.request(session.turn or "") if session is not None else state.request(holder)


def _target_length(request: Request | None) -> int | None:
    """Return the length at which the turn would end if all of its outputs counted."""
    return request.origin + request.output if request is not None else None


def _named_cursors(
    state: State, requests: dict[str, Cursors | None], slots: dict[str, Cursors | None]
) -> dict[str, dict[str, int] | str]:
    """Return the cursors of requests and slots, by name. A slot that is lent to a running turn has none
    (REF-1)."""
    cursors_by_name: dict[str, dict[str, int] | str] = {
        n: _cursors(c or ZERO) for n, c in sorted(requests.items())
    }
    for name, slot in sorted(slots.items()):
        session = state.session(name)
        turn = state.request(session.turn or "") if session is not None else None
        if turn is not None and turn.phase in IN_BATCH:
            cursors_by_name[f"slot of {name}"] = f"lent to {turn.name}"
        else:
            cursors_by_name[f"slot of {name}"] = _cursors(slot) if slot is not None else "none"
    return cursors_by_name


def _reference_nodes(state: State) -> dict[str, Data]:
    tree = state.tree
    nodes: dict[str, Data] = {}
    if tree is not None:
        for p in sorted(radix.nodes(tree), key=lambda p: p.path):
            full, swa = lockers(tree, p)
            nodes[path_text(p.path)] = {
                "parent": path_text(p.path[: p.start]),
                "start": p.start,
                "end": p.end,
                "live": p.node.live if tree.window is not None else None,
                "full_locks": len(full),
                "swa_locks": len(swa),
                "full_locked_by": full,
                "swa_locked_by": swa,
            }
    return nodes


def lockers(tree: radix.Tree, placed: radix.Placed) -> tuple[list[str], list[str]]:
    """Return the holders that need a node's full KV, and those that need its SWA KV."""
    through = [lock for lock in tree.locks if lock.key[: placed.end] == placed.path]
    swa = [
        lock.holder for lock in through if tree.window is not None and lock.swa_from < placed.end
    ]
    return [lock.holder for lock in through], swa


def _system_nodes(tree: TreeFacts | None, geometry: Geometry) -> dict[str, Data]:
    """Return the system's tree nodes by the text of their path, with page numbers in place of slots. Empty
    without a tree."""
    size = geometry.page_size
    nodes: dict[str, Data] = {}
    if tree is not None:
        for n in tree.nodes:
            has_all_swa = len(n.swa_slots) == len(n.slots) and all(n.swa_slots)
            nodes[path_text(n.path)] = {
                "parent": path_text(n.path[: n.start]),
                "start": n.start,
                "end": len(n.path),
                "live": None if geometry.window is None else n.live,
                "full_locks": n.full_locks,
                "swa_locks": n.swa_locks if geometry.window is not None else 0,
                "full": [slot // size for slot in n.slots[::size]],
                "swa": [slot // size for slot in n.swa_slots[::size]],
                "wrong": any(
                    got and tuple(got) != n.path[n.start :] for got in (n.full_read, n.swa_read)
                ),
                "half": n.live and not has_all_swa,
            }
    return nodes


def _accounts(outcome: Outcome | None) -> dict[str, Data]:
    """Return the counts of a memory check, a dictionary for each pool."""
    report = outcome.report if isinstance(outcome, Done) else None
    accounts = [asdict(account) for account in report.accounts] if report is not None else []
    return {account.pop("pool"): account for account in accounts}


def _pool_pages(facts: Facts, name: str) -> dict[int, Data]:
    """Return each page that is not free, once: its owners as (holder, page of its sequence), and its
    times free."""
    pool = facts.pools[name]
    owners: dict[int, list[tuple[str, int]]] = {}
    for owned in pool.owned:
        owners.setdefault(owned.page, []).append((owned.holder, owned.at))
    free = Counter(pool.free)
    plain = {page for page, times in free.items() if times == 1 and page not in owners and page > 0}
    pages = {*owners, *free, *range(1, pool.size + 1)} - {p for p in plain if p <= pool.size}
    return {page: {"owners": owners.get(page, []), "free": free[page]} for page in sorted(pages)}


def wrong_reads(state: State, facts: Facts) -> dict[str, dict[str, list[int]]]:
    """Return holder -> positions per pool whose KV differs from the text's token there."""
    window = state.config.geometry.window
    positions: dict[str, dict[str, list[int]]] = {}
    for h in holders(state):
        seen = facts.holders.get(h.name)
        wrong = {"full": list[int](), "swa": list[int]()}
        if seen is not None:
            for pool in state.config.geometry.pools:
                start, want, got = reads(h, seen, pool, window)
                wrong[pool] = [start + index for index, (a, b) in enumerate(zip(want, got)) if a != b]
        if any(wrong.values()):
            positions[h.name] = wrong
    return positions
