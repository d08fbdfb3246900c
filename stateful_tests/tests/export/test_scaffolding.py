"""The scaffolding of an exported test: what the sizes of its server rule out is not written."""

import ast

from ci.export.helper_inlining import inline_helpers
from ci.export.specialised_scaffold import fill_lines, decide_branches, without_annotations
from ci.export.template_parts import head_of, used_definitions
from ci.export.unit_test import failure_message, with_message

SOURCE = '''
class Server:
    def __init__(self, size: int, window: int | None = None, *more: int, tree=False, **others: str) -> None:
        self.pool = Swa(size) if window is not None else Full(size)
        if tree:
            kind = Radix
        elif window is None:
            kind = Chunks
        else:
            kind = SwaChunks
        spare = Bag(size=size)

        def nobody():
            return size

        self.cache = (SwaTree if window is not None else Tree)(kind, disable=not tree)

    def asked(self, window):
        return 1 if window is not None else 2
'''


def init_of(source: str) -> str:
    body = ast.parse(source).body[0].body[0].body
    return "\n".join(map(ast.unparse, body))


def test_branches_that_the_sizes_rule_out_are_left_out():
    """Only in the functions that the facts are about; what nothing reads goes with them."""
    with_window = {"Server.__init__": {"window is not None": True, "window is None": False}}
    text = decide_branches(SOURCE, with_window, {"Server.__init__": {"tree": False}})
    assert init_of(text) == "\n".join([
        "self.pool = Swa(size)", "kind = SwaChunks", "self.cache = SwaTree(kind, disable=True)",
    ])  # fmt: skip
    assert "return 1 if window is not None else 2" in text
    with_tree = {"Server.__init__": {"tree": True}}
    assert "kind = Radix" in (text := init_of(decide_branches(SOURCE, with_tree)))
    assert "Swa(size) if window is not None" in text  # nothing is known of the window


def test_annotations_are_left_out():
    head = "def __init__(self, size, window=None, *more, tree=False, **others):"
    assert head in without_annotations(SOURCE)
    assert without_annotations("def f(a: int = 1) -> int:\n    b: int = a\n    return b\n") == (
        "def f(a=1):\n    b = a\n    return b\n"
    )


def test_items_are_laid_out_in_the_fewest_lines():
    one = "made = f(\n    a=1,\n    **more,\n)\n"
    assert fill_lines(one) == "made = f(a=1, **more)\n"
    assert (
        fill_lines("made = f(\n    a=1,  # one\n    b=2,\n)\n")
        == "made = f(\n    a=1,  # one\n    b=2,\n)\n"
    )
    names = [f"a_long_name_{n}={n}" for n in range(12)]
    text = fill_lines(f"made = f({', '.join(names)}, last={{\n    'a': 1,\n}})\n")
    assert max(map(len, text.splitlines())) <= 100
    assert ast.unparse(ast.parse(text)) == f"made = f({', '.join(names)}, last={{'a': 1}})"


def test_unreachable_code_is_left_out():
    source = "import os\nimport re\n\n\nclass Engine:\n    def __init__(self):\n        self.a = os\n"
    source += "\n    def one(self):\n        return self.two()\n\n    def two(self):\n        return 2\n"
    source += "\n    def three(self):\n        return re\n"
    text = used_definitions(source, "engine = Engine()\nengine.one()")
    assert "def two" in text
    assert "three" not in text
    assert "import re" not in text
    assert head_of("import os\n\n\nX = os\n") == ("import os", "X = os")


def test_a_message_names_a_release_and_no_checkout():
    text = failure_message("A-1", "b", "sglang==0.5.10", "a")
    assert text == "A-1: expected b; observed on sglang==0.5.10: a"
    assert failure_message("A-1", "b", "vllm@checkout", "a") == "A-1: expected b; observed: a"


def test_an_assertion_says_what_was_expected_and_observed():
    """The message takes the place of any other; where nothing is asserted it is a comment."""
    lines = ["self.assertEqual(a, b, engine.places(b))", "for x in y:", "    self.assertTrue(x, y)"]
    assert with_message(lines, "A-1: expected b; torch: a") == [
        "", 'message = "A-1: expected b; torch: a"', "self.assertEqual(a, b, message)", "for x in y:",
        "    self.assertTrue(x, message)",
    ]  # fmt: skip
    long = with_message([f"self.assertEqual(f({'x' * 60}), g({'y' * 30}))"], f"A-1: {'word ' * 30}")
    text = "\n".join(long)
    message = ast.parse(text).body[0].value
    assert isinstance(message, ast.Constant) and message.value.split()[1:] == ["word"] * 30
    assert max(map(len, long)) <= 100 and ast.unparse(ast.parse(text)).endswith(", message)")
    assert with_message(["try:", "    f()"], "A-1: x")[:2] == ["", "# A-1: x"]


SHORT = '''
def locked(req, cache, **more):
    """What it has matched stays."""
    req.lock = cache.lock(req.node, **more)


def doubled(tokens):
    return tokens + tokens


def listed(tokens):
    return list(tokens)


def twice(req):
    req.check()


def begin(server, req):
    locked(req, server.cache)
    twice(req)
    twice(req)
    return listed(doubled(req.given()))
'''


def test_a_function_of_one_line_is_inlined():
    """Where it is called once, by the scaffolding, and an argument that is more than a name is used once."""
    text = inline_helpers(SHORT, "begin(server, req)")
    assert "def locked" not in text and "    req.lock = server.cache.lock(req.node)\n" in text
    assert "def listed" not in text and "    return list(doubled(req.given()))\n" in text
    assert "def doubled" in text and "def twice" in text
    assert "def locked" in inline_helpers(SHORT, "locked(req, cache)\nbegin(server, req)")
