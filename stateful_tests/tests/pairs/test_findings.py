"""Known faults of vLLM as a pair: their traces, the sentence that explains each, and its page."""

import tomllib
from pathlib import Path

import pytest

from ci.explain import because
from ci.report import report_data
from ci.report.pages import trace_page
from impl.vllm.api import RELEASES
from stateful_tests.lockstep import known_faults
from stateful_tests.lockstep.replays import replay
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import NIGHT
from stateful_tests.traces import trace_files as traces

TRACES = [
    trace
    for trace in known_faults.traces("vllm")
    if "pair" in known_faults.ways_of(trace[0].parent.name)
]

# a part of what `because` says of each trace
REASONS = tomllib.loads(Path(__file__).with_name("reasons.toml").read_text(encoding="utf-8"))


def last_release_of(fault):
    """Return the newest release that has a fault."""
    return [version for version in RELEASES if fault.is_in(version)][-1]


@pytest.fixture(scope="module")
def pair():
    systems = {}

    def of(version):
        if version not in systems:
            systems[version] = resolve(f"vllm=={version}+pair")
        return systems[version]

    yield of
    for system in systems.values():
        system.close()


@pytest.mark.parametrize(("path", "fault"), TRACES, ids=lambda each: getattr(each, "stem", ""))
def test_a_trace_violates_its_clause_in_its_last_step(pair, path, fault):
    trace = traces.load(path)
    newest = last_release_of(fault)
    own = path.parent.name.removeprefix("vllm-").removesuffix("+pair")
    for version in (own, newest) if NIGHT else (newest,):
        violation = replay(pair(version), trace).violation
        assert violation is not None
        assert trace.clause in violation.clauses and trace.clause in fault.clauses
        assert violation.step == len(trace.commands) - 1


@pytest.mark.parametrize(("path", "fault"), TRACES, ids=lambda each: getattr(each, "stem", ""))
def test_the_reason_is_a_sentence_and_the_page_has_both_servers(pair, path, fault):
    run = replay(pair(last_release_of(fault)), traces.load(path))
    explained = because(run)
    assert REASONS[path.stem] in explained.text
    drawn = trace_page.page(report_data.replay_data(str(path), run) | {"replay": "kvspec replay"}, run)
    assert "the pool of P" in drawn and "the pool of D, and the wire between" in drawn


def test_every_trace_has_a_sentence():
    assert REASONS.keys() == {path.stem for path, _ in TRACES}
