"""Exactness checks of models on request, and what they found in plain words."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final

from msgspec import Meta

from ....errors import InputError
from ....models.find import BUNDLED_MODEL
from ....models.json_file import record_from_json
from ....runtime.measure.exactness import ExactnessReport
from ....runtime.scheduling.request_run import Run
from ..app_context import AppContext
from .job_process import run_job
from .work_queue import WorkState, outcome

_SETTING: Final = "exactness"
_MAX_REPORTS: Final = 50
_KINDS: Final = {
    "greedy": "the likeliest token each time",
    "sampled": "tokens drawn at random, with a seed",
    "exact": "the likeliest token, near ties recomputed",
    "together": "the likeliest token, several answers at a time",
}


class ExactnessChecks:
    """Checks whether drafting changes what a model writes on this machine, one model at a time.

    Args:
        context: the models, the store, which keeps the last report of each model, and the windows.
    """

    def __init__(self, context: AppContext) -> None:
        self._context: Final = context
        self._lock: Final = threading.Lock()
        self._check: dict[str, Any] = {}
        """The check that runs or ran last, as a JSON object, which is not changed in place."""
        self._run: Run[None] | None = None

    def describe(self) -> dict[str, Any]:
        """The check that runs or ran last, and the last report of each model."""
        return {"check": self._check or None, "reports": self._context.store.setting(_SETTING, {})}

    def start(
        self,
        model: str | None = None,
        limit: Annotated[int, Meta(ge=1, le=20)] = 1,
        max_tokens: Annotated[int, Meta(ge=2, le=512)] = 48,
    ) -> dict[str, Any]:
        """Begin a check.

        Args:
            model: the model's id; None for the first one.
            limit: number of prompts of each category.
            max_tokens: most tokens of an answer.

        Raises:
            InputError: a check runs already.
            RequestError: there is no such model.
        """
        entry = self._context.pool.offered.find(model)
        arguments = {
            "model": entry.source,
            "shell": entry.id == BUNDLED_MODEL,
            "limit": limit,
            "max_tokens": max_tokens,
            "load": dict(self._context.load_options),
        }
        with self._lock:
            if self._run is not None and not self._run.ended:
                raise InputError("an exactness check is running", "cancel it, or wait for its end")
            self._check = {"model": entry.id, "state": WorkState.RUNNING, "stage": "", "fraction": 0.0, "error": ""}
            shown = {"check": self._check}
            self._run = Run(partial(self._work, entry.id, arguments), "edge-run exactness")
            self._run.start()
        return shown

    def cancel(self) -> dict[str, Any]:
        """End the check that runs."""
        if (run := self._run) is not None:
            run.cancellation.cancel()
        return self.describe()

    def close(self) -> None:
        """End the check, and wait for its process."""
        self.cancel()
        if (run := self._run) is not None:
            run.join()

    def _work(self, model: str, arguments: Mapping[str, Any], run: Run[None]) -> None:
        def update(stage: str, fraction: float, **changes: Any) -> None:
            self._check = {**self._check, "stage": stage, "fraction": fraction, **changes}
            self._context.events.publish("exactness", check=self._check)

        def check() -> None:
            found = run_job("exactness", arguments, update, run.cancellation)
            report = explained(record_from_json(ExactnessReport, found.pop("report")))
            kept = self._context.store.setting(_SETTING, {})
            kept.pop(model, None)
            kept[model] = {"report": report, "measured": time.time(), **found}
            self._context.store.set_setting(_SETTING, dict(list(kept.items())[-_MAX_REPORTS:]))

        state, error = outcome("the check", check)
        fraction = 1.0 if state is WorkState.DONE else self._check["fraction"]
        update(self._check["stage"], fraction, state=state, error=error)


def explained(report: ExactnessReport) -> dict[str, Any]:
    """An exactness report in plain words: a result, what it means, and the counts it rests on."""
    counts = {kind: count for kind in _KINDS if (count := getattr(report, kind)) is not None}
    texts, ties, failed = (
        sum(getattr(count, name) for count in counts.values()) for name in ("texts", "near_ties", "failed")
    )
    if not report.noise.sound:
        result = "Drafting is not exact here: passes over several tokens compute something else."
        meaning = (
            "On this machine a pass over several tokens gives other results than passes over one token, beyond the "
            "noise of arithmetic. Answers with drafting can be wrong. Switch drafting off, and report this model."
        )
    elif failed:
        result = f"Drafting is not exact here: {failed} of {texts} texts differ."
        meaning = (
            f"These texts differ at a place where the best token was clear: it led by {report.epsilon:.3g} logits or "
            "more. That should not happen. Please report this model."
        )
    elif report.noise.identical and not ties:
        result = "Bit-identical for every pass width."
        meaning = (
            f"Drafting changes nothing but the speed: all {texts} texts that were compared are the same with it and "
            "without, and passes over several tokens give the same numbers to the last bit."
        )
    else:
        result = f"Identical up to near ties below {report.epsilon:.3g} logits."
        meaning = (
            "Wide passes differ from narrow ones in the last bits, because activations have 8 bits. A text can only "
            f"change where the two best tokens are that close, which happened in {ties or 'none'} of {texts} texts. "
            "Either text is then as good an answer of the model as the other. With the option exact they never differ."
        )
    rows = [
        {
            "kind": kind,
            "name": _KINDS[kind],
            **{name: getattr(count, name) for name in ("texts", "identical", "near_ties", "failed")},
            "drafted": count.drafts.drafted,
            "accepted": count.drafts.accepted,
        }
        for kind, count in counts.items()
    ]
    return {
        "passed": report.passed,
        "result": result,
        "meaning": meaning,
        "rows": rows,
        "widths": {str(width): value for width, value in report.noise.chains.items()},
        "trees": report.noise.trees,
    }
