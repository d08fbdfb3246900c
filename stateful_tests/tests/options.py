"""Short names, in this repository, for the options of the kvspec plugin: `pytest -k machine --impl X`.

A plugin by name, not a conftest, so that they work from anywhere in the checkout.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvspec")
    for name in ("impl", "device", "sglang-path"):
        group.addoption(f"--{name}", dest=f"kvspec_{name.replace('-', '_')}", help=f"--kvspec-{name}")
    group.addoption("--accept", action="store_true", help="Write transcripts with what is printed now.")
