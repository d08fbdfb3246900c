"""A model for SPIN, printed from the rules that a finished `ColumnSearch` has traced, and its counts.

The rules are those traces, as C: a side of a condition that no state of ours ever took is an error there. All
else is SPIN's own: which commands there are in a state, what the units leave free, that units are a multiset,
which states are new. Commands that are refused change nothing and are left out. Not for scopes with memory
checks, which ask about all units, nor for rude ones with a bound on chunks, where lengths decide on commands.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from stateful_tests.column_search import ColumnSearch
from stateful_tests.traced import Expressions, Node
from stateful_tests.unit_rules import FREE, Case, New, Result, Template
from stateful_tests.units import SHAPE_BITS

RULES = "rules.c"
_SHAPE = (1 << SHAPE_BITS) - 1
NEEDS = ("spin", "gcc")
SECONDS = 600  # that a search may take
_CC = ("gcc", "-w", "-DSAFETY", "-DNOREDUCE", "pan.c", "-o")
_TWO_CORES = "-DNCORE=2"  # depth first on two cores; every state is kept whole, unlike in its -DBFS_PAR

_HELPERS = """
#include <string.h>
#define UNIT(i) (now.u + (i) * K)
static unsigned char next[SLOTS * K];
static int least(int a, int b) { return a < b ? a : b; }
static int most(int a, int b) { return a > b ? a : b; }
static int quotient(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }
static int rest(int a, int b) { return a - quotient(a, b) * b; }
static int untraced(void) { printf("untraced\\n"); exit(1); }
static int above(const unsigned char *a, const unsigned char *b) {
  for (int at = K - 1; at >= 0; at--) if (a[at] != b[at]) return a[at] > b[at];
  return 0;
}
static void sort(int from, int to) {
  unsigned char one[K];
  for (int i = from + 1; i < to; i++)
    for (int j = i; j > from && above(next + j * K, next + j * K - K); j--) {
      memcpy(one, next + j * K, K);
      memcpy(next + j * K, next + j * K - K, K);
      memcpy(next + j * K - K, one, K);
    }
}
static int sorted(void) { sort(0, SESSIONS); sort(SESSIONS, SLOTS); return 1; }
"""

_ASKED = """
static int owns(const unsigned char *a, int what);
static int others_leave(int what, int i, int j) {
  int left = TOTAL[what];
  for (int k = 0; k < SLOTS; k++) if (k != i && k != j) left -= owns(UNIT(k), what);
  return left;
}
static int alone(int i, int n) {
  if (!UNIT(i)[0] || (i && i != SESSIONS && !memcmp(UNIT(i), UNIT(i - 1), K))) return 0;
  memcpy(next, now.u, sizeof next);
  return about_one(UNIT(i), n, others_leave(0, i, i), others_leave(1, i, i), others_leave(2, i, i),
                   next + i * K) && sorted();
}
static int together(int i, int j, int n) {
  for (int a = 0; a <= i; a++)
    for (int b = a + 1; b < (a < i ? SLOTS : j); b++)
      if ((a < SESSIONS) + (b < SESSIONS) == (i < SESSIONS) + (j < SESSIONS)
          && !memcmp(UNIT(a), UNIT(i), K) && !memcmp(UNIT(b), UNIT(j), K)) return 0;
  memcpy(next, now.u, sizeof next);
  return about_two(UNIT(i), UNIT(j), n, others_leave(0, i, j), others_leave(1, i, j), others_leave(2, i, j),
                   next + i * K, next + j * K) && sorted();
}
"""

_C = {"+": "({} + {})", "-": "({} - {})", "*": "({} * {})", "<": "({} < {})", "==": "({} == {})",
      "//": "quotient({}, {})", "%": "rest({}, {})", "min": "least({}, {})",
      "max": "most({}, {})"}  # fmt: skip


class SpinError(Exception):
    """SPIN or the compiler failed: the end of what it said."""


@dataclass(frozen=True, slots=True)
class SpinRun:
    """What SPIN has counted. made_s: CPU seconds to translate and compile; seconds: of its search alone.

    two_cores_s: wall-clock seconds of its search on two cores, if that was asked for.
    """

    states: int
    transitions: int
    seconds: float
    made_s: float
    two_cores_s: float | None


def missing() -> str | None:
    """Which program is not installed, in words, or None."""
    absent = [name for name in NEEDS if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed (Debian: apt install spin gcc)" if absent else None


class _Writer:
    """C for conditions and lengths: each expression is computed once on each path."""

    def __init__(self, search: ColumnSearch, case: Case) -> None:
        self.terms: Expressions = search.rules.terms
        self.units = search.units
        self.names = {
            f"{tag}.{name}": f"{tag}[{at}]"
            for tag, _ in zip("ab", case.shapes)
            for at, name in enumerate(search.rules.lengths, 1)
        } | {name: name for name in FREE}

    def text(self, place: int, known: set[int], out: list[str]) -> str:
        how, *of = self.terms.ops[place]
        if how == "number":
            return str(of[0])
        if how == "name":
            return self.names.get(of[0], of[0])
        if place not in known:
            parts = [self.text(at, known, out) for at in of]
            out.append(f"int e{place} = {_C[how].format(*parts)};")
            known.add(place)
        return f"e{place}"

    def body(self, choice: _Choice, known: set[int]) -> list[str]:
        if choice is _UNTRACED:
            return ["return untraced();"]
        if not isinstance(choice, _Test):
            return self._units(choice, known)
        out: list[str] = []
        test = self.text(choice.test, known, out)
        yes, no = self.body(choice.yes, set(known)), self.body(choice.no, set(known))
        return [*out, f"if ({test}) {{", *yes, "} else {", *no, "}"]

    def _units(self, units: tuple[New | None, ...] | None, known: set[int]) -> list[str]:
        out: list[str] = []
        if units is None:
            return ["return 0;"]
        for into, new in zip("xy", units):
            if new is None:
                out.append(f"memset({into}, 0, K);")
                continue
            texts = [self.text(place, known, out) for place in new[1]]
            values = ", ".join([str(self.units.shape_number(new[0])), *texts])
            out.append(f"{{ unsigned char made[K] = {{{values}}}; memcpy({into}, made, K); }}")
        return [*out, "return 1;"]


@dataclass(frozen=True, slots=True)
class _Test:
    """A condition of which the units afterwards depend."""

    test: int
    yes: _Choice
    no: _Choice


_UNTRACED = ()
_Choice = Any  # a _Test, _UNTRACED, the units afterwards, or None: refused


def _choice(node: Node[Result] | None) -> _Choice:
    """A node without the conditions that only situations ask."""
    if node is None:
        return _UNTRACED
    if node.result is not None:
        return node.result.units
    no, yes = map(_choice, node.sides)
    return yes if yes == no else _Test(node.test, yes, no)


def _commands(search: ColumnSearch, case: Case) -> Iterator[tuple[Template, tuple[int, ...]]]:
    """Every command of a case that is carried out somewhere, with every value of its parameters."""
    root, terms = case.commands.root, search.rules.terms
    if root is None:
        return
    assert root.result is not None, "which commands there are depends on lengths"
    for template in root.result:
        if _choice(template.results.root) not in (None, _UNTRACED):
            bounds = [terms.bounds[loop.number.place] for loop in template.loops]
            for numbers in product(*(range(low, high + 1) for low, high in bounds)):
                yield template, numbers


def _function(search: ColumnSearch, case: Case, number: int, template: Template, lines: list[str]) -> str:
    """A template as a function of the units, of what the others leave and of its parameters."""
    writer, known = _Writer(search, case), set[int]()
    parameters = [loop.name for loop in template.loops]
    units = ["a", "b"][: len(case.shapes)]
    heads = [f"const unsigned char *{unit}" for unit in units]
    heads += [f"int {name}" for name in (*FREE, *parameters)]
    heads += [f"unsigned char *{into}" for into in "xy"[: len(units)]]
    name, body = f"t{number}", list[str]()
    for loop in template.loops:
        low, high = (writer.text(writer.terms.place(end), known, body) for end in (loop.start, loop.stop))
        body.append(f"if ({loop.name} < {low} || {loop.name} >= {high}) return 0;")
    body += writer.body(_choice(template.results.root), known)
    lines += [f"static __attribute__((noinline)) int {name}({', '.join(heads)}) {{", *body, "}"]
    return name


def model_of(search: ColumnSearch) -> tuple[str, str]:
    """The model of a search at its fixed point: Promela, and the rules that it includes as C."""
    scope, units = search.scope, search.units
    assert not scope.checks, "a memory check asks about everybody"
    lines: list[str] = []
    one: list[str] = []
    two: list[str] = []
    owns: list[str] = []
    most = {1: 0, 2: 0}
    made: dict[int, str] = {}
    for case in search.rules.cases():
        commands = list(_commands(search, case))
        wide = len(case.shapes)
        most[wide] = max(most[wide], len(commands))
        into = one if wide == 1 else two
        shapes = [units.shape_number(shape) for shape in case.shapes]
        into.append(f"case {shapes[0] * 256 + shapes[1] if wide == 2 else shapes[0]}: switch (n) {{")
        given = ["a", "b"][:wide] + list(FREE)
        for at, (template, numbers) in enumerate(commands):
            if id(template) not in made:
                made[id(template)] = _function(search, case, len(made), template, lines)
            arguments = ", ".join([*given, *map(str, numbers), *"xy"[:wide]])
            into.append(f"case {at}: return {made[id(template)]}({arguments});")
        into.append("} break;")
        if wide == 1:
            writer, known, body = _Writer(search, case), set[int](), list[str]()
            texts = [writer.text(place, known, body) for place in search.rules.owned(case.shapes[0])]
            owned = f"return what == 0 ? {texts[0]} : what == 1 ? {texts[1]} : {texts[2]};"
            owns += [f"case {shapes[0]}: {{", *body, owned, "}"]
    come, arrivals = _arrivals(search)
    heads = "int n, int full, int swa, int rows, unsigned char *x"
    c_code = "\n".join([
        f"#define K {len(search.rules.lengths) + 1}", f"#define SLOTS {search.slots}",
        f"#define SESSIONS {scope.sessions}", _HELPERS, *lines,
        f"static int about_one(const unsigned char *a, {heads}) {{ switch (a[0]) {{", *one, "} return 0; }",
        f"static int about_two(const unsigned char *a, const unsigned char *b, {heads}, unsigned char *y)",
        "{ switch (a[0] * 256 + b[0]) {", *two, "} return 0; }",
        f"static const int TOTAL[3] = {{{', '.join(map(str, search.totals))}}};", _ASKED,
        "static int owns(const unsigned char *a, int what) { switch (a[0]) {", *owns, "} return 0; }", *come,
    ])  # fmt: skip
    asked = [f"nobody({n})" for n in range(arrivals)]
    asked += [f"alone({slot}, {n})" for slot in range(search.slots) for n in range(most[1])]
    asked += [
        f"together({a}, {b}, {n})"
        for b in range(search.slots) for a in range(b) for n in range(most[2])
    ]  # fmt: skip
    commit = "c_code { memcpy(now.u, next, sizeof next); }"
    options = "\n".join(f"  :: d_step {{ c_expr {{ ({call}) }} -> {commit} }}" for call in asked)
    size = search.slots * (len(search.rules.lengths) + 1)
    model = (
        f"/* Generated from the reference's rules for scope {scope.name}. */\nbyte u[{size}];\n"
        f'c_code {{ \\#include "{RULES}" }}\nactive proctype units() {{\n  do\n{options}\n  od\n}}\n'
    )
    return model, c_code


def _arrivals(search: ColumnSearch) -> tuple[list[str], int]:
    """Who may come, by how many there are: a function, and how many commands there are for it at most."""
    scope, units = search.scope, search.units
    lines = [
        "static int nobody(int n) {", "int sessions = 0, ordinary = 0;",
        "for (int i = 0; i < SLOTS; i++) if (UNIT(i)[0]) { if (i < SESSIONS) sessions++; else ordinary++; }",
        "memcpy(next, now.u, sizeof next);", f"switch (sessions * {scope.ordinary + 1} + ordinary) {{",
    ]  # fmt: skip
    most = 0
    for code, (_, _, come) in search.nobody():
        here = [bool(code >> SHAPE_BITS * (search.slots - 1 - slot) & _SHAPE) for slot in range(search.slots)]
        counts = sum(here[: scope.sessions]), sum(here[scope.sessions :])
        lines.append(f"case {counts[0] * (scope.ordinary + 1) + counts[1]}: switch (n) {{")
        for at, (session, number) in enumerate(come):
            word = int(units.words[number])
            values = [word & _SHAPE, *((word >> shift) & units.mask for shift in units.shifts)]
            slot = scope.sessions - 1 if session else search.slots - 1
            values_text = ", ".join(map(str, values))
            lines.append(f"case {at}: {{ unsigned char made[K] = {{{values_text}}};")
            lines.append(f"memcpy(next + {slot} * K, made, K); return sorted(); }}")
        lines.append("} break;")
        most = max(most, len(come))
    return [*lines, "} return 0; }"], most


def run(search: ColumnSearch, optimise: str = "-O2", two_cores: bool = False) -> SpinRun:
    """Let SPIN search the model of a finished search. Raises SpinError; see `missing` before."""
    deep, hashed = max(10_000, 2 * search.states), max(16, search.states.bit_length() + 1)
    bounds = ("-E", f"-w{hashed}", f"-m{deep}")
    with tempfile.TemporaryDirectory() as folder:
        model, rules = model_of(search)
        Path(folder, "model.pml").write_text(model)
        Path(folder, RULES).write_text(rules)
        before = _cpu_s()
        for command in (("spin", "-a", "model.pml"), (*_CC, "pan", optimise)):
            _called(command, folder)
        made = _cpu_s() - before
        before = _cpu_s()
        counted = _counts(_called(("./pan", *bounds), folder))
        seconds, wall = _cpu_s() - before, None
        if two_cores:
            _called((*_CC, "pan2", optimise, _TWO_CORES), folder)
            began = time.perf_counter()
            again = _counts(_called(("./pan2", *bounds), folder))
            wall = time.perf_counter() - began
            if again != counted:
                raise SpinError(f"{counted} on one core, {again} on two")
    return SpinRun(*counted, seconds, made, wall)


def _counts(said: str) -> tuple[int, int]:
    """States and transitions. Raises SpinError where the search has not come to its end."""
    found = re.search(r"(\d+) states, stored\s.*?(\d+) transitions", said, re.S)
    if "errors: 0" not in said or found is None or "max search depth too small" in said:
        raise SpinError(said[-400:])
    return int(found[1]), int(found[2]) - 1  # the first state is stored without a transition


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _called(command: tuple[str, ...], folder: str) -> str:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise SpinError(f"{command[0]} took more than {SECONDS} s") from None
    if done.returncode:
        raise SpinError((done.stdout + done.stderr)[-400:])
    return done.stdout
