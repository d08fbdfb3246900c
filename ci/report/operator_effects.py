"""Meanings of a mismatch in a log for the operator of the server, by its clause."""

import re

# What a mismatch means for who runs the server, by the clause, else by its family.
_LOST = (
    "leak: what is lost stays lost until the server restarts; by itself it makes no answer wrong"
)
_BACK = "the count is right again: see the mismatch before it on the same count"
_SHARED = (
    "answers may be wrong: KV that is read is free, or another's; close the sessions that are named, or"
    " restart the server"
)
_WRONG_PREFIX = (
    "answers may be wrong: requests that share this prefix may read KV of another text, or none; flush the"
    " cache, or restart the server"
)
_ROOM = (
    "room: what counts as evictable is not what can be evicted, so requests wait or are retracted, or an"
    " allocation fails; by itself it makes no answer wrong"
)
_CACHE = (
    "cache: prefixes are computed again, or pages are kept that nobody matches; by itself it makes no answer"
    " wrong"
)
_EFFECTS = {
    "LEN": "answers of this session may be wrong from here on, or KV is lost: close it",
    "SES-1": "the session's text is not what its clients sent and got: close it",
    "SES": "a session or request is kept too long, or ended too early: its client may wait for ever",
    "TREE-6": "locks: tree nodes can never be evicted, or can be evicted while they are read",
    "STA-6": _LOST,
    "OUT": "the server did what the rules refuse: what it holds from here on is not known",
    "PRO": "a client may wait for ever, or is refused though there is room",
    "REF-1": "the cursors are not the expected ones: answers of this session may be wrong",
    **dict.fromkeys(("PD-2", "PD-5"), _LOST),
    "PD": "the answer of this request may be wrong: the decode server reads KV that was not sent to it",
    **dict.fromkeys(("OWN", "MAP", "READ", "SWA", "OUT-3", "STA"), _SHARED),
    **dict.fromkeys(("TREE", "HOST", "XFER", "LOAD", "STORE"), _WRONG_PREFIX),
    **dict.fromkeys(("TREE-7", "TREE-9", "TREE-10", "TREE-17"), _ROOM),
    **dict.fromkeys(("TREE-11", "TREE-14", "TREE-15"), _CACHE),
}
# Of what is free: how far it is off, and was at the step before.
_COUNT = re.compile(r"\d+ \(([+-])(\d+)(?:, ([+-]))?")


def effect(clause: str, observed: str) -> str:
    """Return the meaning of a mismatch for the operator of the server."""
    if counted := _COUNT.match(observed):
        if counted[2] == "0":
            return _BACK
        return _LOST if counted[1] == "-" and counted[3] != "+" else _SHARED
    return next((_EFFECTS[of] for of in (clause, clause.split("-")[0]) if of in _EFFECTS), "")
