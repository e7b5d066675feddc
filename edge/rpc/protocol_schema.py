"""JSON Schema of the protocol, made from its types."""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec

from .protocol import NOTIFICATIONS, PROTOCOL_VERSION, ErrorObject, RequestId
from .stdio_service import CLIENT_NOTIFICATIONS, METHODS


def protocol_schema() -> dict[str, Any]:
    """JSON Schema (2020-12) of every message.

    A message of either side validates against the whole. `methods` and `notifications` name the schemas of parameters
    and results, for programs that generate code.
    """
    methods = {name: (each.parameters.kind, each.result) for name, each in METHODS.items()}
    notified = {name: each.parameters.kind for name, each in CLIENT_NOTIFICATIONS.items()}
    types: list[Any] = [*chain(*methods.values()), *notified.values(), *NOTIFICATIONS.values(), ErrorObject, RequestId]
    types = list(dict.fromkeys(types))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    by_type = dict(zip(types, schemas, strict=True))
    id_ = by_type[RequestId]
    requests = [_call(name, by_type[params], id_) for name, (params, _) in methods.items()]
    sent = [_call(name, by_type[kind]) for name, kind in notified.items()]
    received = [_call(name, by_type[kind]) for name, kind in NOTIFICATIONS.items()]
    results = list({str(by_type[result]): by_type[result] for _, result in methods.values()}.values())
    # The id of an error is null where the request's could not be read, or belongs to another request.
    nullable_id = {"anyOf": [*id_.get("anyOf", [id_]), {"type": "null"}]}
    responses = [
        _message({"id": id_, "result": {"anyOf": results}}),
        _message({"id": nullable_id, "error": by_type[ErrorObject]}),
    ]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"edge-run rpc, protocol version {PROTOCOL_VERSION}",
        "description": "Every message is one line of UTF-8 JSON. See docs/rpc.md.",
        "anyOf": [{"$ref": "#/$defs/ClientMessage"}, {"$ref": "#/$defs/ServerMessage"}],
        "methods": {
            name: {"params": by_type[params], "result": by_type[result]} for name, (params, result) in methods.items()
        },
        "notifications": {
            "client": {name: by_type[kind] for name, kind in notified.items()},
            "server": {name: by_type[kind] for name, kind in NOTIFICATIONS.items()},
        },
        "$defs": {
            "ClientMessage": {"title": "Request or notification of the client", "oneOf": [*requests, *sent]},
            "ServerMessage": {"title": "Response or notification to the client", "anyOf": [*responses, *received]},
            **components,
        },
    }


def _call(method: str, params: dict[str, Any], id_: dict[str, Any] | None = None) -> dict[str, Any]:
    """The schema of a request, or of a notification if it has no id."""
    optional = method in METHODS and not METHODS[method].parameters.kind.__struct_fields__
    members = {**({} if id_ is None else {"id": id_}), "method": {"const": method}, "params": params}
    return _message(members, optional="params" if optional else "")


def _message(members: dict[str, Any], optional: str = "") -> dict[str, Any]:
    properties = {"jsonrpc": {"const": "2.0"}, **members}
    required = [name for name in properties if name != optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
