"""Options by name, which type checkers and editors read; written by tests/support/generated_texts.py."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from ..blocks.commit_rules import CommitRule
from ..speculation.choice import DraftSampling, Speculation
from ..strategies.lossy import LossyRule
from ..strategies.strategy import Strategy
from ..structure.response_format import ResponseFormat


class LoadKeywords(TypedDict, total=False):
    """The options of `LoadOptions` by name."""

    device: str
    threads: int | None
    power: str
    context: int | None
    kv: str
    prefill: str
    tool_format: str
    cache: bool
    prefix_cache: int | None
    overflow: str | None
    lossy_parking: bool
    lossy_image_tokens: float
    prefix_disk: int
    tokenizer: str | os.PathLike[str] | None
    draft: str | os.PathLike[str] | None
    draft_device: str
    anchor: str | os.PathLike[str] | None
    lora: Sequence[str]
    control_vectors: Sequence[str]
    history: bool
    learned: bool
    parallel: int
    max_waiting: int


class GenerateKeywords(TypedDict, total=False):
    """The options of `GenerateOptions` by name."""

    block_rule: CommitRule | str | None
    block_size: int | None
    lossy_block_cache: bool
    lossy: LossyRule | str | None
    adapter: str | None
    control: str | None
    control_strength: float
    num_beams: int
    beam_groups: int
    diversity_penalty: float
    length_penalty: float
    best_first: bool
    extract: str | None
    cntp: bool
    adadec: bool
    penalty_alpha: float
    trials: int
    entropy: float
    vote: bool
    vote_by: str | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repeat_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    strategies: Sequence[Strategy]
    least_confidence: float
    ignore_eos: bool
    logprobs: int | None
    n: int
    best_of: int | None
    early_stop: float
    branch: bool
    seed: int | None
    suffix: str | None
    suffix_first: bool | None
    extra: Sequence[Mapping[str, str]]
    document: str | None
    raw: bool
    system: str | None
    answer_start: str | Sequence[int]
    special_tokens_in_messages: bool
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    parse_answer: bool
    template_variables: Mapping[str, Any] | None
    speculation: Speculation
    exact: bool
    draft_sampling: DraftSampling
    explain: bool
    overflow: str | None
    keep_prefix: bool
    response_format: ResponseFormat | None
    grammar_aligned: int
