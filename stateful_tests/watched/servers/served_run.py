"""A run of whole schedulers as a file, and the smaller runs that shrinking tries: fewer clients and turns,
then smaller numbers, then a plainer configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from impl.sglang.server.clients import Client, Config, Turn
from impl.sglang.server.pair.choices import NetworkChoice
from stateful_tests.watched.servers import server_pairs

FORMAT = "kvspec-served-run"
VERSION = 1


class ServedRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run as a file, with everything that is needed to repeat it."""

    release: str
    config: Config
    clients: tuple[Client, ...]
    seed: int
    #: choices of the network of a pair
    choices: tuple[NetworkChoice, ...] = ()
    #: key of the finding that it shows, "" for none
    key: str = ""
    format: str = FORMAT
    version: int = VERSION


_PLAINEST: dict[type, dict[str, Any]] = {
    Config: {
        "draft": 0, "overlap": False, "tree": False, "window": 0, "swa": 8, "page_size": 1, "pressure": False,
        "mixed": False, "lazy": False, "track": 0, "states": 0,
        "rust": False, "storage": 0, "hicache": False, "lowest": False, "queue": 0, "threshold": 0,
        "priority": 0,
        "decode_overlap": False, "decode_tree": False, "decode_tokens": 0, "optimistic": 0, "deferred": True,
        "prefill_complete": False, "prefill_draft": False, "decode_hicache": False, "host_backup": False,
    },
    Client: {
        "start": 0, "after": "", "close": 1, "impatient": False, "session": False, "resends": False,
        "operator": "",
    },
    Turn: {
        "wait": 0, "stop": 0, "abort": 0, "shared": 0, "tokens": 1, "limit": 1, "ignore_eos": False,
        "priority": 0,
    },
    NetworkChoice: {"late": False, "at": 0, "steps": 0},
}  # fmt: skip


def smaller_parts(part: Any) -> Iterator[Any]:
    """Yield smaller runs, or smaller parts of a run: with fewer clients or turns, with plainer fields, and
    with a smaller part."""
    if isinstance(part, ServedRun):
        choices = server_pairs.choices_about(part.clients, part.choices)
        if len(choices) < len(part.choices):
            yield msgspec.structs.replace(part, choices=choices)
    for name, least in (("clients", 0), ("choices", 0), ("turns", 1)):
        yield from _with_fewer(part, name, least)
    for name, plain in _PLAINEST.get(type(part), {}).items():
        if isinstance(part, Turn | NetworkChoice):
            yield from _with_smaller_number(part, name, plain)
        elif getattr(part, name) != plain:
            yield msgspec.structs.replace(part, **{name: plain})
    if isinstance(part, ServedRun):
        for config in smaller_parts(part.config):
            if not config.states or config.track or not (config.overlap or config.page_size > 1):
                yield msgspec.structs.replace(part, config=config)
    for name in ("clients", "choices", "turns"):
        children = getattr(part, name, ())
        for index, child in enumerate(children):
            for smaller in smaller_parts(child):
                with_smaller = (*children[:index], smaller, *children[index + 1 :])
                yield msgspec.structs.replace(part, **{name: with_smaller})


def _with_fewer(part: Any, name: str, least: int) -> Iterator[Any]:
    """Yield a part without some of its children, many at a time first.

    name: the field with the children; a part without it has none.
    least: number of children that stay.
    """
    children = getattr(part, name, ())
    for size in sorted({len(children) // 2, len(children) // 4, 1} - {0}, reverse=True):
        if len(children) - size < least:
            continue
        for index in range(0, len(children), size):
            left = children[:index] + children[index + size :]
            yield msgspec.structs.replace(part, **{name: left})


def _with_smaller_number(
    part: Turn | NetworkChoice, name: str, plain: int
) -> Iterator[Turn | NetworkChoice]:
    """Yield a part with smaller values of a field, the smallest first. A turn shares at most its tokens, and
    stops within its limit."""
    value = getattr(part, name)
    for less in dict.fromkeys((plain, (plain + value) // 2, value - 1)):
        if not plain <= less < value:
            continue
        smaller = msgspec.structs.replace(part, **{name: less})
        if isinstance(smaller, Turn):
            shared = min(smaller.shared, smaller.tokens)
            stop = min(smaller.stop, smaller.limit)
            smaller = msgspec.structs.replace(smaller, shared=shared, stop=stop)
        yield smaller
