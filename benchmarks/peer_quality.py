"""Loss of quality at equal bytes: edge-run's plans and the formats of other engines, of one trained model.

Example: python benchmarks/peer_quality.py CHECKPOINT --text heldout.jsonl --calibration training.jsonl \\
    --llama-python ~/llama/bin/python --llama-source ~/llama.cpp --work work

Where hidden sizes are multiples of 256, llama.cpp stores all linears in the format that was asked for. llama.cpp's
files are made by its own converter and quantizer, each format without and with an importance matrix of the
calibration text. edge-run's are exports of the same checkpoint with the same calibration text: 4 bits for all linears
in blocks of several sizes, with scales in float16, zero points and an int8 head, and mixed formats within the bytes
of each of llama.cpp's files. Plans that an earlier export wrote (--plans) take the place of the searches. With
--genai-python and --openvino-python, the exports of GenAI's builder and of optimum-intel are measured in their own
engines, with the 4 bits and blocks that they have by default.

All read the held-out texts as token ids. The mean KL divergence is from the float32 export, in nats over all positions,
where positions with equal prefixes count once; so rounding of activations to 8 bits, which both engines do, counts too.
Bytes are those of all tensors in a file: linears, embedding, norms, scales and zero points, not tables of rotary
positions. The engines then take turns at decoding in processes of their own. Prints two tables, then one JSON line: all
models; and for each of llama.cpp's, edge-run's plan of lowest KL that has no more bytes and is no slower.

Models and their losses are kept in --work, so that a second run only measures the speed again.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from rich.console import Console
from tokenizers import Tokenizer

import edgerun
from artifacts import made_once
from edgerun.export import (
    FP32,
    ExportRecipe,
    WeightFormat,
    export_checkpoint,
)
from edgerun.export.allocation.format_candidates import planned_linears
from edgerun.export.allocation.plan_costs import Budget, Measure
from edgerun.export.checkpoint.config import read_config
from edgerun.export.quantization.option_values import MethodChoice
from peer_models import LlamaTools, genai_export, openvino_block, openvino_model
from processes import Worker
from quality_tables import EXACT, MeasuredModel, as_json, draw, show
from quantization import Tokens, divergence, new_positions, read_texts
from rounds import IdleLoad, alternate, join, restarted

QUANTIZATIONS: Final = ("Q4_0", "Q4_K_M", "Q3_K_M", "IQ4_XS")
_LONGEST: Final = 256
"""Maximum tokens of a text, and the context of all models."""
_CONTEXT: Final = 64
"""Number of cached tokens before decoding is timed."""
_TOKENS: Final = 64
_SPARE: Final = 6144
"""Bytes of a budget left for small constants of the graph, such as tables that expand codes."""


class QualityComparison:
    """One checkpoint, its texts, and the models made of it in a working folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._work: Path = options.work
        self._work.mkdir(parents=True, exist_ok=True)
        self._tools = LlamaTools(options.llama_source, options.llama_python)
        self._exact = self._export("fp32", ExportRecipe(FP32, context=_LONGEST))
        config = read_config(options.checkpoint)
        self._weights = sum(linear.weight_count for linear in planned_linears(config))
        with edgerun.load(self._exact, draft=None) as engine:
            kind = "txt" if engine.template is None else "jsonl"
        self._conversations = self._work / f"calibration.{kind}"
        made_once(self._conversations, self._write_conversations)
        self._texts = self._read_texts()
        self._exact_logits, self._exact_bytes = self._run("edge-run", self._exact)

    def models(self) -> list[MeasuredModel]:
        """All models with their bytes and losses, not timed."""
        theirs = [*self._llama_models(), *self._other_models()]
        names = set(self._options.searches)
        budgets = sorted({each.bytes for each in theirs if names & set(each.label.split())})
        plans = {plan.stem: replace(self._calibrated("plans"), plan=plan) for plan in self._options.plans}
        mixed = plans or {f"mixed, {limit / 1e6:.3f} MB": self._mixed_recipe(limit) for limit in budgets}
        recipes = {**mixed, **self._uniform_recipes()}
        ours = (self._measured(f"edge-run {name}", "edge-run", self._export(name, recipes[name])) for name in recipes)
        return [*theirs, *ours]

    def timed(self, models: Sequence[MeasuredModel], restarts: int, rounds: int) -> list[MeasuredModel]:
        """The same models with milliseconds of a token, measured in turn."""
        idle_load = IdleLoad()
        parts = []
        for workers in restarted(models, restarts, self._worker):
            for worker in workers:
                worker.call("decode", context=_CONTEXT, tokens=4)

            def decode(worker: Worker) -> float:
                return float(worker.call("decode", context=_CONTEXT, tokens=_TOKENS))

            parts.append(alternate(workers, rounds, decode, idle_load))
        series = join(parts)
        return [replace(each, decode_ms=1e3 * statistics.median(series[each.label])) for each in models]

    def _llama_models(self) -> list[MeasuredModel]:
        folder = self._work / "llama"
        whole = self._tools.convert(self._options.checkpoint, folder / "f32.gguf", "f32")
        text = made_once(folder / "calibration.txt", self._write_plain_text)
        importance = self._tools.importance(whole, text, folder / "importance.gguf", _LONGEST)
        found = [self._measured(EXACT, "llama", whole)]
        for name in self._options.formats:
            for suffix, weights in (("", None), (" with importance", importance)):
                file = folder / f"{name}{'-importance' if weights else ''}.gguf"
                self._tools.quantize(whole, file, name, weights)
                found.append(self._measured(f"llama.cpp {name}{suffix}", "llama", file))
        return found

    def _other_models(self) -> Iterator[MeasuredModel]:
        options, source = self._options, self._options.checkpoint
        if options.genai_python is not None:
            for block in (32, 128):
                folder = genai_export(source, self._work / f"genai-{block}", block, options.genai_python)
                yield self._measured(f"GenAI int4, blocks of {block}", "genai", folder)
        if options.openvino_python is not None:
            folder = openvino_model(source, self._work / "openvino", options.openvino_python)
            block = openvino_block(source)
            scales = f"blocks of {block}" if block > 0 else "a scale for each row"
            yield self._measured(f"OpenVINO int4, {scales}", "openvino", folder)

    def _uniform_recipes(self) -> dict[str, ExportRecipe]:
        """Plans with one format for all linears, rounded as by default and with the calibration text."""
        methods = {f", {each.value}": replace(self._calibrated(each), method=each) for each in self._options.methods}
        found = {}
        for block, zero_points in ((32, False), (64, True), (64, False), (128, False)):
            body = WeightFormat(4, block, zero_points=zero_points, half_scales=True)
            for name, recipe in {"": ExportRecipe(context=_LONGEST), **methods}.items():
                found[f"{body}{name}"] = replace(recipe, weights=body)
                found[f"{body}, int8 head{name}"] = replace(recipe, weights=body, head=replace(body, bits=8))
        return found

    def _mixed_recipe(self, limit: int) -> ExportRecipe:
        """The recipe of the mixed plan that a search finds within a number of bytes in the file."""
        others = self._exact_bytes - 4 * self._weights
        return replace(
            self._calibrated("search"),
            weights="mixed",
            budget=Budget((limit - others - _SPARE) // 100 / 1e4, Measure.MEGABYTES, in_file=True),
            method=self._options.methods[-1],
            time_limit=self._options.search_minutes,
            half_scales=True,
        )

    def _calibrated(self, kind: str) -> ExportRecipe:
        """A recipe with the calibration text; exports of a kind share the statistics of that text."""
        return ExportRecipe(
            context=_LONGEST,
            calibration=self._conversations,
            calibration_tokens=self._options.calibration_tokens,
            work=self._work / kind,
        )

    def _export(self, name: str, recipe: ExportRecipe) -> Path:
        def make(folder: Path) -> None:
            print(f"exporting {name}", file=sys.stderr)
            export_checkpoint(self._options.checkpoint, folder, recipe)

        return made_once(self._work / "edge-run" / re.sub(r"[^a-z0-9]+", "-", name.lower()), make)

    def _write_conversations(self, file: Path) -> None:
        """Write the conversations of the calibration text, as many as its tokens allow."""
        rows = _conversations(self._options.calibration)
        np.random.default_rng(0).shuffle(rows)
        count = 0
        with edgerun.load(self._exact, draft=None) as engine, file.open("w", encoding="utf-8") as out:
            for messages in rows:
                text = "\n".join(turn["content"] for turn in messages)
                chat = engine.template is not None
                count += len(
                    engine.encode_chat(messages) if chat else engine.tokenizer.encode(text, add_special_tokens=True)
                )
                if count > self._options.calibration_tokens:
                    break
                out.write(json.dumps({"messages": messages}) + "\n" if chat else text + "\n\n")

    def _write_plain_text(self, file: Path) -> None:
        """Write the same conversations in the chat template, for llama-imatrix."""
        if self._conversations.suffix == ".txt":
            file.write_text(self._conversations.read_text(encoding="utf-8"), encoding="utf-8")
            return
        tokenizer = Tokenizer.from_file(str(self._exact / "tokenizer.json"))
        with edgerun.load(self._exact, draft=None) as engine:
            texts = [
                tokenizer.decode(engine.encode_chat(messages), skip_special_tokens=False)
                for messages in _conversations(self._conversations)
            ]
        file.write_text("".join(texts), encoding="utf-8")

    def _read_texts(self) -> Tokens:
        source = made_once(self._work / "heldout.jsonl", self._write_heldout)
        return read_texts(self._exact, source, self._options.texts, _LONGEST)

    def _write_heldout(self, file: Path) -> None:
        rows = _conversations(self._options.text)
        file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in rows), encoding="utf-8")

    def _measured(self, label: str, engine: str, path: Path) -> MeasuredModel:
        """A model with its loss, which is measured once."""

        def make(file: Path) -> None:
            kept = np.concatenate(new_positions(self._texts))
            logits, size = self._run(engine, path)
            kl, agrees = divergence(self._exact_logits[kept], logits[kept])
            figures: dict[str, Any] = {"kl": float(kl.mean()), "top1": float(agrees.mean()), "bytes": size}
            texts = np.split(kl, np.cumsum([mask.sum() for mask in new_positions(self._texts)])[:-1])
            figures |= {"p99": float(np.quantile(kl, 0.99)), "text_kl": [float(each.sum()) for each in texts]}
            file.write_text(json.dumps(figures), encoding="utf-8")

        name = f"{engine}-{path.name}.json"
        figures = json.loads(made_once(self._work / "losses" / name, make).read_text(encoding="utf-8"))
        print(f"{label}: KL {figures['kl']:.5f}", file=sys.stderr)
        return MeasuredModel(label, engine, path, **figures)

    def _run(self, engine: str, path: Path) -> tuple[npt.NDArray[np.float32], int]:
        """Logits of all texts, float32 [all tokens, vocabulary], and the number of bytes of the model's tensors."""
        texts, out = self._work / "texts.json", self._work / "logits.npy"
        texts.write_text(json.dumps([text.tolist() for text in self._texts]), encoding="utf-8")
        with self._worker(MeasuredModel("logits", engine, path, 0, 0.0, 0.0)) as worker:
            worker.call("write_logits", texts=str(texts), out=str(out))
            size = int(worker.call("weights_bytes"))
        loaded: npt.NDArray[np.float32] = np.load(out)
        out.unlink()
        return loaded, size

    def _worker(self, model: MeasuredModel) -> Worker:
        pythons = {"llama": self._tools.python, "genai": self._options.genai_python}
        return Worker(
            model.label,
            model.engine,
            model.path,
            python=pythons.get(model.engine, None if model.is_ours else self._options.openvino_python),
            environment=self._tools.environment if model.engine == "llama" else {},
            threads=self._options.threads,
            capacity=_LONGEST,
        )


