"""What keeps this process from using the whole processor: its CPU affinity and its container's CPU quota."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import psutil


def cpu_quota(root: Path = Path("/")) -> float | None:
    """How many processors' time the control groups (cgroups) of this process allow it; None for no limit.

    Args:
        root: the folder with `proc` and `sys`.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            mounts = [root / "sys/fs/cgroup"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / name for name in (controllers, "cpu")]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for mount in mounts:
            # Inside a container the path may be that of the host, while the mount holds the container's own group.
            folders = [mount.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
            quotas += [quota for quota in map(_quota, folders) if quota is not None]
    return min(quotas, default=None)


def _quota(group: Path) -> float | None:
    """The quota of one control group, in processors."""
    try:
        if (group / "cpu.max").is_file():
            quota, period = (group / "cpu.max").read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        processors = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return processors if processors > 0 else None


def allowed_cpus() -> frozenset[int] | None:
    """Numbers of the logical processors that this process may run on; None where the system does not tell (macOS)."""
    allowed: frozenset[int] | None = None
    if sys.platform != "darwin":
        with suppress(OSError, psutil.Error):
            allowed = frozenset(psutil.Process().cpu_affinity()) or None
    return allowed
