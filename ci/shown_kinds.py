"""The modules that show each kind of system: one explains a run, one draws its page, one makes a test
of it.

A module is imported at its first use: explanations need neither pages nor exports.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol, cast

from impl.process.remote_system import WorkerSystem
from reference.failures import Place
from reference.system_kinds import BLOCKS, PAIRS, ROWS, TIERS, AnyConfig, kind_of_config
from stateful_tests.lockstep.run_results import Run, Trace


class ExplainedPlaces(Protocol):
    """Explains a run of a system that only facts and clauses judge."""

    def place_name(self, place: Place, m: Any) -> str:
        """Return a place of a failure, in words."""

    def facts_at(self, place: Place, m: Any) -> list[Any]:
        """Return the facts about a place at a moment (see `ci.explain.places`)."""

    def events(self, past: Any) -> list[str]:
        """Return events that the facts of one moment do not show."""


class DrawnPage(Protocol):
    """The page of a run."""

    def states(self, run: Run) -> list[dict[str, Any]]:
        """Return the data of the page, a step each."""

    def content(self, data: dict[str, Any], run: Run) -> dict[str, Any]:
        """Return the values for the template besides the head of every page."""


class ExportedTests(Protocol):
    """Makes a trace a unit test of a release's own classes.

    ENGINE: the engine whose releases it knows.
    """

    ENGINE: str

    def target(self, text: str) -> Any:
        """Return a release by its version, or a checkout by its folder."""

    def unit_test(self, trace: Trace, file: str, system: WorkerSystem, *more: Any) -> str:
        """Return the text of the test."""

    def shared_module(self, system: WorkerSystem, fixed: Any) -> str:
        """Return the text of the module that the tests of one folder import."""

    def hook(self, trace: Trace) -> str:
        """Return the code that loads a release for the test of a trace."""


class ServerAsserts(Protocol):
    """The assertions of a test of SGLang's classes, and the sizes of its server.

    HOOK: loads the release.
    """

    HOOK: str

    def assert_violation(self, run: Any) -> Any:
        """Return the assertion that shows the violated clause."""

    def device_sizes(self, config: AnyConfig) -> Any:
        """Return the sizes of the server's device memory."""

    def host_arguments(self, config: AnyConfig) -> list[str]:
        """Return the arguments of the server for its host memory."""

    def is_unified(self, release: Any, config: AnyConfig) -> bool:
        """Return whether the tree is the one for all kinds of KV."""


@dataclass(frozen=True)
class ShownKind:
    """The modules that show a kind, by name.

    tests: exports a test of an engine's classes; "" where there is none.
    places, page: "" where the reference model runs beside the system, which ci.explain.places and
        ci.report.pages.trace_page show.
    asserts: the assertions of tests of SGLang's classes.
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


def shown_kind(kind_name: str) -> ShownKind:
    """Return the modules that show a kind."""
    return _SHOWN[kind_name]


def shown_kind_of(config: object) -> ShownKind:
    """Return the modules that show a system with these sizes."""
    return shown_kind(kind_of_config(config).name)
