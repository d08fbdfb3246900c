"""The notation of systems under test: `vllm==0.33.0+async`, `torch+BUG`, `module:factory`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

EngineName = Literal["sglang", "vllm", "transformers", "lmdeploy"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)  # whose releases and checkouts are driven
ALL = "all"  # in the place of a version
_CHECKOUT = "@checkout"  # behind an engine, in the name of a system


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """A system under test, as a command line or a report names it. `str` writes it again.

    engine: a package whose releases are driven, or reference, torch, module:factory.
    version: of a release; None of all else, and where an option names a checkout.
    ways: to run, each behind a plus sign, in order; the bug of torch.
    checkout: it is the name of a checkout that is driven.
    """

    engine: str
    version: str | None = None
    ways: tuple[str, ...] = ()
    checkout: bool = False

    @classmethod
    def parse(cls, text: str) -> SystemSpec:
        """Take a name apart. Any text is a name; whether it names a system is for `systems.resolve`."""
        package, *ways = text.split("+")
        engine, stated, version = package.partition("==")
        checkout = not stated and engine.endswith(_CHECKOUT)
        if checkout:
            engine = engine.removesuffix(_CHECKOUT)
        if engine in ENGINES and version.count(".") == 1 and version.replace(".", "").isdecimal():
            version += ".0"  # vllm==0.33, as a package index reads it
        return cls(engine, version if stated else None, tuple(ways), checkout)

    def __str__(self) -> str:
        stated = "" if self.version is None else f"=={self.version}"
        return "+".join((f"{self.engine}{_CHECKOUT * self.checkout}{stated}", *self.ways))

    @property
    def way(self) -> str:
        """The ways to run as one text: "rust+overlap", "" for the plain one."""
        return "+".join(self.ways)

    @property
    def short(self) -> str:
        """The name of a release beside others of its engine, such as "0.5.23+overlap"; else the whole
        name."""
        return str(self) if self.version is None else "+".join((self.version, *self.ways))

    @property
    def stranger(self) -> bool:
        """Whether it names a factory of the user's own: module:factory."""
        return ":" in str(self)

    @property
    def bug(self) -> str | None:
        """The named bug that is put into the built-in implementation."""
        return self.way if self.engine == "torch" and self.version is None and self.ways else None

    def of_version(self, version: str | None) -> SystemSpec:
        """Return another release, in the same ways; None for what an option names."""
        return replace(self, version=version, checkout=False)

    def in_way(self, way: str) -> SystemSpec:
        """Return the spec of the same release in other ways.

        way: the ways as text, such as "rust+overlap".
        """
        return replace(self, ways=ways_in(way))


def option(engine: str) -> str:
    """Return the option that names a checkout of an engine."""
    return f"--{engine}-path"


def ways_in(way: str) -> tuple[str, ...]:
    """Return the ways of a text such as "rust+overlap"; "" has none."""
    return tuple(way.split("+")) if way else ()


def release_name(engine: str, version: str, ways: Iterable[str] = ()) -> str:
    """Return the name of a release that is run in these ways."""
    return str(SystemSpec(engine, version, tuple(ways)))


def system_spec(system: Any) -> SystemSpec:
    """Return the spec of a system. A release or a checkout states it; for others it is their name."""
    spec = getattr(system, "spec", None)
    return spec if isinstance(spec, SystemSpec) else SystemSpec.parse(system.name)
