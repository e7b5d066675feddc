"""What few bits cost in quality: mean KL from the float32 model, by method and format.

Example: python benchmarks/quantization.py CHECKPOINT --text conversations.jsonl --formats 4/32 2/32

Exports the checkpoint once in float32 and once for each method and format, and runs the same texts through all of them:
the lines of a text file, or of a .jsonl file the `messages`, in the model's chat template where it has one; without
--text, what the float32 model itself makes of --prompt with as many seeds. Prints a table (mean KL in nats over all
positions, of several with the same tokens before them only one; share of positions that prefer the same token; seconds
of the export), then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

import edgerun
from edgerun.export import FP32, ExportRecipe, Method, WeightFormat, export_checkpoint
from edgerun.export.config import read_config
from edgerun.export.session import GraphSession

Tokens = list[npt.NDArray[np.int64]]
Floats = npt.NDArray[np.float64]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--formats", nargs="+", default=["4/32", "4/128", "2/32", "8/32"], help="bits/block")
    parser.add_argument("--methods", nargs="+", choices=[each.value for each in Method], default=[*Method])
    parser.add_argument("--texts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=256, help="tokens of a text that are read")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as folder:
        exact = export_checkpoint(options.checkpoint, Path(folder) / "fp32", ExportRecipe(FP32)).bundle
        if options.text is None:
            texts = sampled_texts(exact, options.prompt, options.texts, options.longest)
        else:
            texts = read_texts(exact, options.text, options.texts, options.longest)
        print(f"{options.checkpoint.name}, {sum(map(len, texts))} tokens in {len(texts)} texts")
        print(f"{'weights':8} {'method':8} {'mean KL':>9} {'top-1':>7} {'bits':>6} {'seconds':>8}")
        for name in options.formats:
            form = WeightFormat(*map(int, name.split("/")))
            for method in map(Method, options.methods):
                report = export_checkpoint(options.checkpoint, Path(folder) / "few", ExportRecipe(form, method=method))
                kl, agreement = compare(exact, report.bundle, texts)
                results.append({"format": name, "method": method.value, "mean_kl": kl, "top1_agreement": agreement})
                facts = f"{kl:9.5f} {agreement:7.4f} {report.bits_per_weight:6.3f} {report.seconds:8.1f}"
                print(f"{name:8} {method.value:8} {facts}", flush=True)
    print(json.dumps({"benchmark": "quantization", "edgerun": edgerun.__version__, "results": results}))


def read_texts(bundle: Path, source: Path, count: int, longest: int) -> Tokens:
    """Some texts as tokens, the same ones every time."""
    lines = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    random.Random(0).shuffle(lines)
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
            texts.append(np.array(ids[:longest], np.int64))
    return [text for text in texts if len(text) > 1]


def sampled_texts(bundle: Path, prompt: str, count: int, longest: int) -> Tokens:
    """Texts that the model writes after a prompt, as tokens, the prompt's included."""
    with edgerun.load(bundle) as engine:
        ids = engine.tokenizer.encode(prompt, add_special_tokens=True)
        room = longest - len(ids)
        replies = [
            engine.generate(prompt, raw=True, seed=seed, temperature=1.0, max_tokens=room) for seed in range(count)
        ]
        return [
            np.array([*ids, *engine.tokenizer.encode(reply.text, add_special_tokens=False)][:longest], np.int64)
            for reply in replies
        ]


def compare(exact: Path, rounded: Path, texts: Tokens) -> tuple[float, float]:
    """Mean KL(exact || rounded) over all positions of all texts, and the share that agrees on the likeliest token."""
    longest = max(map(len, texts))
    first, second = (GraphSession(bundle, read_config(bundle), longest) for bundle in (exact, rounded))
    divergences, same = [], []
    seen: set[bytes] = set()  # what many texts begin with, the template's tokens, counts once
    for tokens in texts:
        prefixes = [tokens[: end + 1].tobytes() for end in range(len(tokens))]
        new = np.array([prefix not in seen for prefix in prefixes])
        seen.update(prefixes)
        first.length = second.length = 0
        logits = [session.forward(tokens, np.arange(len(tokens))) for session in (first, second)]
        ours, theirs = (log_softmax(each[new]) for each in logits)
        divergences.append((np.exp(ours) * (ours - theirs)).sum(axis=1))
        same.append(ours.argmax(axis=1) == theirs.argmax(axis=1))
    return float(np.concatenate(divergences).mean()), float(np.concatenate(same).mean())


def log_softmax(logits: npt.NDArray[np.float32]) -> Floats:
    """Log-probabilities [m, vocabulary] in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    normed: Floats = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return normed


if __name__ == "__main__":
    main()
