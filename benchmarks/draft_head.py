"""Time of a draft step by the size of the draft's LM head, compared with the bytes read.

Example: python benchmarks/draft_head.py models/bundled/shell-helper/draft --keep 1024 256

Trims the LM head of a bundle to its first tokens, which cost as much as any others, and times passes over one token of
all results in turn. Bytes are those of quantized linears as ONNX Runtime packs them on x86. Without a bundle, random
weights of the Qwen2.5-0.5B shape are exported first. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from artifacts import bundle
from edgerun.export.drafts.trimmed_head import head_tokens, write_trimmed
from edgerun.export.upgrade.edit.editable import EditableGraph
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.runtime.measure.bundle_timing import BundleTimer
from shapes import SHAPES


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, nargs="?")
    parser.add_argument(
        "--keep", type=int, nargs="+", help="sizes of the trimmed heads (a quarter and a sixteenth of all tokens)"
    )
    parser.add_argument(
        "--block", type=int, choices=(32, 64, 128), default=128, help="block size of the Qwen2.5-0.5B shape"
    )
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "edge-run-benchmarks")
    options = parser.parse_args()
    whole = open_bundle(options.bundle or bundle(options.work, SHAPES["qwen2.5-0.5b"], options.block))
    tokens = head_tokens(EditableGraph.open(whole.graph))
    sizes = [tokens, *(options.keep or (tokens // 4, tokens // 16))]
    with tempfile.TemporaryDirectory() as folder:
        drafts = [whole.folder]
        for size in sizes[1:]:
            drafts.append(Path(folder) / str(size))
            write_trimmed(whole, drafts[-1], np.arange(size))
        read = [bytes_read(open_bundle(draft)) for draft in drafts]
        times = [each[1] for each in BundleTimer(options.threads).time_passes(drafts, (1,), options.rounds)]
    table = Table(title=f"{whole.folder.name}: draft step by size of the LM head")
    for name in ("tokens", "MB read", "ratio", "ms", "ratio"):
        table.add_column(name, justify="right")
    for size, count, seconds in zip(sizes, read, times, strict=True):
        ratios = f"{count / read[0]:.3f}", f"{seconds / times[0]:.3f}"
        table.add_row(str(size), f"{count / 1e6:.1f}", ratios[0], f"{1e3 * seconds:.3f}", ratios[1])
    Console().print(table)
    results = [
        {"head": size, "bytes": count, "seconds": seconds}
        for size, count, seconds in zip(sizes, read, times, strict=True)
    ]
    print(json.dumps({"benchmark": "draft_head", "model": whole.folder.name, "results": results}))


def bytes_read(model: Bundle) -> float:
    """Bytes of packed quantized linears that a pass over one token reads."""
    total = 0.0
    for node in onnx.load(model.graph, load_external_data=False).graph.node:
        if node.op_type == "MatMulNBits":
            given = {each.name: each.i for each in node.attribute}
            total += given["N"] * given["K"] * (given["bits"] + 64 / given["block_size"]) / 8
    return total


if __name__ == "__main__":
    main()
