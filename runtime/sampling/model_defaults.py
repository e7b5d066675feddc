"""How a model samples by default, from the files beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from ...errors import BundleError, InputError
from ...models.bundle import Bundle
from ...models.variants import GENAI_CONFIG
from .sampler import SamplingParams

_Number = TypeVar("_Number", int, float)
_LARGEST = 1e30


def model_defaults(bundle: Bundle) -> SamplingParams:
    """How a model samples by default: greedily, where its files do not say that it samples.

    Raises:
        BundleError: a value is not a number, or out of range.
    """
    name = "generation_config.json"
    config = bundle.json_file(name)
    if not config and isinstance(search := bundle.json_file(GENAI_CONFIG).get("search"), dict):
        name, config = GENAI_CONFIG, search
    try:
        sampled = SamplingParams(
            temperature=_number(config, "temperature", 1.0),
            top_k=_number(config, "top_k", 0),
            top_p=_number(config, "top_p", 1.0),
            min_p=_number(config, "min_p", 0.0),
            repeat_penalty=_number(config, "repetition_penalty", 1.0),
        )
    except InputError as error:
        raise BundleError(f"{bundle.folder / name}: {error.what}", error.hint) from error
    return sampled if config.get("do_sample") else SamplingParams(repeat_penalty=sampled.repeat_penalty)


def _number(config: Mapping[str, Any], name: str, default: _Number) -> _Number:
    value = config.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -_LARGEST < value < _LARGEST:
        raise InputError(f"{name} is {value!r:.60}", "it must be a number")
    return type(default)(value)
