"""What is done to a radix tree with a host tier: by requests, by the scheduler's loop, by the copy engine.

Match, Unlock, Insert, Evict are as without a host tier, Copy and Complete as of vLLM's connector. A command
that does not apply is refused and changes nothing, so that any part of a trace means something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union, get_args

from reference.blocks.commands import Complete, Copy, ResetCache
from reference.commands import Evict, Insert, Match, Prompt, Unlock


@dataclass(frozen=True, slots=True)
class Load:
    """Match, and what has KV on the host alone is loaded back: device slots are taken for it, a load is
    queued, and `holder` locks all of it."""

    holder: str
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Send:
    """What is queued goes to the copy engine as one transfer. load: queued loads, else stores."""

    load: bool = False


@dataclass(frozen=True, slots=True)
class Poll:
    """The scheduler sends queued stores and takes note of the transfers that have completed."""


TierCommand = Union[
    Match, Load, Insert, Unlock, Evict, Send, Copy, Complete, Poll, ResetCache
]
TIER_COMMANDS: tuple[type, ...] = get_args(TierCommand)
