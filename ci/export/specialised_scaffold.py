"""The scaffolding of one test: source text without branches that the sizes rule out, and without annotations.

Each edit replaces a piece of the text, so that lines which stay keep their form.
"""

import ast
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

WIDTH = 100
# Stand-ins that only hold values: one that no name leads to can be left out.
_HOLDERS = {"Bag", "Questions", "Values"}
Edit = tuple[int, int, str]  # characters of the text, and what takes their place


class _Unknown(Exception):
    """The sizes do not determine the value of an expression."""


def decide_branches(
    source: str, facts: Mapping[str, Mapping[str, Any]], absent: Mapping[str, Mapping[str, Any]] = {}
) -> str:
    """Return the source with each `if` decided whose test follows from the facts.

    facts: function name -> expression -> value; "" for all functions.
    absent: the same for parameters that a function does not have: their values stand in their places.
    """
    facts = {name: {**facts.get(name, {}), **absent.get(name, {})} for name in {*facts, *absent}}
    while (edit := next(_decided_edits(source, facts, absent), None)) is not None:
        source = apply_edits(source, [edit])
    while (edit := next(_unread_edits(source), None)) is not None:
        source = apply_edits(source, [edit])
    return re.sub(r"\n{3,}(?= )", "\n\n", source)


def without_annotations(source: str) -> str:
    """Return the source without annotations of parameters, variables and results."""
    offsets = Offsets(source)
    edits: list[Edit] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arguments):
            edits += _annotations(node, offsets)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            edits.append((offsets(node.target, end=True), offsets(node.value, end=False), " = "))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            end = offsets(node.returns, end=True)
            edits.append((source.rindex("->", 0, end) - 1, end, ""))
    return apply_edits(source, edits)


def _annotations(node: ast.arguments, offsets: "Offsets") -> Iterator[Edit]:
    """Return edits that remove the annotations of parameters."""
    several = [*node.posonlyargs, *node.args]
    defaults = [*[None] * (len(several) - len(node.defaults)), *node.defaults, *node.kw_defaults]
    more = [parameter for parameter in (node.vararg, node.kwarg) if parameter is not None]
    parameters = zip([*several, *node.kwonlyargs, *more], [*defaults, *[None] * len(more)])
    for parameter, default in parameters:
        if parameter.annotation is not None:
            first = offsets(parameter, end=False) + len(parameter.arg)
            if default is None:
                yield first, offsets(parameter.annotation, end=True), ""
            else:
                yield first, offsets(default, end=False), "="


def fill_lines(source: str) -> str:
    """Return the source with calls, dictionaries and parameters in as few lines as hold them."""
    while (edit := next(_fill_edits(source), None)) is not None:
        source = apply_edits(source, [edit])
    source = re.sub(r"^( *)(def \w+)\(\n([^()]*)\n *\):", _signature, source, flags=re.MULTILINE)
    return re.sub(r"  # fmt: skip$", "", source, flags=re.MULTILINE)


def _signature(match: re.Match[str]) -> str:
    """Return a function's first line, or lines."""
    indent, name, parameters = match.groups()
    items = [item.strip() for item in parameters.split(",") if item.strip()]
    signature_line = f"{indent}{name}({', '.join(items)}):"
    if len(signature_line) <= WIDTH:
        return signature_line
    return f"{indent}{name}(\n{_filled_lines(items, len(indent) + 4)}\n{indent}):"


def _fill_edits(source: str) -> Iterator[Edit]:
    """Yield edits that lay bracketed lists anew: on one line where they fit, else filled up to WIDTH. Lists
    with comments stay."""
    offsets = Offsets(source)
    for node in ast.walk(ast.parse(source)):
        pieces, begin_of_items = _bracket_items(node, offsets)
        if not pieces:
            continue
        last = offsets(node, end=True)
        text = source[begin_of_items:last]
        items = [
            source[offsets(a, end=False) - len(before) : offsets(b, end=True)]
            for before, a, b in pieces
        ]
        too_long = max(map(len, text.split("\n"))) > WIDTH
        if "\n" not in text or "#" in text or (any("\n" in item for item in items) and not too_long):
            continue
        begin = source.rfind("\n", 0, begin_of_items) + 1
        indent = len(source[begin:]) - len(source[begin:].lstrip(" "))
        rest_of_line = source[last : source.index("\n", last)].replace("  # fmt: skip", "")
        joined_text = f"{text[0]}{', '.join(items)}{text[-1]}"
        if "\n" not in joined_text and begin_of_items - begin + len(joined_text) + len(rest_of_line) <= WIDTH:
            new = joined_text
        else:
            new = f"{text[0]}\n{_filled_lines(items, indent + 4)}\n{' ' * indent}{text[-1]}"
        shorter = max(map(len, new.split("\n"))) <= WIDTH if too_long else False
        if shorter or new.count("\n") < text.count("\n"):
            yield begin_of_items, last, new


