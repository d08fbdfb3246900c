"""The entries in the tables of both sides of the connectors of a pair, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from impl.vllm.pair.both_connectors import multi_connector_tables, nixl_of
from impl.vllm.pair.server import PairServer

# Tables of requests, transfers, leases and notifications. Every release has some of them.
_OF_WORKER = (
    "_recving_metadata", "_recving_transfers", "_reqs_to_send", "_reqs_to_process", "_sending_transfers",
    "_push_finished_blocks", "_pending_d_registrations", "_send_failures", "_recv_failures",
    "consumer_notification_counts_by_req", "expected_consumer_notifications_by_req", "_pending_recv_notifs",
    "_handshake_futures",
)  # fmt: skip
_OF_SCHEDULER = (
    "_reqs_need_recv", "_reqs_need_save", "_reqs_need_send", "_reqs_not_processed", "_reqs_in_batch",
    "_finished_request_blocks", "_push_pending_registrations", "_push_registration_deadlines",
    "_heartbeat_by_engine", "_heartbeat_req_engine",
)  # fmt: skip
_OF_CORE = "finished_recving_kv_req_ids", "failed_recving_kv_req_ids"


def kept_records(servers: Mapping[str, PairServer]) -> Iterator[str]:
    """Yield the server, the table and the request of each table entry, and the number of open transfer
    handles."""
    for name, server in servers.items():
        places = (
            (server.mover.worker, _OF_WORKER),
            (nixl_of(server.scheduler.connector).connector_scheduler, _OF_SCHEDULER),
            (server.scheduler, _OF_CORE),
        )
        for owner, tables in places:
            for table in tables:
                for entry in getattr(owner, table, ()):
                    yield f"{name} {table.lstrip('_')}: {server.name_of(str(entry))}"
        connectors = server.scheduler.connector, server.mover.connector
        for name_of_table, entries in multi_connector_tables(connectors).items():
            yield from (f"{name} {name_of_table}: {server.name_of(str(entry))}" for entry in entries)
        if server.mover.agent.handles:
            yield f"{name} transfer handles: {len(server.mover.agent.handles)}"
