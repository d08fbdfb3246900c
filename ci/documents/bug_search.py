"""Known bugs by the words of a report: `kvspec bugs garbage after abort`.

SQLite ranks: its full-text index has Porter's stemmer and BM25. A word counts in full where a text has it, by
half where a text has another word for it (words.toml).
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from ci.documents.findings import known_bugs
from ci.documents.upstream_reports import upstream_reports
from stateful_tests.lockstep.known_faults import FOLDER, known_faults, ways_of

if TYPE_CHECKING:
    from ci import Data

MESSAGES = FOLDER / "messages.json"
WORDS = FOLDER / "words.toml"
FITS = 0.8  # share of a query's words that an answer must have
SHOWN = 10  # rows that are listed
_ALIKE = 0.5  # score of a synonym, relative to the word itself
# Of a column: the name, what happens, where, what a server prints, what a reporter sees, remarks, stories.
_WEIGHTS = {
    "name": 4.0, "says": 4.0, "place": 3.0, "said": 4.0, "seen": 2.0, "more": 1.5, "story": 1.0,
}  # fmt: skip
_SHORT = "{" + " ".join(name for name in _WEIGHTS if name != "story") + "}: "
KNOWN_KINDS = ("known", "mended")  # faults of releases
# Factors of the score: of rows that fit alike, live faults of releases come first, mended ones next.
_FACTORS = {"known": 1.0, "mended": 0.95, "reported": 0.8, "not driven": 0.7, "beyond": 0.8, "named": 0.6}


# What is driven as `+hicache` without a host tier.
_WITHOUT_HOST_TIER = "a server that only prefills"
_SHOWN_NAMES = 3  # classes or options of a row that is not driven


class _Beyond(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    what: str
    words: str
    says: str


class ReporterWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of words.toml, which documents each field."""

    stop: list[str]
    same: list[list[str]]
    symptoms: dict[str, str]
    ways: dict[str, str]
    said: dict[str, list[str]]
    beyond: list[_Beyond]


