"""The command line, and everything that it shows: reports, explanations, exports, documents, benchmarks."""

from typing import Any

Data = dict[str, Any]  # a report: the text is made from it, and `--json` gives it
