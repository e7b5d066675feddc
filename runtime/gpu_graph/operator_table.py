"""Operators for which a provider registers kernels, from ONNX Runtime's documentation.

DirectML's provider runs on Windows only, and the table is what its graphs are checked against elsewhere. The file
`operator_kernels.json` names its source and keeps what decoder graphs use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from ...models.onnx_file.graph_editor import GraphEditor

_FILE: Final = "operator_kernels.json"


@cache
def operator_table(provider: str) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The operators of a provider by domain and name.

    Each has `since`, the lowest operator set; `inputs` and `outputs`, names of types in order (with dots for any number
    of them); and `types`, the element types by name.
    """
    package = __package__ or ""
    data: dict[str, Any] = json.loads(resources.files(package).joinpath(_FILE).read_text(encoding="utf-8"))
    table: dict[str, dict[str, dict[str, Any]]] = data[provider]
    return table


def operators_outside(editor: GraphEditor, provider: str) -> list[str]:
    """Names of a graph's operators that a provider has no kernel for, sorted."""
    table = operator_table(provider)
    versions = {"" if each.domain == "ai.onnx" else each.domain: each.version for each in editor.model.opset_import}
    missing = set()
    for each in editor.graph.node:
        domain = "" if each.domain == "ai.onnx" else each.domain
        entry = table.get(domain, {}).get(each.op_type)
        if entry is None or versions.get(domain, 1) < entry["since"]:
            missing.add(str(each.op_type))
    return sorted(missing)
