"""--since REV: what changed in a checkout is driven first, and what nothing drives is reported."""

import subprocess
from collections import Counter
from dataclasses import replace

import pytest

from reference.commands import Finish, Mode
from stateful_tests.check import changes, corpus, driving, tiers
from stateful_tests.lockstep.reference_system import ReferenceSystem

BEFORE = """
LIMIT = 1

class Cache:
    def free(self):
        return 1

    @property
    def size(self):
        def inner():
            return 2
        return inner()

def gone():
    return 3
"""


@pytest.fixture
def root(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "cache.py").write_text(BEFORE)
    git("init")
    git("add", ".")
    git("commit", "-m", "before")
    return tmp_path / "python"


@pytest.mark.parametrize("old, new, found", [
    ("return 1", "return 4", {"Cache.free"}),
    ("        return inner()\n", "", {"Cache.size"}),
    ("@property", "@staticmethod", {"Cache.size"}),
    ("LIMIT = 1", "LIMIT = 2", {"outside of functions"}),
    ("def gone():\n    return 3\n", "", set()),
    ("\nclass", "\n\nclass", set()),
    ("LIMIT", "LIMIT = (", {"cannot be parsed"}),
])  # fmt: skip
def test_a_changed_function_is_named(root, old, new, found):
    (root / "cache.py").write_text(BEFORE.replace(old, new))
    assert {*changes.changed_functions(root, "HEAD")} == {("cache.py", name) for name in found}


def test_all_of_a_new_file_has_changed(root):
    (root / "new.py").write_text("def one(): ...")
    assert [*changes.changed_functions(root, "HEAD")] == [("new.py", "one")]


class Checkout(ReferenceSystem):
    """Says that a finish calls Cache.free."""

    def called(self, geometry, commands, *, each):
        assert each
        return ("cache.py: Cache.free, Cache.size",) * any(isinstance(c, Finish) for c in commands)


def test_lines_that_call_it_come_first(root):
    (root / "cache.py").write_text(BEFORE.replace("return 1", "return 4").replace("return 3", "return 5"))
    system = Checkout()
    system.root = root
    found = changes.changes(system, "HEAD", corpus.load())
    assert len(found.first) == changes.ENOUGH and found.missed == (("cache.py", "gone"),)
    assert "5 directed runs come first, which call 1 of 2 changes; none calls" in found.text
    called = "cache.py: Cache.size, Cache.evict", "other.py: gone"
    changed = found._replace(called=Counter({("cache.py", "Cache.size"): 1})).among(called)
    assert changed == ["cache.py: Cache.size"]
    plan = replace(tiers.plan("smoke"), first=found.first)
    driven = [line for mode in Mode for line in driving.lines_of(system, plan, mode)[: changes.ENOUGH]]
    assert found.first < {*driven} and {*driving.lines_of(system, tiers.plan("smoke"), Mode.FREE)} == {
        *driving.lines_of(system, plan, Mode.FREE)
    }


def test_what_git_cannot_tell_is_a_line(root, kvspec):
    with pytest.raises(ValueError, match="bad revision 'nothing'"):
        [*changes.changed_functions(root, "nothing")]
    code, _, err = kvspec("check", "--since", "HEAD")
    assert code == 2 and "--since goes with a checkout" in err
