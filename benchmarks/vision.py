"""Time to first token of a question about an image, edge-run beside llama.cpp's mtmd, random weights.

Both have 4-bit weights of the language model (int4 in blocks of 128, Q4_0) and 8-bit weights of the vision tower, made
from the same checkpoint by the engines' own tools. Every engine runs in a process of its own; they answer in turn, each
time about another image of 448 x 448 pixels, and ratios are medians over the turns. The first image of a process counts
apart: edge-run loads its tower for it, mtmd has loaded its own before. Then edge-run is asked about the last one again.

    python benchmarks/vision.py --shape smolvlm-500m --work /tmp/bench --llama-python PYTHON --llama-source FOLDER
    python benchmarks/vision.py --shape smolvlm-500m --work /tmp/bench --shares 1 0.5   # lossy_image_tokens instead
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from artifacts import made_once
from checkpoints import write_checkpoint
from edgerun.export import ExportRecipe, WeightFormat, export_checkpoint
from peer_models import LlamaTools, run_tool
from processes import Worker
from vision_shapes import VISION_SHAPES, VisionShape


def main() -> None:
    """Command line."""
    options = _command().parse_args()
    shape, folder = VISION_SHAPES[options.shape], options.work / options.shape
    bundle = made_once(folder / f"edge-run-{options.tower}", lambda target: _export(shape, folder, target, options))
    if options.shares and not options.prepare:
        _compare_shares(bundle, folder, options)
    if options.shares:
        return
    tools = LlamaTools(options.llama_source, options.llama_python)
    model, mmproj = _llama_files(shape, folder, tools)
    if options.prepare:
        return
    images = [str(_image(folder, number, options.side)) for number in range(options.turns + 1)]
    environment = {**tools.environment, "MTMD_CPP_LIB": str(tools.binaries)}
    process: dict[str, Any] = {"python": tools.python, "environment": environment}
    settings = {"threads": options.threads, "mmproj": str(mmproj), "capacity": 4096}
    first: list[dict[str, Any]] = []
    later: list[dict[str, Any]] = []
    for _ in range(options.processes):
        with (
            Worker("edge-run", "edge-run-vision", bundle, threads=options.threads) as own,
            Worker("llama.cpp", "llama-vision", model, **process, **settings) as other,
        ):
            turns = [{each.label: each.call("first_token", image=image) for each in (own, other)} for image in images]
            again = own.call("first_token", image=images[-1], question="how many colours are there")
        first.append(turns[0])
        later += turns[1:]
        print(json.dumps({"turns": turns, "second question": again}))
    for name, turns in (("first image of a process", first), ("later images", later)):
        ratios = [turn["llama.cpp"]["seconds"] / turn["edge-run"]["seconds"] for turn in turns]
        middle, low, high = np.percentile(ratios, (50, 0, 100))
        seconds = {each: round(float(np.median([turn[each]["seconds"] for turn in turns])), 2) for each in turns[0]}
        print(f"{shape.name}, {name}: {seconds}, llama.cpp / edge-run {middle:.2f} [{low:.2f}, {high:.2f}]")


def _compare_shares(bundle: Path, folder: Path, options: argparse.Namespace) -> None:
    """Seconds to the first token, tokens of the prompt and bytes of its cache with shares of the image's tokens."""
    images = [str(_image(folder, number, options.side)) for number in range(options.turns + 1)]
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                Worker(str(share), "edge-run-vision", bundle, threads=options.threads, lossy_image_tokens=share)
            )
            for share in options.shares
        ]
        turns = [{each.label: each.call("first_token", image=image) for each in workers} for image in images]
    for turn in turns:
        print(json.dumps({share: round(found["seconds"], 2) for share, found in turn.items()}))
    for share in turns[0]:
        ratios = [turn[share]["seconds"] / next(iter(turn.values()))["seconds"] for turn in turns[1:]]
        seconds = float(np.median([turn[share]["seconds"] for turn in turns[1:]]))
        print(json.dumps(turns[-1][share] | {"share": share, "seconds": seconds, "of_first": float(np.median(ratios))}))


def _checkpoint(shape: VisionShape, folder: Path) -> Path:
    def make(target: Path) -> None:
        write_checkpoint(shape, target)
        shape.write_processor(target)

    return made_once(folder / "checkpoint", make)


def _export(shape: VisionShape, folder: Path, target: Path, options: argparse.Namespace) -> None:
    recipe = ExportRecipe(WeightFormat(4, 128), context=4096, vision_weights=options.tower)
    export_checkpoint(_checkpoint(shape, folder), target, recipe)


def _llama_files(shape: VisionShape, folder: Path, tools: LlamaTools) -> tuple[Path, Path]:
    """The language model in Q4_0, and the vision tower in Q8_0."""
    source, whole = folder / "checkpoint", folder / "llama-bf16.gguf"
    model, mmproj = folder / "llama-Q4_0.gguf", folder / "llama-mmproj-Q8_0.gguf"
    if not model.is_file():
        _checkpoint(shape, folder)
        tools.quantize(tools.convert(source, whole, "bf16"), model, "Q4_0")
        whole.unlink()

    def make(part: Path) -> None:
        script = Path(__file__).with_name("llama_convert.py")
        command = [tools.python, str(script), str(tools.source), str(source), "--mmproj"]
        named = part.with_name(f"{part.name}.gguf")
        run_tool("llama.cpp's converter", [*command, "--outfile", str(named), "--outtype", "q8_0"])
        next(part.parent.glob(f"*{named.name}")).rename(part)

    return model, made_once(mmproj, make)


def _image(folder: Path, number: int, side: int) -> Path:
    """A picture of random squares."""
    path = folder / f"image-{side}-{number}.png"
    if not path.is_file():
        squares = np.random.default_rng(number).integers(0, 256, (side // 16, side // 16, 3), np.uint8)
        Image.fromarray(squares.repeat(16, axis=0).repeat(16, axis=1)).save(path)
    return path


def _command() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", choices=sorted(VISION_SHAPES), default="smolvlm-500m")
    made.add_argument("--work", type=Path, required=True, help="folder for models, made once")
    made.add_argument("--prepare", action="store_true", help="make the models and end")
    made.add_argument("--tower", default="int8", help="format of the tower's weights")
    made.add_argument("--side", type=int, default=448, help="pixels of a side of the images")
    made.add_argument("--turns", type=int, default=3, help="turns behind the first one of a process")
    made.add_argument("--processes", type=int, default=1, help="processes of each engine, one after another")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--shares", type=float, nargs="+", help="shares of image tokens to compare, without llama.cpp")
    made.add_argument("--llama-python", help="interpreter with llama-cpp-python")
    made.add_argument("--llama-source", type=Path, help="llama.cpp's source, built in build/")
    return made


if __name__ == "__main__":
    main()
