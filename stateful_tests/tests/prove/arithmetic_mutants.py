"""Faults of the arithmetic, as changes of the reference's text: what proofs and CrossHair have to refute.

A named bug of `impl.bugs` is the same fault in the torch implementation, as far as the fault is one of
lengths and pages. The bugs that are not here are faults of free lists, rows, contents, order or of
sessions, which no cursor shows.
"""

from __future__ import annotations

from dataclasses import dataclass

CURSORS, LEDGER, ADMIT, DECODE, FINISH, RETRACT = (
    f"reference.{name}"
    for name in ("cursors", "ledger", "rules.admit", "rules.decode", "rules.finish", "rules.retract")
)


@dataclass(frozen=True)
class Fault:
    """right: text in `module` that is replaced by `wrong`.

    refuted: obligations that it must refute; the first about a rule, if there is one, has a trace that
    shows it on `torch+bug`. crosshair: the function of `cursors` whose contract CrossHair must refute.
    """

    name: str
    module: str
    right: str
    wrong: str
    refuted: tuple[str, ...]
    bugs: tuple[str, ...] = ()
    crosshair: str | None = None

    @property
    def edits(self) -> dict[str, tuple[tuple[str, str], ...]]:
        return {self.module: ((self.right, self.wrong),)}


_OWED_SWA = "    return ceil_page(live, page_size), ceil_page(c.kv_allocated_len, page_size)"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "E is not capped", CURSORS,
        "        min(c.swa_evicted_seqlen, target),", "        c.swa_evicted_seqlen,",
        ("caps/finish", "contract/cut"), ("pr22900",), "cut",
    ),
    Fault(
        "C is not capped", CURSORS,
        "        min(c.kv_committed_len, target),", "        c.kv_committed_len,",
        ("caps/finish", "contract/cut"), ("pr22897",), "cut",
    ),
    Fault(
        "A is not capped", CURSORS,
        "        min(c.kv_allocated_len, target),", "        c.kv_allocated_len,",
        ("caps/retract", "contract/cut"), ("pr22213-tail",), "cut",
    ),
    Fault(
        "R is taken from the prefix", CURSORS,
        "        c.cache_protected_len,\n    )", "        min(c.kv_committed_len, target),\n    )",
        ("caps/admit", "contract/cut"), ("pr20070",), "cut",
    ),
    Fault(
        "a free starts inside a page", CURSORS,
        "    return ceil_page(target, page_size), ceil_page(c.kv",
        "    over = target < c.kv_allocated_len\n"
        "    return (floor_page if over else ceil_page)(target, page_size), ceil_page(c.kv",
        ("full-pages/finish",), ("pr22862-align",),
        "owed_full",
    ),
    Fault(
        "swept pages are freed again", CURSORS,
        "    live = max(target, c.swa_evicted_seqlen, c.cache_protected_len)",
        "    live = max(target, c.cache_protected_len)",
        ("swa-pages/finish",), ("cut-frees-swept-twice",), "owed_swa",
    ),
    Fault(
        "a trim forgets the SWA pool", CURSORS,
        _OWED_SWA, _OWED_SWA.replace("ceil_page(live", "ceil_page(max(live, c.kv_allocated_len)"),
        ("swa-pages/finish",), ("trim-forgets-swa",),
    ),
    Fault(
        "the prefix is one short", CURSORS,
        "    prefix = min(c.kv_committed_len, key)",
        "    prefix = max(c.cache_protected_len, min(c.kv_committed_len, key - 1))",
        ("literal-resume/admit",), ("pr22862-prefix",),
    ),
    Fault(
        "resumed on a dead window", CURSORS,
        "    if window == 0 or window_live(lost_below(c), prefix, window):", "    if True:",
        ("window/admit", "contract/resume"), ("resume-on-dead-window",), "resume",
    ),
    Fault(
        "a window too long", CURSORS,
        "return max(0, position - window)", "return max(0, position - window - 1)",
        ("contract/window-start",), (), "window_start",
    ),
    Fault(
        "a sweep moves back", CURSORS,
        "max(c.swa_evicted_seqlen, c.cache_protected_len, frontier)", "max(c.cache_protected_len, frontier)",
        ("sweep/evict_swa",), ("sweep-moves-back",),
    ),
    Fault(
        "a sweep reaches into the window", CURSORS,
        "    frontier = floor_page(length - window - page_size, page_size)",
        "    frontier = floor_page(length - window + 1, page_size) + page_size\n"
        "    if frontier > c.kv_allocated_len:\n"
        "        frontier = floor_page(length - window - page_size, page_size)",
        ("sweep/evict_swa",), ("sweep-into-window",), "sweep",
    ),
    Fault(
        "a sweep ends inside a page", CURSORS,
        "floor_page(length - window - page_size, page_size)", "length - window - page_size",
        ("frontier/evict_swa",), ("sweep-off-the-page",),
    ),
    Fault(
        "tokens are counted, not pages", CURSORS,
        "return ceil_page(c.kv_allocated_len, page_size) - c.cache_protected_len",
        "return c.kv_allocated_len - c.cache_protected_len",
        ("contract/counted-full",), ("check-forgets-page-rounding",), "counted_full",
    ),
    Fault(
        "a check ignores the sweep", CURSORS,
        "    dead = max(c.cache_protected_len, c.swa_evicted_seqlen)", "    dead = c.cache_protected_len",
        ("contract/counted-swa",), ("check-ignores-the-sweep",), "counted_swa",
    ),
    Fault(
        "E is taken for a page boundary", CURSORS,
        "- ceil_page(dead, page_size)", "- dead",
        ("contract/counted-swa",), ("check-frontier-inside-a-page",), "counted_swa",
    ),
    Fault(
        "full pages end at the commit", LEDGER,
        "range(cursors.cache_protected_len // page_size, -(-cursors.kv_allocated_len // page_size))",
        "range(cursors.cache_protected_len // page_size, -(-cursors.kv_committed_len // page_size))",
        ("full-pages/spec_decode",), (),
    ),
    Fault(
        "finish does not trim", FINISH,
        "slot = cut_of_turn(state, request, target, context)", "slot = cursors",
        ("caps/finish",), ("pr22897",),
    ),
    Fault(
        "retract does not trim", RETRACT,
        "slot=cut_of_turn(state, request, target, context)", "slot=request.cursors",
        ("caps/retract",), ("pr22213-tail",),
    ),
    Fault(
        "admit does not trim", ADMIT,
        "restored = cut(session.slot, prefix)", "restored = session.slot._replace(kv_committed_len=prefix)",
        ("caps/admit", "text/admit"), ("pr22862-tail",),
    ),
    Fault(
        "the slot keeps the lengths of before", ADMIT,
        "state = state.with_session(session._replace(slot=restored))", "pass",
        ("caps/admit",), ("restore-caps-request-only",),
    ),
    Fault(
        "the last token is left out twice", ADMIT,
        "    key = request.origin + request.output - 1\n", "    key = request.origin + request.output - 2\n",
        ("literal-resume/admit",), ("pr22862-prefix",),
    ),
    Fault(
        "decode commits without a slot", DECODE,
        "        allocated = max(cursors_of(request).kv_allocated_len, most)",
        "        allocated = cursors_of(request).kv_allocated_len",
        ("order/decode", "slots/decode"), ("decode-commits-without-slot",),
    ),
    Fault(
        "rejected drafts are committed", DECODE,
        "Cursors(committed + gain, allocated", "Cursors(allocated, allocated",
        ("text/spec_decode",), ("spec-commits-drafts",),
    ),
    Fault(
        "decode goes on without its window", "reference.rules.batch",
        "or window_live(lost_below(c), request.settled_len, window),", "or True,",
        ("window/decode", "reads/decode"), ("decode-past-lost-window",),
    ),
)  # fmt: skip
