"""The next command: of which kind (command_weights.py), drawn by the harness of that kind (commands/).

Mostly commands that apply; one in N need not, and may be refused. `Choices` makes the decisions.
"""

from __future__ import annotations


from impl.adapter import Capabilities
from reference.commands import Abort, CheckIdle, Close, Command, Evict, Unlock
from reference.prefix_cache import lock_holders
from reference.state import State
from impl.choices import Choices, by_weight, once_in
from stateful_tests.generate.commands import HARNESSES
from stateful_tests.generate.enabled_commands import Enabled
from stateful_tests.generate.run_profile import RunProfile
from stateful_tests.generate.command_weights import kind_weights


def propose(
    state: State, source: Choices, profile: RunProfile, last: type | None = None
) -> Command:
    """Draw the next command for `state`; a few ignore their precondition.

    last: the kind of the previous one.
    """
    invalid = once_in(source, profile.invalid_rate)
    return next_of(Enabled(state, source, profile, invalid, last))


def next_of(c: Enabled) -> Command:
    """Draw a command of the kinds that may come next, each by its weight."""
    kind = by_weight(c.source, kind_weights(c))
    assert kind is not None  # some command may always come
    command: Command = HARNESSES[kind].draw(c)
    return command


def finale(state: State, capabilities: Capabilities | None = None) -> list[Command]:
    """Yield commands that end everything: abort what runs, close what is open, and empty the radix
    tree."""
    ends: list[Command] = [Abort(r.name) for r in state.requests]
    closing = {s.name for s in state.sessions if s.closing}
    ends += [Close(s.name) for s in state.sessions if s.name not in closing]
    if state.tree is not None:
        geometry = state.config.geometry
        everything = [geometry.pages(pool) * geometry.page_size for pool in geometry.pools]
        ends += [*(Unlock(name) for name in lock_holders(state)), Evict(*everything), CheckIdle()]
    offered = (capabilities or Capabilities()).commands
    return [command for command in ends if type(command).__name__ in offered]
