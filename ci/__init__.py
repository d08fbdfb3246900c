"""When it is run, and how it is shown: the command line, tiers, benchmarks and reports."""

from typing import Any

Data = dict[str, Any]  # a report: the text is made from it, and `--json` gives it
