"""The example adapter with a window: it conforms, and faults put into it are found."""

import kvspec
import pytest
from hypothesis import settings

from impl.examples.windowed_engine import WindowedEngine, make

TestWindowedEngine = kvspec.machine(make, presets=["page2"]).TestCase
TestWindowedEngine.settings = settings(max_examples=20)  # two block tables take their time


def test_the_windowed_engine_conforms_and_evicts_windows():
    result = kvspec.check(make, presets=["page2"], examples=10)
    assert not result.findings
    assert any(
        "evict_swa" in str(situation) for situation in result.situations
    )


class SweepsAPageTooFar(WindowedEngine):
    """Takes the window for one page smaller than it is."""

    def reset(self, geometry):
        super().reset(geometry)
        self.window = max(0, self.window - self.page_size)


class LeavesTheMapping(WindowedEngine):
    """Gives blocks back, and full slots still lead to them."""

    def _release(self, blocks, slots):
        super()._release(blocks, [])


class FreesSweptBlocksAgain(WindowedEngine):
    """A evicted block keeps its number in the table, so the end of the request frees it once more."""

    def _evict_window(self, command):
        before = list(self.swa_blocks.get(command.request, ()))
        outcome = super()._evict_window(command)
        self.free_swa += (
            before[:1] if isinstance(outcome, kvspec.Done) and before[:1] != [0] else []
        )
        return outcome


@pytest.mark.parametrize(
    "fault, clauses",
    [
        (SweepsAPageTooFar, {"OUT-3"}),
        (LeavesTheMapping, {"MAP-3", "MAP-4"}),
        (FreesSweptBlocksAgain, {"FREE-2", "OWN-1", "OWN-2"}),
    ],
)
def test_a_fault_is_found(fault, clauses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kvspec.ClauseViolated) as error:
        kvspec.check(fault, presets=["page2"], examples=10)
    assert clauses & {clause for run in error.value.runs for clause in run.violation.clauses}, (
        error.value
    )
