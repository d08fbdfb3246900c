"""The entries in the tables of both sides of the connectors of a pair, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from impl.vllm.api import KEPT_BY_CORE, KEPT_BY_SCHEDULER, KEPT_BY_WORKER
from impl.vllm.pair.both_connectors import multi_connector_tables, nixl_of
from impl.vllm.pair.server import PairServer


def kept_records(servers: Mapping[str, PairServer]) -> Iterator[str]:
    """Yield the server, the table and the request of each table entry, and the number of open transfer
    handles."""
    for name, server in servers.items():
        places = (
            (server.worker_side.worker, KEPT_BY_WORKER),
            (nixl_of(server.scheduler.connector).connector_scheduler, KEPT_BY_SCHEDULER),
            (server.scheduler, KEPT_BY_CORE),
        )
        for owner, tables in places:
            for table in tables:
                for entry in getattr(owner, table, ()):
                    yield f"{name} {table.lstrip('_')}: {server.name_of(str(entry))}"
        connectors = server.scheduler.connector, server.worker_side.connector
        for name_of_table, entries in multi_connector_tables(connectors).items():
            yield from (f"{name} {name_of_table}: {server.name_of(str(entry))}" for entry in entries)
        if server.worker_side.agent.handles:
            yield f"{name} transfer handles: {len(server.worker_side.agent.handles)}"
