"""Plans from small to exact for one checkpoint, with bytes and measured KL.

These are the plans for other budgets that a report shows beside the chosen one. Here they are found before anything is
chosen: the sensitivities of all linears give the plans by Lagrangian relaxation, and each plan is measured on held-out
text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..models.progress import Progress, silent
from .allocation.allocate import frontier_plans, measured_tokens, plan_sensitivities
from .allocation.choices import linear_choices
from .allocation.format_candidates import planned_linears, write_plan
from .allocation.plan_costs import BYTES_READ, plan_cost, weight_count
from .architectures import supported_families
from .bundle_content import SourceModel
from .calibration.divergence import PlanEvaluator
from .calibration.prepare import calibrate, settings_of
from .calibration.work_folder import work_folder
from .checkpoint.open import open_source
from .gguf.gguf_model import is_gguf
from .optimum_path import needs_optimum
from .recipe import ExportRecipe
from .upgrade.describe import holds_graph

_STAGE: Final = "measuring plans"


@dataclass(frozen=True)
class FrontierPlan:
    """A quantization plan and what it costs."""

    plan: str
    """The text of a plan file, for `edge-run export --plan`."""
    bytes_read: int
    """Bytes that a pass over one token reads, which is about what the weights take in memory."""
    bits_per_weight: float
    """Those bytes in bits, divided by the number of weights."""
    kl: float
    """Mean KL(float32 model || quantized model) in nats on held-out text, each linear quantized independently."""


def measure_frontier(source: Path, recipe: ExportRecipe, progress: Progress = silent) -> tuple[FrontierPlan, ...]:
    """Find and measure the plans among which an export of a checkpoint can choose.

    What is measured stays in the recipe's work folder, where an export of one of the plans uses it again.

    Args:
        source: the checkpoint's folder.
        recipe: a recipe for mixed weights; its budget or plan is not used.
        progress: reports the stages.

    Returns:
        The plans in ascending order of bytes. A plan that reads no fewer bytes than one with less KL is left out.

    Raises:
        InputError: the source is not a checkpoint of a family that edge-run exports itself, or has experts, or there is
            too little text.
        CheckpointError: the checkpoint is damaged, incomplete or not supported.
        DestinationError: the disk refused a write.
    """
    if holds_graph(source) or is_gguf(source) or needs_optimum(source):
        raise InputError(
            "mixed weights need a checkpoint of a family that edge-run exports itself",
            f"these are {', '.join(supported_families())}",
        )
    with open_source(source) as (config, checkpoint):
        model = SourceModel(checkpoint, config, recipe.context_for(config))
        with work_folder(source, settings_of(recipe, model.context), recipe.work) as folder:
            model, text, store = calibrate(model, recipe, folder, progress)
            alone = PlanEvaluator(model, text.calibration, store.weights, folder / "calibration")
            sensitivities = plan_sensitivities(config, recipe, alone, progress)
            alone.release()
            plans = frontier_plans(config, linear_choices(config, sensitivities, [BYTES_READ]))
            held_out = PlanEvaluator(model, text.held_out, store.weights, folder / "independent")
            found = []
            for number, plan in enumerate(plans, 1):
                size = round(plan_cost(plan, BYTES_READ, config))
                kl = held_out.mean_kl(plan, measured_tokens(config))
                named = {linear.name: plan[linear.name] for linear in planned_linears(config)}
                found.append(FrontierPlan(write_plan(named), size, 8 * size / weight_count(config), kl))
                progress(_STAGE, number / len(plans))
            held_out.release()
    kept: list[FrontierPlan] = []
    for each in sorted(found, key=lambda each: (each.bytes_read, each.kl)):
        if not kept or each.kl < kept[-1].kl:
            kept.append(each)
    return tuple(kept)
