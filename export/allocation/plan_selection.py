"""Formats chosen unit by unit for one model: what is measured, on how much text, and within what.

Measurements take as many tokens as the model's size allows: a pass over a small model is cheap, and its text is read
whole; of a large one a part has to do, and the search makes up for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Final

from ...models.manifest import WeightFormat
from ...models.progress import Progress
from ..bundle_content import SourceModel
from ..calibration.divergence import PlanEvaluator
from ..calibration.text_split import CalibrationText
from ..recipe import ExportRecipe, MixedPrecisionRequest
from .allocate import Allocation, Limited, allocate, measures_for
from .budget import Budget, Measure
from .format_candidates import levels, weight_count
from .linear_times import LinearTimes
from .quantized_weights import QuantizedLinearStore
from .search import SearchSettings
from .whole_passes import slower_than_predicted

_SOLO_WORK: Final = 3e10
_PLAN_WORK: Final = 5e11
"""Weights times tokens of one measurement, of a unit and of a plan: seconds of two cores."""
_FEWEST_TOKENS: Final = 256
_STAGES: Final = (1 / 16, 1 / 4, 1.0)
"""Shares of the text on which plans are measured, one after the other."""
_SEARCH_SECONDS: Final = 600.0
_TIMED_ROWS: Final = (1, 4)
"""Rows of the passes in which a level must not be spent in vain."""


class Mixing:
    """The choice for one model and one text."""

    def __init__(
        self,
        model: SourceModel,
        text: CalibrationText,
        recipe: ExportRecipe,
        request: MixedPrecisionRequest,
        store: QuantizedLinearStore,
        times: LinearTimes,
        folder: Path,
    ) -> None:
        """Nothing runs yet.

        Args:
            model: what is to be exported.
            text: its calibration part is what plans are measured on.
            recipe: says how codes are chosen.
            request: what is asked for; it has a budget.
            store: has the units in all formats.
            times: of passes on this machine.
            folder: keeps what is found out.

        Raises:
            InputError: the model has experts.
        """
        self._config = model.config
        self._recipe = recipe
        self._request = request
        self.times = times
        """As measured unit by unit; once plans have been measured as a whole, of the machine as it is."""
        self._folder = folder
        self._evaluator = PlanEvaluator(
            model.source, model.config, text.calibration, store.weights, folder / "calibration", model.context
        )
        self._all_tokens = sum(map(len, text.calibration))

    def allocation(self, progress: Progress) -> Allocation:
        """Search.

        Raises:
            CheckpointError: a tensor cannot be read.
            InputError: the budget is out of reach.
            OSError: the disk refused a write.
        """
        recipe, request = self._recipe, self._request
        found = allocate(
            self._config,
            self._solo,
            [partial(self._measured, share) for share in _STAGES],
            self._budget,
            self.measures,
            levels([recipe.methods], request.zero_points, request.powers_of_two, request.low_rank_correction),
            folder=self._folder,
            settings=SearchSettings(
                seed=0 if recipe.calibration is None else recipe.calibration.seed,
                seconds=_SEARCH_SECONDS if request.max_seconds is None else request.max_seconds,
            ),
            progress=progress,
            slowness=self._slowness if self._budget.measure is Measure.MILLISECONDS else None,
        )
        self.times = self.times.scaled(found.slowness)
        return found

    def _slowness(self, plan: Mapping[str, WeightFormat]) -> float:
        return slower_than_predicted(self.times, plan, [self._budget.rows])

    @property
    def measures(self) -> list[Limited]:
        """In which plans cost something, that of the budget first."""
        rows = (self._budget.rows, *_TIMED_ROWS) if self._budget.measure is Measure.MILLISECONDS else _TIMED_ROWS
        return measures_for(self._budget, self._config, [self.times.costs(count) for count in dict.fromkeys(rows)])

    @property
    def _budget(self) -> Budget:
        assert self._request.budget is not None  # noqa: S101 -- a mix without a plan has one
        return self._request.budget

    def _measured(self, share: float, plan: Mapping[str, WeightFormat]) -> float:
        tokens = int(share * min(self._tokens(_PLAN_WORK), self._all_tokens))
        return self._evaluator.divergence(plan, max(_FEWEST_TOKENS, tokens)).mean_kl

    def _solo(self, linear: str, form: WeightFormat) -> float:
        return self._evaluator.solo(linear, form, self._tokens(_SOLO_WORK))

    def _tokens(self, work: float) -> int:
        return max(_FEWEST_TOKENS, int(work / weight_count(self._config)))
