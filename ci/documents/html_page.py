"""SPEC.md as one HTML file: a list of headings, a search that hides what does not match, drawings in colour.

It needs no network, and reads as well without scripts, in dark mode and in print.
"""

import re
from collections.abc import Callable
from html import escape, unescape

from markdown_it import MarkdownIt
from markupsafe import Markup

from ci import templates
from ci.documents import drawing

_HEADING = re.compile(r"<h([123])>(.*?)</h\1>", re.DOTALL)
_FENCE = re.compile(r'<pre><code class="language-(\w+)">(.*?)</code></pre>', re.DOTALL)
_ROW = re.compile(r"\|[-#+t.|]+\|")  # the cells of a pool in a drawing of a row
_CELL = {"#": "kv", "+": "ahead", "-": "rest", "t": "tree", ".": "swept"}
_WORD = re.compile(r"(tombstone|SWA live|(?:full|SWA) pinned by [\w ]+)")
_LINK = re.compile(r'<a href="([^"#][^"]*)">(.*?)</a>', re.DOTALL)


def page(markdown: str, anchor: Callable[[str], str]) -> str:
    """The page of the document; anchor: what a heading is called in links to it."""
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(_without_comment(markdown))
    body = _LINK.sub(_link, _FENCE.sub(_fence, body))
    contents: list[tuple[int, str, str]] = []

    def heading(found: re.Match[str]) -> str:
        words = unescape(re.sub(r"<[^>]+>", "", found[2]))
        contents.append((int(found[1]), anchor(words), words))
        return f'</section><section><h{found[1]} id="{escape(anchor(words))}">{found[2]}</h{found[1]}>'

    body = _HEADING.sub(heading, body).removeprefix("</section>") + "</section>"
    return templates(escape=True).get_template("spec.html").render(
        title=contents[0][2], contents=contents[1:], body=Markup(body), cells=list(_CELL.items()),
        legend=drawing.LEGEND,
    )  # fmt: skip


def _without_comment(markdown: str) -> str:
    return re.sub(r"\A\s*<!--.*?-->\n", "", markdown)


def _fence(found: re.Match[str]) -> str:
    if found[1] == "mermaid":
        return _arrows(unescape(found[2]))
    return f'<pre class="drawing">{_WORD.sub(_word, _ROW.sub(_cells, found[2]))}</pre>'


def _cells(found: re.Match[str]) -> str:
    return "".join(f'<i class="{_CELL[c]}">{c}</i>' if c in _CELL else c for c in found[0])


def _word(found: re.Match[str]) -> str:
    kind = {"tombstone": "tombstone", "SWA live": "live"}.get(found[0], "pinned")
    return f'<b class="{kind}">{found[0]}</b>'


def _arrows(diagram: str) -> str:
    """A state diagram as a table: from, by, to."""
    says = {name: text for text, name in re.findall(r'state "(.*)" as (\w+)', diagram)}
    rows = "".join(
        f"<tr><td>{escape(says.get(a, 'none'))}</td><td>{escape(commands)}</td>"
        f"<td>{escape(says.get(b, 'none'))}</td></tr>"
        for a, b, commands in re.findall(r"^ *(\S+) --> (\S+): (.*)$", diagram, re.MULTILINE)
    )
    return f"<table><thead><tr><th>from</th><th>by</th><th>to</th></tr></thead><tbody>{rows}</tbody></table>"


def _link(found: re.Match[str]) -> str:
    """Files of the repository are named, fixtures as `kvspec replay` takes them; the web stays a link."""
    target, words = found[1], found[2]
    if target.startswith("https:"):
        return found[0]
    if target.endswith(".json"):
        name = target.rpartition("/")[2].removesuffix(".json")
        return f'<span class="file" title="kvspec replay @{escape(name)}">{words}</span>'
    return f'<span class="file" title="{escape(target)}">{words}</span>'
