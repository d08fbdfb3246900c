"""Named bugs: each puts one fault back into torch_kv by overriding one small method.

Faults of the past name the change that has or fixed them and are re-created from its report; those
of source "kvspec" are mistakes of a kind that some clause is there to catch. `broken(id)` gives the
faulty system.
"""

# isort: off
# They fill BUGS, in this order.
from impl.bugs import (  # noqa: F401
    memory_checks, pools, trees, tree_locks, tree_evictions, prefixes, reports, sessions, late, states,
    tracked_states,
)  # fmt: skip

# isort: on
from impl.bugs.register import BUGS, Bug, torch_with_bug

__all__ = ["BUGS", "Bug", "torch_with_bug"]