def _bracket_items(node: ast.AST, offsets: "Offsets") -> tuple[list[tuple[str, Any, Any]], int]:
    """Return the items in brackets, each as the text before a node, the node, and the node that it ends
    with; and the position of the brackets."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values)
        return [("**", b, b) if a is None else ("", a, b) for a, b in pairs], offsets(node, end=False)
    if isinstance(node, ast.Call):
        items = sorted([*node.args, *node.keywords], key=lambda each: offsets(each, end=False))
        return [("", item, item) for item in items], offsets(node.func, end=True)
    return [], 0


def _filled_lines(items: list[str], indent: int) -> str:
    """Return items in lines as full as they can be; one that has lines of its own is alone."""
    rows = [""]
    for item in items:
        alone = "\n" in item or "\n" in rows[-1]
        if rows[-1] and (alone or indent + len(rows[-1]) + len(item) + 2 > WIDTH):
            rows.append("")
        rows[-1] += f" {item}," if rows[-1] else f"{item},"
    return "\n".join(" " * indent + row for row in rows)


def apply_edits(source: str, edits: Iterable[Edit]) -> str:
    for begin, end, text in sorted(edits, reverse=True):
        source = source[:begin] + text + source[end:]
    return source


class Offsets:
    """Positions of nodes in a text, in characters."""

    def __init__(self, source: str) -> None:
        self.lines = source.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def __call__(self, node: Any, *, end: bool) -> int:
        if end:
            row = node.end_lineno
            column = node.end_col_offset
        else:
            row = node.lineno
            column = node.col_offset
        line: str = self.lines[row - 1]
        start: int = self.starts[row - 1]
        return start + len(line.encode()[:column].decode())


def _value(node: ast.expr, facts: Mapping[str, Any]) -> Any:
    """Return the value of an expression. Raises _Unknown."""
    if (code := ast.unparse(node)) in facts:
        return facts[code]
    match node:
        case ast.Constant():
            return node.value
        case ast.UnaryOp(ast.Not(), operand):
            return not _value(operand, facts)
        case ast.BoolOp(op, values):
            return _boolean_value(values, facts, ends=isinstance(op, ast.Or))
        case ast.Compare(left, [op], [right]):
            left_value = _value(left, facts)
            other = _value(right, facts)
            if isinstance(op, (ast.Is, ast.Eq)):
                return left_value == other
            if isinstance(op, (ast.IsNot, ast.NotEq)):
                return left_value != other
            if isinstance(op, ast.Gt):
                return left_value > other
    raise _Unknown


def _boolean_value(values: Iterable[ast.expr], facts: Mapping[str, Any], *, ends: bool) -> Any:
    """Return the value of `or` (ends: true) or `and`: one operand may decide where another is unknown."""
    unknown = False
    value = None
    for each in values:
        try:
            value = _value(each, facts)
        except _Unknown:
            unknown = True
            continue
        if bool(value) is ends:
            return value
    if unknown:
        raise _Unknown
    return value


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions at the top and methods; a nested function belongs to the one around it."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef):
                    yield f"{node.name}.{member.name}", member


def _decided_edits(
    source: str,
    facts: Mapping[str, Mapping[str, Any]],
    absent: Mapping[str, Mapping[str, Any]],
) -> Iterator[Edit]:
    """Return edits that put a branch in the place of an `if`, or of a conditional expression, and a
    value in that of an absent parameter."""
    offsets = Offsets(source)
    for name, function in _functions(ast.parse(source)):
        known_values = {**facts.get("", {}), **facts.get(name, {})}
        for node in ast.walk(function):
            if isinstance(node, ast.If):
                with suppress(_Unknown):
                    yield _branch_edit(source, offsets, node, is_taken=bool(_value(node.test, known_values)))
            elif isinstance(node, ast.IfExp):
                with suppress(_Unknown):
                    taken = node.body if _value(node.test, known_values) else node.orelse
                    code = ast.get_source_segment(source, taken) or ""
                    begin = offsets(node, end=False)
                    end = offsets(node, end=True)
                    alone = re.match(r"[^\w.\])]\(", source[begin - 2 : begin]) and source[end] == ")"
                    if alone and isinstance(taken, ast.Name):
                        begin = begin - 1
                        end = end + 1
                    yield begin, end, code
            elif isinstance(node, (ast.Name, ast.UnaryOp)) and absent.get(name):
                names_read = {name_node.id for name_node in ast.walk(node) if isinstance(name_node, ast.Name)}
                is_stored = isinstance(getattr(node, "ctx", 0), ast.Store)
                if names_read and names_read <= {*absent[name]} and not is_stored:
                    yield offsets(node, end=False), offsets(node, end=True), repr(_value(node, absent[name]))


def _branch_edit(source: str, offsets: Offsets, node: ast.If, *, is_taken: bool) -> Edit:
    """Return the edit that puts the statements of a branch in the place of an `if`, as far left."""
    statements = node.body if is_taken else node.orelse
    begin = offsets.starts[node.lineno - 1]
    last = offsets.starts[node.end_lineno or 0]
    head = source[begin : offsets(node, end=False)]
    if not statements:
        return begin, last, "" if not head.strip() else head + "pass\n"
    rows = offsets.lines[statements[0].lineno - 1 : statements[-1].end_lineno]
    if rows[0].lstrip().startswith("elif"):
        rows[0] = rows[0].replace("elif", "if", 1)
    indent = len(offsets.lines[node.lineno - 1]) - len(offsets.lines[node.lineno - 1].lstrip())
    body = textwrap.indent(textwrap.dedent("\n".join(rows)), " " * indent) + "\n"
    if offsets.lines[node.lineno - 1].lstrip().startswith("elif"):
        body = f"{' ' * indent}else:\n{textwrap.indent(body, '    ')}"
    return begin, last, body


def _unread_edits(source: str) -> Iterator[Edit]:
    """Return edits that remove nested functions, and variables with a stand-in, that no code reads."""
    offsets = Offsets(source)
    for _, function in _functions(ast.parse(source)):
        read = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        for node in function.body:
            lines = offsets.starts[node.lineno - 1], offsets.starts[node.end_lineno or 0]
            match node:
                case ast.Assign([ast.Name(name)], ast.Name(other)) if name == other:
                    yield *lines, ""
                case ast.FunctionDef(name) if name not in read:
                    yield *lines, ""
                case ast.Assign([ast.Name(name)], ast.Call(ast.Name(made))) if name not in read:
                    if made in _HOLDERS:
                        yield *lines, ""
