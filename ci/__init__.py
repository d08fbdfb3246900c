"""The command line, and everything that it shows: reports, explanations, exports, documents, benchmarks."""

from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")
Data = dict[str, Any]  # a report: the text is made from it, and `--json` gives it
