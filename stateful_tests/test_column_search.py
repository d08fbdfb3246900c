"""The search by columns: against the reference state by state, against SPIN, on torch; its paths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from reference import model
from reference.commands import Done, Mode
from reference.geometry import Geometry
from stateful_tests import promela
from stateful_tests.arrays import TorchArrays, arrays_on
from stateful_tests.column_search import ColumnSearch
from stateful_tests.explorer import Explorer
from stateful_tests.scopes import Scope
from stateful_tests.traced import BUILTINS, Expressions, Rows, Tree

BOTH = Scope("both", "", Geometry(1, 1, 2, 2, 2, 2), sessions=1, ordinary=1, submits=(1,), ahead=2, chunks=1)
TINY = (
    BOTH,
    replace(BOTH, mode=Mode.FAITHFUL, checks=True, geometry=Geometry(2, 2, 2, 1, 1, 3)),
    replace(BOTH, sessions=2, ordinary=0, rude=False, geometry=Geometry(1, None, 2, 0, 2, 2)),
    replace(BOTH, sessions=1, ordinary=2, ahead=0, sweeps=False, retracts=False, submits=(1, 2)),
)  # fmt: skip


@pytest.mark.parametrize("scope", TINY, ids=range(len(TINY)))
def test_every_state_is_that_of_the_reference(scope: Scope) -> None:
    """The same states at the same depth, what each leads to, how often, and in which situations."""
    search, explorer = ColumnSearch(scope), Explorer(scope, clauses=False)
    explorer.graph.quotient = search.quotient
    assert (search.run(), explorer.run()) == ("fixed point", "fixed point")
    ours, other = search.result("fixed point"), explorer.result("fixed point")
    for field in ("states", "expanded", "transitions", "refused", "depth", "situations", "missing"):
        assert getattr(ours, field) == getattr(other, field), field
    for level, start, end in zip(search.levels, explorer.levels, [*explorer.levels[1:], None]):
        keys = {search.quotient_key(key): key for key in level.tolist()}
        assert keys.keys() == set(explorer.keys[start:end])
    for level in search.levels:
        search.count_from(0, {})
        explorer.graph.situations.clear()
        keys, transitions = list(map(search.quotient_key, level.tolist())), 0
        leads = [{key} for key in keys]  # a command that changes nothing may be left out
        for sources, targets in search.targets(level):
            for source, target in zip(sources.tolist(), targets.tolist()):
                leads[source].add(search.quotient_key(target))
        for key, found in zip(keys, leads):
            due = [target for _, target in explorer.graph.targets(key)]
            assert found == {key, *due}
            transitions += len(due)
        assert (search.transitions, search.situations) == (transitions, explorer.graph.situations)


@pytest.mark.parametrize("scope", TINY[:2], ids=range(2))
def test_a_way_told_leads_there_and_is_a_shortest(scope: Scope) -> None:
    search = ColumnSearch(scope)
    search.run()
    counted = search.transitions
    for depth in (0, 1, 5, len(search.levels) - 1):
        key = int(search.levels[depth][-1])
        state = search.quotient.initial
        commands = search.path(key)
        assert len(commands) == depth
        for command in commands:
            state, outcome = model.step(state, command)
            assert isinstance(outcome, Done)
        assert search.quotient.key(state) == search.quotient_key(key)
    assert search.transitions == counted


def test_torch_finds_the_same() -> None:
    arrays = TorchArrays("cpu")
    arrays.torch.set_num_threads(1)
    one, two = ColumnSearch(TINY[2]), ColumnSearch(TINY[2], arrays)
    assert (one.run(), two.run()) == ("fixed point", "fixed point")
    assert (one.transitions, one.situations) == (two.transitions, two.situations)
    assert [level.tolist() for level in one.levels] == [level.tolist() for level in two.levels]


@pytest.mark.parametrize("chunk", [1, 7])
def test_it_counts_the_same_in_small_portions(chunk: int) -> None:
    arrays = arrays_on("cpu")
    arrays.chunk = chunk
    whole, parts = ColumnSearch(BOTH), ColumnSearch(BOTH, arrays)
    assert (whole.run(), parts.run()) == ("fixed point", "fixed point")
    assert (whole.starts, whole.states, whole.transitions, whole.situations) == (
        parts.starts, parts.states, parts.transitions, parts.situations,
    )  # fmt: skip


def test_more_units_than_a_key_can_name_end_the_search() -> None:
    search = ColumnSearch(BOTH)
    search.bits, search.mask = 4, 15
    with pytest.raises(AssertionError, match="more units than a key can name"):
        search.run()


@pytest.mark.skipif(promela.missing() is not None, reason=str(promela.missing()))
@pytest.mark.parametrize("scope", [TINY[0], TINY[2], TINY[3]], ids=range(3))
def test_spin_counts_the_same(scope: Scope) -> None:
    search = ColumnSearch(replace(scope, rude=False))  # what is ill-formed is refused: SPIN has none of it
    search.run()
    run = promela.run(search, optimise="-O0")
    assert (run.states, run.transitions) == (search.states, search.transitions)


def test_a_function_is_traced_on_every_path_that_rows_take() -> None:
    """Plain Python with branches, loops of its own and stand-ins, against itself on numbers."""

    def work(a, b, largest=BUILTINS["max"], size=BUILTINS["len"], span=BUILTINS["range"]):
        total = 0
        for step in (1, 2, 3):
            if a * step > b:
                total = total + largest(a - b, step)
            elif not (a - b) % 3:
                total = total - b // 2
        return total + size(span(a, b)), "even" if a % 2 == 0 else "odd"

    import numpy as np

    terms = Expressions()
    names = [terms.name(name, -5, 5) for name in "ab"]
    tree: Tree = Tree(terms, lambda: work(*names))
    grid = np.array([(a, b) for a in range(-5, 6) for b in range(-5, 6)], dtype=np.int16)
    columns = {"a": grid[:, 0], "b": grid[:, 1], "row": np.arange(len(grid))}
    found = {}
    table = Rows(arrays_on("cpu"), terms, columns.get, len(grid))
    for (total, parity), places in tree.results(table):
        values = np.broadcast_to(table.get(terms.place(total)), table.size)[places]
        found.update(zip(table.column("row")[places].tolist(), ((int(v), parity) for v in values)))
    assert [found[row] for row in range(len(grid))] == [
        work(int(a), int(b), max, len, range) for a, b in grid
    ]


def test_the_report_says_how_it_was_searched(kvspec: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = kvspec("explore", "--scope", "ordinary", "--no-clauses")
    assert code == 0
    assert "columns, by numpy" in out
    code, out, _ = kvspec("explore", "--scope", "ordinary", "--depth", "2")
    assert "one step after the other" in out


def test_a_device_that_is_not_there_is_said_in_one_line(
    kvspec: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, error = kvspec("explore", "--scope", "ordinary", "--device", "cuda")
    assert code == 2
    assert error.strip().splitlines() == ["kvspec: --device cuda: torch finds no CUDA device"]
