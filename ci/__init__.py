"""The command line, and everything that it shows: reports, `because`, exports, documents, benchmarks."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

TEMPLATES = Path(__file__).with_name("templates")
Data = dict[str, Any]  # a report: the text is made from it, and `--json` gives it


@cache  # of compiled templates: an export fills several, each more than once
def templates(*, escape: bool, **options: Any) -> "Environment":
    """Return the templates.

    escape: they make HTML, and what they are filled with is text.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # most commands need none

    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=escape,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
