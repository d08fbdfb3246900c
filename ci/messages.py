"""Collect what releases say where a known fault ends or stops them (fixtures/releases/messages.json).

`python -m ci.messages [FAULT...]`, when a fault or a release is added; without names it takes ten minutes.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import PurePath

from ci.documents.bug_search import MESSAGES
from impl.adapter import UnusableImplementation
from impl.system_spec import SystemSpec, release_name
from stateful_tests.lockstep import replays
from stateful_tests.lockstep.known_faults import FOLDER, KnownFault, known_faults, releases, ways_of
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.traces.trace_files import load


def shows_message(fault: KnownFault) -> bool:
    """Return whether a release prints something in a trace of the fault: it raises, or its own check
    counts wrong."""
    says = any(clause == "BROKEN" or clause.startswith("CHK-") for clause in fault.clauses)
    return says and bool(fault.traces)


def message(trace: str, release: str) -> str:
    """Return the text that a trace of a known fault makes a release print; "" where it violates another
    clause or conforms, or cannot be driven."""
    name = release_name(SystemSpec.parse(_release_of_folder(trace)).engine, release, ways_of(trace))
    try:
        with closing(resolve(name)) as system:
            violation = replays.replay(system, load(FOLDER / trace)).violation
    except UnusableImplementation:
        return ""
    if violation is None:
        return ""
    described = [
        each.observed
        for clause, each in zip(violation.clauses, violation.failures)
        if clause == "BROKEN" or clause.startswith("CHK-")
    ]
    return described[0] if described else ""


def messages(fault: KnownFault) -> dict[str, list[str]]:
    """Return trace -> messages of the first release that has the fault, its own and the newest, each
    text once."""
    newest = [release for release in releases(fault.engine) if fault.is_in(release)][-1]
    by_trace = {}
    for trace in fault.traces:
        own_version = SystemSpec.parse(_release_of_folder(trace)).version or newest
        texts = [message(trace, version) for version in dict.fromkeys((fault.first, own_version, newest))]
        if distinct := [*dict.fromkeys(filter(None, texts))]:
            by_trace[trace] = distinct
    return by_trace


def _release_of_folder(trace: str) -> str:
    """Return the release that a trace's folder names, as a system."""
    return PurePath(trace).parts[0].replace("-", "==", 1)


if __name__ == "__main__":
    saved_messages = json.loads(MESSAGES.read_text("utf-8")) if MESSAGES.is_file() else {}
    for fault in known_faults().values():
        if shows_message(fault) and (not sys.argv[1:] or fault.id in sys.argv[1:]):
            saved_messages[fault.id] = messages(fault)
            print(fault.id, saved_messages[fault.id])
    saved_messages = {fault: saved_messages[fault] for fault in known_faults() if saved_messages.get(fault)}
    MESSAGES.write_text(json.dumps(saved_messages, indent=1) + "\n", "utf-8")
