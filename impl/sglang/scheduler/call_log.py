"""The driver's calls of a release, noted as the lines of Python that would do the same.

Noted are calls and assignments that the driver itself makes, none that the release makes meanwhile. Names in
the lines that are not the release's are those of ci/templates/exported_test.py.j2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from impl.sglang.parts.stand_ins import SERVER_ARGS, Bag, ForwardMode, SamplingParams
from impl.sglang.releases.names import name_in_release
from impl.sglang.scheduler.live_requests import LiveRequest, LockHolder
from reference.token_ids import SHARED, position_of, serial_of

# Methods of a release's class that are noted: each has a method here that gives its line.
_OF_RELEASE = (
    "hold", "set_chunk", "count_chunk", "check_finished", "checkpoint", "end", "hand_in", "drop", "retract",
    "retract_decode", "abort_queued", "prepare_spec", "put", "commit",
)  # fmt: skip
# What the loop of a server does to its cache, with a host tier.
_OF_CACHE = "ready_to_load_host_cache", "flush_pending_backups", "check_hicache_events", "reset"
LOCK_HOLDER = "lock holder "  # what the ids of lock holders' requests begin with (tree_commands.py)


def ids_text(tokens: Sequence[int]) -> str:
    """Return token ids as a list of small numbers; runs as ranges."""
    numbers = enumerate(map(small_id, tokens))
    runs = [[token for _, token in run] for _, run in groupby(numbers, lambda at: at[1] - at[0])]
    parts = [f"*range({r[0]}, {r[-1] + 1})" if len(r) > 1 else str(r[0]) for r in runs]
    return f"[{', '.join(parts)}]"


def quote(text: str) -> str:
    """Return a string as Python, in double quotes."""
    return json.dumps(text)


def variable(request: str) -> str:
    """Return the name of a request in the lines."""
    if re.fullmatch(r"[rh][0-9]+", request):
        return request
    return f"req_{re.sub('[^A-Za-z0-9]', '_', request)}"


def small_id(token: int) -> int:
    """Return a token id as it stands in the lines: 100000 for each serial."""
    serial = serial_of(token)
    return (serial if serial < SHARED else 900 + serial - SHARED) * 100_000 + position_of(token)


class Calls:
    """Notes what `driver` (a Driver, or a TierDriver) does. Its module's classes stay wrapped: for a process
    of one release."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._lines: list[str] = []
        self._depth = 0
        self._names: dict[int, str] = {}
        self._named_objects: list[Any] = []  # an id means something as long as its bearer lives
        self._unmatched: set[int] = set()  # lock holders that have locked nothing
        self._chunk = -1  # the longest chunk, as it was last set (tokens)
        release = driver.release
        batch = driver.release.batch
        # The newer module commits nothing ahead.
        self._ahead = release.spec_file.endswith("eagle_info_v2.py")
        for name in _OF_RELEASE:
            self._wrap(release, name, getattr(self, f"_{name}"))
        for owner, names in {
            batch.Req: ("init_next_round_input", "set_finish_with_abort"),
            batch.ScheduleBatch: (
                "prepare_for_extend",
                "prepare_for_decode",
                "mix_with_running",
                "_evict_swa",
            ),
        }.items():
            for name in names:
                self._wrap_method(owner, name)
        for owner in (batch.Req, SamplingParams):
            self._watch(owner)
        self._wrap(driver, "_compute", self._compute)
        if hasattr(driver, "_load_prefix"):  # with a host tier
            self._wrap(driver, "_load_prefix", lambda req, _: f"load_back(server, {self._name(req)})")
            self._wrap(driver, "_note_promised_match", lambda _: "")

    def begin_server(self) -> None:
        """Begin the lines of another server of the driver."""
        server = self._driver.server
        if (results := getattr(self._driver, "results", None)) is not None:
            self._wrap(results, "add_outputs", self._sampled_line)
        if (copies := getattr(self._driver, "copies", None)) is not None:
            for name in filter(partial(hasattr, server.cache), _OF_CACHE):
                self._wrap(server.cache, name, lambda name=name: f"server.cache.{name}()")
            for name in ("rows", "allocator"):
                owner = getattr(server, name)
                self._wrap(owner, "clear", lambda name=name: f"server.{name}.clear()")
            self._wrap(copies, "copy", lambda job: f"server.copies.copy(load={job.load})")
            self._wrap(copies, "complete", lambda load: f"server.copies.complete({load=})")
        self._wrap(server.controller, "open", self._open)
        self._wrap(server.controller, "close", self._close)
        self._wrap(server.controller, "maybe_reap", self._reap)
        self._wrap(server.allocator, "free_group_begin", self._free_group_begin)
        self._wrap(server.allocator, "free_group_end", self._free_group_end)
        self._wrap(server, "new_request", self._request, after=True)
        self._wrap(server, "new_batch", self._batch, after=True)
        self._wrap(server.scheduler, "busy", self._busy)
        self._wrap(server.scheduler, "idle", self._idle)
        if server.tree is not None:
            self._wrap(server.tree, "reset_match", self._reset_match)
            self._wrap(server.tree, "lock", self._lock)
            self._wrap(server.tree, "unlock", self._unlock)
            self._wrap(server.tree, "match", self._match)
            self._wrap(server.tree, "evict", self._evict)
        self._chunk = -1
        self._lines.clear()

    def take(self) -> tuple[str, ...]:
        """Return the lines since the last call, and forget them."""
        lines = tuple(self._lines)
        self._lines = []
        return lines

    def late(self) -> tuple[tuple[str, str], ...]:
        """Return the effect of the waiting results on each request, by its name."""
        server = self._driver.server
        lines = []
        for turn in server.turns.values():
            name = self._name(turn.req)
            for result in (r for r in turn.pending if r.visible):
                if server.spec and not result.prefill:
                    lines.append((name, self._commit(turn.req, len(result.tokens))))
                lines.append((name, self._sampled_line(turn, result.tokens)))
        return tuple(lines)

    # -- wrapping ---------------------------------------------------------------------------------

    def _wrap(
        self, owner: Any, name: str, line_of: Callable[..., str], *, after: bool = False
    ) -> None:
        """Note calls of `owner.name`; `line_of` gives the line, if any.

        after: it takes the result first.
        """
        call = getattr(owner, name)

        def noting_call(*args: Any, **kwargs: Any) -> Any:
            outermost = not self._depth
            if outermost and not after and (line := line_of(*args, **kwargs)):
                self._lines.append(line)
            self._depth += 1
            try:
                result = call(*args, **kwargs)
            finally:
                self._depth -= 1
            if outermost and after:
                self._lines.append(line_of(result, *args, **kwargs))
            return result

        setattr(owner, name, noting_call)

    def _wrap_method(self, owner: type, name: str) -> None:
        def line_of(this: Any, *args: Any) -> str:
            return f"{self._name(this)}.{name}({', '.join(map(self._text, args))})"

        kind = type(self._driver.release)
        self._wrap(owner, name_in_release(f"{owner.__name__}.{name}", kind).rpartition(".")[2], line_of)

    def _watch(self, owner: type) -> None:
        """Note assignments to attributes of objects that have a name."""
        assign: Any = owner.__setattr__

        def noting_call(this: Any, attribute: str, value: Any) -> None:
            name = self._names.get(id(this))
            if name is not None and not self._depth:
                text = self._text(value)
                if attribute == "output_ids":  # only ever shortened
                    text = f"{name}.output_ids[:{len(value) - len(this.output_ids)}]"
                if attribute == "stop_token_ids":
                    text = ids_text(value)
                self._lines.append(f"{name}.{attribute} = {text}")
            self._depth += 1  # an alias assigns what it stands for
            try:
                assign(this, attribute, value)
            finally:
                self._depth -= 1

        owner.__setattr__ = noting_call  # type: ignore[method-assign, assignment]

    # -- words ------------------------------------------------------------------------------------

    def _name(self, this: Any) -> str:
        return self._names.get(id(this), "batch")

    def _text(self, value: Any) -> str:
        if value is self._driver.server.cache:
            return "server.cache"
        if type(value).__name__ == "FINISH_ABORT":
            return "FINISH_ABORT()"
        return self._names.get(id(value)) or (
            quote(value) if isinstance(value, str) else repr(value)
        )

    def _give_name(self, this: Any, name: str) -> None:
        self._named_objects.append(this)
        self._names[id(this)] = name

    # -- what the release is asked to do ------------------------------------------------------------

    def _hold(self, _: Any, req: Any) -> str:
        return self._lock(req)

    def _set_chunk(self, req: Any, _: int, end: int) -> str:
        return f"chunk({self._name(req)}, end={end})"

    def _count_chunk(self, req: Any, more: int) -> str:
        return f"middle_chunks({self._name(req)}, {more:+})"

    def _check_finished(self, req: Any, outputs: int = 1) -> str:
        how = f", outputs={outputs}" if outputs > 1 else ""
        return f"check_finished({self._name(req)}{how})"

    def _checkpoint(self, req: Any, _: Any, chunked: bool) -> str:
        how = ", chunked=True" if chunked else ""
        return f"checkpoint({self._name(req)}, server.cache{how})"

    def _end(self, req: Any, _: Any) -> str:
        how = "".join(
            f", {name}={value}" for name, value in self._driver.release.keeps(req).items()
        )
        return f"release_kv_cache({self._name(req)}, server.cache{how})"

    def _hand_in(self, req: Any, *_: Any) -> str:
        return f"hand_in(server, {self._name(req)})"

    def _drop(self, req: Any, _: Any, start: int, end: int) -> str:
        return f"drop(server, {self._name(req)}, {start}, {end})"

    def _retract(self, _: Any) -> str:
        return f"batch.release_req({', '.join(['0', '0', *self._settings()])})"

    def _retract_decode(self, batch: Any) -> str:
        alone = "batch.filter_batch = lambda **_: None  # no server goes on with it\n"
        call = f"batch.retract_decode({', '.join(self._settings())})"
        return alone + call if len(batch.reqs) > 1 else call

    def _settings(self) -> list[str]:
        """Return the settings of the server as an argument, for retracts that read them."""
        places = self._driver.release.places
        if places["kv_committed_len"].startswith("kv."):
            return []
        flat = places["kv_allocated_len"] == "kv_allocated_len"
        return ["server.args" if flat else "get_context().server_args"]

    def _abort_queued(self, req: Any, cache: Any) -> str:
        del cache
        return f"abort_queued(server, {self._name(req)})"

    def _prepare_spec(self, _: Any, draft_len: int) -> str:
        claimed = "claimed = " if self._ahead else ""
        return f"{claimed}prepare_verify(batch, draft_len={draft_len})"

    def _put(self, *_: Any) -> str:
        return ""  # a part of another call

    def _commit(self, req: Any, tokens: int) -> str:
        less = " - claimed" if self._ahead else ""
        return (
            f"{self._name(req)}.{self._driver.release.places['kv_committed_len']} += {tokens}{less}"
        )

    # -- what the server is -------------------------------------------------------------------------

    def _sampled_line(self, turn: LiveRequest, tokens: Sequence[int]) -> str:
        return f"sampled({self._name(turn.req)}, {ids_text(tokens)})"

    def _open(self, ask: Any) -> str:
        return f"server.open({quote(ask.session_id)})"

    def _close(self, ask: Any) -> str:
        return f"server.close({quote(ask.session_id)})"

    def _reap(self, *_: float) -> str:
        return "server.reap()"

    def _free_group_begin(self) -> str:
        return "server.allocator.free_group_begin()"

    def _free_group_end(self) -> str:
        return "server.allocator.free_group_end()"

    def _request(
        self, req: Any, rid: str, tokens: list[int], session: str | None, undo: Bag | None,
        **namespace: str,
    ) -> str:  # fmt: skip
        name = variable(rid.partition("#")[0].removeprefix(LOCK_HOLDER))
        self._give_name(req, name)
        self._give_name(req.sampling_params, f"{name}.sampling_params")
        arguments = "" if session is None else f", session={quote(session)}"
        if undo is not None:
            arguments += f", drop_previous_output={undo.drop_previous_output}, offset={undo.offset}"
        if namespace:
            arguments += "".join(f", {field}={quote(value)}" for field, value in namespace.items())
        request = quote(rid.removeprefix(LOCK_HOLDER))
        return f"{name} = server.request({request}, {ids_text(tokens)}{arguments})"

    def _batch(self, batch: Any, turns: Sequence[LiveRequest], mode: ForwardMode) -> str:
        mixes = mode is ForwardMode.DECODE and self._lines[-1:] == ["batch.prepare_for_extend()"]
        name = "running" if mixes else "batch"
        self._give_name(batch, name)
        names = ", ".join(self._name(t.req) for t in turns)
        server = self._driver.server
        how = ""
        before = ""
        if any(turn.pending for turn in turns) and mode is ForwardMode.DECODE:
            how = f", late={[turn.output - len(turn.req.output_ids) for turn in turns]}"
        if server.spec:
            how += ", spec=True"
        # a prefill is, by what a chunk may be
        evicted = server.swa_pool is not None and server.tree is None
        if evicted and self._chunk != SERVER_ARGS.chunked_prefill_size:
            self._chunk = SERVER_ARGS.chunked_prefill_size
            before = f"server.chunks_of({self._chunk})\n"
        return f"{before}{name} = server.batch(ForwardMode.{mode.name}, {names}{how})"

    # -- the tree ---------------------------------------------------------------------------------

    def _reset_match(self, req: Any) -> str:
        self._unmatched.add(id(req))
        return ""

    def _lock(self, req: Any) -> str:
        return f"lock({self._name(req)}, server.cache)"

    def _unlock(self, req: Any) -> str:
        if id(req) not in self._unmatched:
            return f"unlock({self._name(req)}, server.cache)"
        self._unmatched.remove(id(req))  # nothing was noted of it, and it has the root at most
        return ""

    def _match(self, req: Any, ids: Sequence[int]) -> str:
        return f"match({self._name(req)}, server.cache, {ids_text(ids)})"

    @staticmethod
    def _evict(full: int, swa: int, states: int = 0) -> str:
        assert not states  # an export of a run with states is refused
        return f"evicted = server.cache.evict(EvictParams(num_tokens={full}, swa_num_tokens={swa}))"

    def _compute(self, holder: LockHolder, tokens: Sequence[int], evicted: int) -> str:
        self._unmatched.discard(id(holder.req))
        page = self._driver.server.geometry.page_size
        boundary = f", evicted={-(-evicted // page) * page}" if evicted > len(holder.slots) else ""
        text = ids_text(self._driver.named_tokens(list(tokens)))
        return f"compute(server, {self._name(holder.req)}, {text}{boundary})"

    # -- memory checks ----------------------------------------------------------------------------

    def _busy(self, _: int) -> str:
        scheduler = self._driver.server.scheduler
        last = scheduler.last_batch
        running = scheduler.running_batch
        if last is None:
            return ""
        others = f", others={self._request_list(running)}" if running is not last and running.reqs else ""
        mode = f"ForwardMode.{last.forward_mode.name}"
        return f"checks = memory_checks(server, {mode}, {self._request_list(last)}{others})"

    def _idle(self, *_: Any) -> str:
        return "checks = memory_checks(server, ForwardMode.IDLE, [])"

    def _request_list(self, batch: Any) -> str:
        return f"[{', '.join(map(self._name, batch.reqs))}]"
