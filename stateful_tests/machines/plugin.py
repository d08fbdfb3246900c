"""pytest options, loaded as a plugin so that `pytest --impl X` works from anywhere in the checkout."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvspec")
    group.addoption("--impl", default="torch", help="system that the machines drive (see kvspec check)")
    group.addoption("--device", default="cpu", help="cpu or cuda, for torch")
    group.addoption("--sglang-path", default=None, help="checkout for --impl sglang")
