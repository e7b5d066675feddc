"""Formats chosen for each linear, compared with one format for all and with the usual rule, at equal size.

Example: python benchmarks/allocation.py CHECKPOINT --text conversations.jsonl --work work --budgets 3 3.5 4 4.5 5 6

For each budget in bits per weight, as a pass reads them, a plan is searched for on one part of the text, and its mean
KL divergence from the float32 model is measured on the other part. It is compared with plans that have one format for
all linears, interpolated linearly in log KL over bytes: plans rounded by the same methods with the same text, and plans
rounded to nearest. The usual rule gives more bits to the LM head and to qkv and down of the outer layers; the best of
its plans that fit the budget is compared. A choice is wasteful if a cheaper format of that linear would give no more
KL. Mixed plans and those of the same methods are finally rounded layer by layer, as in an export. Prints a table, then
one JSON line.

`--work` keeps all results, and a second run continues from there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import edgerun
from edgerun.errors import InputError
from edgerun.export import Method, WeightFormat
from edgerun.export.allocation.allocate import DEFAULT_SECONDS, Allocation, allocate, cost_measures
from edgerun.export.allocation.choices import linear_choices, measure_sensitivities
from edgerun.export.allocation.format_candidates import allowed_formats, completed_plan, format_candidates
from edgerun.export.allocation.plan_costs import BYTES_READ, Budget, Measure, plan_cost, weight_count
from edgerun.export.allocation.quantized_weights import QuantizedLinearStore
from edgerun.export.bundle_content import SourceModel
from edgerun.export.calibration.divergence import PlanEvaluator
from edgerun.export.calibration.prepare import calibrate
from edgerun.export.calibration.sequential import quantize_sequentially
from edgerun.export.checkpoint.config import DecoderConfig
from edgerun.export.checkpoint.open import open_source
from edgerun.export.checkpoint.source import ModelSource
from edgerun.export.quantization.methods import CALIBRATED_METHODS, DEFAULT_METHODS
from edgerun.export.recipe import ExportRecipe
from edgerun.export.report.compared_plans import rule_plans, uniform_plan
from edgerun.export.report.figures import PlanFigures, PlanKind, log_line
from edgerun.models.progress import silent

Plan = Mapping[str, WeightFormat]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, help="calibration text; without it, text that the model generates")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--budgets", type=float, nargs="+", default=[2.75 + 0.25 * step for step in range(14)])
    parser.add_argument("--tokens", type=int, default=16384, help="tokens of text")
    parser.add_argument("--searched", type=int, default=2048, help="tokens on which plans are compared")
    parser.add_argument("--solo", type=int, default=1024, help="tokens on which linears are measured separately")
    parser.add_argument(
        "--method", type=Method, default=Method.GPTQ, choices=list(Method), help="method of 2 and 4 bits"
    )
    parser.add_argument("--zero-points", action="store_true")
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS, help="time limit of each search")
    options = parser.parse_args()
    with open_source(options.checkpoint) as (config, checkpoint):
        Comparison(options, config, checkpoint).print_all()


class Comparison:
    """One model, its text, and plans for it."""

    def __init__(self, options: argparse.Namespace, config: DecoderConfig, checkpoint: ModelSource) -> None:
        self.options, self.config, work = options, config, options.work
        text_file = options.text or Path("self")
        recipe = ExportRecipe("mixed", budget="4bpw", calibration=text_file, calibration_tokens=options.tokens)
        work.mkdir(parents=True, exist_ok=True)
        self.model = SourceModel(checkpoint, config, recipe.context_for(config))
        self.observed, text, store = calibrate(self.model, recipe, work, silent)
        self.methods = {**CALIBRATED_METHODS, 2: options.method, 4: options.method}
        self.formats = format_candidates(self.methods, options.zero_points)
        self.text = text
        self.statistics = store.statistics
        self.search_evaluator = PlanEvaluator(self.model, text.calibration, store.weights, work / "search")
        self.final_evaluator = PlanEvaluator(self.model, text.held_out, store.weights, work / "held-out")
        tokens = f"{sum(map(len, text.calibration))} tokens for the search, {sum(map(len, text.held_out))} held out"
        print(f"{options.checkpoint.name}, {weight_count(config)} weights; {tokens}")

    def print_all(self) -> None:
        """Measure and print every budget."""
        rounded = self.uniform(format_candidates(dict.fromkeys(DEFAULT_METHODS, Method.RTN)), self.kl)
        uniform = self.uniform(self.formats, self.exported_kl)
        for kind, plans in (("", uniform), ("to nearest", rounded)):
            for plan in plans:
                print(f"{plan.name:24} {kind:10} {plan.bits_per_weight:6.3f} bits, KL {plan.kl:.5f}")
        titles = ("bits", "found KL", "KL", "/ uniform", "/ nearest", "/ rule", "wasteful")
        print(f"{'budget':>6}", *(f"{title:>9}" for title in titles))
        results = []
        for amount in self.options.budgets:
            try:
                row = self.row(Budget(amount, Measure.BITS), uniform, rounded)
            except InputError as error:
                print(f"{amount:6.2f} {error}")
                continue
            results.append(row)
            values = (f"{'-' if value is None else format(value, '.4f'):>9}" for value in list(row.values())[1:])
            print(f"{amount:6.2f}", *values, flush=True)
        print(json.dumps({"benchmark": "allocation", "edgerun": edgerun.__version__, "results": results}))

    def row(
        self, budget: Budget, uniform: Sequence[PlanFigures], rounded: Sequence[PlanFigures]
    ) -> dict[str, float | None]:
        """Figures of one budget; ratios are of the mixed plan's KL to another plan's, None if there is none."""
        found = self.mixed(budget)
        kl, size = self.exported_kl(found.plan), self.size(found.plan)
        rules = rule_plans(self.config, self.formats, BYTES_READ, budget.limit(self.config))
        best = min(rules, key=self.kl, default=None)
        lines = log_line(size, uniform), log_line(size, rounded), None if best is None else self.exported_kl(best)
        of_uniform, of_nearest, of_rule = (None if other is None else kl / other for other in lines)
        return {
            "budget": budget.amount,
            "bits": 8 * size / weight_count(self.config),
            "search_kl": found.divergence,
            "kl": kl,
            "of_uniform": of_uniform,
            "of_nearest": of_nearest,
            "of_rule": of_rule,
            "wasteful": self.wasteful_choices(found),
        }

    def mixed(self, budget: Budget) -> Allocation:
        """Search for a plan."""
        tokens = self.options.searched
        alone = partial(self.search_evaluator.divergence_alone, tokens=self.options.solo)
        sensitivities = measure_sensitivities(allowed_formats(self.config, self.formats), alone)
        divergences = partial(self.searched_kl, tokens // 4), partial(self.searched_kl, tokens)
        costs = cost_measures(budget, self.config)
        return allocate(self.config, sensitivities, divergences, budget, costs, seconds=self.options.seconds)

    def searched_kl(self, tokens: int, plan: Plan) -> float:
        """Mean KL of a plan on the text of the search."""
        return self.search_evaluator.divergence(plan, tokens).mean_kl

    def wasteful_choices(self, found: Allocation) -> int:
        """Number of linears whose next cheaper format would give no more KL, on the text of the search."""
        count = 0
        for choice in linear_choices(self.config, found.sensitivities, [BYTES_READ]):
            formats = [option.weight_format for option in choice.options]
            at = formats.index(found.plan[choice.linear])
            if at > 0:
                plan = completed_plan(self.config, {**found.plan, choice.linear: formats[at - 1]})
                count += self.search_evaluator.divergence(plan, self.options.searched).mean_kl <= found.divergence
        return count

    def uniform(self, formats: Sequence[WeightFormat], kl: Callable[[Plan], float]) -> list[PlanFigures]:
        """Figures of a uniform plan for each format."""
        found = []
        for form in formats:
            plan = uniform_plan(self.config, form)
            size = self.size(plan)
            bits = 8 * size / weight_count(self.config)
            found.append(PlanFigures(str(form), PlanKind.UNIFORM, size, bits, kl(plan), {}))
        return found

    def size(self, plan: Plan) -> int:
        """Number of bytes that a pass reads with a plan."""
        return int(plan_cost(plan, BYTES_READ, self.config))

    def exported_kl(self, plan: Plan) -> float:
        """Mean KL of a plan as an export rounds it, on held-out text."""
        whole = completed_plan(self.config, plan)
        key = hashlib.sha256(repr(sorted(whole.items())).encode()).hexdigest()[:16]
        folder = self.options.work / f"rounded-{key}"
        store = QuantizedLinearStore(self.observed.source, self.config, folder, self.statistics)
        quantize_sequentially(self.observed, self.text, whole, store, silent)
        final_evaluator = PlanEvaluator(self.model, self.text.held_out, store.weights, folder / "held-out")
        return final_evaluator.divergence(whole, self.options.searched).mean_kl

    def kl(self, plan: Plan) -> float:
        """Mean KL of a plan whose linears are rounded separately, on held-out text."""
        return self.final_evaluator.divergence(plan, self.options.searched).mean_kl


if __name__ == "__main__":
    main()
