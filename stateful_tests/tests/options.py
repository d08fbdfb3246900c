"""Short names, in this repository, for the options of the kvspec plugin: `pytest -k machine --impl X`.

A plugin by name, not a conftest, so that they work from anywhere in the checkout.
"""

import os

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvspec")
    for name in ("impl", "device", "sglang-path"):
        group.addoption(
            f"--{name}", dest=f"kvspec_{name.replace('-', '_')}", help=f"--kvspec-{name}"
        )
    group.addoption(
        "--accept", action="store_true", help="Write what is found where a file has what is due."
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("accept"):
        os.environ["KVSPEC_ACCEPT"] = "1"
