"""The bug reports beside the findings are what `kvspec export --as story` prints today."""

import pytest

from ci import cli
from stateful_tests.lockstep.known_faults import FOLDER, known_faults, releases, ways_of

REPORTS = sorted(path for path in (FOLDER / "reports").glob("*.md") if path.stem != "README")


def without_versions(text: str) -> str:
    return text.partition("## Versions")[0]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_quotes_the_current_output(path, request, capsys):
    fault, trace = next((f, t) for f in known_faults().values() for t in f.traces if path.stem in t)
    newest = [version for version in releases(fault.engine) if fault.is_in(version)][-1]
    system = "+".join([f"{fault.engine}=={newest}", *ways_of(trace)])
    assert cli.run(["export", str(FOLDER / trace), "--as", "story", "--impl", system]) == 0
    printed = capsys.readouterr().out
    if request.config.getoption("accept"):
        path.write_text(printed, encoding="utf-8")
    report = path.read_text(encoding="utf-8")
    assert without_versions(printed) == without_versions(report), (
        "accept what is true: pytest --accept"
    )
