"""The specification, findings, commands: what a contributor bookmarks, as one HTML file.

The findings have filters by release. The page needs no network, and reads without scripts,
in dark mode and in print.
"""

import re
from collections.abc import Callable, Mapping
from html import escape, unescape
from pathlib import Path

from markdown_it import MarkdownIt
from markupsafe import Markup

from ci import templates
from ci.documents import findings
from impl.engines import engine
from impl.system_spec import ENGINES
from stateful_tests.lockstep import text_drawings

ROOT = Path(__file__).parents[2]

_HEADING = re.compile(r"<h([123])>(.*?)</h\1>", re.DOTALL)
_FENCE = re.compile(r'<pre><code class="language-(\w+)">(.*?)</code></pre>', re.DOTALL)
_ROW = re.compile(r"\|[-#+t.|]+\|")  # the cells of a pool in a drawing of a row
_CELL = {"#": "kv", "+": "ahead", "-": "rest", "t": "tree", ".": "evicted"}
_WORD = re.compile(r"(tombstone|SWA live|(?:full|SWA) pinned by [\w ]+)")
_LINK = re.compile(r'<a href="([^"#][^"]*)">(.*?)</a>', re.DOTALL)


def page(markdown: str, anchor: Callable[[str], str]) -> str:
    """Return the page of the document.

    anchor: returns the name of a heading in links to it.
    """
    markdown = f"{_without_comment(markdown)}\n{_coverage_section()}\n{_commands_section()}"
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown)
    body = _LINK.sub(_plain_link, _FENCE.sub(_render_fence, body))
    contents: list[tuple[int, str, str]] = []

    def heading(match: re.Match[str]) -> str:
        words = unescape(re.sub(r"<[^>]+>", "", match[2]))
        contents.append((int(match[1]), anchor(words), words))
        return (
            f'</section><section><h{match[1]} id="{escape(anchor(words))}">{match[2]}</h{match[1]}>'
        )

    body = _HEADING.sub(heading, body).removeprefix("</section>") + "</section>"
    return templates(escape=True).get_template("spec.html").render(
        title=contents[0][2], contents=contents[1:], body=Markup(body), cells=list(_CELL.items()),
        legend=text_drawings.LEGEND, findings=findings.table(), anchor=anchor,
        engines={name: (engine(name).title, engine(name).releases) for name in ENGINES},
    )  # fmt: skip


def _coverage_section() -> str:
    """Describe what is driven and what is not, from the releases and the limits in README.md."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    limits = readme.partition("## Limits\n")[2].partition("\n## ")[0]
    lines = [f"- {record.title}: {', '.join(record.releases)}" for record in map(engine, ENGINES)]
    return "\n".join(["## What is driven", "", "Releases:", "", *lines, "", "Limits:", "", limits])


def _commands_section() -> str:
    """Return ci/COMMANDS.md, below a heading that the specification lacks."""
    text = (ROOT / "ci" / "COMMANDS.md").read_text(encoding="utf-8").replace("\n## ", "\n### ")
    return text.replace("# Commands\n", "## The command line\n", 1)


def _without_comment(markdown: str) -> str:
    return re.sub(r"\A\s*<!--.*?-->\n", "", markdown)


def _render_fence(match: re.Match[str]) -> str:
    if match[1] == "mermaid":
        diagram = unescape(match[2])
        says = {name: text for text, name in re.findall(r'state "(.*)" as (\w+)', diagram)}
        arrows = re.findall(r"^ *(\S+) --> (\S+): (.*)$", diagram, re.MULTILINE)
        return _state_table(arrows, says) + _arrow_table(arrows, says)
    return f'<pre class="drawing">{_WORD.sub(_linked_word, _ROW.sub(_row_cells, match[2]))}</pre>'


def _row_cells(match: re.Match[str]) -> str:
    return "".join(f'<i class="{_CELL[c]}">{c}</i>' if c in _CELL else c for c in match[0])


def _linked_word(match: re.Match[str]) -> str:
    kind = {"tombstone": "tombstone", "SWA live": "live"}.get(match[0], "pinned")
    return f'<b class="{kind}">{match[0]}</b>'


def _state_table(arrows: list[tuple[str, str, str]], says: Mapping[str, str]) -> str:
    """Return a state diagram: a column for each state, a line for each transition."""
    names = [*dict.fromkeys(("[*]", *says))]
    x = {name: 70 + 140 * index for index, name in enumerate(names)}
    ends = [x[b] + (40 + 6 * len(commands) if a == b else 70) for a, b, commands in arrows]
    wide = max(ends)
    high = 50 + 28 * len(arrows)
    parts = [
        f'<svg class="states" role="img" aria-label="State diagram" viewBox="0 0 {wide} {high}">'
    ]
    for name in names:
        title = says.get(name, "none").partition(":")[0]
        parts.append(f'<rect x="{x[name] - 56}" y="4" width="112" height="24" rx="12"/>')
        parts.append(f'<text x="{x[name]}" y="20">{escape(title)}</text>')
        parts.append(f'<path class="life" d="M{x[name]} 28V{high}"/>')
    for index, (a, b, commands) in enumerate(arrows):
        y = 60 + 28 * index
        end = x[b]
        if a == b:
            parts.append(f'<path d="M{end} {y - 12}h24v12H{end + 5}"/>')
        else:
            parts.append(f'<path d="M{x[a]} {y}H{end + (5 if end < x[a] else -5)}"/>')
        tip = 7 if a == b or end < x[a] else -7
        parts.append(f'<path class="tip" d="M{end} {y}l{tip} -4v8z"/>')
        middle = end + 28 if a == b else (x[a] + end) // 2
        kind = "loop" if a == b else "by"
        parts.append(f'<text class="{kind}" x="{middle}" y="{y - 4}">{escape(commands)}</text>')
    return f'<div class="picture">{"".join(parts)}</svg></div>'


def _arrow_table(arrows: list[tuple[str, str, str]], says: Mapping[str, str]) -> str:
    """Return the arrows as a table with the columns from, by and to."""
    rows = "".join(
        f"<tr><td>{escape(says.get(a, 'none'))}</td><td>{escape(commands)}</td>"
        f"<td>{escape(says.get(b, 'none'))}</td></tr>"
        for a, b, commands in arrows
    )
    table = f"<table><thead><tr><th>from</th><th>by</th><th>to</th></tr></thead><tbody>{rows}</tbody></table>"
    return f"<details><summary>as a table</summary>{table}</details>"


def _plain_link(match: re.Match[str]) -> str:
    """Replace a link to a file of the repository by its name, for fixtures as `kvspec replay` takes it;
    links to the web stay."""
    target = match[1]
    words = match[2]
    if target.startswith("https:"):
        return match[0]
    if "SPEC.md#" in target:
        return f'<a href="#{escape(target.partition("#")[2])}">{words}</a>'
    if target.endswith("FINDINGS.md"):
        return f'<a href="#findings">{words}</a>'
    if target.endswith(".json"):
        name = target.rpartition("/")[2].removesuffix(".json")
        return f'<span class="file" title="kvspec replay @{escape(name)}">{words}</span>'
    return f'<span class="file" title="{escape(target)}">{words}</span>'
