"""The command line of the worker that drives a release of vLLM."""

from pathlib import Path

import pytest

from impl.vllm.driver import _engine_of_arguments


def test_each_option_of_a_worker_is_a_parameter_of_its_engine():
    root, parameters = _engine_of_arguments(["checkout", "--async", "--storage"])
    assert root == Path("checkout")
    assert parameters == {
        "overlap": True, "v2": False, "offloads": False, "encodes": False, "stores": True,
    }  # fmt: skip


@pytest.mark.parametrize("option", ["--asynch", "--overlap", "--pair", "--store"])
def test_an_unknown_option_of_a_worker_is_refused(option, capsys):
    with pytest.raises(SystemExit, match="2"):
        _engine_of_arguments(["checkout", option])
    assert f"unrecognized arguments: {option}" in capsys.readouterr().err
