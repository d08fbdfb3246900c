"""Methods of the release's `Engine`, cut out of its file: sleep, the longest session, ends of sessions."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from impl.loading.function_cuts import cut
from impl.loading.isolation import Inert
from impl.stand_ins import Values

ENGINE = Path("lmdeploy/pytorch/engine/engine.py")
_METHODS = frozenset({"Engine.sleep", "Engine._cancel_and_end_all_sessions"})
_ENDS = frozenset({"Engine._on_stop_session", "Engine._on_end_session", "Engine.end_session"})


def sleep_of(root: Path) -> Callable[[Any, Any], Coroutine[Any, Any, Any]]:
    """Return the steps of a server of the release when it sleeps, given its scheduler and its maker of
    batches. Nobody is there: the clients have ended their sessions."""
    methods = cut(root / ENGINE, _METHODS, {"logger": Inert(), "_SLEEPING_TAGS": set()})

    async def nothing(*_: Any) -> None:
        """Do nothing: the workers hold no memory, and no batch is in flight."""

    async def sleep(scheduler: Any, maker: Any) -> None:
        loop = Values(drain_for_sleep=nothing, reset_runtime_state=maker.reset_runtime_state)
        engine: Any = Values(
            scheduler=scheduler,
            executor=Values(sleep=nothing),
            _engine_loop=loop,
            _block_new_inputs=lambda: None,
            _cancel_and_end_all_sessions=lambda: methods["_cancel_and_end_all_sessions"](engine),
        )
        await methods["sleep"](engine)

    return sleep


def longest_session_of(root: Path) -> Callable[[int, Any], int]:
    """Return the function that gives a server's longest session in tokens, from the requested one and the
    cache: `EngineInstance` refuses a longer prompt."""
    methods = cut(root / ENGINE, frozenset({"Engine._get_max_session_len"}), {})

    def longest(asked: int, cache: Any) -> int:
        plan = Values(max_session_len=asked)
        engine = Values(scheduler_config=plan, cache_config=cache)
        return int(methods["_get_max_session_len"](engine))

    return longest


class SessionEnds(NamedTuple):
    """The steps of a server that end a session, each given its scheduler and the session.

    stop, end: the steps for a front end.
    free: the step for a peer that has read the KV of the session.
    """

    stop: Callable[[Any, int], object]
    end: Callable[[Any, int], object]
    free: Callable[[Any, int], object]


def session_ends_of(root: Path, modules: dict[str, Any]) -> SessionEnds:
    """Return the steps of a server of the release that end a session.

    modules: of the release, as loaded.
    """
    environment = {
        "logger": Inert(),
        "Response": object,
        "ResponseType": Inert(),
        "MessageStatus": modules["messages"].MessageStatus,
        "Request": object,
    }
    methods = cut(root / ENGINE, _ENDS, environment)

    def calling(method: str) -> Callable[[Any, int], object]:
        def call(scheduler: Any, session: int) -> object:
            engine: Any = Values(
                scheduler=scheduler,
                req_manager=Values(reject_request=lambda _: None),
                _has_multimodal_session=lambda _: False,
                _maybe_trim_multimodal_session=lambda _: None,
                _response=lambda *_: None,
            )
            engine.end_session = lambda session_id: methods["end_session"](engine, session_id)
            if method == "end_session":
                return engine.end_session(session)
            return methods[method](engine, [Values(data={"session_id": session}, resp=None)])

        return call

    return SessionEnds(
        stop=calling("_on_stop_session"),
        end=calling("_on_end_session"),
        free=calling("end_session"),
    )
