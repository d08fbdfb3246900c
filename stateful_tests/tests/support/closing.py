"""A server with a fault that hides another: what ends a run comes before the close that never happens."""

from typing import ClassVar

from impl.torch_kv.sessions import KVRequest, KVSession
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
