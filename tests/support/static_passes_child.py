"""Runs recorded passes of static graphs on a provider; needs no package but numpy and onnxruntime.

Arguments: a file with the passes (see `static_passes`), and the provider as JSON: `name`, `options` and, for a plugin,
`library`. Outputs are written beside the passes; the last line of standard output is a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort


def _load(graph: str, provider: dict[str, Any]) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    name, settings = provider["name"], provider["options"]
    if "library" not in provider:
        return ort.InferenceSession(graph, options, providers=[(name, settings)])
    devices = [device for device in ort.get_ep_devices() if device.ep_name == name]
    options.add_provider_for_devices(devices[:1], settings)
    return ort.InferenceSession(graph, options)


def _main(passes: Path, provider: dict[str, Any]) -> None:
    if "library" in provider:
        ort.register_execution_provider_library(provider["name"], provider["library"])
    sessions: dict[str, ort.InferenceSession] = {}
    seconds: dict[str, float] = {}
    outputs = {}
    with np.load(passes) as recorded:
        for number, graph in enumerate(recorded["graphs"].tolist()):
            session = sessions[graph] = sessions.get(graph) or _load(graph, provider)
            feeds = {value.name: recorded[f"{number}/{value.name}"] for value in session.get_inputs()}
            started = time.perf_counter()
            values = session.run(None, feeds)
            seconds[Path(graph).name] = time.perf_counter() - started
            for value, output in zip(session.get_outputs(), values, strict=True):
                outputs[f"{number}/{value.name}"] = output
    np.savez(passes.with_name("outputs.npz"), **outputs)
    nodes = Counter(
        part.ep_name
        for session in sessions.values()
        for part in session.get_provider_graph_assignment_info()
        for _ in part.get_nodes()
    )
    print(json.dumps({"nodes": nodes, "milliseconds": {name: 1e3 * each for name, each in seconds.items()}}))


if __name__ == "__main__":
    _main(Path(sys.argv[1]), json.loads(sys.argv[2]))
