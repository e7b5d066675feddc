"""What whole passes of a plan take now, against the sum of its units' times.

Times of units are added up as they once were measured. A machine gets slower when it is hot or has other work, and a
unit takes a little more or less by what comes before it. So where time is the budget, models of random weights with the
plans in question are timed as a whole: what counts in the end is a pass, not a sum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import Final

from ...models.cache import cache_folder
from ...models.manifest import WeightFormat
from ...runtime.measure.bundle_timing import BundleTimer
from ..checkpoint.layout import fused_linears
from .format_candidates import EMBEDDING_LINEAR, HEAD_LINEAR
from .linear_times import LinearTimes
from .timing_bundles import TimingBundle

_ROUNDS: Final = 8
_LOADS: Final = 3
"""How often the model is loaded: where its weights lie in memory makes up to a tenth of a pass, and what disturbs one
makes it slower, never faster."""


def slower_than_predicted(times: LinearTimes, plan: Mapping[str, WeightFormat], rows: Sequence[int]) -> float:
    """Measured by predicted time of undisturbed passes of a model with that plan; over several rows the geometric mean.

    Args:
        times: of its units.
        plan: format by unit, for every unit of the graph.
        rows: of the passes.

    Raises:
        BundleError, EdgeError: ONNX Runtime cannot run it.
        OSError: the disk refused a write.
    """
    # A tied head saves writing a matrix, and takes the same time.
    tied = replace(times.config, tied_head=True)
    formats = {linear.name: plan[linear.name] for linear in fused_linears(tied)} | {EMBEDDING_LINEAR: plan[HEAD_LINEAR]}
    cache_folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="plan-", dir=cache_folder()) as folder:
        path = Path(folder) / "model"
        TimingBundle(tied, formats).write(path)
        loads = [BundleTimer().time_passes([path], rows, _ROUNDS)[0] for _ in range(_LOADS)]
    least = {count: min(seconds[count] for seconds in loads) for count in rows}
    return geometric_mean(1e3 * least[count] / times.milliseconds(plan, count) for count in rows)
