"""Stand-ins for what the queues of disaggregated servers use of disaggregation/utils.py."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from impl.sglang.parts.stand_ins import Bag
from impl.sglang.tiers.played_decode import Sender
from impl.sglang.tiers.played_prefill import Peer


def utilities() -> dict[str, Any]:
    """Return them by name; one rank, no fake transfers."""

    def abort(req: Any, message: str, status_code: Any = None) -> None:
        batch = importlib.import_module("sglang.srt.managers.schedule_batch")
        req.finished_reason = batch.FINISH_ABORT(message, status_code)

    def aborted(req: Any) -> bool:
        kind = importlib.import_module("sglang.srt.managers.schedule_batch").FINISH_ABORT
        return isinstance(req.to_finish, kind) or isinstance(req.finished_reason, kind)

    def polls(pollers: Sequence[Any], *_: Any, **__: Any) -> list[int]:
        return [poller.poll() for poller in pollers]

    return {
        "prepare_abort": abort,
        "is_aborted": aborted,
        "poll_and_all_reduce": polls,
        "poll_and_all_reduce_attn_cp_tp_group": polls,
        "all_reduce_flags": lambda flags, **_: flags,
        "get_kv_class": lambda _, kind: Sender if kind == "sender" else Peer,
        "_is_fake_transfer": lambda _: False,
        "is_mla_backend": lambda _: False,
        "is_unadmitted_reject": lambda _: False,
        "KVClassType": Bag(SENDER="sender", RECEIVER="receiver"),
        "TransferBackend": Bag(),
    }
