"""Requests for the bundled model, from a file or `edge-run bench`."""

from __future__ import annotations

import json
from pathlib import Path

from edgerun.edge.bench.prompt_sets import bundled_prompts


def shell_requests(file: Path | None, limit: int) -> list[str]:
    """Read at most `limit` requests; each line of a file is an object with `request`."""
    if file is None:
        requests = [each.exchanges[0].prompt for each in bundled_prompts(for_shell=True)]
    else:
        requests = [json.loads(line)["request"] for line in file.read_text(encoding="utf-8").splitlines()]
    return requests[:limit]
