"""Mutants: which there are, that one is put in and noticed, and that a small sample has no survivor."""

import json

import pytest

from ci.cli import run
from stateful_tests.check.check_plans import plan
from ci.mutants import mutant_judges
from ci.mutants.mutant_judges import Noticed, accepted_mutants, judge, sample
from ci.mutants.__main__ import mutants
from ci.mutants.mutation_operators import Mutant, mutants_of
from stateful_tests.tests.support.night import at_night

SOURCE = b'''
def cut(a, b=2):
    """A docstring."""
    assert a > 0
    if a < b and not b:
        a.drop(min(a, 1))
        a = a - 1
    return [-(-x // 2) for x in sorted(a, reverse=True) if x is not None] if b else f"{a + 1}"

def made(f):
    def inner(): return f() + 1
    return inner

class Some:
    def words(self) -> str:
        return self.a + self.b
'''
CHANGES = """never: if a < b and not b|always: if a < b and not b|a < b and not b -> a < b or not b
a < b and not b -> not b|a < b and not b -> a < b|a < b -> a <= b|not b -> b
without: a.drop(min(a, 1))
min(a, 1) -> max(a, 1)|min(a, 1) -> a|min(a, 1) -> 1|1 -> 2 in min(a, 1)|1 -> 0 in min(a, 1)
without: a = a - 1|a - 1 -> a + 1|1 -> 2 in a - 1|1 -> 0 in a - 1""".replace("\n", "|").split("|")
PLAN = plan("smoke", presets=["page2"], machines=["sessions"], examples=6)


@pytest.fixture(autouse=True, scope="module")
def _loaded():
    mutant_judges.prepare()


def named_mutant(name: str) -> Mutant:
    [mutant], _ = sample((name,), None, 0)
    return mutant


def test_docstrings_asserts_factories_and_text_functions_have_no_mutants():
    mutants_found = mutants_of("a.py", SOURCE)
    assert [m.change for m in mutants_found][: len(CHANGES)] == CHANGES
    rest = {m.change for m in mutants_found[len(CHANGES) :]}
    assert {
        "always: if x is not None",
        "-(-x // 2) -> x // 2",
        "x is not None -> x is None",
        "True -> False in sorted(a, reverse=True)",
    } <= rest
    assert {m.function for m in mutants_found} == {"cut"}
    for mutant in mutants_found:
        compile(mutant.apply_to(SOURCE), "a.py", "exec")


def test_a_seed_fixes_the_sample_and_a_larger_sample_extends_it():
    some, of = sample(("reference/rules",), 10, 3)
    again, _ = sample(("reference/rules",), 10, 3)
    other, _ = sample(("reference/rules",), 10, 4)
    more, _ = sample(("reference/rules",), 11, 3)
    assert some == again != other
    assert of > 300
    assert some == more[:10]


def test_accepted_mutants_exist_and_have_a_reason():
    mutants, of = sample((), None, 0)
    every = {m.name for m in mutants}
    assert len(every) == of > 3_000, "no two have the same name"
    assert [name for name in accepted_mutants() if name not in every] == []
    assert all(reason.endswith(".") for reason in accepted_mutants().values())


@pytest.mark.parametrize(
    "name, by",
    [
        ("impl/torch_kv/steps.py Steps._lanes: name in self.requests -> name not in self.requests", "OUT-1"),
        ("impl/torch_kv/kernels.py _give: index >= swa_begin -> index > swa_begin", "a test"),
        ("reference/cursors.py cut: min(c.kv_committed_len, target) -> c.kv_committed_len", "REF-1"),
        ("reference/clauses/sessions.py _close_happens: always: if session.closing", "a fixture"),
    ],
)  # fmt: skip
def test_a_mutant_is_noticed(name, by):
    assert judge(PLAN, 60, named_mutant(name)).by == by


def test_a_mutant_that_gives_no_answer_is_noticed(monkeypatch):
    monkeypatch.setattr(mutant_judges, "_fixture_runs", lambda: mutant_judges.time.sleep(60))
    name = "reference/clauses/sessions.py _close_happens: always: if session.closing"
    assert judge(PLAN, 0.2, named_mutant(name)).by == "no answer"


@at_night
def test_no_unaccepted_mutant_of_a_small_sample_survives(tmp_path):
    """A small sample of fixed seed; the job `mutants` judges a larger one."""
    file = tmp_path / "mutants.json"
    only = ("--only=impl/torch_kv", "--only=reference/rules", "--only=reference/clauses")
    assert (
        run([*only, "--sample", "5", "--seed", "1", "-j", "1", "--json", str(file)], mutants) == 0
    )
    data = json.loads(file.read_text())
    assert (data["survived"], len(data["mutants"])) == (0, 5)


def test_selecting_a_function_gives_its_mutants_alone():
    file = "reference/clauses/sessions.py"
    of_function, _ = mutant_judges.sample((f"{file}:_close_happens",), None, 0)
    assert {mutant.function for mutant in of_function} == {"_close_happens"}
    of_file, _ = mutant_judges.sample((file,), None, 0)
    assert len(of_file) > len(of_function) > 1


def test_a_survivor_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(mutant_judges, "judge", lambda plan, limit, mutant: Noticed(""))
    name = "reference/cursors.py cut: min(c.swa_evicted_seqlen, target) -> c.swa_evicted_seqlen"
    assert run(["--only", name, "-j", "1"], mutants) == 1
    out = capsys.readouterr().out
    assert out.startswith("1 of 1 mutants (seed 0, tier smoke): 0 noticed, 0 accepted, 1 survived")
    assert (
        "  -        min(c.swa_evicted_seqlen, target),\n  +        c.swa_evicted_seqlen,\n" in out
    )
    assert f"again: python -m ci.mutants --only '{name}'" in out


def test_no_verdict_counts_where_unchanged_code_is_noticed(monkeypatch, capsys):
    name = "reference/cursors.py cut: min(c.swa_evicted_seqlen, target) -> c.swa_evicted_seqlen"
    for asked in ("judge", "notice_unchanged"):
        monkeypatch.setattr(mutant_judges, asked, lambda *_: Noticed("READ-1", "random runs on torch"))
    assert run(["--only", name, "-j", "1"], mutants) == 2
    assert (
        "reference: READ-1 notices unchanged code as well (random runs on torch): no verdict counts"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--only", "README.md"], "--only README.md: it has no mutant"),
        (["--only", "reference/clauses/freed_pages.py:none"], "freed_pages.py:none: it has no mutant"),
        (["--only", "reference/commands.py"], "kernels.py, impl/torch_kv, reference/clauses"),
        (["--sample", "0"], "--sample"),
    ],
)
def test_bad_input_exits_2_and_names_the_reason(arguments, says, capsys):
    assert run(arguments, mutants) == 2
    assert says in capsys.readouterr().err
