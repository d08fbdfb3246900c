"""Documents of the trace format, valid but for what a test changes, and the schema that judges them."""

from dataclasses import MISSING, fields
from typing import Any

import jsonschema

from reference.geometry import PRESETS, Geometry
from stateful_tests.traces import trace_files as traces

SCHEMA = jsonschema.Draft202012Validator(traces.schema())


def document(**changes: Any) -> dict[str, Any]:
    """Return a valid document with some header fields changed; MISSING takes a field out."""
    small = PRESETS["page2"]
    content = {
        "format": "kvspec-trace",
        "version": 2,
        "spec": "1",
        "kind": "rows",
        "geometry": {
            f.name: getattr(small, f.name) for f in fields(Geometry) if f.name != "settings"
        },
        "mode": "free",
        "origin": "hand-written",
        "steps": [
            {"do": "open", "session": "s1"},
            {"do": "extend", "lanes": [{"request": "r1", "tokens": 4}]},
        ],
    }
    return {k: v for k, v in {**content, **changes}.items() if v is not MISSING}


def geometry(**changes: Any) -> dict[str, Any]:
    return {**document()["geometry"], **changes}
