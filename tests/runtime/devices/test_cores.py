"""Cores and limits of recorded machines: which threads compute where the user gives no number."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from edgerun.runtime.devices.processor import (
    Core,
    allowed_cpus,
    apple_cores,
    available_memory,
    cpu_list,
    cpu_quota,
    default_threads,
    linux_cores,
    physical_cores,
    threads_for,
    usable_cores,
    windows_cores,
)


def write_tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n", encoding="ascii")
    return root


def test_intel_with_performance_and_efficiency_cores_on_linux(tmp_path: Path) -> None:
    # A Core i7-12700: 8 cores with two logical processors each, and 4 efficiency cores.
    pairs = {f"system/cpu/cpu{n}/topology/core_cpus_list": f"{n - n % 2}-{n - n % 2 + 1}" for n in range(16)}
    single = {f"system/cpu/cpu{n}/topology/core_cpus_list": f"{n}" for n in range(16, 20)}
    kinds = {"cpu_core/cpus": "0-15", "cpu_atom/cpus": "16-19", "system/cpu/cpufreq/policy0/affected_cpus": "0"}
    cores = linux_cores(write_tree(tmp_path, {**pairs, **single, **kinds}))
    assert [core.fast for core in cores] == [True] * 8 + [False] * 4
    assert cores[1] == Core(frozenset({2, 3}), fast=True)
    assert threads_for(cores, None, None) == 8
    assert threads_for(cores, frozenset({0, 1, 2, 16, 17}), None) == 2
    assert threads_for(cores, frozenset({16, 17, 18}), None) == 3
    assert threads_for(cores, None, 2.5) == 2
    assert threads_for(cores, None, 0.4) == 1


def test_arm_with_big_and_little_cores_on_linux(tmp_path: Path) -> None:
    # An RK3588: four Cortex-A55 and four Cortex-A76; an older kernel names the siblings differently.
    capacities = {f"system/cpu/cpu{n}/cpu_capacity": "530" if n < 4 else "1024" for n in range(8)}
    topology = {f"system/cpu/cpu{n}/topology/thread_siblings_list": f"{n}" for n in range(8)}
    cores = linux_cores(write_tree(tmp_path, {**capacities, **topology}))
    assert [core.fast for core in cores] == [False] * 4 + [True] * 4
    assert threads_for(cores, None, None) == 4


def test_one_kind_of_cores_on_linux(tmp_path: Path) -> None:
    # Four cores with two logical processors each, numbered as AMD does; processor 7 is offline.
    topology = {f"system/cpu/cpu{n}/topology/core_cpus_list": f"{n % 4},{n % 4 + 4}" for n in range(7)}
    topology["system/cpu/cpu3/topology/core_cpus_list"] = "3"
    assert threads_for(linux_cores(write_tree(tmp_path, topology)), None, None) == 4
    assert linux_cores(tmp_path / "absent") == ()
    assert threads_for((), None, 1.0) == 0


@pytest.mark.parametrize(
    ("values", "fast", "slow"),
    [
        ({"hw.nperflevels": 2, "hw.perflevel0.physicalcpu": 4, "hw.physicalcpu": 8, "hw.logicalcpu": 8}, 4, 4),
        ({"hw.perflevel0.physicalcpu": 10, "hw.physicalcpu": 14, "hw.logicalcpu": 14}, 10, 4),
        ({"hw.physicalcpu": 6, "hw.logicalcpu": 12}, 6, 0),
        ({}, 0, 0),
    ],
    ids=["M1", "M4 Pro", "Intel", "none"],
)
def test_apple(values: Mapping[str, int], fast: int, slow: int) -> None:
    cores = apple_cores(lambda name: values.get(name, 0))
    assert [core.fast for core in cores] == [True] * fast + [False] * slow
    assert len({cpu for core in cores for cpu in core.cpus}) == values.get("hw.logicalcpu", 0)


def windows_record(efficiency_class: int, *groups: tuple[int, int], relation: int = 0) -> bytes:
    """A SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX with a PROCESSOR_RELATIONSHIP, masks and groups given."""
    word = struct.calcsize("P")
    masks = b"".join(mask.to_bytes(word, "little") + struct.pack("<HHHH", group, 0, 0, 0) for mask, group in groups)
    smt = int(groups[0][0].bit_count() > 1)
    return struct.pack("<IIBB20xH", relation, 32 + len(masks), smt, efficiency_class, len(groups)) + masks


def test_windows() -> None:
    # Two performance cores with two logical processors each and four efficiency cores, as on a Core i3-1215U.
    records = b"".join(windows_record(1, (0b11 << 2 * n, 0)) for n in range(2))
    records += windows_record(7, (0b1, 0), relation=3)
    records += b"".join(windows_record(0, (1 << 4 + n, 0)) for n in range(4))
    cores = windows_cores(records)
    assert cores[:3] == (Core(frozenset({0, 1})), Core(frozenset({2, 3})), Core(frozenset({4}), fast=False))
    assert threads_for(cores, None, None) == 2
    assert windows_cores(windows_record(0, (1 << 5, 1))) == (Core(frozenset({69})),)
    assert windows_cores(records[:-1])[-1] == Core(frozenset({6}), fast=False)
    assert windows_cores(b"") == windows_cores(b"\0" * 40) == ()


@pytest.mark.parametrize(
    ("groups", "limits", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/", {"cpu.max": "max 100000"}, None),
        (
            "0::/user.slice/app.scope",
            {"user.slice/cpu.max": "400000 100000", "user.slice/app.scope/cpu.max": "max 100000"},
            4.0,
        ),
        (
            "9:cpu,cpuacct:/docker/4f3a\n3:cpuset:/docker/4f3a\n0::/",
            {"cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/", {"cpu.max": "damaged"}, None),
        ("", {}, None),
    ],
    ids=["v2", "v2 without limit", "v2 of a parent", "v1 in a container", "v1 without limit", "damaged", "none"],
)
def test_quotas_of_containers(tmp_path: Path, groups: str, limits: Mapping[str, str], quota: float | None) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    assert cpu_quota(write_tree(tmp_path, {"proc/self/cgroup": groups, **files})) == quota


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        (
            "0::/",
            {"memory.max": "9000", "memory.current": "8000", "memory.stat": "active_file 5\ninactive_file 2"},
            1007,
        ),
        (
            "4:memory:/docker/4f3a\n0::/",
            {
                "memory/memory.limit_in_bytes": "9000",
                "memory/memory.usage_in_bytes": "9000",
                "memory/memory.stat": "active_file 0\ninactive_file 0\ntotal_active_file 10\ntotal_inactive_file 20",
            },
            30,
        ),
        (
            "0::/app",
            {
                "app/memory.max": "9000",
                "app/memory.current": "9000",
                "app/memory.stat": "active_file 0\ninactive_file 0",
                "memory.max": "max",
            },
            0,
        ),
        (
            "0::/",
            {"memory.max": "max", "memory.current": "8000", "memory.stat": "active_file 5\ninactive_file 2"},
            None,
        ),
        ("0::/", {"memory.max": "9000", "memory.current": "damaged", "memory.stat": "damaged"}, None),
        ("", {}, None),
    ],
    ids=["v2", "v1 in a container", "full", "without limit", "damaged", "none"],
)
def test_memory_of_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, str], available: int | None
) -> None:
    memory = psutil.virtual_memory()._replace(available=1 << 40)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    tree = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    root = write_tree(tmp_path, {"proc/self/cgroup": groups, **tree})
    assert available_memory(root) == (memory.available if available is None else available)


def test_lists_of_processors() -> None:
    assert cpu_list("0-2,5,7-8") == {0, 1, 2, 5, 7, 8}
    assert cpu_list("") == cpu_list("0-") == cpu_list("a") == frozenset()


def test_this_machine() -> None:
    assert 1 <= default_threads() <= usable_cores() <= (os.cpu_count() or 1)
    allowed = allowed_cpus()
    assert allowed is None or allowed
    if physical_cores():
        assert sum(len(core.cpus) for core in physical_cores()) <= (os.cpu_count() or 1)


AFFINITIES = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import edgerun
with edgerun.load(sys.argv[1], cache=False):
    print({cpu for task in os.listdir("/proc/self/task") for cpu in os.sched_getaffinity(int(task))})
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPU affinity")
def test_no_thread_computes_where_the_process_may_not_run(tiny_bundle: Path) -> None:
    command = [sys.executable, "-c", AFFINITIES, str(tiny_bundle)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == f"{{{min(os.sched_getaffinity(0))}}}"