def _conversations(source: Path) -> list[list[dict[str, str]]]:
    """Messages of each line, which has either `messages` or a `request` and a `command`."""
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        row["messages"]
        if "messages" in row
        else [{"role": "user", "content": row["request"]}, {"role": "assistant", "content": row["command"]}]
        for row in rows
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True, help="held-out conversations, JSON lines")
    parser.add_argument("--calibration", type=Path, required=True, help="other conversations, JSON lines")
    parser.add_argument("--llama-python", metavar="PATH", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--llama-source", type=Path, metavar="DIR", required=True, help="source, built in DIR/build")
    parser.add_argument("--genai-python", metavar="PATH", help="interpreter that has onnxruntime-genai and its builder")
    parser.add_argument("--openvino-python", metavar="PATH", help="interpreter that has openvino-genai, optimum-intel")
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw KL over bytes (needs matplotlib)")
    parser.add_argument("--formats", nargs="+", metavar="NAME", default=QUANTIZATIONS)
    parser.add_argument("--calibration-tokens", type=int, default=16384)
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--search-minutes", type=float, default=3.0, help="time limit of each search for a plan")
    parser.add_argument(
        "--searches",
        nargs="*",
        metavar="NAME",
        default=QUANTIZATIONS,
        help="formats, GenAI or OpenVINO: mixed plans are searched within their bytes",
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        type=MethodChoice,
        default=(MethodChoice.GPTQ,),
        help="of the plans of one format; the last rounds mixed plans too",
    )
    parser.add_argument(
        "--plans", nargs="+", type=Path, metavar="FILE", default=(), help="plan files instead of searches"
    )
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    comparison = QualityComparison(options)
    models = comparison.models()
    if options.restarts:
        models = comparison.timed(models, options.restarts, options.rounds)
    console = Console()
    if not console.is_terminal:
        console.width = 130
    exact = next(each for each in models if each.label == EXACT)
    show(console, models, exact.bytes // 4)
    if options.plot is not None:
        draw(options.plot, models, exact.bytes // 4)
    print(json.dumps({"benchmark": "peer_quality", "models": [as_json(each) for each in models]}))


if __name__ == "__main__":
    main()
