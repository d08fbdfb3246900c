"""Commands to servers with a host tier that several test files give."""

from typing import Any

from reference.system_kinds import TIERS
from stateful_tests.tests.support.commands import script

NEWEST = "0.5.23"
# A node that was demoted is loaded back, read, split while its load waits to be acknowledged.
ROUND = """
insert h1 a12; send; complete; poll; evict full 12; load h2 a12; insert h2 a12b2; insert h3 a5c2; complete;
poll; unlock h2; match h4 a4; unlock h4; reset_cache"""
# What is stored, read back after the tree was forgotten.
STORED = """
insert h1 a4; poll; complete; poll; backup; backup; backup; poll; reset_cache; prefetch h2 a4b1; query; query;
poll; fetch; fetch; poll"""


def commands(text: str) -> tuple[Any, ...]:
    """Return the commands of a text such as "insert h1 a4; poll"."""
    return script(text, TIERS)
