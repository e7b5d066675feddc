"""Step time of drafts from a model's own layers, and the agreement at which they pay off.

Example: python benchmarks/own_draft.py BUNDLE... [--choose] [--text FILE]

Times passes of each bundle, and of its graph without a growing fraction of its attentions and feed-forwards, in turn.
Prints the step time relative to the target's, and the agreement from which the best chain of draft tokens is faster
than plain decoding (above 1 if none is), on this machine and if each further token costs a tenth of a pass. With
--choose, the skipped parts are chosen on a copy with text of the model (or of a file), and the draft is evaluated by
replay. Then prints one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx

import edgerun
from edgerun.export.calibration.calibration_text import split_texts
from edgerun.export.drafts.head_size import TARGET_WIDTHS, tokens_per_second
from edgerun.export.drafts.layer_skip_draft import adopt_layer_skip_draft
from edgerun.export.drafts.skipped_layers import SubLayer, as_bundle, inner_sub_layers, without
from edgerun.models.bundle import open_bundle
from edgerun.models.progress import silent
from edgerun.runtime.measure.bundle_timing import BundleTimer
from edgerun.runtime.measure.draft_benefit import measure_draft_benefit
from edgerun.runtime.measure.self_text import read_texts, sample_texts

FRACTIONS: Final = (0.25, 0.5, 0.75, 1.0)
CHEAP_TOKEN: Final = 0.1
"""Cost of one more token of a pass, relative to a pass, on a machine that reads weights slowly."""
MAX_LENGTH: Final = 256
TOKENS: Final = 6000


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--choose", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit of a search")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    results = [measured(bundle, options) for bundle in options.bundles]
    print(json.dumps({"benchmark": "own_draft", "edgerun": edgerun.__version__, "results": results}))


def measured(bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one bundle."""
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / bundle.name
        shutil.copytree(bundle, copied)
        found: dict[str, Any] = {"model": bundle.name, "steps": steps(copied, options.rounds)}
        if options.choose:
            found["chosen"] = chosen(copied, options)
    return found


def steps(bundle: Path, rounds: int) -> list[dict[str, float]]:
    """Step times of drafts, by the fraction of parts that they skip."""
    manifest = open_bundle(bundle).manifest
    if manifest is None:
        raise SystemExit(f"{bundle} is not a bundle")
    parts = inner_sub_layers(manifest.architecture.layers)
    whole = onnx.load(bundle / "model.onnx", load_external_data=False)
    with ExitStack() as stack:
        made = [
            stack.enter_context(as_bundle(bundle, manifest, without(whole, evenly_chosen(parts, fraction))))
            for fraction in FRACTIONS
        ]
        target, *drafts = BundleTimer().time_passes([bundle, *made], TARGET_WIDTHS, rounds)
    curve = ", ".join(f"t({width}) {target[width] / target[1]:.2f}" for width in TARGET_WIDTHS[1:])
    print(f"{bundle.name}: {1e3 * target[1]:.2f} ms per pass, {curve}")
    print(f"{'skipped':>10} {'step ms':>9} {'of target':>10} {'pays from':>10} {'cheap tokens':>16}")
    cheap = {width: target[1] * (1 + CHEAP_TOKEN * (width - 1)) for width in TARGET_WIDTHS}
    results = []
    for fraction, times in zip(FRACTIONS, drafts, strict=True):
        row = {
            "left_out": len(evenly_chosen(parts, fraction)),
            "parts": len(parts),
            "step_ms": 1e3 * times[1],
            "of_target": times[1] / target[1],
            "pays_from": break_even(times[1], target),
            "pays_from_with_cheap_tokens": break_even(times[1], cheap),
        }
        results.append(row)
        facts = f"{row['step_ms']:9.3f} {row['of_target']:10.3f} {row['pays_from']:10.3f}"
        print(
            f"{row['left_out']:>4} of {row['parts']:<3} {facts} {row['pays_from_with_cheap_tokens']:16.3f}", flush=True
        )
    return results


def evenly_chosen(parts: list[SubLayer], fraction: float) -> list[SubLayer]:
    """Choose a fraction of the parts, evenly spaced."""
    count = round(fraction * len(parts))
    return [parts[place] for place in np.linspace(0, len(parts) - 1, count).round().astype(int)]


def break_even(step: float, target: Mapping[int, float]) -> float:
    """The agreement from which speculation is faster than plain decoding; above 1 for never."""
    agreements = np.linspace(0, 1, 1001)
    return next(
        (float(each) for each in agreements if tokens_per_second(float(each), step, target) > 1 / target[1]), 1.001
    )


def chosen(bundle: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Choose a draft, and evaluate it."""
    if options.text is None:
        texts, origin = sample_texts(bundle, TOKENS, MAX_LENGTH, 0), "the model's own text"
    else:
        texts, origin = read_texts(bundle, options.text, TOKENS, MAX_LENGTH), options.text.name
        texts = texts[: next((n for n in range(len(texts)) if sum(map(len, texts[:n])) > TOKENS), len(texts))]
    text = split_texts(texts, origin, MAX_LENGTH)
    skips, _ = adopt_layer_skip_draft(bundle, None, text, silent, max_seconds=options.seconds)
    found = measure_draft_benefit(bundle, text.held_out)
    print(f"chosen on {origin}: without {', '.join(skips)}")
    print(
        f"  replayed: agreement {found.agreement:.3f}, {found.tokens_per_pass:.2f} tokens a pass, "
        f"{found.plain_seconds / found.speculative_seconds:.2f} times plain",
        flush=True,
    )
    return {"skips": skips, "replayed": dataclasses.asdict(found)}


if __name__ == "__main__":
    main()
