"""Short functions of a test's scaffolding that have one caller: their line stands there."""

import ast
import re
from collections.abc import Iterator
from typing import Any

from ci.export.specialised_scaffold import WIDTH, Edit, Offsets, apply_edits


def inline_helpers(source: str, code: str) -> str:
    """Return the source with each function of one line, which is called once, in the place of that call.

    code: the test, whose calls count as well.
    """
    while (edits := next(_inlinings(source, code), None)) is not None:
        source = re.sub(r"\n{4,}", "\n\n\n", apply_edits(source, edits))
    return source


def _inlinings(source: str, code: str) -> Iterator[list[Edit]]:
    """Return edits that put one function in the place of its call, and drop it."""
    tree = ast.parse(source)
    offsets = Offsets(source)
    nodes = [*ast.walk(tree)]
    names = [n.id for n in (*nodes, *ast.walk(ast.parse(code))) if isinstance(n, ast.Name)]
    alone = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or names.count(function.name) != 1:
            continue
        call = next((n for n in nodes if isinstance(n, ast.Call) and _calls(n, function.name)), None)
        text = None if call is None else _inlined_line(source, function, call, call in alone)
        if call is None or text is None:
            continue
        begin = offsets(call, end=False)
        end = offsets(call, end=True)
        around = source.find("\n", end) - source.rfind("\n", 0, begin) - 1 - (end - begin)
        if around + len(text) <= WIDTH:
            lines = offsets.starts[function.lineno - 1], offsets.starts[function.end_lineno or 0]
            yield [(*lines, ""), (begin, end, text)]


def _calls(node: ast.Call, name: str) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == name


def _inlined_line(source: str, function: ast.FunctionDef, call: ast.Call, alone: bool) -> str | None:
    """Return the only line of a function, behind its docstring, with the arguments of a call; None for
    any other function.

    alone: the call is a statement, which the line may be as well.
    """
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    value: ast.AST
    match body:
        case [ast.Return(ast.expr() as value)] | [ast.Expr(value)]:
            pass
        case [ast.Assign() as value] if alone:
            pass
        case _:
            return None
    arguments = _call_arguments(function, call)
    text = ast.get_source_segment(source, value)
    if arguments is None or text is None or "\n" in text:
        return None
    if function.args.kwarg is not None:  # the call has no keywords
        text = text.replace(f", **{function.args.kwarg.arg}", "")
    uses = [node.id for node in ast.walk(value) if isinstance(node, ast.Name) and node.id in arguments]
    if any(uses.count(name) > 1 and not name_like for name, (_, name_like) in arguments.items()):
        return None
    texts = {name: value for name, (value, _) in arguments.items()}
    return re.sub(r"(?<![\w.])[A-Za-z_]\w*\b(?!=)", lambda name: texts.get(name[0], name[0]), text)


def _call_arguments(function: ast.FunctionDef, call: ast.Call) -> dict[str, tuple[str, bool]] | None:
    """Return the text of each parameter at a call, and whether it is a name or a constant; None where
    the two do not fit."""
    parameters = [argument.arg for argument in function.args.args]
    if function.args.vararg or function.args.kwonlyargs or call.keywords:
        return None
    missing = len(parameters) - len(call.args)
    values: list[Any] = [*call.args, *function.args.defaults[len(function.args.defaults) - missing :]]
    if missing < 0 or len(values) != len(parameters):
        return None
    simple = (ast.Name, ast.Constant, ast.Attribute)
    texts = [(ast.unparse(value), isinstance(value, simple)) for value in values]
    return dict(zip(parameters, texts, strict=True))
