"""A server with a fault that hides another: what ends a run comes before the close that never happens."""

from typing import ClassVar

from impl.torch_kv.requests import KVRequest, KVSession
from impl.torch_kv.system import TorchKV
from impl.vocabulary import RequestPhase


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
