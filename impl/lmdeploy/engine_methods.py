"""Methods of the release's `Engine`, cut out of its file: its sleep, and the longest session."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from impl.loading.function_cuts import cut
from impl.loading.isolation import Inert
from impl.stand_ins import Values

ENGINE = Path("lmdeploy/pytorch/engine/engine.py")
_METHODS = frozenset({"Engine.sleep", "Engine._cancel_and_end_all_sessions"})


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
