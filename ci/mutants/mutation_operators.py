"""Mutants of a module: comparisons, one more or less, min and max, floor and ceil, dropped statements or
conditions, swapped arguments, a neighbour's attribute, union for intersection, `break` for `continue`, loops
without their first or last.

A mutant is an edit of the module's text inside one function. What only words or raises a message is left as
it is, and so are decorators, defaults and assertions.
"""

from __future__ import annotations

import ast
import functools
import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_SWAPPED = {
    "min": "max",
    "any": "all",
    "ceil_page": "floor_page",
    "ceil": "floor",
    "maximum": "minimum",
}
_SWAPPED |= {b: a for a, b in _SWAPPED.items()}
_DROPPED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Return, ast.Continue, ast.Break)
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
# without which a number says too little
_AROUND = (ast.expr, ast.Assign, ast.AugAssign, ast.Return)
_ROOT = Path(__file__).parents[2]
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of a file."""

    #: the file, from the root of the repository
    path: str
    #: its function, such as "RadixTree.evict"
    function: str
    #: the line where that begins
    first: int
    line: int
    #: the range (bytes) that `new` replaces
    start: int
    end: int
    new: str
    #: the edit in words; with path and function it names the mutant, wherever its line moves
    change: str

    @property
    def name(self) -> str:
        return f"{self.path} {self.function}: {self.change}"

    def apply_to(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file, in its order."""
    text = _Text(source)
    mutants: list[Mutant] = []
    for function, name in _functions(ast.parse(source)):
        name_counts: Counter[str] = Counter()
        first_line = min([function.lineno, *(d.lineno for d in function.decorator_list)])
        for old, new, change in _edits(function, text):
            start, end = text.span(old)
            if source[start:end].decode() == new:
                continue
            name_counts[change] += 1
            again = f" (#{name_counts[change]})" if name_counts[change] > 1 else ""
            mutants.append(
                Mutant(
                    path,
                    function=name,
                    first=first_line,
                    line=old.lineno,
                    start=start,
                    end=end,
                    new=new,
                    change=change + again,
                )
            )
    return mutants


class _Text:
    """The positions of nodes in the bytes of a file."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._starts[node.lineno - 1]
        end = self._starts[node.end_lineno - 1]
        return start + node.col_offset, end + node.end_col_offset

    def of(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return " ".join(self._source[start:end].decode().split())


def _functions(module: ast.Module) -> Iterator[tuple[_Function, str]]:
    """Yield functions and methods, without those that make functions: these have run when a mutant is
    put in."""
    for node in module.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for function in inside:
            if isinstance(function, _Function):
                inner_functions = {n.name for n in ast.walk(function) if isinstance(n, _Function)}
                gives = [n.value for n in ast.walk(function) if isinstance(n, ast.Return)]
                makes = any(isinstance(value, ast.Name) and value.id in inner_functions for value in gives)
                words = isinstance(function.returns, ast.Name) and function.returns.id == "str"
                if not makes and not words:
                    yield function, prefix + function.name


def _edits(function: _Function, text: _Text) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield (replaced node, new text, the change in words)."""
    waiting: list[tuple[ast.AST, ast.AST]] = [(node, function) for node in reversed(function.body)]
    while waiting:
        node, above = waiting.pop()
        strict = isinstance(node, ast.keyword) and node.arg == "strict"  # of zip: it asserts
        if strict or isinstance(node, _LEFT_ALONE):
            continue
        if isinstance(node, ast.stmt):
            yield from _of_statement(node, above, text)
            parts = [
                n for n in ast.iter_child_nodes(node) if n is not getattr(node, "annotation", None)
            ]
        else:
            parts = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.comprehension):
            yield from ((test, "True", f"always: if {text.of(test)}") for test in node.ifs)
            yield from _shorter(node.iter, text)
        if isinstance(node, ast.expr):
            where = ""
            if isinstance(node, ast.Constant) and isinstance(above, _AROUND):
                where = f" in {text.of(above)}"
            for new in chain(_of_expression(node), _mistaken(node)):
                new_text = ast.unparse(new)
                loose = isinstance(new, (ast.BoolOp, ast.IfExp)) or (
                    isinstance(new, ast.Compare) and not isinstance(node, ast.Compare)
                )
                if loose and isinstance(above, ast.expr):
                    new_text = f"({new_text})"
                yield node, new_text, f"{text.of(node)} -> {new_text}{where}"
        around = above if isinstance(node, ast.keyword) else node
        waiting += [(part, around) for part in reversed(parts)]


def _of_statement(
    node: ast.stmt, above: ast.AST, text: _Text
) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    if isinstance(node, (ast.If, ast.While)):
        kind = "if" if isinstance(node, ast.If) else "while"
        yield node.test, "False", f"never: {kind} {text.of(node.test)}"
        if isinstance(node, ast.If):
            yield node.test, "True", f"always: if {text.of(node.test)}"
    if isinstance(node, ast.For):
        yield from _shorter(node.iter, text)
    if isinstance(node, ast.Break):
        yield node, "continue", "break -> continue"
    if isinstance(node, ast.Continue):
        yield node, "break", "continue -> break"
    # as "never" above
    guarded = isinstance(above, ast.If) and above.body == [node] and not above.orelse
    if isinstance(node, _DROPPED) and _says_something(node) and not guarded:
        yield node, "pass", f"without: {text.of(node)}"


