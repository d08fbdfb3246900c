"""The tests that upstream could merge, in fixtures/releases/reports: each fails on the newest release.

They pass where the fault is fixed; no release has fixed these yet.
"""

import re

import pytest

from impl.adapter import UnusableImplementation
from impl.process.run_test import FAILS, outcomes
from stateful_tests.lockstep.known_faults import FOLDER, known_faults, releases
from stateful_tests.lockstep.systems import resolve
from stateful_tests.tests.support import upstream_tests

REPORTS = FOLDER / "reports"
TESTED = [each for each in known_faults().values() if each.test]
READS = {"test_received_prompt_keeps_a_window_of_swa_kv.py": "sglang/srt/disaggregation/decode.py"}


def test_what_the_newest_release_has_and_no_report_tells_has_a_test():
    assert {fault.test for fault in TESTED} == {path.name for path in REPORTS.glob("*.py")}
    assert {fault.verdict for fault in TESTED} == {"none found", "not searched"}
    newest = [each for each in known_faults().values() if not each.fixed]
    assert all(fault in newest for fault in TESTED)
    assert all(fault.test for fault in newest if fault.verdict == "none found")


@pytest.mark.parametrize("fault", TESTED, ids=lambda fault: fault.id)
def test_it_stands_alone_and_fails_at_its_own_assertion(fault):
    path = REPORTS / fault.test
    text = path.read_text()
    assert text.count("\n") <= 80
    assert not re.search(r"^ *(from|import) (kvspec|impl|reference|stateful_tests|ci)\b", text, re.MULTILINE)
    newest, connector = releases(fault.engine)[-1], "+offload" * (fault.way == "offload")
    try:
        root = resolve(f"{fault.engine}=={newest}{connector}").root
    except UnusableImplementation as error:
        pytest.skip(str(error))
    needs = READS.get(path.name, "")
    if not (root / needs).exists():
        pytest.skip(f"{root} has no {needs}: it was fetched by an older kvspec; remove it")
    hook = f"{upstream_tests.__name__}:{fault.engine}"
    [(code, said)] = outcomes((root, newest, [path]), hook=hook)
    assert code == FAILS, said
