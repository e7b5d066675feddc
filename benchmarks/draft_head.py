"""Time of a draft step by the size of the draft's LM head, compared with the bytes read.

Example: python benchmarks/draft_head.py models/bundled/shell-helper/draft --keep 1024 256

Trims the LM head of a bundle to its first tokens, which cost as much as any others, and times passes over one token of
all results in turn. Of a bundle with a multi-token-prediction module, that of the module is trimmed, and the model
itself takes turns with it. Bytes are those of quantized linears as ONNX Runtime packs them on x86. Without a bundle,
random weights of the Qwen2.5-0.5B shape are exported first. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import onnx
from rich.console import Console
from rich.table import Table

from artifacts import bundle
from edgerun.export.drafts.trimmed_head import head_tokens, trim_own_draft, write_trimmed
from edgerun.export.upgrade.editable import EditableGraph
from edgerun.models.bundle import Bundle, open_bundle
from edgerun.models.manifest import HeadKind
from edgerun.models.pairing import find_draft
from edgerun.runtime.devices.providers import choose_device
from edgerun.runtime.graph.model_metadata import ModelMetadata, metadata_of
from edgerun.runtime.graph.session import GraphSession, SessionConfig
from edgerun.runtime.measure.bundle_timing import BundleTimer, bind_filled, mean_of_fastest, time_in_turns
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
    pair = find_draft(whole)
    if pair is not None and pair.head is HeadKind.MTP:
        measure_module(whole, sizes, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        drafts = [whole.folder]
        for size in sizes[1:]:
            drafts.append(Path(folder) / str(size))
            write_trimmed(whole, drafts[-1], np.arange(size))
        read = [bytes_read(draft / "model.onnx") for draft in drafts]
        times = [each[1] for each in BundleTimer(options.threads).time_passes(drafts, (1,), options.rounds)]
    show(whole, [f"{size} tokens" for size in sizes], read, times)


def measure_module(whole: Bundle, sizes: list[int], options: argparse.Namespace) -> None:
    """Time the passes of a bundle and of its multi-token-prediction module with LM heads of these sizes."""
    config = SessionConfig(choose_device("cpu"), options.threads)
    as_head = ModelMetadata(input_vocab=whole.input_vocab, draft_head=True)
    with tempfile.TemporaryDirectory() as folder:
        graphs = [whole.folder / "draft.onnx"]
        for size in sizes[1:]:
            copied = Path(shutil.copytree(whole.folder, Path(folder) / str(size)))
            trim_own_draft(copied, np.arange(size))
            graphs.append(copied / "draft.onnx")
        read = [bytes_read(graph) for graph in (whole.graph, *graphs)]
        bound = [bind_filled(GraphSession(whole.graph, config, metadata_of(whole)), whole)]
        bound += [bind_filled(GraphSession(graph, config, as_head), whole) for graph in graphs]
        times = [mean_of_fastest(each[1]) for each in time_in_turns(bound, (1,), options.rounds)]
    show(whole, ["model", *(f"module, {size} tokens" for size in sizes)], read, times)


def show(whole: Bundle, names: list[str], read: list[float], times: list[float]) -> None:
    """Print the table and the JSON line; ratios are to the first one."""
    table = Table(title=f"{whole.folder.name}: draft step by size of the LM head")
    for name in ("LM head", "MB read", "ratio", "ms", "ratio"):
        table.add_column(name, justify="right")
    for name, count, seconds in zip(names, read, times, strict=True):
        ratios = f"{count / read[0]:.3f}", f"{seconds / times[0]:.3f}"
        table.add_row(name, f"{count / 1e6:.1f}", ratios[0], f"{1e3 * seconds:.3f}", ratios[1])
    Console().print(table)
    results = [
        {"head": name, "bytes": count, "seconds": seconds}
        for name, count, seconds in zip(names, read, times, strict=True)
    ]
    print(json.dumps({"benchmark": "draft_head", "model": whole.folder.name, "results": results}))


def bytes_read(graph: Path) -> float:
    """Bytes of packed quantized linears that a pass over one token reads."""
    total = 0.0
    for node in onnx.load(graph, load_external_data=False).graph.node:
        if node.op_type == "MatMulNBits":
            given = {each.name: each.i for each in node.attribute}
            total += given["N"] * given["K"] * (given["bits"] + 64 / given["block_size"]) / 8
    return total


if __name__ == "__main__":
    main()
