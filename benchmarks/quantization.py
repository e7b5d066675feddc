"""Loss of quality by quantization: mean KL divergence from the float32 model, by method and format.

Example: python benchmarks/quantization.py CHECKPOINT --text conversations.jsonl --formats 4/32 2/32+z

Exports the checkpoint once in float32 and once for each method and format, and runs the same texts through all exports:
the lines of a text file, or the `messages` of a .jsonl file, in the model's chat template if it has one; without
--text, continuations of --prompt by the float32 model with different seeds. Methods that need calibration use
--calibration-tokens of text by the model itself, or with --same-kind the other lines of the text file. Methods with
"+text" are calibrated although they need not be. Prints a table (mean KL in nats over all positions, where positions
with equal prefixes count once; fraction of positions with the same top token; seconds of the export), then one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun.export import (
    DEFAULT_CALIBRATION_TOKENS,
    FP32,
    ExportRecipe,
    WeightFormat,
    export_checkpoint,
)
from edgerun.export.check.contract_session import ContractSession

Tokens = list[npt.NDArray[np.int64]]
Floats = npt.NDArray[np.float64]


CHOICES: Final = ("rtn", "k-quant", "k-quant+text", "gptq", "awq", "awq+k-quant", "awq+gptq")
"""Quantization methods with and without calibration."""


def recipe_of(choice: str, weight_format: WeightFormat, text: Path | None, tokens: int) -> ExportRecipe:
    """The recipe of a choice with one format for all linears."""
    if choice in ("rtn", "k-quant"):
        return ExportRecipe(weight_format, method=choice)
    method = choice.removesuffix("+text")
    return ExportRecipe(weight_format, method=method, calibration=text or Path("self"), calibration_tokens=tokens)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--formats", nargs="+", default=["4/32", "4/128", "2/32", "8/32"], help="bits/block[+z][+p]")
    parser.add_argument("--methods", nargs="+", choices=CHOICES, default=CHOICES)
    parser.add_argument("--calibration-tokens", type=int, default=DEFAULT_CALIBRATION_TOKENS)
    parser.add_argument(
        "--same-kind", action="store_true", help="calibrate with the lines of --text that are not measured"
    )
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=256, help="maximum tokens of a text")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        exact = export_checkpoint(options.checkpoint, Path(folder) / "fp32", ExportRecipe(FP32)).bundle
        if options.text is None:
            texts = sampled_texts(exact, options.prompt, options.texts, options.longest)
        else:
            texts = read_texts(exact, options.text, options.texts, options.longest)
        rest = unread_lines(options.text, options.texts, Path(folder)) if options.same_kind else None
        print(f"{options.checkpoint.name}, {sum(map(len, texts))} tokens in {len(texts)} texts")
        print(f"{'weights':8} {'method':12} {'mean KL':>9} {'top-1':>7} {'bits':>6} {'seconds':>8}")
        for name in options.formats:
            weight_format = read_format(name)
            for method in options.methods:
                recipe = recipe_of(method, weight_format, rest, options.calibration_tokens)
                destination = Path(folder) / "few"
                report = export_checkpoint(options.checkpoint, destination, recipe)
                kl, agreement = compare(exact, report.bundle, texts)
                results.append({"format": name, "method": method, "mean_kl": kl, "top1_agreement": agreement})
                facts = f"{kl:9.5f} {agreement:7.4f} {report.bits_per_weight:6.3f} {report.seconds:8.1f}"
                print(f"{name:8} {method:12} {facts}", flush=True)
    print(json.dumps({"benchmark": "quantization", "edgerun": edgerun.__version__, "results": results}))


def read_format(name: str) -> WeightFormat:
    """Parse a format of --formats."""
    plain, *marks = name.split("+")
    bits, block = map(int, plain.split("/"))
    return WeightFormat(bits, block, zero_points="z" in marks)


def shuffled_lines(source: Path) -> list[str]:
    """The non-empty lines of a file, shuffled in the same order every time."""
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(lines)
    return lines


def unread_lines(source: Path, count: int, folder: Path) -> Path:
    """Write a file of the lines that `read_texts` does not read."""
    lines = shuffled_lines(source)
    taken = set(lines[:count])
    rest = folder / f"rest{source.suffix}"
    rest.write_text("\n".join(line for line in lines[count:] if line not in taken), encoding="utf-8")
    return rest


def read_texts(bundle: Path, source: Path, count: int, max_length: int) -> Tokens:
    """Read some texts as token ids, the same ones every time."""
    lines = shuffled_lines(source)
    with edgerun.load(bundle) as engine:
        texts = []
        for line in lines[:count]:
            if source.suffix != ".jsonl":
                ids = engine.tokenizer.encode(line, add_special_tokens=True)
            elif engine.template is None:
                turns = (turn["content"] for turn in json.loads(line)["messages"])
                ids = engine.tokenizer.encode("\n".join(turns), add_special_tokens=True)
            else:
                ids = engine.encode_chat(json.loads(line)["messages"])
            texts.append(np.array(ids[:max_length], np.int64))
    return [text for text in texts if len(text) > 1]


def sampled_texts(bundle: Path, prompt: str, count: int, max_length: int) -> Tokens:
    """Sample texts after a prompt, as token ids including the prompt."""
    with edgerun.load(bundle) as engine:
        ids = engine.tokenizer.encode(prompt, add_special_tokens=True)
        room = max_length - len(ids)
        replies = [
            engine.generate(prompt, raw=True, seed=seed, temperature=1.0, max_tokens=room) for seed in range(count)
        ]
        return [
            np.array([*ids, *engine.tokenizer.encode(reply.text, add_special_tokens=False)][:max_length], np.int64)
            for reply in replies
        ]


def compare(exact: Path, rounded: Path, texts: Tokens) -> tuple[float, float]:
    """Mean KL(exact || rounded) over all positions of all texts, and the fraction with the same top token."""
    max_length = max(map(len, texts))
    first, second = (ContractSession(bundle, max_length) for bundle in (exact, rounded))
    divergences, same = [], []
    for tokens, new in zip(texts, new_positions(texts), strict=True):
        first.length = second.length = 0
        exact_logits, logits = (session.forward(tokens, np.arange(len(tokens)))[new] for session in (first, second))
        kl, agrees = divergence(exact_logits, logits)
        divergences.append(kl)
        same.append(agrees)
    return float(np.concatenate(divergences).mean()), float(np.concatenate(same).mean())


def new_positions(texts: Tokens) -> list[npt.NDArray[np.bool_]]:
    """Which positions of each text to count: a prefix of several texts, such as the template's tokens, counts once."""
    seen: set[bytes] = set()
    found = []
    for tokens in texts:
        prefixes = [tokens[: end + 1].tobytes() for end in range(len(tokens))]
        found.append(np.array([prefix not in seen for prefix in prefixes]))
        seen.update(prefixes)
    return found


def divergence(
    exact: npt.NDArray[np.float32], rounded: npt.NDArray[np.float32]
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """KL(exact || rounded) in nats of each row of logits [m, vocabulary], and whether the top token is the same."""
    ours, theirs = log_softmax(exact), log_softmax(rounded)
    kl: Floats = (np.exp(ours) * (ours - theirs)).sum(axis=1)
    return kl, ours.argmax(axis=1) == theirs.argmax(axis=1)


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    """Log-probabilities [m, vocabulary] in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normed: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normed


if __name__ == "__main__":
    main()
