"""How events of prefill and of rounds are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from impl.sglang.server import events as log
from reference import given
from reference.clauses.step import cursors_text
from reference.commands import Admit, Choice, Chunk, Decode, Draft, EvictSwa, Extend, Reason, SpecDecode
from reference.ledger import Cursors, Phase
from stateful_tests.watched import deviations as known
from stateful_tests.watched.beside import reads
from stateful_tests.watched.judging import Shown, Verdict
from stateful_tests.watched.turns import Turns


class Rounds(Turns):
    """Each method is a row of the table."""

    # -- prefill ------------------------------------------------------------------------------------

    @reads(log.Admitted, "admit, if the session has a slot", "whose turn it is; cursors of the request")
    def _admit(self, e: log.Admitted) -> None:
        request = self._request(e.request)
        session = self.state.session(request.session) if request is not None else None
        if request is None:
            return
        self._interrupts(e.request)
        self._matched[e.request] = e.prefix
        if session is not None and e.session is None:
            want = f"{e.request} goes on as the turn of {session.name}"
            told = Verdict("SES-2", want, "as a request of nobody's")
            self._orphan(session, Admit(e.request), told, ends=False)
            request = self.state.request(e.request) or request
        if request.phase in (Phase.QUEUED, Phase.ADMITTED):
            if (slot := self._slot(request)) is not None:
                self._reach("a turn that resumes")
                self._reach("a tail that admission frees", slot.kv_allocated_len > e.prefix)
                cursors = Cursors(*e.cursors)
                self._pages.cut(str(request.session), cursors.kv_committed_len)
                self._do(Admit(e.request), shown=Shown({e.request: cursors}, {str(request.session): cursors}))
            else:
                offered = e.cursors[3] if self.header.tree and e.cursors[3] <= e.prefix else 0
                self._untouched(e, Cursors(0, 0, 0, offered))
        elif request.cursors is not None:
            self._untouched(e, request.cursors)

    def _untouched(self, e: log.Admitted, want: Cursors) -> None:
        """Who is only looked at has no new cursors."""
        self.result.compared += 1
        if e.cursors != want:
            self._part(None, Verdict("LEN-4", f"{e.request}: {cursors_text(want)}", f"shows {e.cursors}"))

    @reads(log.Extended, "admit of those without a slot, extend", "prefix and cursors of each lane")
    def _extend(self, e: log.Extended) -> None:
        shown: dict[str, Cursors] = {}
        self._prepared(e.lanes)
        for name, prefix, _, cells in e.lanes:
            request = self._request(name)
            if request is None:
                return
            offered = self._matched.pop(name, None)
            if offered != prefix:
                told = f"{name} goes on at {offered}, as it was admitted"
                if offered is None:
                    told = f"refused: {Reason.WRONG_PHASE.value}, as nobody admitted {name}"
                self._part(None, Verdict("OUT-1", told, f"goes on at {prefix}"))
            if request.phase is Phase.QUEUED:
                self._do(Admit(name))
                if self.header.tree:
                    self._match(name, prefix, Cursors(*cells))
            shown[name] = self._with_protected(name, Cursors(*cells))
            request = self.state.request(name)
            have = request.cursors.kv_committed_len if request is not None and request.cursors else 0
            self.result.compared += 1
            if have != prefix:
                self._part(None, Verdict("LEN-4", f"{name} goes on at {have}", f"goes on at {prefix}"))
        self._reach("a prefill of several requests", len(e.lanes) > 1)
        lanes = tuple(Chunk(name, tokens) for name, _, tokens, _ in e.lanes)
        sweeps = [self._sweeps.pop(name) for name, *_ in e.lanes if name in self._sweeps]
        self._do(Extend(lanes), *sweeps, shown=Shown(shown, {}))
        phases = [request.phase for name in shown if (request := self.state.request(name))]
        self._reach("a chunked prefill", Phase.EXTENDING in phases)

    def _prepared(self, lanes: Sequence[tuple[Any, ...]]) -> None:
        """A round of these lanes will be run; in a mixed batch beside those of the prefill."""
        self._reach("a mixed batch", bool(self._lanes))
        self._lanes |= {lane[0] for lane in lanes}
        self.result.prepared = True
        self.result.parked = any(
            r.phase is Phase.EXTENDING and r.name not in self._lanes for r in self.state.requests
        )

    def _match(self, name: str, prefix: int, got: Cursors) -> None:
        """The tree gave an admitted request its prefix: how much is the tree's choice."""
        protected = got.cache_protected_len
        self._reach("a prefix from the tree", prefix > 0)
        if protected % self.header.page_size or protected > prefix:
            self._part(
                None, Verdict("LEN-1", "cache_protected_len of whole pages, in the prefix", str(protected))
            )
        self.state = given.with_cursors(self.state, name, Cursors(prefix, prefix, 0, protected))

    def _with_protected(self, name: str, got: Cursors) -> Cursors:
        """What the server shows; a sweep inside what is the tree's has swept nothing, and moves E alone."""
        request = self.state.request(name)
        if not self.header.tree or request is None or request.cursors is None:
            return got
        mine = request.cursors
        swept, was = got.swa_evicted_seqlen, mine.swa_evicted_seqlen
        if swept != was and max(swept, was) <= mine.cache_protected_len:
            self.state = given.with_cursors(
                self.state, name, mine._replace(swa_evicted_seqlen=got.swa_evicted_seqlen)
            )
        return got

    @reads(log.Checkpointed, "", "only cache_protected_len moves, up and by whole pages (E inside of it)")
    def _insert(self, e: log.Checkpointed) -> None:
        got = Cursors(*e.cursors)
        self._catch_up(e.request, got)  # a request that ends inserts before its release is told
        request = self._request(e.request)
        if request is None or request.cursors is None or request.cursors == got:
            return
        mine, length = request.cursors, got.cache_protected_len
        if self.geometry.window and got.swa_evicted_seqlen > max(length, mine.swa_evicted_seqlen):
            frontier = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
            self._do(EvictSwa(e.request, mine.kv_committed_len), frontier)
            mine = self.state.request(e.request).cursors or mine  # type: ignore[union-attr]
        whole = (
            mine.cache_protected_len <= length <= mine.kv_committed_len and not length % self.header.page_size
        )
        want = mine._replace(cache_protected_len=length)
        if max(want.swa_evicted_seqlen, got.swa_evicted_seqlen) <= length:
            want = want._replace(swa_evicted_seqlen=got.swa_evicted_seqlen)
        self.result.compared += 1
        if not whole or want != got:
            told = (
                f"C {mine[0]}, A {mine[1]}, E {mine[2]}, R from {mine[3]} to a page boundary up to {mine[0]}"
            )
            self._part(None, Verdict("TREE-12" if want == got else "LEN-4", told, f"shows {tuple(got)}"))
        self.state = given.with_cursors(self.state, e.request, got)

    # -- rounds -------------------------------------------------------------------------------------

    def _decode(self, lanes: list[log.Lane]) -> None:
        """A round of one token each."""
        self._given_up()
        self._prepared(lanes)
        shown = {name: Cursors(c, a, e, r) for name, c, a, e, r in lanes}
        known = {request.name: request.cursors for request in self.state.requests}
        for name, got in shown.items():
            if (mine := known.get(name)) is None:
                if self._request(name) is None:
                    return
            elif mine.swa_evicted_seqlen != got.swa_evicted_seqlen:
                self._with_protected(name, got)
        self._do(Decode(tuple(shown)), shown=Shown(shown, {}))

    def _speculate(self, lanes: list[log.Lane]) -> None:
        """Slots are taken for a verify round: A goes up, within the row."""
        self._given_up()
        mixed = bool(self._lanes)
        self._prepared(lanes)
        for name, *cells in lanes:
            request, got = self._request(name), self._with_protected(name, Cursors(*cells))
            if request is None or request.cursors is None:
                continue
            mine = (self.state.request(name) or request).cursors
            assert mine is not None
            claims = self.header.claims
            if not claims:  # else a result that accepts the claim alone cannot be told
                self._launched[name].append(mixed)
            if len(self._launched[name]) > 1 + self.header.overlap and name not in self._midway:
                want = f"a result of {name} before its next round"
                self._part(None, Verdict("OUT-1", want, f"{len(self._launched[name])} rounds have none"))
            self.result.compared += 1
            ahead = (
                max(mine.kv_allocated_len, mine.kv_committed_len + 1)
                <= got.kv_allocated_len
                <= self.header.width
            )
            taken = mine._replace(kv_allocated_len=got.kv_allocated_len)
            if not ahead or got != taken._replace(kv_committed_len=mine.kv_committed_len + claims):
                want = f"{name}: {tuple(mine)} with kv_allocated_len up to {self.header.width}"
                self._part(None, Verdict("LEN-4", want, f"shows {tuple(got)}"))
            if request.phase is not Phase.RUNNING:
                told = Verdict("OUT-1", f"refused: {Reason.WRONG_PHASE.value}", f"runs a round of {name}")
                self._part(None, told)
            self.state = given.with_cursors(self.state, name, taken)
            if claims:
                draft = Draft(name, taken.kv_allocated_len - taken.kv_committed_len, claims)
                self._do(SpecDecode((draft,)), shown=Shown({name: got}, {}))
                if (claimed := self.state.request(name)) is not None:  # the round is told by its result
                    self.state = self.state.with_request(claimed._replace(known=request.known))

    @reads(log.Resulted, "spec_decode with what was accepted", "outputs and cursors of each lane")
    def _result(self, e: log.Resulted) -> None:
        drafts: list[Draft] = []
        shown: dict[str, Cursors] = {}
        for name, _, cells, _ in e.lanes:
            draft = self._accepted(name, Cursors(*cells))
            if draft is not None:
                drafts.append(draft)
                shown[name] = Cursors(*cells)
            else:
                self._stands(name, Cursors(*cells))
        self._reach("a verify round that accepts several", any(draft.accept > 1 for draft in drafts))
        if drafts:
            self._do(SpecDecode(tuple(drafts)), shown=Shown(shown, {}))
        for name, outputs, _, new in e.lanes:
            self._outputs(name, outputs)
            self._texts.says(name, new)

    def _accepted(self, name: str, got: Cursors) -> Draft | None:
        """The lane of a verify round whose result moved the commit to what the server shows."""
        request = self.state.request(name)
        if request is None or request.cursors is None or not self.header.speculative:
            return None
        mine = request.cursors
        accept = got.kv_committed_len - mine.kv_committed_len
        if accept <= 0 or request.phase is not Phase.RUNNING:
            return None
        if not (self._launched[name] or self.header.claims or name in self._midway):
            told = f"no result of {name}: no round of it is in flight"
            self._part(None, Verdict("OUT-1", told, f"{accept} tokens are accepted"))
        del self._launched[name][:1]
        return Draft(name, max(1, mine.kv_allocated_len - mine.kv_committed_len), accept)

    def _ends_mixed(self, name: str, outputs: int, got: Cursors) -> None:
        """The last round of a request was a lane of a mixed batch, which the server does not count."""
        request = self.state.request(name)
        mine = request.cursors if request is not None else None
        if request is None or mine is None or not any(self._launched[name][:1]):
            return
        if (outputs, got.kv_committed_len) != (request.output + 1, mine.kv_committed_len):
            return
        self._do(SpecDecode((Draft(name, max(1, mine.kv_allocated_len - mine.kv_committed_len), 1),)))
        told = Verdict("LEN-2", f"{name} has computed {mine[0] + 1} tokens", f"counts {mine[0]}")
        self._part(None, told, known.ends_in_mixed_batch(self.header))
        self.state = given.with_cursors(self.state, name, mine)

    def _catch_up(self, name: str, got: Cursors) -> None:
        """The result of a verify round that is not told yet has moved this request's commit."""
        draft = self._accepted(name, got)
        if draft is not None:
            mine = self.state.request(name)
            assert mine is not None and mine.cursors is not None
            moved = mine.cursors._replace(kv_committed_len=got.kv_committed_len)
            self._do(SpecDecode((draft,)), shown=Shown({name: moved}, {}))

    def _stands(self, name: str, got: Cursors) -> None:
        """Nothing has moved this request's cursors since they were told."""
        got = self._with_protected(name, got)
        request = self.state.request(name)
        self.result.compared += 1
        if request is not None and request.cursors is not None and request.cursors != got:
            want = f"{name}: {cursors_text(request.cursors)}"
            self._part(None, Verdict("LEN-4", want, f"shows {cursors_text(got)}"))

    def _outputs(self, name: str, outputs: int) -> None:
        """How many outputs the server counts: all, under overlap perhaps without that of a prefill."""
        request = self.state.request(name)
        if request is None or request.phase is not Phase.RUNNING:
            return
        self.result.compared += 1
        prefill = request.output == 1 or self._retracts[name]  # its result may be to come
        late = self.header.overlap and bool(prefill or not self.header.speculative)
        ahead = self.header.claims if self.header.overlap else 0  # of the round that is in flight
        if not request.output - late - ahead <= outputs <= request.output:
            told = Verdict("SES-1", f"{name} has {request.output} outputs", f"counts {outputs}")
            self._part(None, told)

    @reads(log.Swept, "evict_swa, or a choice of the extend that follows", "how far; cursors")
    def _sweep(self, e: log.Swept) -> None:
        self._reach("a window sweep")
        request, got = self._request(e.request), Cursors(*e.cursors)
        if request is None:
            return
        choice = Choice(e.request, swa_evicted_seqlen=got.swa_evicted_seqlen)
        if request.cursors is not None:
            self._stands(e.request, got._replace(swa_evicted_seqlen=request.cursors.swa_evicted_seqlen))
        if request.phase in (Phase.EXTENDING, Phase.RUNNING):
            self._do(EvictSwa(e.request, e.length), choice, shown=Shown({e.request: got}, {}))
        else:
            self._sweeps[e.request] = choice
