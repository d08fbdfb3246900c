"""The facts of a server that only decodes or only prefills: its requests, and what is received or sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from impl.loading.optional import optional
from impl.sglang.scheduler.server import Server
from impl.sglang.tiers.copy_engine import CopyEngine, slots_by_pool
from impl.sglang.tiers.decode_side import DecodeSide
from impl.sglang.tiers.prefill_side import PrefillSide
from reference.tiers.config import TierConfig
from reference.tiers.facts import METADATA, TierRequest, TierRequestState, TierSend


def session_of(name: str) -> str:
    """Name the slot of a session as facts do."""
    return f"session {name}"


class _RoleGatherer:
    """Looks at a server with one role.

    side: what the adapter plays of it.
    """

    side: DecodeSide | PrefillSide

    def __init__(self, release: Any, server: Server, config: TierConfig, copies: CopyEngine) -> None:
        self.release = release
        self.server = server
        self.config = config
        self.copies = copies

    def facts(self) -> dict[str, Any]:
        """Return the fields of TierFacts that only such a server has."""
        raise NotImplementedError

    def locks(self) -> Iterator[tuple[str, Any]]:
        """Yield the locks that requests and idle sessions have in the tree, by holder."""
        holders = [(name, turn.req.lock) for name, turn in self.side.arrivals.items()]
        slots = self.release.slots(self.server.cache).items()
        holders += [(session_of(name), slot.lock) for name, slot in slots]
        yield from ((name, lock) for name, lock in holders if lock is not None)

    def _own(self, req: Any) -> dict[str, tuple[int, ...]]:
        """Return the device slots of a request that the tree does not have, in whole pages as the pool
        allocates them."""
        kv = req.kv
        size = self.config.page_size
        cells = self.server.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len].tolist()
        pages = dict.fromkeys(cell // size for cell in cells[kv.cache_protected_len :])
        slots_of = {"full": tuple(page * size + index for page in pages for index in range(size))}
        if self.config.window is not None:
            mapping = self.server.allocator.full_to_swa_index_mapping
            mapped = (int(mapping[cell]) for cell in cells[kv.cache_protected_len :])
            swa = dict.fromkeys(slot // size for slot in mapped if slot > 0)
            slots_of["swa"] = tuple(page * size + index for page in swa for index in range(size))
        return slots_of


class DecodeGatherer(_RoleGatherer):
    """Looks at a server that only decodes."""

    def __init__(self, side: DecodeSide, *given: Any) -> None:
        super().__init__(*given)
        self.side: DecodeSide = side

    def facts(self) -> dict[str, Any]:
        """Return its requests, and transfers that are under way for requests that are gone."""
        side = self.side
        requests = []
        rooms = set()
        states = {id(req): state for req, state in side.requests_with_states()}
        token_rows = {id(entry.req): entry.metadata_buffer_index for entry in side.transfers.queue}
        token_rows |= {id(entry[0].req): entry[3] for entry in side.transfers._deferred_releases}
        for name, turn in side.arrivals.items():
            req = turn.req
            room = turn.req.bootstrap_room
            rooms.add(room)
            holds = req.kv is not None and req.kv.holds_kv
            requests.append(
                TierRequest(
                    name,
                    state=states.get(id(req), TierRequestState.NOWHERE),
                    row=req.kv.req_pool_idx if holds else -1,
                    first=token_rows.get(id(req), -1),
                    slots=self._own(req) if holds else {},
                    kept=self._retracted_slots(req),
                    writing=self._writing(room),
                )
            )
        for name, slot, state in side.idle():
            row = -1
            slots_of_pool = {}
            retracted = {}
            if slot is not None and slot.kv.holds_kv:
                row = slot.kv.req_pool_idx
                slots_of_pool = self._own(slot)
                retracted = self._retracted_slots(slot)
            if slot is not None or state is TierRequestState.BUSY:
                requests.append(
                    TierRequest(
                        session_of(name),
                        state=state,
                        row=row,
                        first=-1,
                        slots=slots_of_pool,
                        kept=retracted,
                        writing={},
                    )
                )
        for room, to in side.peers.writing.items():
            if room not in rooms:
                requests.append(
                    TierRequest(
                        to.name,
                        state=TierRequestState.GONE,
                        row=-1,
                        first=-1,
                        slots={},
                        kept={},
                        writing=self._writing(room),
                    )
                )
        return {
            "requests": tuple(requests),
            "free_rows": tuple(self.server.rows.free_slots),
            "free_first": tuple(side.first.free_slots),
        }

    def _writing(self, room: int) -> dict[str, tuple[int, ...]]:
        to = self.side.peers.writing.get(room)
        slots_of: dict[str, list[int]] = {}
        if to is not None:
            for pool, slot, _ in to.slots:
                slots_of.setdefault(pool, []).append(slot)
        return {pool: tuple(slots) for pool, slots in slots_of.items()}

    def _retracted_slots(self, req: Any) -> dict[str, tuple[int, ...]]:
        backup = optional(req.kv, "ReqKvInfo.retraction_backup")
        if backup is None or backup.host_indices is None:
            return {}
        return slots_by_pool(backup.host_indices, backup.pool_transfers)


class PrefillGatherer(_RoleGatherer):
    """Looks at a server that only prefills."""

    def __init__(self, side: PrefillSide, *given: Any) -> None:
        super().__init__(*given)
        self.side: PrefillSide = side

    def facts(self) -> dict[str, Any]:
        """Return the requests of a server that only prefills, and what is still to be read for their decode
        servers."""
        side = self.side
        states: dict[int, TierRequestState] = {}
        for req, state in side.requests_with_states():
            states.setdefault(id(req), state)
        requests = []
        for name, turn in side.arrivals.items():
            req = turn.req
            holds = req.kv.holds_kv
            requests.append(
                TierRequest(
                    name,
                    state=states.get(id(req), TierRequestState.NOWHERE),
                    row=req.kv.req_pool_idx if holds else -1,
                    first=req.metadata_buffer_index,
                    slots=self._own(req) if holds else {},
                    kept={},
                    writing={},
                    due=side.sender(turn).due,
                )
            )
        memory = self.copies.memory
        sends = []
        for sender in side.senders.by_room.values():
            for part in sender.parts:
                if part.pool == METADATA:
                    stamps = [side.rows_of_metadata.room_in(slot) for slot in part.slots]
                else:
                    # what is handed in before it is written may be read before
                    pool_memory = memory[part.pool]
                    stamps = [0 if slot in part.early else pool_memory[slot] for slot in part.slots]
                sends.append(
                    TierSend(
                        part.job,
                        name=sender.name,
                        pool=part.pool,
                        position=part.position,
                        slots=tuple(part.slots),
                        wanted=tuple(part.wanted),
                        found=tuple(stamps[: len(part.wanted)]),
                    )
                )
        begun = {rid.partition("#")[0] for rid in side.loop.disagg_prefill_pending_chunk_rids}
        return {
            "requests": tuple(requests),
            "free_rows": tuple(self.server.rows.free_slots),
            "free_first": tuple(side.rows_of_metadata.free_slots),
            "sends": tuple(sends),
            "begun": tuple(sorted(begun)),
        }
