"""The OpenAPI document of a daemon's HTTP API: written paths, and schemas of the records."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import msgspec

from ...membership.shared.run_status import RecordedRound
from ..metrics_store import PastEvent
from ..process.log_ring import PeerLog
from ..status_records import MasterStatus, PeerStatus

# The paths, and the schemas that no record stands behind.
WRITTEN = Path(__file__).with_name("api_paths.json")
RECORDS = (MasterStatus, PeerStatus, RecordedRound, PastEvent, PeerLog)


@functools.cache
def api_description() -> dict[str, Any]:
    """Return the document; it is made at the first request, as most daemons get none."""
    document: dict[str, Any] = json.loads(WRITTEN.read_text(encoding="utf-8"))
    _kinds, made = msgspec.json.schema_components(
        RECORDS, ref_template="#/components/schemas/{name}"
    )
    for schema in made.values():
        schema.pop("title", None)
        if "properties" in schema:
            schema["additionalProperties"] = False
            schema["required"] = list(schema["properties"])  # answers hold the defaults, too
            for each in schema["properties"].values():
                each.pop("default", None)
    for name in ("PastEvent", "EventRow"):
        made[name]["properties"]["kind"] = {"$ref": "#/components/schemas/EventKind"}
    document["components"]["schemas"] |= made
    return document
