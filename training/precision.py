"""The arithmetic a pass runs in: bfloat16 matrix products where the machine does them natively."""

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
    """bfloat16 autocast on machines that gain from it, otherwise nothing."""
    if native_bfloat16(device.type):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
