"""A server with a fault that hides another: what ends a run comes before the close that never happens."""

from types import SimpleNamespace
from typing import Any, ClassVar

from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.system import TorchKV
from impl.vocabulary import RequestPhase
from stateful_tests.check.trees.base_selection import Base, BaseKind


class WaitsForEver(TorchKV):
    """An abort keeps the KV of a turn that was retracted, and a close waits for that turn ever after."""

    name = "torch+waits-for-ever"
    lost: ClassVar[set[KVSession]] = set()

    def wipes(self, request: KVRequest) -> bool:
        retracted = request.started and request.phase is RequestPhase.QUEUED
        if retracted and request.session is not None:
            self.lost.add(request.session)
        return request.started and not retracted

    def must_defer_close(self, session: KVSession) -> bool:
        return session in self.lost or super().must_defer_close(session)


class KeepsOnThreeWays(TorchKV):
    """SES-2 three times: an abort keeps the slot after a retract, and where no page is free; a close that
    follows a rejected turn does not wait."""

    name = "torch+keeps-on-three-ways"
    has_rejected = False

    def reset(self, geometry):
        super().reset(geometry)
        self.has_rejected = False

    def wipes(self, request):
        retracted = request.started and request.phase is RequestPhase.QUEUED
        return super().wipes(request) and not retracted and bool(self.view().free_full)

    def turn_in_flight(self, session):
        busy = super().turn_in_flight(session)
        self.has_rejected |= busy
        return busy

    def must_defer_close(self, session):
        return super().must_defer_close(session) and not self.has_rejected


def as_release(kind: type[TorchKV], release: str = "0.5.23", **attributes: Any) -> TorchKV:
    """Return a system that goes by the name of a release of SGLang, whose known faults it may have."""
    return type(kind.__name__, (kind,), {"name": f"sglang=={release}", **attributes})()


def named_base(name: str) -> Base:
    """Return a base that the user has named, which is not driven."""
    system: Any = SimpleNamespace(name=name)
    return Base(system, BaseKind.STATED)
