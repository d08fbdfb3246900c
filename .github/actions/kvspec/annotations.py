"""Print what a check found as annotations of GitHub: annotations.py REPORT.json."""

import json
import sys
from typing import Any


def annotations(report: dict[str, Any]) -> list[str]:
    """Yield a line for each new finding, and one for a plan that was not done."""
    lines = []
    for found in report["findings"]:
        clauses = ", ".join(clause["id"] for clause in found["clauses"])
        violation = found["violation"] or {"expected": "", "observed": ""}
        difference = f"expected {violation['expected']}; observed {violation['observed']}"
        text = _plain(f"{difference}. {found['replay']}")
        lines.append(f"::error title=kvspec: {_plain(clauses)}::{text}")
    if report["exit_code"] == 4:
        lines.append(f"::warning title=kvspec: incomplete::{_plain(report['verdict'])}")
    return lines


def _plain(text: str) -> str:
    """Return text as GitHub wants it in a workflow command."""
    return text.replace("%", "%25").replace("\r", "").replace("\n", "%0A").replace("::", ": :")


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print("\n".join(annotations(json.load(file))))
