"""Exactness checks of models on request, and what they found in plain words."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from ....errors import InputError
from ....models.find import BUNDLED_MODEL
from ....models.json_file import record_from_json
from ....runtime.measure.exactness import ComparisonCounts, ExactnessReport
from ....runtime.scheduling.request_run import Cancellation
from ...conversations.store import ConversationStore
from ...service.model_pool import ModelPool
from .job_process import JobKind, run_job
from .work_queue import Publish, WorkState, outcome

_SETTING: Final = "exactness"
_MAX_REPORTS: Final = 50
_KINDS: Final = {
    "greedy": "the likeliest token each time",
    "sampled": "tokens drawn at random, with a seed",
    "exact": "the likeliest token, near ties recomputed",
}


class ExactnessChecks:
    """Checks whether drafting changes what a model writes on this machine, one model at a time.

    Args:
        pool: the models.
        store: keeps the last report of each model.
        publish: called with the JSON object of the check when it has changed.
        load_options: further arguments of `edgerun.load`, as the app opens its models.
    """

    def __init__(
        self,
        pool: ModelPool,
        store: ConversationStore,
        publish: Publish,
        load_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._pool: Final = pool
        self._store: Final = store
        self._publish: Final = publish
        self._load_options: Final = dict(load_options or {})
        self._lock: Final = threading.Lock()
        self._check: dict[str, Any] | None = None
        self._cancellation = Cancellation()
        self._thread: threading.Thread | None = None

    def describe(self) -> dict[str, Any]:
        """The check that runs or ran last, and the last report of each model."""
        with self._lock:
            return {"check": None if self._check is None else dict(self._check), "reports": self._reports()}

    def start(self, model: str | None, limit: int = 1, max_tokens: int = 48) -> dict[str, Any]:
        """Begin a check.

        Args:
            model: the model's id; None for the first one.
            limit: number of prompts of each category.
            max_tokens: most tokens of an answer.

        Raises:
            InputError: a check runs already, or a number is out of range.
            RequestError: there is no such model.
        """
        if not (1 <= limit <= 20 and 2 <= max_tokens <= 512):
            raise InputError(f"limit is {limit} and max_tokens {max_tokens}", "give 1 to 20, and 2 to 512")
        entry = self._pool.find(model)
        with self._lock:
            if self._thread is not None and self._thread.is_alive():
                raise InputError("an exactness check is running", "cancel it, or wait for its end")
            self._cancellation = Cancellation()
            self._check = {
                "model": entry.id,
                "state": WorkState.RUNNING.value,
                "stage": "",
                "fraction": 0.0,
                "error": "",
            }
            arguments = {
                "model": entry.source,
                "shell": entry.id == BUNDLED_MODEL,
                "limit": limit,
                "max_tokens": max_tokens,
                "load": self._load_options,
            }
            shown = dict(self._check)
            self._thread = threading.Thread(
                target=self._run, args=(entry.id, arguments, self._cancellation), name="edge-run exactness", daemon=True
            )
            self._thread.start()
        return shown

    def cancel(self) -> dict[str, Any]:
        """End the check that runs."""
        self._cancellation.cancel()
        return self.describe()

    def close(self) -> None:
        """End the check, and wait for its process."""
        self._cancellation.cancel()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, model: str, arguments: Mapping[str, Any], cancellation: Cancellation) -> None:
        def progress(stage: str, fraction: float) -> None:
            self._update(stage=stage, fraction=fraction)

        def check() -> None:
            found = run_job(JobKind.EXACTNESS, arguments, progress, cancellation)
            report = {
                "report": explained(record_from_json(ExactnessReport, found["report"])),
                "measured": time.time(),
                "device": found["device"],
                "prompts": found["prompts"],
            }
            with self._lock:
                kept = self._reports()
                kept.pop(model, None)
                self._store.set_setting(_SETTING, dict([*kept.items(), (model, report)][-_MAX_REPORTS:]))

        state, error = outcome("the check", check)
        if state is WorkState.DONE:
            self._update(state=state.value, fraction=1.0)
        else:
            self._update(state=state.value, error=error)

    def _reports(self) -> dict[str, Any]:
        stored = self._store.setting(_SETTING, {})
        return dict(stored) if isinstance(stored, Mapping) else {}

    def _update(self, **changes: Any) -> None:
        with self._lock:
            assert self._check is not None  # noqa: S101  set before the thread begins
            self._check.update(changes)
            shown = dict(self._check)
        self._publish(shown)


def explained(report: ExactnessReport) -> dict[str, Any]:
    """An exactness report in plain words: a result, what it means, and the counts it rests on."""
    counts = {kind: count for kind in _KINDS if (count := getattr(report, kind)) is not None}
    texts = sum(count.texts for count in counts.values())
    ties = sum(count.near_ties for count in counts.values())
    failed = sum(count.failed for count in counts.values())
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
        seen = f"which happened in {ties} of {texts} texts" if ties else f"which happened in none of {texts} texts"
        meaning = (
            "Wide passes differ from narrow ones in the last bits, because activations have 8 bits. A text can only "
            f"change where the two best tokens are that close, {seen}. Either text is then as good an answer of the "
            "model as the other. With the option exact they never differ."
        )
    rows = [_row(kind, count) for kind, count in counts.items()]
    return {
        "passed": report.passed,
        "result": result,
        "meaning": meaning,
        "rows": rows,
        "epsilon": report.epsilon,
        "widths": {str(width): value for width, value in report.noise.chains.items()},
        "trees": report.noise.trees,
        "texts": texts,
    }


def _row(kind: str, count: ComparisonCounts) -> dict[str, Any]:
    return {
        "kind": kind,
        "name": _KINDS[kind],
        "texts": count.texts,
        "identical": count.identical,
        "near_ties": count.near_ties,
        "failed": count.failed,
        "drafted": count.drafts.drafted,
        "accepted": count.drafts.accepted,
        "recomputed": count.recomputed,
    }
