"""Search of a quantization plan for one model and text.

The number of tokens of a measurement follows from the size of the model: a pass over a small model is cheap, so its
whole text is used; a large model is measured on part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from ...models.atomic import temporary_folder
from ...models.manifest import WeightFormat
from ...models.progress import Progress
from ...models.user_folders import cache_folder
from ...runtime.measure.bundle_timing import BundleTimer
from ..bundle_content import SourceModel
from ..calibration.calibration_text import CalibrationText
from ..calibration.divergence import PlanEvaluator
from ..checkpoint.config import DecoderConfig
from ..checkpoint.layer_weights import QuantPlan
from ..checkpoint.layout import fused_linears
from ..recipe import ExportRecipe, MixedPrecisionRequest
from .allocate import Allocation, AllocationProblem, allocate, cost_limits
from .budget import Budget, Measure
from .evolutionary_search import SearchSettings
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR, format_candidates
from .linear_times import LinearTimes
from .plan_costs import weight_count
from .quantized_weights import QuantizedLinearStore
from .timing_bundles import TimingBundle

_SENSITIVITY_WORK: Final = 3e10
"""Weights times tokens of one measurement of a sensitivity: seconds on two cores."""
_PLAN_WORK: Final = 5e11
"""Weights times tokens of one measurement of a plan."""
_MIN_TOKENS: Final = 256
_STAGES: Final = (1 / 16, 1 / 4, 1.0)
"""Shares of the text on which plans are measured, one after the other."""
_DEFAULT_SECONDS: Final = 600.0
_TIMED_WIDTHS: Final = (1, 4)
"""Widths of the passes in which an option must not be dominated."""
_ROUNDS: Final = 8
_LOADS: Final = 3
"""Number of times a bundle is loaded: the place of its weights in memory changes a pass by up to a tenth, and
disturbances make it slower, never faster."""


class PlanSearch:
    """Search of a plan for one model on one text."""

    def __init__(
        self,
        model: SourceModel,
        text: CalibrationText,
        recipe: ExportRecipe,
        store: QuantizedLinearStore,
        times: LinearTimes,
        folder: Path,
    ) -> None:
        """Prepare a search; nothing runs yet.

        Args:
            model: The model to export.
            text: The calibration text; plans are measured on its calibration part.
            recipe: The recipe, with mixed precision within a budget.
            store: Quantized linears.
            times: Times of passes on this machine.
            folder: Keeps all measurements.
        """
        self._config = model.config
        self._recipe = recipe
        self.times = times
        """Times as measured linear by linear; after a search in which whole passes were measured, corrected to the
        machine's current speed."""
        self._folder = folder
        self._evaluator = PlanEvaluator(model, text.calibration, store.weights, folder / "calibration")
        self._all_tokens = sum(map(len, text.calibration))

    def run(self, progress: Progress) -> Allocation:
        """Search.

        Raises:
            CheckpointError: A tensor cannot be read.
            InputError: No plan is within the budget.
            OSError: The disk refused a write.
        """
        recipe, request, budget = self._recipe, self._request, self._budget
        timed = budget.measure is Measure.MILLISECONDS
        widths = dict.fromkeys((budget.width, *_TIMED_WIDTHS) if timed else _TIMED_WIDTHS)
        problem = AllocationProblem(
            self._config,
            self._divergence_alone,
            [partial(self._divergence, share) for share in _STAGES],
            budget,
            cost_limits(budget, self._config, [self.times.costs(width) for width in widths]),
            format_candidates(
                [recipe.methods],
                zero_points=request.zero_points,
                half_scales=request.half_scales,
                low_rank=request.low_rank_correction,
            ),
            self._measured_ratio if timed else None,
        )
        settings = SearchSettings(
            seed=0 if recipe.calibration is None else recipe.calibration.seed,
            seconds=_DEFAULT_SECONDS if request.max_seconds is None else request.max_seconds,
        )
        found = allocate(problem, self._folder, settings, progress)
        self.times = self.times.scaled(found.measured_ratio)
        return found

    @property
    def _request(self) -> MixedPrecisionRequest:
        assert self._recipe.mixed_precision is not None  # noqa: S101 -- see `__init__`
        return self._recipe.mixed_precision

    @property
    def _budget(self) -> Budget:
        assert self._request.budget is not None  # noqa: S101 -- see `__init__`
        return self._request.budget

    def _measured_ratio(self, plan: QuantPlan) -> float:
        return measured_over_predicted(self.times, plan, [self._budget.width])

    def _divergence(self, share: float, plan: QuantPlan) -> float:
        tokens = int(share * min(plan_tokens(self._config), self._all_tokens))
        return self._evaluator.divergence(plan, max(_MIN_TOKENS, tokens)).mean_kl

    def _divergence_alone(self, linear: str, weight_format: WeightFormat) -> float:
        return self._evaluator.divergence_alone(linear, weight_format, sensitivity_tokens(self._config))


def sensitivity_tokens(config: DecoderConfig) -> int:
    """Number of tokens on which a sensitivity of a model of this size is measured."""
    return _tokens(config, _SENSITIVITY_WORK)


def plan_tokens(config: DecoderConfig) -> int:
    """Number of tokens on which a plan of a model of this size is measured."""
    return _tokens(config, _PLAN_WORK)


def _tokens(config: DecoderConfig, work: float) -> int:
    return max(_MIN_TOKENS, int(work / weight_count(config)))


def measured_over_predicted(times: LinearTimes, plan: QuantPlan, widths: Sequence[int]) -> float:
    """Ratio of the measured time of whole passes to the sum of their linears' times; geometric mean over widths.

    Times of linears are added up as they were measured once. A machine becomes slower when it is hot or busy, and a
    linear's time depends a little on what runs before it. So a model of random weights with the plan is timed as a
    whole.

    Args:
        times: Times of the plan's linears.
        plan: Format of every linear of the graph.
        widths: Widths of the passes.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run the model.
        OSError: The disk refused a write.
    """
    # A tied head saves writing a matrix, and takes the same time.
    tied = replace(times.config, tied_head=True)
    formats = {linear.name: plan[linear.name] for linear in fused_linears(tied)} | {EMBEDDING_LINEAR: plan[HEAD_LINEAR]}
    with temporary_folder(cache_folder(), "plan") as folder:
        path = folder / "model"
        TimingBundle(tied, formats).write(path)
        loads = [BundleTimer().time_passes([path], widths, _ROUNDS)[0] for _ in range(_LOADS)]
    least = {width: min(seconds[width] for seconds in loads) for width in widths}
    return geometric_mean(1e3 * least[width] / times.milliseconds(plan, width) for width in widths)
