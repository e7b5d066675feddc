"""Exports of checkpoints in the app: plans are measured first, and the one that is chosen is exported.

An export has two steps, each in a process of its own (`job_process`). The first one measures the plans between the
smallest and the most exact one, and the job waits for a choice: the positions of the page's slider are these plans and
nothing between them, since only they were measured. The second one exports the chosen plan with what the first one left
in the work folder. Without a plan, an export has all its weights in one format and only the second step.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta

from ....errors import InputError
from ....models.atomic import write_atomically
from ....models.file_system import remove
from ....models.find import BUNDLED_MODEL, exports_folder
from ....models.user_folders import cache_folder
from ....runtime.scheduling.request_run import Cancellation
from .job_process import INSTALL, run_job
from .work_queue import ENDED, QueuedWork, WorkQueue, WorkState, outcome

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._ -]{0,62}[A-Za-z0-9]|[A-Za-z0-9]")
_PACKAGES: Final = ("onnx", "threadpoolctl")
"""Packages of the extra that a test of the environment looks for."""
_MAX_JOBS: Final = 20


@dataclass
class _ExportJob(QueuedWork):
    """An export."""

    key: str
    source: str
    name: str
    bits: int | None
    """Bits of all weights; None where a plan is chosen."""
    calibration_tokens: int | None
    state: WorkState = WorkState.QUEUED
    stage: str = ""
    fraction: float = 0.0
    plans: list[dict[str, Any]] = field(default_factory=list)
    chosen: int | None = None
    error: str = ""
    result: dict[str, Any] | None = None
    cancellation: Cancellation = field(default_factory=Cancellation)

    @property
    def destination(self) -> Path:
        return exports_folder() / self.name

    @property
    def work(self) -> Path:
        return cache_folder() / "app-exports" / self.key

    def remove_work(self) -> None:
        """Remove intermediate results; what the system keeps from being removed is left in the cache."""
        for path in (self.work, self.work.with_suffix(".toml")):
            with suppress(OSError):
                remove(path)

    def as_object(self) -> dict[str, Any]:
        """The job as a JSON object; the texts of its plans stay here."""
        names = ("key", "source", "name", "bits", "state", "stage", "fraction", "chosen", "error", "result")
        plans = [{name: plan[name] for name in ("bytes_read", "bits_per_weight", "kl")} for plan in self.plans]
        return {**{name: getattr(self, name) for name in names}, "plans": plans}


class ExportJobs(WorkQueue[_ExportJob]):
    """The exports of the app, one of which works at a time."""

    def describe(self) -> dict[str, Any]:
        """All jobs, where their models go, and what is missing to export anything."""
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        return {**self.list(), "folder": str(exports_folder()), "missing": missing, "install": INSTALL}

    def add(
        self,
        source: str,
        name: str | None = None,
        bits: int | None = None,
        calibration_tokens: Annotated[int, Meta(ge=1)] | None = None,
    ) -> dict[str, Any]:
        """Queue an export.

        Args:
            source: path of a checkpoint folder, or its id on the hub.
            name: name of the model, and of its folder; None for the last part of the source.
            bits: bits of all weights: 2, 4 or 8; None to measure plans and choose one.
            calibration_tokens: most tokens of calibration text; None for the default.

        Raises:
            InputError: a package is missing, a value cannot be used, or a model has the name.
        """
        if missing := self.describe()["missing"]:
            raise InputError(f"export needs the package {missing[0]}", INSTALL)
        source = source.strip()
        if not source:
            raise InputError("the source is empty", "give a checkpoint folder, or org/name on the hub")
        if bits not in {None, 2, 4, 8}:
            raise InputError(f"bits is {bits}", "give 2, 4 or 8")
        last = re.split(r"[\\/]", source.rstrip("\\/"))[-1].partition(":")[0]
        chosen = (name or "").strip() or last.removesuffix(".gguf").removesuffix(".onnx")
        job = _ExportJob(secrets.token_hex(8), source, chosen, bits, calibration_tokens)
        with self._changed:
            if not _NAME.fullmatch(chosen) or chosen == BUNDLED_MODEL:
                raise InputError(
                    f"{chosen!r:.80} cannot be the name of a model",
                    "use letters, digits, spaces, dots, hyphens and underscores, at most 64 of them",
                )
            active = [each for each in self._items.values() if each.state not in ENDED]
            if any(each.name == chosen for each in active) or job.destination.exists():
                raise InputError(f"there is a model with the name {chosen}", "choose another name, or remove that one")
            if len(active) >= _MAX_JOBS:
                raise InputError(f"{_MAX_JOBS} exports wait already", "cancel some of them")
            for key in [key for key, each in self._items.items() if each.state in ENDED][: -_MAX_JOBS or None]:
                del self._items[key]
            self._items[job.key] = job
            self._wake()
            return self._told(job)

    def choose(self, key: str, plan: int) -> dict[str, Any]:
        """Export one of the plans that were measured.

        Args:
            key: the job's key.
            plan: index of the plan.

        Raises:
            RefusedError: there is no such job.
            InputError: there is no such plan, or the job does not wait for a choice.
        """
        with self._changed:
            job = self._of(key)
            if job.state is not WorkState.CHOOSING:
                raise InputError(f"the export of {job.name} does not wait for a choice", "reload the page")
            if not 0 <= plan < len(job.plans):
                raise InputError(f"plan is {plan}", f"give 0 to {len(job.plans) - 1}")
            job.chosen = plan
            job.state = WorkState.QUEUED
            self._wake()
            return self._told(job)

    def cancel(self, key: str) -> dict[str, Any]:
        """End a job; what it has written is removed. A job that has ended is taken off the list.

        Raises:
            RefusedError: there is no such job.
        """
        with self._changed:
            job = self._of(key)
            if job.state in ENDED:
                del self._items[key]
                return self._told(job, "removed")
            if job.state not in {WorkState.MEASURING, WorkState.EXPORTING}:
                self._end(job, WorkState.CANCELLED)
            # It reads a flag and closes a pipe; the thread of the job sets its state.
            job.cancellation.cancel()
            return {"job": job.as_object()}

    def close(self) -> None:
        """End the job that works."""
        thread = self._close()
        for job in self._items.values():
            job.cancellation.cancel()
        if thread is not None:
            thread.join()
        for job in self._items.values():
            job.remove_work()

    def _begin(self, work: _ExportJob) -> None:
        work.state = WorkState.MEASURING if work.bits is None and work.chosen is None else WorkState.EXPORTING
        work.stage, work.fraction = "", 0.0
        self._told(work)

    def _do(self, work: _ExportJob) -> None:
        state, error = outcome("the export", lambda: self._work(work))
        if state is not WorkState.DONE or work.state is WorkState.EXPORTING:  # else it waits for a choice
            self._end(work, state, error)
        if work.state is WorkState.DONE:
            self._events.publish("models")

    def _work(self, job: _ExportJob) -> None:
        arguments: dict[str, Any] = {"source": job.source, "calibration_tokens": job.calibration_tokens}

        def progress(stage: str, fraction: float) -> None:
            with self._changed:
                job.stage, job.fraction = stage, fraction
                self._told(job)

        if job.state is WorkState.MEASURING:
            arguments["work"] = str(job.work)
            found = run_job("frontier", arguments, progress, job.cancellation)
            with self._changed:
                job.cancellation.check()
                job.plans, job.state = list(found["plans"]), WorkState.CHOOSING
                self._told(job)
            return
        job.destination.parent.mkdir(parents=True, exist_ok=True)
        arguments |= {"destination": str(job.destination), "bits": job.bits}
        if job.chosen is not None:
            # Beside the work folder, which must hold nothing else before it is used.
            plan = job.work.with_suffix(".toml")
            write_atomically(plan, str(job.plans[job.chosen]["plan"]).encode())
            arguments |= {"work": str(job.work), "plan": str(plan)}
        result = run_job("export", arguments, progress, job.cancellation)
        with self._changed:
            job.result = result

    def _end(self, job: _ExportJob, state: WorkState, error: str = "") -> None:
        job.remove_work()
        with self._changed:
            job.state, job.error = state, error
            self._told(job)
