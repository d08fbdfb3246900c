"""The tests that upstream could merge, in fixtures/releases/reports: each fails on the newest release.

They pass where the fault is fixed; no release has fixed these yet.
"""

import re

import pytest

from impl import engines
from impl.adapter import UnusableImplementation
from impl.process.run_test import FAILS, outcomes
from stateful_tests.lockstep.known_faults import FOLDER, known_faults, releases
from stateful_tests.lockstep.system_names import resolve
from stateful_tests.tests.support.night import at_night

REPORTS = FOLDER / "reports"
TESTED = [fault for fault in known_faults().values() if fault.test]
_RECEIVED = "keeps_a_window_of_swa_kv", "publishes_only_sent_swa_kv"
READS = {
    f"test_received_prompt_{name}.py": "sglang/srt/disaggregation/decode.py" for name in _RECEIVED
}


def test_each_unreported_fault_of_the_newest_release_has_a_test():
    assert {fault.test for fault in TESTED} == {path.name for path in REPORTS.glob("*.py")}
    verdicts = {"none found", "cause known", "known", "threads end before it"}
    assert {fault.verdict for fault in TESTED} == verdicts
    newest = [fault for fault in known_faults().values() if not fault.fixed]
    assert all(fault in newest for fault in TESTED)
    # A unit test has one scheduler, and a pair has two with a network: its trace or its run is the report.
    pairs = "a prefill and a decode server", "a server that only prefills"
    alone = [fault for fault in newest if fault.way != "pair" and not (fault.only or "").startswith(pairs)]
    assert all(fault.test for fault in alone if fault.verdict == "none found")


def test_the_page_of_reports_has_each_fault_of_the_newest_releases_that_no_report_tells_once():
    rows = re.findall(r"^\| `(.*?)` .*?\|", (REPORTS / "README.md").read_text(), re.MULTILINE)
    untold = [
        fault.id
        for fault in known_faults().values()
        if not fault.fixed and not fault.reports and not fault.cause
    ]
    assert sorted(rows) == sorted(untold)


def test_the_page_of_reports_links_the_test_of_each_fault():
    rows = (REPORTS / "README.md").read_text().splitlines()
    for fault in TESTED:
        row = [line for line in rows if line.startswith(f"| `{fault.id}` ")]
        assert all(f"]({fault.test})" in line for line in row), fault.id


@pytest.mark.parametrize("fault", TESTED, ids=lambda fault: fault.id)
def test_an_upstream_test_imports_no_kvspec(fault):
    text = (REPORTS / fault.test).read_text()
    assert text.count("\n") <= 100
    assert not re.search(
        r"^ *(from|import) (kvspec|impl|reference|stateful_tests|ci)\b", text, re.MULTILINE
    )


@at_night
@pytest.mark.parametrize("engine", sorted({fault.engine for fault in TESTED}))
def test_upstream_tests_fail_at_their_own_assertion(engine):
    newest = releases(engine)[-1]
    by_hook: dict[str, list] = {}
    for fault in (fault for fault in TESTED if fault.engine == engine):
        try:
            root = resolve(f"{engine}=={newest}{'+offload' if fault.way == 'offload' else ''}").root
        except UnusableImplementation as error:
            pytest.skip(str(error))
        if not (root / READS.get(fault.test, "")).exists():
            pytest.skip(
                f"{root} lacks {READS[fault.test]}: it was fetched by an older kvspec; remove it"
            )
        hook = engines.engine(engine).test_hook((REPORTS / fault.test).read_text())
        by_hook.setdefault(hook, []).append((root, newest, [REPORTS / fault.test]))
    for hook, runs in by_hook.items():
        ends = outcomes(*runs, hook=hook)
        assert [
            (run[2][0].name, output) for run, (code, output) in zip(runs, ends) if code != FAILS
        ] == []
