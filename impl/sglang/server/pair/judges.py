"""Judges of a pair: each block as it is copied, who waits when nothing more happens, and what is left.

A judge notes a key, which begins with the clause that fails: PD of pairs, XFER of transfers, OWN of pages,
PRO of progress, TXT of answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from impl.sglang.server.clients import Clients
from impl.sglang.server.outcome import PairNote
from impl.sglang.server.server_leftovers import (
    OF_A_ROOM,
    full_size,
    has_unsent_load,
    held_tokens,
    leftovers,
    rooms_kept,
)
from impl.sglang.server.pair.model import Region, ServerModel
from impl.sglang.server.pair.network import Block, PlayedNetwork
from impl.sglang.server.pair.stand_ins import NamedPages
from impl.sglang.server.fake_model import _stamped_tokens
from reference.pairs.config import DECODE, PREFILL
from reference.recurrent_states import chained, describe_stamp, stamp_after

_FAILED = 0  # KVPoll.Failed
RESERVED = 8  # tokens that D reserves for decoding, for each request


class Judges:
    """The judges of one run.

    deferred: D keeps what it has named for a transfer until P writes no more.
    """

    def __init__(
        self, network: PlayedNetwork, models: dict[str, ServerModel], managers: dict[str, Any],
        script: Clients, deferred: bool,
    ) -> None:  # fmt: skip
        self.network = network
        self.models = models
        self.managers = managers
        self.script = script
        self.deferred = deferred
        self.page = int(models[PREFILL].allocator.page_size)
        self.noted: dict[str, PairNote] = {}
        self.answered_at: dict[str, int] = {}  # by P
        self._timed_out = False
        self.aborted: dict[str, set[str]] = {server: set() for server in models}  # for clients
        self.refused: dict[str, set[str]] = {
            server: set() for server in models
        }  # by server, at once
        network.copies = self.judge_copy
        network.names = self.note_named_pages
        network.carries_row = self.carries_row
        for model in models.values():
            model.notes = self.note

    def note(self, key: str, request: str, says: str) -> None:
        """Keep the first of each key."""
        if key not in self.noted:
            self.noted[key] = PairNote(key, request, says)
            self.network.tell("wire", f"FOUND {key}: {says}")

    # -- a block is copied --------------------------------------------------------------------------

    def note_named_pages(self, promise: NamedPages) -> None:
        """Note that D has named pages. Pages of the window in its row that it has not named hold no KV
        yet."""
        model = self.models[DECODE]
        row = promise.request.req.kv.req_pool_idx
        model.outdated -= set(promise.pages)
        if not model.window:
            return
        end = len(promise.request.req.origin_input_ids)
        slots = model.scheduler.req_to_token_pool.req_to_token[int(row), promise.prefix : end]
        swa = model.allocator.translate_loc_from_full_to_swa(slots.to(torch.int64))
        pages = {int(page) for page in (swa // self.page).tolist()} - {0}
        model.unsent |= pages - set(promise.swa)

    def carries_row(self, blocks: Sequence[Block]) -> bool:
        """Return whether a transfer is that of a metadata row."""
        place = self._place(PREFILL, blocks[0][0]) if blocks else None
        return place is not None and place[0].pool == "metadata"

    def judge_copy(self, chunk: Any, source: int, target: int, length: int) -> None:
        """Judge a block of a transfer at the moment it is copied."""
        name = self.network.rooms.get(chunk.room, "")
        from_ = self._place(PREFILL, source)
        to = self._place(DECODE, target)
        if (
            from_ is None
            or to is None
            or (from_[0].pool, from_[0].number) != (to[0].pool, to[0].number)
        ):
            says = f"a transfer of {name} goes from {_at(from_)} of P to {_at(to)} of D"
            self.note("XFER-2 another pool", name, says)
            return
        promise = self.network.promises[chunk.room]
        for number in range(length // from_[0].item):
            if from_[0].pool == "metadata":
                self._row(promise, name, from_[1] + number, to[1] + number)
            elif from_[0].pool == "state":
                self._state(promise, name, from_[1] + number, to[1] + number)
            else:
                self._page(promise, name, from_[0], from_[1] + number, to[1] + number)

    def _place(self, server: str, address: int) -> tuple[Region, int] | None:
        """Return the region of an address, and the page or row."""
        for region in self.models[server].regions:
            if region.start <= address < region.start + region.size:
                return region, (address - region.start) // region.item
        return None

    def _page(
        self, promise: NamedPages, name: str, region: Region, source: int, target: int
    ) -> None:
        """Judge a copied page of KV: D still keeps the target for this position, and P has that position in
        the source."""
        pool = region.pool
        pages = promise.pages
        first = promise.prefix
        if pool == "swa":
            pages = promise.swa
            first = self._window_start(promise, name)
        if target not in pages:
            says = f"page {target} of D is written for {name}, which has named {pages} of the {pool} pool"
            self.note(f"XFER-2 {pool} page of another", name, says)
            return
        if pool == "swa":
            self.models[DECODE].unsent.discard(target)
        position = first + pages.index(target) * self.page
        if not self._still_kept(promise, pool, position, target):
            if self.deferred and not self.network.harmed_by_time:
                free = "free" if target in self.models[DECODE].free_pages(pool) else "another's"
                says = (
                    f"page {target} of D is {free} when position {position} of {name} arrives in it"
                )
                self.note(f"XFER-1 {pool} page of D is given back", name, says)
            return
        if not self._can_succeed(promise.room):
            return
        prompt = self.script.prompt(name)
        expected = [
            (float(t), float(at)) for at, t in enumerate(prompt[position:][: self.page], position)
        ]
        if pool == "swa":  # before the window nothing is read
            skip = max(0, len(prompt) - (self.models[PREFILL].window or 0) - position)
            expected = expected[skip:]
        else:
            skip = 0
        assert region.tensor is not None
        rows = region.tensor[source * self.page + skip :][: len(expected), 0, :2]
        actual = [tuple(row) for row in rows.tolist()]
        is_free = source in self.models[PREFILL].free_pages(pool)
        if (actual != expected or is_free) and self._is_replaced(name, region, source, position, expected):
            if actual != expected:
                self.models[DECODE].outdated.add(target)
            says = f"page {source} of P, position {position} of {name}, is sent and has been given back:"
            says += " the tree's is in its place"
            self.note(f"PD-1 {pool} page of P is replaced before it is sent", name, says)
        elif actual != expected:
            self._wrong_source(name, pool, source, position, expected, actual)
        elif is_free:
            says = f"page {source} of P, position {position} of {name}, is free when it is sent"
            self.note(f"PD-1 {pool} page of P is free", name, says)

    def _is_replaced(
        self, name: str, region: Region, source: int, position: int, expected: list[tuple[float, float]]
    ) -> bool:
        """Return whether P's row of the request leads to another page for this position, and that page is
        right: an insert has found it in the tree, and has given `source` back."""
        if region.pool != "full":
            return False
        assert region.tensor is not None
        model = self.models[PREFILL]
        for request in _computed_or_sent(model.scheduler):
            if request.rid == name and request.kv.req_pool_idx is not None:
                row = model.scheduler.req_to_token_pool.req_to_token[int(request.kv.req_pool_idx)]
                page = int(row[position]) // self.page
                target_rows = region.tensor[page * self.page :][: len(expected), 0, :2].tolist()
                return page != source and [tuple(row) for row in target_rows] == expected
        return False

    def _wrong_source(
        self, name: str, pool: str, source: int, position: int, expected: Any, actual: Any
    ) -> None:
        prompt = self.script.prompt(name)
        token, token_position = actual[0]
        own = 0 <= token_position < len(prompt) and prompt[int(token_position)] == token
        writer = self.models[PREFILL].writers[pool].get(source * self.page, "nobody")
        says = f"page {source} of P is sent for position {position} of {name}, which"
        if own and token_position != position:
            key = f"PD-6 another {pool} page is sent"
            says += f" is that of position {int(token_position)}"
        else:
            key = f"PD-1 {pool} page of P is rewritten"
            says += f" {writer} has written: {actual} and not {expected}"
        self.note(key, name, says)

    def _window_start(self, promise: NamedPages, name: str) -> int:
        """Return the first position whose page of the window D has named."""
        window = self.models[DECODE].window or 0
        return max(promise.prefix, len(self.script.prompt(name)) - window) // self.page * self.page

    def _still_kept(self, promise: NamedPages, pool: str, position: int, page: int) -> bool:
        """Return whether D's row of the request still leads to this page."""
        row = promise.request.req.kv.req_pool_idx
        if row is None:
            return False
        model = self.models[DECODE]
        slot = model.scheduler.req_to_token_pool.req_to_token[int(row), position]
        if pool == "swa":
            # D may have no slot before the window
            last = min(position + self.page, len(promise.request.req.origin_input_ids)) - 1
            slot = model.scheduler.req_to_token_pool.req_to_token[int(row), last]
            slot = model.allocator.translate_loc_from_full_to_swa(slot.view(1).to(torch.int64))[0]
        return int(slot) // self.page == page

    def _can_succeed(self, room: int) -> bool:
        """Return whether D may still use what P sends: P has told D success, or has not failed."""
        if room in self.network.told_success:  # P may have cleared the room already
            return True
        status = self.managers[PREFILL].request_status.get(room)
        return status is not None and int(status) != _FAILED

    def _row(self, promise: NamedPages, name: str, source: int, target: int) -> None:
        """Judge a copied row of metadata: P's is that of the room, and D still keeps its own."""
        schedulers = {server: model.scheduler for server, model in self.models.items()}
        if target != promise.row:
            says = f"row {target} of D is written for {name}, which has named row {promise.row}"
            self.note("XFER-2 metadata row of another", name, says)
        elif target in schedulers[DECODE].req_to_metadata_buffer_idx_allocator.free_slots:
            if self.deferred and not self.network.harmed_by_time:
                says = f"metadata row {target} of D is free when that of {name} arrives in it"
                self.note("XFER-1 metadata row of D is given back", name, says)
        if not self._can_succeed(promise.room):
            return
        has = int(schedulers[PREFILL].disagg_metadata_buffers.bootstrap_room[source, 0])
        if has != promise.room:
            room = self.network.rooms.get(has, "nobody")
            says = f"metadata row {source} of P is sent for {name} and has what {room} left there"
            self.note("PD-1 metadata row of P is another's", name, says)
        elif source in schedulers[PREFILL].req_to_metadata_buffer_idx_allocator.free_slots:
            says = f"metadata row {source} of P is free when it is sent for {name}"
            self.note("PD-1 metadata row of P is free", name, says)

    def _state(self, promise: NamedPages, name: str, source: int, target: int) -> None:
        """Judge a copied recurrent state: P's is that after the prompt, and D still keeps the slot for this
        request."""
        states = {server: model.states for server, model in self.models.items()}
        from_ = states[PREFILL]
        to = states[DECODE]
        assert from_ is not None and to is not None
        if target not in promise.state:
            says = f"state {target} of D is written for {name}, which has named {promise.state}"
            self.note("XFER-2 state of another", name, says)
        elif promise.request.req.kv.mamba_pool_idx != target:
            if self.deferred and not self.network.harmed_by_time:
                says = f"state {target} of D is not kept for {name} when its own arrives in it"
                self.note("XFER-1 state of D is given back", name, says)
            return
        if not self._can_succeed(promise.room):
            return
        prompt = self.script.prompt(name)
        text = chained(_stamped_tokens(prompt))
        got = int(from_.cells[source])
        if got != stamp_after(text, len(prompt)):
            says = f"state {source} of P is sent for {name}, which {describe_stamp(got, text)}"
            kind = "another state is sent" if got in text else "state of P is rewritten"
            self.note(f"{'PD-6' if got in text else 'PD-1'} {kind}", name, says)
        elif source in from_.rows.mamba_allocator.free_slots.tolist():
            says = f"state {source} of P is free when it is sent for {name}"
            self.note("PD-1 state of P is free", name, says)

    # -- nothing more happens -----------------------------------------------------------------------

    def waiting(self, unanswered: dict[str, list[str]]) -> None:
        """Judge the pair when nothing more can happen without a timeout.

        unanswered: for each server, the requests without an answer.
        """
        if (
            self._timed_out or self.network.harmed
        ):  # what a timeout has ended may leave others waiting
            return
        self._timed_out = True
        if self._too_large(unanswered) or self._is_parked(unanswered):
            return
        refused = sorted(self.refused[PREFILL] & set(unanswered.get(DECODE, ())))
        if refused:  # others may wait for the pages that D keeps for it
            unanswered = {DECODE: refused}
        elif in_vain := self._wasted_prompts(unanswered):  # others may wait for that KV
            unanswered = {PREFILL: in_vain}
        for server, names in unanswered.items():
            if names:
                says = f"{server} answers {names[0]} only after a timeout, and nothing has failed"
                peer = DECODE if server == PREFILL else PREFILL
                if server == PREFILL and (early := [*filter(self._given_up_before, names)]):
                    key = "PD-4 P waits for a request that D gave up before it came"
                    self.note(key, early[0], says)
                elif all(name in self.refused[peer] for name in names):
                    key = f"PD-4 {server} waits for a prompt that {peer} has refused"
                    self.note(key, names[0], says)
                else:
                    self.note(f"PD-4 {server} waits for a timeout", names[0], says)
            elif tokens := held_tokens(self.models[server].scheduler):
                says = f"{server} keeps {tokens} tokens until a timeout, and nobody waits there"
                self.note(f"PD-2 {server} keeps KV until a timeout", "", says)

    def _wasted_prompts(self, unanswered: dict[str, list[str]]) -> list[str]:
        """Return the prompts that P has computed and keeps, and that D has refused."""
        computed = {req.rid for req in self.models[PREFILL].scheduler.disagg_prefill_inflight_queue}
        return sorted(computed & self.refused[DECODE] & set(unanswered.get(PREFILL, ())))

    def _given_up_before(self, name: str) -> bool:
        """Return whether P heard that D has given a request up before it had the request itself."""
        heard, request_step = (self.network.delivered.get((what, name)) for what in ("notice", "request"))
        return heard is not None and request_step is not None and heard <= request_step

    def judge_end(self, unanswered: dict[str, list[str]]) -> None:
        """Judge the pair when every timeout has passed and nothing happens."""
        if self._too_large(unanswered):
            return
        for server, names in unanswered.items():
            if names:
                says = f"{server} never answers {names[0]}: every timeout has passed"
                self.note(f"PRO-1 {server} never answers", names[0], says)
            else:
                self._judge_leftovers(server)

    def _too_large(self, unanswered: dict[str, list[str]]) -> bool:
        """Note a server that waits for room which its pools never have. Returns whether there is one: other
        requests may wait for that prompt."""
        size = full_size(self.models[PREFILL].scheduler)
        for name in unanswered.get(PREFILL, ()):
            tokens = len(self.script.prompt(name))
            if tokens <= size <= tokens + 1 + self.page:
                says = f"{name} has {tokens} tokens, P's pool has {size}, and P asks for a page more"
                self.note("PRO-1 P waits for a prompt that never fits", name, says)
                return True
        model = self.models[DECODE]
        sizes = {"full": full_size(model.scheduler)}
        if model.window and self.page == 1:  # else it keeps a window alone
            sizes["SWA"] = int(model.allocator.size_swa)
        for name in unanswered.get(DECODE, ()):
            tokens = len(self.script.prompt(name))
            needed = -(-tokens // self.page) * self.page + RESERVED
            for pool, size in sizes.items():
                if needed > size:
                    says = f"{name} has {tokens} tokens, {RESERVED} are reserved, D's {pool} pool has {size}"
                    self.note("PRO-1 D waits for a prompt that never fits", name, says)
                    return True
        return False

    def _is_parked(self, unanswered: dict[str, list[str]]) -> bool:
        """Note that P keeps KV of prompts that it has computed before D named pages, while a prompt that D
        has admitted waits for that room and D waits for P. Returns whether that is so."""
        scheduler = self.models[PREFILL].scheduler
        parked = [
            req.rid for req in scheduler.disagg_prefill_inflight_queue if req.pending_bootstrap
        ]
        names = {req.rid for req in scheduler.waiting_queue} & set(unanswered.get(PREFILL, ()))
        admitted = sorted(name for name in names if ("metadata", name) in self.network.delivered)
        if not parked or not admitted:
            return False
        says = f"P keeps KV of {', '.join(parked)}; {admitted[0]}, which D has admitted, waits for room"
        self.note("PD-4 P keeps KV of prompts that D has not admitted", admitted[0], says)
        return True

    def _judge_leftovers(self, server: str) -> None:
        """Judge what a server without work has not freed."""
        model = self.models[server]
        manager = self.managers[server]
        scheduler = model.scheduler
        for pool in model.tensors:
            pages = model.free_pages(pool)
            if twice := sorted({page for page in pages if pages.count(page) > 1}):
                self.note(
                    f"OWN-1 {server} frees twice", "", f"pages {twice} of {server} are free twice"
                )
        if tokens := held_tokens(scheduler):
            what = "KV of a load that it does not send" if has_unsent_load(scheduler) else "KV"
            self.note(f"PD-2 {server} keeps {what}", "", f"{server} keeps {tokens} tokens for nobody")
        for what, number in leftovers(scheduler, server):
            self.note(
                f"PD-5 {server} keeps {what}", "", f"{server} keeps {what} of what is gone: {number}"
            )
        for table, rooms in rooms_kept(manager, server):
            names = [self.network.rooms.get(room, str(room)) for room in rooms]
            kinds: dict[str, list[str]] = {}
            for name in names:
                what = table.lstrip("_")
                if server == PREFILL and self._comes_late(name):
                    what = "a room that late metadata revives"
                elif server == PREFILL and name in self.aborted[PREFILL] and table in OF_A_ROOM:
                    what = "a room that an abort has ended"
                kinds.setdefault(what, []).append(name)
            for what, which in kinds.items():
                says = f"{table} of {server} has an entry of {', '.join(which)}, which is gone"
                self.note(f"PD-5 {server} keeps {what}", which[0], says)

    def _comes_late(self, name: str) -> bool:
        """Return whether D's pages were named to P after it had ended the request, or for one that it
        refused."""
        if name in self.refused[PREFILL]:
            return True
        arrived = self.network.delivered.get(("metadata", name), 0)
        ended = self.answered_at.get(name, arrived + 1)
        return arrived >= min(ended, self.network.forgotten.get((PREFILL, name), ended))

    def prefix_is_gone(self, name: str) -> None:
        """Note that D fails a request: it has matched a prefix in its host tier and cannot load it."""
        if name not in self.aborted[DECODE] and not self.network.harmed:
            says = f"D fails {name}, as it has lost the prefix that it told P not to send"
            self.note("PD-1 D loses a prefix of its host tier", name, says)

    def judge_answer(self, name: str, tokens: Sequence[int], reason: str) -> None:
        """Judge an answer of D. A server may cut an answer short where memory is short: its tokens must be
        right."""
        turn = self.script.turns[name]
        most = min(turn.limit, turn.stop or turn.limit)
        want = [self.script.sampled_token(name, position) for position in range(1, most + 1)]
        short = len(tokens) < len(want) and reason == "stop"
        if list(tokens) != want[: len(tokens)] or short:
            says = f"{name} is answered {list(tokens)} ({reason}), and the model said {want}"
            self.note("TXT-1 another answer", name, says)


def _computed_or_sent(scheduler: Any) -> list[Any]:
    """Return the requests of which P may have chunks on their way."""
    last = scheduler.last_batch
    found = [*scheduler.disagg_prefill_inflight_queue, scheduler.chunked_req]
    return [req for req in [*found, *(last.reqs if last is not None else ())] if req is not None]


def _at(place: tuple[Region, int] | None) -> str:
    if place is None:
        return "memory of nobody"
    region, number = place
    what = "row" if region.pool == "metadata" else "page"
    return f"{what} {number} of tensor {region.number} of {region.pool}"
