"""Python functions on integers as z3 terms: what `reference/cursors.py` is written in, and no more.

A function is assignments, `if ...: return ...` and a return. Integers are exact and unbounded. A quotient by
an unknown page size is a new unknown q with `q * P <= x < q * P + P`. z3 is weak at products of unknowns, so
what it needs about them is added: two quotients differ by k or more where their products differ by k * P.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import z3

from reference.cursors import Cursors

_CONTRACT = re.compile(r"^\s*(pre|post): (.*)$", re.MULTILINE)
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


class NotTranslated(Exception):
    """A construct that is not in the language of this module."""


@dataclass(frozen=True)
class Contract:
    """A function with what its docstring asks for (`pre:`) and promises (`post:`), as expressions."""

    name: str
    about: str
    arguments: tuple[str, ...]
    pre: tuple[str, ...]
    post: tuple[str, ...]


def contracts(source: str) -> dict[str, Contract]:
    """Return the functions of a module that promise something, by name."""
    contracts_by_name = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            docstring = ast.get_docstring(node) or ""
            lines = _CONTRACT.findall(docstring)
            pre, post = (
                tuple(text for kind, text in lines if kind == wanted) for wanted in ("pre", "post")
            )
            if post:
                names = tuple(argument.arg for argument in node.args.args)
                contracts_by_name[node.name] = Contract(
                    node.name, docstring.partition("\n")[0], names, pre, post
                )
    return contracts_by_name


@dataclass
class Translation:
    """Calls of functions as z3 terms.

    functions: by name.
    facts: of the quotients that came up.
    """

    functions: Mapping[str, ast.FunctionDef]
    facts: list[z3.BoolRef] = field(default_factory=list)
    _quotients: dict[tuple[str, str], tuple[z3.ArithRef, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, *sources: str) -> Translation:
        """Return the translation of the functions in these sources."""
        trees = [node for source in sources for node in ast.parse(source).body]
        return cls({node.name: node for node in trees if isinstance(node, ast.FunctionDef)})

    def expression(self, text: str, names: Mapping[str, Any]) -> Any:
        """Return the value of a Python expression."""
        return self._value(ast.parse(text, mode="eval").body, dict(names))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Return the value of a function."""
        return self._body(self.functions[name].body, dict(arguments))

    def lemmas(self) -> list[z3.BoolRef]:
        """Return what holds for the quotients, pair by pair, where the divisor is positive."""
        lemmas = []
        for one, other in combinations([*self._quotients.values(), (z3.IntVal(0), None)], 2):
            (quotient, divisor) = one
            (less, other_divisor) = other
            if other_divisor is not None and divisor is not other_divisor:
                continue
            for k in (-1, 0, 1, 2):
                apart = quotient * divisor - less * divisor >= k * divisor
                lemmas.append(z3.Implies(divisor > 0, (quotient - less >= k) == apart))
        return lemmas

    # -- statements -------------------------------------------------------------------------------

    def _body(self, statements: list[ast.stmt], names: dict[str, Any]) -> Any:
        for index, statement in enumerate(statements):
            match statement:
                case ast.Expr(ast.Constant()):  # a docstring
                    continue
                case ast.Assign([ast.Name(name)], value):
                    names[name] = self._value(value, names)
                case ast.Return(ast.expr() as value):
                    return self._value(value, names)
                case ast.If(test, body, []):
                    rest_value = self._body(statements[index + 1 :], dict(names))
                    return _if_then_else(self._value(test, names), self._body(body, dict(names)), rest_value)
                case _:
                    raise NotTranslated(ast.unparse(statement))
        raise NotTranslated("a function that ends without a return")

    # -- expressions ------------------------------------------------------------------------------

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        """Return an expression as a term of z3. Raises NotTranslated.

        names: the terms of its variables.
        """
        match node:
            case ast.Constant(value):
                return value
            case ast.Name(name):
                return names[name]
            case ast.Tuple(parts):
                return tuple(self._value(part, names) for part in parts)
            case ast.Attribute(owner, name):
                return getattr(self._value(owner, names), name)
            case ast.Subscript(owner, ast.Constant(int(index))):
                return self._value(owner, names)[index]
            case ast.UnaryOp(ast.USub(), operand):
                return -self._value(operand, names)
            case ast.UnaryOp(ast.Not(), operand):
                return z3.Not(self._value(operand, names))
            case ast.BoolOp(how, operands):
                joined = z3.And if isinstance(how, ast.And) else z3.Or
                return joined(*(self._value(operand, names) for operand in operands))
            case ast.Compare(left, hows, rights):
                values = [self._value(operand, names) for operand in (left, *rights)]
                pairs = zip(hows, values, values[1:])
                return z3.And(*(_COMPARISONS[type(how)](a, b) for how, a, b in pairs))
            case ast.IfExp(test, then, other):
                return _if_then_else(*(self._value(part, names) for part in (test, then, other)))
            case ast.BinOp(left, ast.FloorDiv(), right):
                return self._quotient(self._value(left, names), self._value(right, names))
            case ast.BinOp(left, ast.Mod(), right):
                value = self._value(left, names)
                by = self._value(right, names)
                return value - self._quotient(value, by) * by
            case ast.BinOp(left, how, right) if type(how) in _ARITHMETIC:
                return _ARITHMETIC[type(how)](self._value(left, names), self._value(right, names))
            case ast.Call():
                return self._translate_call(node, names)
        raise NotTranslated(ast.unparse(node))

    def _translate_call(self, node: ast.Call, names: dict[str, Any]) -> Any:
        positional = [self._value(argument, names) for argument in node.args if not _is_range(argument)]
        keywords = {str(keyword.arg): self._value(keyword.value, names) for keyword in node.keywords}
        match node.func:
            case ast.Name("min" | "max" as name):
                best = positional[0]
                for value in positional[1:]:
                    best = _if_then_else(value < best if name == "min" else value > best, value, best)
                return best
            case ast.Name("len") if _is_range(node.args[0]):
                start, stop = (self._value(end, names) for end in node.args[0].args)  # type: ignore[attr-defined]
                return _if_then_else(stop > start, stop - start, 0)
            case ast.Name("Cursors"):
                return Cursors(*positional)
            case ast.Attribute(owner, "_replace"):
                return self._value(owner, names)._replace(**keywords)
            case ast.Name(name) if name in self.functions:
                return self.call(name, dict(zip(_arguments(self.functions[name]), positional)) | keywords)
        raise NotTranslated(ast.unparse(node))

    def _quotient(self, value: Any, by: Any) -> Any:
        if isinstance(value, int) and isinstance(by, int):
            return value // by
        key = str(z3.simplify(z3.IntVal(0) + value)), str(by)
        if key not in self._quotients:
            quotient = z3.Int(f"quotient{len(self._quotients)}")
            self._quotients[key] = quotient, by
            product = quotient * by
            self.facts.append(z3.Implies(by > 0, z3.And(product <= value, value < product + by)))
        return self._quotients[key][0]


def _arguments(function: ast.FunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.args]


def _is_range(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"
    )


def _if_then_else(test: Any, then: Any, other: Any) -> Any:
    """`then if test else other`, of numbers, truth values or cursors."""
    if isinstance(test, bool):
        return then if test else other
    if isinstance(then, Cursors):
        return Cursors(*(_if_then_else(test, a, b) for a, b in zip(then, other)))
    return z3.If(test, then, other)