def _shorter(values: ast.expr, text: _Text) -> Iterator[tuple[ast.expr | ast.stmt, str, str]]:
    """Yield a loop without its first value, and without its last."""
    for ends, cut in (("first", "[1:]"), ("last", "[:-1]")):
        source = ast.unparse(values)
        yield values, f"[*({source})]{cut}", f"without the {ends} of {text.of(values)}"


def _says_something(node: ast.stmt) -> bool:
    """Return whether a mutant without this statement is meaningful: its names are still bound, and the
    function returns what it may return."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call)
    if isinstance(node, ast.Assign):
        read = {n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)}
        bound = [
            n.id
            for t in node.targets
            for n in ast.walk(t)
            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
        ]
        return read.issuperset(bound)
    return not isinstance(node, ast.Return)


def _of_expression(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that may take the place of a node, each with one small change."""
    match node:
        case ast.Compare(left, operators, others):
            for index, operator in enumerate(operators):
                changed = [*operators[:index], _COMPARISONS[type(operator)](), *operators[index + 1 :]]
                yield ast.Compare(left, changed, others)
        case ast.BoolOp(operator, values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
            for index in range(len(values)):
                other_values = [*values[:index], *values[index + 1 :]]
                yield other_values[0] if len(other_values) == 1 else ast.BoolOp(operator, other_values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.UnaryOp(
            ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)
        ):
            yield ast.BinOp(left, ast.FloorDiv(), right)
        case ast.BinOp(left, ast.Add(), right):
            yield ast.BinOp(left, ast.Sub(), right)
        case ast.BinOp(left, ast.Sub(), right):
            yield ast.BinOp(left, ast.Add(), right)
        case ast.BinOp(left, ast.FloorDiv(), right) if not _negative(left):
            ceiled = ast.BinOp(ast.UnaryOp(ast.USub(), left), ast.FloorDiv(), right)
            yield ast.UnaryOp(ast.USub(), ceiled)
        case ast.Constant(bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(int(value)):
            yield ast.Constant(value + 1)
            if value:
                yield ast.Constant(value - 1)
        case ast.IfExp(_, body, orelse):
            yield body
            yield orelse
        case ast.Call(ast.Name(name) | ast.Attribute(attr=name), arguments) if name in _SWAPPED:
            yield ast.Call(_with_function(node.func, _SWAPPED[name]), arguments, node.keywords)
            if len(arguments) == 2 and name in ("min", "max", "maximum", "minimum"):
                yield from arguments


def _mistaken(node: ast.expr) -> Iterator[ast.expr]:
    """Yield expressions of the same type: other arguments first, a neighbour's field, the other of two
    sets."""
    match node:
        case ast.BinOp(left, ast.BitOr(), right):
            yield ast.BinOp(left, ast.BitAnd(), right)
        case ast.BinOp(left, ast.BitAnd(), right):
            yield ast.BinOp(left, ast.BitOr(), right)
        case ast.Call(function, [_, _, *_] as arguments) if not _orderless(function):
            for index, (argument, other) in enumerate(pairwise(arguments)):
                swapped = [*arguments[:index], other, argument, *arguments[index + 2 :]]
                yield ast.Call(function, swapped, node.keywords)
        case ast.Attribute(value, name, ast.Load()):
            for neighbour in neighbours().get(name, ()):
                yield ast.Attribute(value, neighbour, ast.Load())


def _orderless(function: ast.expr) -> bool:
    """Return whether the arguments of a call may be in any order, or fail at once in another."""
    return isinstance(function, ast.Name) and function.id in ("isinstance", "getattr", "max", "min")


@functools.cache
def neighbours() -> dict[str, list[str]]:
    """Return, by the name of a field, the fields of its type that are next to it in a class of the
    reference, or in an event of a server's log."""
    names = defaultdict[str, dict[str, None]](dict)
    events = _ROOT / "impl" / "sglang" / "server" / "events.py"
    for path in [*sorted((_ROOT / "reference").rglob("*.py")), events]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                fields = [
                    (field.target.id, ast.unparse(field.annotation))
                    for field in node.body
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                ]
                for (one, kind), (other, same) in pairwise(fields):
                    if kind == same:
                        names[one][other] = names[other][one] = None
    return {name: [*others] for name, others in names.items()}


def _negative(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)


def _with_function(function: ast.expr, name: str) -> ast.expr:
    if isinstance(function, ast.Attribute):
        return ast.Attribute(function.value, name, ast.Load())
    return ast.Name(name, ast.Load())


def files(root: Path, folder: str) -> list[str]:
    """Return the modules below a folder, or the module itself, from the root."""
    path = Path(os.path.abspath(root / folder))
    if not path.is_relative_to(root):
        return []
    paths = [path] if path.suffix == ".py" else sorted(path.rglob("*.py"))
    return [path.relative_to(root).as_posix() for path in paths if path.is_file()]
