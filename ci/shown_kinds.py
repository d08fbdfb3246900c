"""How kinds of systems are shown: the modules that explain a run of a kind, draw its page, make a test of it.

A module is imported when it is asked for: explanations need neither pages nor exports.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

from reference.system_kinds import BLOCKS, PAIRS, ROWS, TIERS, kind_of_config


class ExplainedPlaces(Protocol):
    """Explains a run of a system that facts and clauses judge alone."""

    def called(self, place: Any, m: Any) -> str:
        """A place of a failure, in words."""

    def facts_at(self, place: Any, m: Any) -> list[Any]:
        """Describe a place at a moment (see `ci.explain.places`)."""

    def events(self, past: Any) -> list[str]:
        """Return what the facts of one moment do not show."""


class DrawnPage(Protocol):
    """The page of a run."""

    def states(self, run: Any) -> list[dict[str, Any]]:
        """Return the data of the page, a step each."""

    def content(self, data: dict[str, Any], run: Any) -> dict[str, Any]:
        """Return what the template takes besides the head of every page."""


class ExportedTests(Protocol):
    """Makes a trace a unit test of a release's own classes. ENGINE: whose releases it knows."""

    ENGINE: str

    def target(self, text: str) -> Any:
        """A release by its version, or a checkout by its folder."""

    def unit_test(self, trace: Any, file: str, system: Any, *more: Any) -> str:
        """The text of the test."""

    def shared_module(self, system: Any, fixed: Any) -> str:
        """The text of the module that the tests of one folder import."""

    def hook(self, trace: Any) -> str:
        """Return the code that loads a release for the test of a trace."""


class ServerAsserts(Protocol):
    """The assertions of a test of SGLang's classes, and the sizes of its server. HOOK: loads the release."""

    HOOK: str

    def asserted(self, run: Any) -> Any:
        """Return the assertion that shows the violated clause."""

    def device_sizes(self, config: Any) -> Any:
        """The sizes of the server's device memory."""

    def host_arguments(self, config: Any) -> list[str]:
        """The arguments of the server for its host memory."""

    def is_unified(self, release: Any, config: Any) -> bool:
        """Whether the tree is the one for all kinds of KV."""


@dataclass(frozen=True)
class ShownKind:
    """How a kind is shown, by the names of modules.

    tests: "" where none are made. places, page: "" where the reference model stands beside the system, which
    has its own (ci.explain.places,
        ci.report.pages.trace_page). tests: of an engine's classes; asserts: what those of SGLang's assert.
    models: an adapter may declare that it has no window, no radix tree, no recurrent state.
    """

    tests: str = ""
    places: str = ""
    page: str = ""
    asserts: str = ""
    models: bool = True

    def explains(self) -> ExplainedPlaces | None:
        return cast(ExplainedPlaces, importlib.import_module(self.places)) if self.places else None

    def draws(self) -> DrawnPage | None:
        return cast(DrawnPage, importlib.import_module(self.page)) if self.page else None

    def exports(self) -> ExportedTests | None:
        return cast(ExportedTests, importlib.import_module(self.tests)) if self.tests else None

    def server_asserts(self) -> ServerAsserts:
        return cast(ServerAsserts, importlib.import_module(self.asserts))


_SHOWN = {
    ROWS.name: ShownKind(tests="ci.export.unit_test", asserts="ci.export.place_assertions"),
    BLOCKS.name: ShownKind(
        tests="ci.export.engine_test", places="ci.explain.block_places", page="ci.report.pages.engine_page"
    ),
    TIERS.name: ShownKind(
        tests="ci.export.unit_test",
        places="ci.explain.tier_places",
        page="ci.report.pages.tier_page",
        asserts="ci.export.tier_assertions",
        models=False,
    ),
    PAIRS.name: ShownKind(places="ci.explain.pair_places", page="ci.report.pages.pair_page", models=False),
}


def shown(kind_name: str) -> ShownKind:
    """How a kind is shown."""
    return _SHOWN[kind_name]


def shown_of(config: object) -> ShownKind:
    """How a system with these sizes is shown."""
    return shown(kind_of_config(config).name)
