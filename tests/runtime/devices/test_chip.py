"""What identifies a chip and a build, from what each system says about them."""

from __future__ import annotations

import platform

import pytest

from edgerun.runtime.devices import chip
from edgerun.runtime.devices.chip import (
    build_platform,
    linux_features,
    linux_name,
    running_architecture,
    windows_features,
    windows_name,
)
from edgerun.runtime.devices.processor import machine, processor

X86 = """
processor	: 0
model name	: Intel(R) Core(TM) i7-1260P
flags		: sse2 avx avx2 avx_vnni

processor	: 1
model name	: Intel(R) Core(TM) i7-1260P
flags		: avx2 sse2 avx avx_vnni
"""
ARM = """
processor	: 0
Features	: fp asimd asimddp i8mm
CPU implementer	: 0x41
CPU part	: 0xd46

processor	: 4
Features	: fp asimd asimddp i8mm sve
CPU implementer	: 0x41
CPU part	: 0xd47
"""


def test_linux_names_the_chip_or_the_kinds_of_its_cores() -> None:
    assert linux_name(X86) == "Intel(R) Core(TM) i7-1260P"
    assert linux_name(ARM) == "CPU implementer 0x41, CPU part 0xd46, CPU part 0xd47"
    assert linux_name("") == ""


def test_linux_features_are_those_of_all_cores_in_any_order() -> None:
    assert linux_features(X86) == "avx avx2 avx_vnni sse2"
    assert linux_features(ARM) == "asimd asimddp fp i8mm"
    assert linux_features("") == ""


def test_emulated_and_native_builds_differ() -> None:
    assert running_architecture() in build_platform().split()
    snapdragon = "Snapdragon(R) X Elite - X1E80100"
    assert windows_name(snapdragon, {"PROCESSOR_IDENTIFIER": "ARMv8 (64-bit) Family 8"}) != windows_name(snapdragon, {})
    assert windows_features(lambda number: number in (10, 40)) == f"{1 << 40 | 1 << 10:x}"


@pytest.mark.parametrize("part", ["build_platform", "chip_name", "chip_features"])
def test_every_part_is_in_the_keys_and_the_platform_module_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def hangs(*_: object) -> str:
        raise AssertionError

    for name in ("machine", "processor", "uname", "system", "node"):
        monkeypatch.setattr(platform, name, hangs)
    known = [function.__wrapped__() for function in (chip.build_platform, chip.chip_name, chip.chip_features)]
    assert "\0".join(known) == processor.__wrapped__()
    monkeypatch.setattr(f"edgerun.runtime.devices.processor.{part}", lambda: "another")
    assert processor.__wrapped__() != "\0".join(known)
    assert machine.__wrapped__()