@dataclass(frozen=True)
class SearchEntry:
    """An entry of the search.

    kind: a key of _FACTORS.
    engine: "" for all.
    row: its row in the listing.
    texts: column -> text.
    """

    kind: str
    engine: str
    row: Data
    texts: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    rows: the best first; the first `fits` of them have most of the query's words. Each has the words that
        it `lacks`.
    known: the first is a bug.
    missing: words that no row has.
    """

    rows: list[Data]
    fits: int
    known: bool
    missing: list[str]


@cache
def reporter_words() -> ReporterWords:
    """Return the words of the file. Raises msgspec.ValidationError for a file that is wrong."""
    return msgspec.convert(tomllib.loads(WORDS.read_text(encoding="utf-8")), ReporterWords)


def search_entries(named_rows: Iterable[Data]) -> list[SearchEntry]:
    """Return all entries: known faults, reports that were not reproduced, features that are not driven,
    and bugs of the built-in implementation, whose rows are `named_rows`."""
    entries = [*_known_entries(), *_reported_entries(), *_undriven_entries(), *_out_of_scope_entries()]
    for row in named_rows:
        symptoms = reporter_words().symptoms.get(row["clause"], "")
        texts = {"name": row["id"], "says": row["title"], "seen": symptoms, "more": row["source"]}
        entries.append(SearchEntry("named", "torch", row, {**texts, "story": row["story"]}))
    return entries


def _known_entries() -> Iterable[SearchEntry]:
    """Yield an entry for each known fault of a release: its names, the messages it causes, the symptoms and
    the upstream reports of it."""
    messages = json.loads(MESSAGES.read_text(encoding="utf-8"))
    also: dict[str, list[str]] = {}
    for report in upstream_reports():
        numbers = " ".join(map(str, report.numbers))
        for name in report.faults:
            also.setdefault(name, []).append(f"{report.says} {numbers}")
    for row in known_bugs():
        fault = known_faults()[row["id"]]
        ways = {fault.way, *(way for trace in fault.traces for way in ways_of(trace))} - {""}
        source = row["source"]
        if fault.only.startswith(_WITHOUT_HOST_TIER):
            ways -= {"hicache"}
            source = source.replace(" +hicache", "")
        called = [reporter_words().ways.get(way, way) for way in sorted(ways)]
        of_way = reporter_words().ways.get(fault.way, "") if fault.way in ways else ""
        clauses = [*fault.clauses, *(["BROKEN"] if fault.ends_server else [])]
        printed = [text for texts in messages.get(fault.id, {}).values() for text in texts]
        symptoms = dict.fromkeys(reporter_words().symptoms.get(clause, "") for clause in clauses)
        yield SearchEntry("mended" if fault.fixed else "known", fault.engine, row, {
            "name": fault.id,
            "says": fault.says,
            "place": f"{source} {fault.only} {of_way}",
            "said": " ".join([*printed, *reporter_words().said.get(fault.id, [])]),
            "seen": " ".join([*clauses, *symptoms]),
            "more": " ".join([fault.upstream, *also.get(fault.id, []), *called]),
            "story": " ".join(row["story"]),
        })  # fmt: skip


def _reported_entries() -> Iterable[SearchEntry]:
    for report in upstream_reports():
        if report.faults:
            continue
        numbers = ", ".join(f"#{number}" for number in report.numbers)
        row = _plain_row(numbers, f"{report.says} {report.why}", report.engine, report.verdict)
        texts = {"name": numbers, "says": report.says, "more": report.why}
        yield SearchEntry("reported", report.engine, row, texts)


def _undriven_entries() -> Iterable[SearchEntry]:
    text = (FOLDER / "driven.toml").read_text(encoding="utf-8")
    for engine, table in tomllib.loads(text).items():
        for reason, names in table["not_driven"].items():
            listed_names = ", ".join(names[:_SHOWN_NAMES])
            if more := len(names) - _SHOWN_NAMES:
                listed_names += f" and {more} more" if more > 0 else ""
            row = _plain_row("-", f"{reason}: {listed_names}", engine, "not driven")
            parts = " ".join(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name) for name in names)
            yield SearchEntry(
                "not driven", engine, row, {"says": reason, "name": f"{' '.join(names)} {parts}"}
            )


def _out_of_scope_entries() -> Iterable[SearchEntry]:
    for report in reporter_words().beyond:
        row = _plain_row("-", f"{report.what}: {report.says}", "any", "not driven")
        yield SearchEntry(
            "beyond", "", row, {"says": f"{report.what} {report.words}", "more": report.says}
        )


def _plain_row(name: str, title: str, engine: str, verdict: str) -> Data:
    """Return the row of an entry that is no bug, with the fields of a bug that a listing shows."""
    row = {"id": name, "kind": "-", "title": title}
    return row | {"clause": verdict, "source": engine, "only": ""}


def find(query: Sequence[str], entries: Sequence[SearchEntry]) -> SearchResult:
    """Return the entries that have words of a query, the best first."""
    index = _search_index(entries)
    query_words = re.findall(r"\w+", " ".join(query).lower())  # update_weights is one word
    content = [
        word for word in dict.fromkeys(query_words) if word not in reporter_words().stop
    ] or query_words
    scores: dict[int, float] = {}
    weighed: dict[int, float] = {}  # row -> the weight of the words that it has
    words_by_row: dict[int, set[str]] = {}
    total = 0.0
    missing = []
    for word in content:
        own = _phrase_scores(index, [word]) or _phrase_scores(index, [word], begins=True)
        synonyms = _phrase_scores(index, _synonyms(word))
        best = {row: max(own.get(row, 0.0), _ALIKE * synonyms.get(row, 0.0)) for row in own | synonyms}
        rarity = math.log(1 + len(entries) / (1 + len(best)))
        total += rarity
        if not best:
            missing.append(word)
        for row, score in best.items():
            scores[row] = scores.get(row, 0.0) + score
            weighed[row] = weighed.get(row, 0.0) + rarity
        # A story has many words: what it alone mentions is no answer.
        for row in _phrase_scores(index, [word, *_synonyms(word)], _SHORT).keys() & best.keys():
            words_by_row.setdefault(row, set()).add(word)
    for first, second in pairwise(query_words):
        if not {first, second} <= {*reporter_words().stop}:
            for row, score in _phrase_scores(index, [f"{first} {second}"]).items():
                scores[row] = scores.get(row, 0.0) + score
    worth = {
        row: score * (weighed.get(row, 0.0) / total) ** 2 * _FACTORS[entries[row].kind]
        for row, score in scores.items()
    }
    fits = {row for row, words in words_by_row.items() if len(words) >= FITS * len(content)}

    def sort_key(row: int) -> tuple[bool, bool, float, int]:
        """Return a sort key: rows that fit first, the better score first. Of the others, bugs of the built-in
        implementation come last."""
        return row not in fits, row not in fits and entries[row].kind == "named", -worth[row], row

    ranked = sorted(worth, key=sort_key)
    is_bug = bool(fits) and entries[ranked[0]].kind in (*KNOWN_KINDS, "named")
    for row in ranked:
        lacking = [word for word in content if word not in words_by_row.get(row, ())]
        entries[row].row["lacks"] = ", ".join(lacking)
    return SearchResult([entries[row].row for row in ranked], len(fits), is_bug, missing)


def _tokens(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())


def _synonyms(word: str) -> list[str]:
    """Return other words for a word, by any of its forms."""
    stem = _with_stems(word)
    return [
        word
        for group in reporter_words().same
        if any(_with_stems(word) == stem for word in group)
        for word in group
        if _with_stems(word) != stem
    ]


@cache
def _with_stems(phrase: str) -> str:
    """Return a phrase with the stems of the index."""
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE VIRTUAL TABLE t USING fts5(x, tokenize='porter unicode61')")
        database.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, instance)")
        database.execute("INSERT INTO t VALUES (?)", (phrase,))
        return " ".join(term for (term,) in database.execute("SELECT term FROM v ORDER BY offset"))


def _search_index(entries: Sequence[SearchEntry]) -> sqlite3.Connection:
    index = sqlite3.connect(":memory:")
    columns = ", ".join(_WEIGHTS)
    index.execute(f"CREATE VIRTUAL TABLE bug USING fts5({columns}, tokenize='porter unicode61')")
    index.executemany(
        f"INSERT INTO bug (rowid, {columns}) VALUES (?{', ?' * len(_WEIGHTS)})",
        ((at, *(entry.texts.get(name, "") for name in _WEIGHTS)) for at, entry in enumerate(entries)),
    )
    return index


def _phrase_scores(
    index: sqlite3.Connection, phrases: Sequence[str], within: str = "", begins: bool = False
) -> dict[int, float]:
    """Return row -> score of the best of some phrases.

    within: columns.
    begins: a longer word counts as well.
    """
    if not phrases:
        return {}
    suffix = "*" if begins else ""
    quoted = (f'"{" ".join(_tokens(phrase))}"{suffix}' for phrase in phrases)
    fts_query = f"{within}({' OR '.join(quoted)})"
    weights = ", ".join(map(str, _WEIGHTS.values()))
    rows = index.execute(
        f"SELECT rowid, -bm25(bug, {weights}) FROM bug WHERE bug MATCH ?", (fts_query,)
    )
    return dict(rows)
