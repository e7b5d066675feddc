"""Precision of forward passes: bfloat16 where the hardware supports it."""

from __future__ import annotations

import contextlib
import functools

import torch


@functools.cache
def native_bfloat16(kind: str) -> bool:
    """Whether a device of this kind multiplies bfloat16 matrices in hardware."""
    if kind == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return kind == "cpu" and bool(torch.cpu._is_avx512_bf16_supported())


def autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return bfloat16 autocast on machines with native support, otherwise a context that does nothing."""
    if native_bfloat16(device.type):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
