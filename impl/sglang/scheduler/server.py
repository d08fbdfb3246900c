"""The release's own objects of one server (pools, session cache, sessions, batches), and the view of them.

Scheduling decisions are made in `driver.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from impl.lazy import torch

from impl.adapter import Cursors, LockHolderView, RequestView, SessionView, StatesView, TreeView, View
from impl.loading.optional import optional
from impl.sglang.parts import namespaces
from impl.sglang.parts.stand_ins import (
    SERVER_ARGS,
    Bag,
    ForwardMode,
    SamplingParams,
    SpecAlgorithm,
    state_chunk,
)
from impl.sglang.parts.trees import ReleaseTree
from impl.sglang.releases.v0_5_10_to_14 import Release0510
from impl.sglang.scheduler.live_requests import LiveRequest, LockHolder, Result
from impl.sglang.scheduler.states import States
from impl.vocabulary import RequestPhase, require
from reference.commands import Reason
from reference.geometry import Geometry
from reference.token_ids import token_id

_TENSORS_BY_ROW = "req_to_token", "req_index_to_mamba_ping_pong_track_buffer_mapping"
VOCABULARY = 1 << 62  # larger than any token id of the specification, so that none is out of range


class Server:
    """A freshly started server of a release with the sizes of `geometry`.

    overlap: the scheduler loop overlaps batches.
    spec: decode rounds are speculative; None before the first round.
    batches: number of batches made so far.
    in_free_group: freed slots are returned together at the end of the batch.
    session_in_namespace: whether a session's text is in the namespace, by the session's name.
    """

    def __init__(self, release: Release0510, geometry: Geometry, *, overlap: bool = False) -> None:
        self.release = release
        self.geometry = geometry
        self.overlap = overlap
        page = geometry.page_size
        SERVER_ARGS.page_size = page
        SERVER_ARGS.speculative_algorithm = None
        release.draft_len = 1  # of the last round
        SERVER_ARGS.speculative_num_draft_tokens = 1
        SERVER_ARGS.disable_radix_cache = not geometry.tree
        SERVER_ARGS.disable_overlap_schedule = not overlap
        SERVER_ARGS.chunked_prefill_size = -1
        tracks = geometry.tracks and geometry.tree
        SERVER_ARGS.mamba.enable_mamba_extra_buffer = tracks
        SERVER_ARGS.mamba.enable_mamba_extra_buffer_lazy = tracks and geometry.lazy
        SERVER_ARGS.max_speculative_num_draft_tokens = geometry.lazy_round
        swa = None if geometry.window is None else geometry.swa_pages * page
        need_sort = "need_sort" in dict(geometry.settings)
        self.allocator = release.make_allocator(geometry.full_pages * page, swa, page, need_sort)
        self.full_pool = self.allocator if swa is None else self.allocator.full_attn_allocator
        self.swa_pool = None if swa is None else self.allocator.swa_attn_allocator
        self.rows = (
            release.make_state_rows(geometry)
            if geometry.states
            else release.make_rows(geometry.rows, geometry.width)
        )
        self.spare_row = self._add_spare_row()
        self.cache = release.make_cache(self.rows, self.allocator, geometry)
        self.tree: ReleaseTree | None = release.make_tree(self.cache, self.allocator, geometry)
        self.lock_holders: dict[str, LockHolder] = {}
        lazy = tracks and geometry.lazy
        bearers = self._bearers if lazy else None
        self.states = States(self.rows, self.tree, bearers) if geometry.states else None
        self.tracker = release.make_tracker(self.cache) if tracks else None
        self.scheduler = release.make_scheduler(self.rows, self.allocator, self.cache, geometry)
        self.controller = release.make_controller(self.cache)
        self.turns: dict[str, LiveRequest] = {}
        self.spec: bool | None = None
        self.batches = 0
        self.in_free_group = False
        self.namespace = dict(geometry.settings).get(namespaces.SETTING, "")
        self.session_in_namespace: dict[str, bool] = {}
        self.full_stamps = [0] * ((geometry.full_pages + 1) * page)
        self.swa_stamps = [] if swa is None else [0] * ((geometry.swa_pages + 1) * page)

    def _add_spare_row(self) -> int:
        """Add a row behind those that the pool hands out, for lock holders of the tree. Returns its index."""
        for name in _TENSORS_BY_ROW:
            if (cells := optional(self.rows, f"HybridReqToTokenPool.{name}")) is not None:
                setattr(self.rows, name, torch.cat([cells, torch.zeros_like(cells[:1])]))
        return len(self.rows.req_to_token) - 1

    # -- questions before a command ---------------------------------------------------------------

    def free_counts(self) -> tuple[int, int, int]:
        """Return rows, full pages and SWA pages that are free or evictable, by the counters that the
        release's scheduler uses. Without a window SWA pages are practically unlimited."""
        page = self.geometry.page_size
        full = self.full_pool.available_size()
        swa = self.swa_pool.available_size() if self.swa_pool is not None else 1 << 30
        if self.tree is not None:
            sizes = self.tree.sizes()
            full += sizes.full_evictable
            swa += sizes.swa_evictable
        return len(self.rows.free_slots), full // page, swa // page

    def require_room(
        self, spans: Sequence[tuple[int, int]], rows: int = 0, *, extend: bool = True
    ) -> None:
        """Refuse the command unless the release can extend its rows over these spans of positions.

        The pages of each span must be free or evictable in both pools. Some releases have a paged two-pool
        allocator that declines an extend without one spare page per entry; that page must be there as well.
        Pages that a window eviction inside the call would free do not count, as in the scheduler's
        budget.
        """
        page = self.geometry.page_size
        require(all(end <= self.geometry.width for _, end in spans), Reason.ROW_TOO_SHORT)
        free_rows, full, swa = self.free_counts()
        require(rows <= free_rows, Reason.NO_ROW)
        pages = sum(-(-end // page) - -(-start // page) for start, end in spans)
        if (
            self.release.spare_page_per_lane
            and extend
            and page > 1
            and self.geometry.window is not None
        ):
            pages = max(pages, -(-sum(end - start for start, end in spans) // page) + len(spans))
        require(pages <= full, Reason.OUT_OF_FULL)
        require(pages <= swa, Reason.OUT_OF_SWA)

    def has_room_for_one(self) -> bool:
        """Return whether a prefill of one token fits without an eviction. Releases ask for one page more."""
        pools = [self.full_pool] if self.swa_pool is None else [self.full_pool, self.swa_pool]
        page = self.geometry.page_size
        need = page * (1 + (page > 1 or self.release.spare_page_per_lane))
        has_states = self.states is None or self.states.has_slots(
            2 + self.states.buffers + self.owed_states()
        )
        return (
            has_states
            and bool(self.rows.free_slots)
            and all(pool.available_size() >= need for pool in pools)
        )

    def is_name_taken(self, name: str) -> bool:
        """Return whether a session, request or lock holder has the name: they share one namespace."""
        return any(
            name in names for names in (self.controller.sessions, self.turns, self.lock_holders)
        )

    def open_session(self, name: str) -> None:
        session_params = Bag(session_id=name, capacity_of_str_len=1 << 20, streaming=True, timeout=None)
        self.controller.open(session_params)

    def in_flight(self, session: str) -> LiveRequest | None:
        return next((t for t in self.turns.values() if t.session == session), None)

    def history(self, session: str) -> list[int]:
        """Return the tokens of the session's ended turns, as the specification has them.

        While a turn runs they are the beginning of its input.
        """
        turn = self.in_flight(session)
        if turn is not None:
            tokens = list(turn.req.origin_input_ids[: turn.history])
        else:
            tokens = self.release.history(self.controller.get(session))
        return namespaces.exchange_texts(tokens) if self.session_in_namespace.get(session) else tokens

    def hands_prompt_in(self, turn: LiveRequest) -> bool:
        """Return whether processing the result of the prefill inserts the prompt into the radix tree."""
        session_has_slot = turn.session is not None and self.slot(turn.session) is not None
        return self.tree is not None and not session_has_slot

    def _bearers(self) -> int:
        """Return the number of holders that have slots of recurrent state, or may take them without a
        further check: requests from their admission on, sessions between turns, lock holders."""
        lent = {name for name in self.controller.sessions if self.slot(name) is not None}
        own = sum(
            turn.phase is not RequestPhase.QUEUED and turn.session not in lent
            for turn in self.turns.values()
        )
        return own + len(lent) + len(self.lock_holders)

    def owed_states(self) -> int:
        """Return slots of recurrent state that the tree takes when the pending results are processed."""
        waiting = (t for t in self.turns.values() if any(r.prefill for r in t.pending))
        return sum(map(self.hands_prompt_in, waiting)) if self.states is not None else 0

    def slot(self, session: str) -> Any:
        """Return the slot, with its row, that the session keeps between turns; None without one."""
        turns = [turn for turn in self.turns.values() if turn.session == session]
        if any(turn.session_had_no_slot for turn in turns):
            return None
        return self.release.slot(self.cache, session)

    # -- making release objects -------------------------------------------------------------------

    def namespace_of(self, tokens: Sequence[int]) -> dict[str, str]:
        """Return the namespace fields of a request for these tokens."""
        return namespaces.fields_of(self.namespace, tokens)

    def is_in_namespace(self, tokens: Sequence[int]) -> bool:
        """Return whether a text that begins with these tokens is looked up in the namespace
        (namespaces.py)."""
        return bool(self.namespace) and namespaces.begins_other(tokens)

    def new_request(
        self, rid: str, tokens: list[int], session: str | None, undo: Bag | None, **namespace: str
    ) -> Any:
        """Make the release's Req: by create_req of its session, or directly for a request without one.

        tokens: the input, in token ids of the release.
        undo: session parameters of a client that takes tokens back.
        namespace: the field that names the namespace, with its value.
        """
        sampling = SamplingParams()
        if session is None:
            return self.release.batch.Req(
                rid=rid,
                origin_input_text=None,
                origin_input_ids=self.release.ids(tokens),
                sampling_params=sampling,
                vocab_size=VOCABULARY,
                **namespace,
            )
        recv_req = Bag(
            rid=rid, input_ids=self.release.ids(tokens), sampling_params=sampling, stream=False,
            return_logprob=False, top_logprobs_num=0, return_hidden_states=False, return_routed_experts=False,
            require_reasoning=False,
            session_params=undo or Bag(id=session, replace=False, drop_previous_output=False), **namespace,
        )  # fmt: skip
        return self.controller.get(session).create_req(recv_req, None, VOCABULARY)

    def new_batch(self, turns: Sequence[LiveRequest], mode: ForwardMode) -> Any:
        """Return a ScheduleBatch of these requests, as ScheduleBatch.init_new and merging leave it."""
        batch = self.release.batch.ScheduleBatch(
            reqs=[t.req for t in turns],
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.cache,
        )
        batch.model_config = Bag(
            is_encoder_decoder=False,
            is_matryoshka=False,
            vocab_size=VOCABULARY,
            hf_text_config=Bag(mamba_chunk_size=state_chunk()),
        )
        batch.device = SERVER_ARGS.device
        batch.enable_overlap = self.overlap
        batch.spec_algorithm = SpecAlgorithm(bool(self.spec))
        batch.spec_info = Bag() if self.spec else None
        batch.return_logprob = False
        batch.hisparse_coordinator = None
        batch.sampling_info = Bag(
            penalizer_orchestrator=Bag(is_required=False),
            merge_batch=lambda _: None,
        )
        batch.forward_mode = mode
        self.batches += 1
        batch.forward_iter = self.batches
        if mode is ForwardMode.DECODE:
            lengths = [t.fill - 1 for t in turns]  # the last output has no KV yet
            rows = [self.release.row(t.req) for t in turns]
            batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
            batch.req_pool_indices = batch.req_pool_indices_cpu.to(batch.device)
            batch.seq_lens_cpu = torch.tensor(lengths, dtype=torch.int64)
            batch.seq_lens = batch.seq_lens_cpu.to(batch.device, copy=True)
            batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
            batch.seq_lens_sum = sum(lengths)
            batch.output_ids = torch.zeros_like(batch.seq_lens)
            batch.multimodal_inputs = [None for _ in turns]
        return batch

    # -- the model's part -------------------------------------------------------------------------

    def forward_batch(
        self, batch: Any, turns: Sequence[LiveRequest], spans: Sequence[tuple[int, int]]
    ) -> None:
        """Run a forward pass in which each request computes its span of positions."""
        for index, (turn, (start, end)) in enumerate(zip(turns, spans, strict=True)):
            kept = self.states.kept_state(batch, index, start, end) if self.states is not None else (0, 0)
            self.forward(turn, start, end, kept=kept)

    def forward(
        self,
        turn: LiveRequest,
        start: int,
        end: int,
        drafts: list[int] | None = None,
        kept: tuple[int, int] = (0, 0),
    ) -> None:
        """Write the KV of positions [start, end): stamp the slots to which row and mapping lead.

        drafts: accepted tokens behind the text, in token ids of the release. Positions behind them are
        rejected drafts and get stamp 0.
        kept: see States.fold.
        """
        text = [*turn.text, *turn.exchange_tokens(drafts or [])][start:end]
        slots = self.rows.req_to_token[self.release.row(turn.req), start:end]
        if self.states is not None:
            self.states.fold(turn.name, self.release.row(turn.req), text, kept)
        text += [0] * (end - start - len(text))
        self.stamp(slots, text)

    def stamp(self, slots: torch.Tensor, tokens: Sequence[int]) -> None:
        """Write the KV of `tokens` to these full slots, and to the SWA slots to which they are mapped."""
        for slot, token in zip(slots.tolist(), tokens, strict=True):
            self.full_stamps[slot] = token
        if self.swa_pool is not None:
            mapped = self.allocator.full_to_swa_index_mapping[slots.to(torch.int64)]
            for slot, token in zip(mapped.tolist(), tokens, strict=True):
                self.swa_stamps[slot] = token

    @staticmethod
    def sample(turn: LiveRequest, count: int) -> list[int]:
        """Return the next `count` tokens of a request, in token ids of the release."""
        positions = range(turn.fill, turn.fill + count)
        return turn.exchange_tokens([token_id(turn.serial, p) for p in positions])

    @contextmanager
    def results_of_prefill(self, whole: bool = True) -> Iterator[None]:
        """Return a context for processing the results of a prefill batch: some releases return all that it
        frees together at its end.

        whole: each chunk is the last of its request; otherwise nothing is grouped.
        """
        if self.in_free_group or not (whole and self.release.groups_prefill):
            yield
            return
        self.allocator.free_group_begin()
        self.in_free_group = True
        yield
        self.in_free_group = False
        self.allocator.free_group_end()

    # -- looking ----------------------------------------------------------------------------------

    def view(self) -> View:
        release = self.release
        page = self.geometry.page_size
        sessions: dict[str, SessionView] = {}
        requests: dict[str, RequestView] = {}
        slots_held: set[int] = set()
        for name, session in self.controller.sessions.items():
            slot = self.slot(name)
            row = None if slot is None else release.row(slot)
            sessions[name] = SessionView(
                history=self.history(name),
                closing=release.closing(session),
                row=row,
                cursors=None if slot is None else release.cursors(slot),
            )
            if row is not None:
                slots_held.add(row)
        for name, turn in self.turns.items():
            row = release.row(turn.req)
            requests[name] = RequestView(
                session=turn.session,
                origin=turn.origin,
                text=turn.text[: turn.origin + turn.visible_output],
                row=row,
                cursors=self._cursors(turn),
            )
            if row is not None:
                slots_held.add(row)
        swa = self.swa_pool
        return View(
            sessions=sessions,
            requests=requests,
            free_full=release.free_pages(self.full_pool),
            free_rows=list(self.rows.free_slots),
            rows={row: self.rows.req_to_token[row].tolist() for row in slots_held},
            full_stamps=self.full_stamps,
            free_swa=() if swa is None else release.free_pages(swa),
            # The mapping has one entry behind those of the slots, which maps "no slot" to itself.
            full_to_swa=()
            if swa is None
            else self.allocator.full_to_swa_index_mapping[
                : (self.geometry.full_pages + 1) * page
            ].tolist(),
            swa_stamps=self.swa_stamps,
            tree=self._tree_view(),
            states=self._states_view(),
        )

    def _states_view(self) -> StatesView | None:
        if self.states is None:
            return None
        slots = {name: self.slot(name) for name in self.controller.sessions}
        kv_by_session = {name: slot.kv for name, slot in slots.items() if slot is not None}
        turns = self.turns.items()
        lengths_reached = {
            name: (turn.processed_len, turn.origin + max(turn.output - 1, 0))
            for name, turn in turns
            if turn.phase is RequestPhase.RUNNING
        }
        holders = {name: turn.req.kv for name, turn in turns}
        return self.states.view(holders, kv_by_session, lengths_reached, bool(self.spec))

    def cursors(self, turn: LiveRequest) -> Cursors:
        """Return cursors of a request with a row, with the kv_committed_len that its visible results lead
        to."""
        cursors = self.release.cursors(turn.req)
        visible = [result for result in turn.pending if result.visible]
        committed = cursors.kv_committed_len + sum(map(self.commits_when_processed, visible))
        return cursors._replace(kv_committed_len=committed)

    def commits_when_processed(self, result: Result) -> int:
        """Return tokens by which kv_committed_len moves when a result is processed.

        Only what a verify round accepts beyond its claim moves it then; the launch has moved it by the
        rest.
        """
        if result.prefill or not self.spec:
            return 0
        return len(result.tokens) - self.release.claimed

    def _cursors(self, turn: LiveRequest) -> Cursors | None:
        """Return cursors of a request with a row, or those of the prefix that an admitted request has
        locked."""
        if self.release.row(turn.req) is not None:
            return self.cursors(turn)
        if self.tree is None or turn.phase is not RequestPhase.ADMITTED:
            return None
        return Cursors(turn.prefix, turn.prefix, 0, turn.prefix)

    def _tree_view(self) -> TreeView | None:
        if self.tree is None:
            return None
        held = {
            name: LockHolderView(holder.slots.tolist())
            for name, holder in self.lock_holders.items()
        }
        return TreeView(list(self.tree.nodes()), held, self.tree.sizes())
