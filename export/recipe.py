"""The choices of one export: weight formats, context length, calibration, draft."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..models.draft_heads import HeadKind
from ..models.manifest import MIN_CONTEXT, GraphLayout, Method, WeightFormat
from .allocation.budget import Budget
from .checkpoint.config import DecoderConfig
from .checkpoint.layer_weights import FusedLinear, QuantPlan
from .checkpoint.layout import PER_LAYER_EMBEDDING, fused_linears
from .npu.npu_request import NpuRequest

FP32: Final = WeightFormat(32)
INT8: Final = WeightFormat(8, 32)
INT4: Final = WeightFormat(4, 32)
INT2: Final = WeightFormat(2, 32)

BLOCKS: Final = (32, 64, 128)
QUANTIZED_BITS: Final = (2, 4, 8)
DEFAULT_METHODS: Final[Mapping[int, Method]] = {2: Method.K_QUANT, 4: Method.K_QUANT, 8: Method.RTN}
"""Method by bit width, without calibration. At 8 bits, round-to-nearest is nearly lossless and the fastest."""
CALIBRATED_METHODS: Final[Mapping[int, Method]] = {2: Method.GPTQ, 4: Method.GPTQ, 8: Method.K_QUANT}
"""Method by bit width, where statistics of the linears' inputs are known."""
DEFAULT_CALIBRATION_TOKENS: Final = 16384
"""Maximum tokens of calibration text by default, except for models with narrow linears."""
DEFAULT_CONTEXT_LIMIT: Final = 32768
"""Longest context exported by default: the rotary table costs 4 * head_dim bytes a position."""
LONGEST_CONTEXT: Final = 1 << 20
"""Longest context exported at all, unless the checkpoint itself has a longer one."""
_VOCABULARY_LINEARS: Final = ("embedding", PER_LAYER_EMBEDDING, "head")


@dataclass(frozen=True)
class CalibrationRequest:
    """The text that the model reads before its weights are quantized.

    Raises:
        InputError: `max_tokens` is less than 1, or the seed is negative.
    """

    file: Path | None = None
    """A text file, or a .jsonl file of conversations; None for text that the model itself generates."""
    max_tokens: int | None = None
    """Maximum number of tokens; None for as many as the widest linear needs."""
    seed: int = 0
    """Random seed of the text, generated or chosen from the file, and of the plan search."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InputError(
                f"calibration needs at least 1 token, not {self.max_tokens}",
                f"give a number such as {DEFAULT_CALIBRATION_TOKENS}",
            )
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}", "it must be 0 or more")


@dataclass(frozen=True)
class MixedPrecisionRequest:
    """A weight format for each linear, found by a search or read from a plan file.

    Raises:
        InputError: not exactly one of `budget` and `plan` is given.
    """

    budget: Budget | None = None
    """What all linears together may take; None where a plan is given."""
    plan: Path | None = None
    """A plan file to follow instead of searching."""
    max_seconds: float | None = None
    """Time limit of the search; None for ten minutes."""
    low_rank_correction: bool = False
    """Whether 2-bit linears may get a low-rank correction (QERA)."""
    zero_points: bool = False
    """Whether blocks have zero points."""
    half_scales: bool = False
    """Whether scales are stored in float16."""
    bandwidth: float | None = None
    """Memory bandwidth, in bytes a second, of another machine whose speed the report predicts."""

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.plan is None):
            raise InputError(
                "mixed weights need either a budget or a plan, not both", "add --budget 3.5bpw, or --plan FILE"
            )


@dataclass(frozen=True)
class DraftRequest:
    """A draft model that is exported with the target.

    Raises:
        InputError: `vocabulary_size` is negative.
    """

    source: Path | None = None
    """The draft's checkpoint; None for a draft made of the target's own layers."""
    vocabulary_size: int | None = None
    """Number of tokens that the draft's LM head keeps; 0 for the fastest number, None for all."""
    weight_format: WeightFormat | None = None
    """Format of the draft checkpoint's weights; None for the target's default."""

    def __post_init__(self) -> None:
        if self.vocabulary_size is not None and self.vocabulary_size < 0:
            raise InputError(
                f"the draft's vocabulary must be a positive number of tokens, not {self.vocabulary_size}",
                "give a number of at least 1, or auto",
            )


class HeadVocabulary(Enum):
    """How many tokens the LM head of a multi-token-prediction module has, where no number is given."""

    DEFAULT = auto()
    """A fixed number if the export has text to rank tokens by and the vocabulary is much larger, else all."""
    ALL = auto()
    """All of them: the LM head is the target's."""
    FASTEST = auto()
    """The number with the most expected tokens a second on this machine."""


@dataclass(frozen=True)
class HeadRequest:
    """A draft head that is exported with its target.

    Raises:
        InputError: `vocabulary` is less than 1, or is given for a head with a vocabulary of its own.
    """

    source: Path | None
    """The head's checkpoint; None for a multi-token-prediction module, which is part of the target's."""
    kind: HeadKind
    weight_format: WeightFormat | None = None
    """Format of its weights; None for the target's default."""
    optional: bool = False
    """Whether the model is exported without it, with a note, where it cannot be used."""
    vocabulary: int | HeadVocabulary = HeadVocabulary.DEFAULT
    """Number of tokens that the LM head of a multi-token-prediction module has."""

    def __post_init__(self) -> None:
        if self.kind is not HeadKind.MTP and self.vocabulary is not HeadVocabulary.DEFAULT:
            raise InputError(
                "only a multi-token-prediction module can be trimmed; other draft heads have a vocabulary of their own",
                "leave the vocabulary out",
            )
        if isinstance(self.vocabulary, int) and self.vocabulary < 1:
            raise InputError(
                f"the draft's vocabulary must be a positive number of tokens, not {self.vocabulary}",
                "give a number of at least 1, or auto",
            )

    @property
    def needs_text(self) -> bool:
        """Whether tokens have to be ranked by a text."""
        return self.vocabulary not in (HeadVocabulary.DEFAULT, HeadVocabulary.ALL)


def _float_format(name: str) -> WeightFormat:  # noqa: ARG001 -- the same for every matrix
    return FP32


@dataclass(frozen=True)
class ExportRecipe:
    """The choices of one export.

    Raises:
        InputError: a format or the context cannot be exported, or two choices exclude each other.
    """

    body: WeightFormat | None = INT4
    """Format of the linears inside the layers; None for the format nearest to how each one is stored."""
    head: WeightFormat | None = None
    """Format of the LM head and of the embedding; None for that of `body`."""
    context: int | None = None
    """Number of positions the graph serves; None for the checkpoint's default, at most `DEFAULT_CONTEXT_LIMIT`."""
    method: Method | None = None
    """Quantization method; None for `DEFAULT_METHODS`, or `CALIBRATED_METHODS` in a calibrated export."""
    layout: GraphLayout = GraphLayout.EDGE
    """Which inputs and outputs the graph has."""
    calibration: CalibrationRequest | None = None
    """Calibration text; None for no calibration, or for the default text where another choice needs one."""
    awq: bool = False
    """Whether AWQ scaling precedes quantization."""
    mixed_precision: MixedPrecisionRequest | None = None
    """Formats chosen linear by linear, instead of `body` and `head`."""
    draft: DraftRequest | None = None
    """The draft model to export with the target; None for none."""
    draft_head: HeadRequest | None = None
    """The draft head to export with the target; None for none."""
    hidden_states: bool = False
    """Whether the graph gives the states before its LM head too, for embeddings."""
    npu: NpuRequest | None = None
    """The static graphs for NPUs to write beside model.onnx; None for none."""
    gpu: bool = False
    """Whether to write the forms of the graph for GPUs beside model.onnx."""
    report: bool = False
    """Whether to write a report even if nothing else needs calibration text."""
    work_folder: Path | None = None
    """Folder that keeps intermediate results; None for one in the cache, which is removed at the end."""

    def __post_init__(self) -> None:
        if self.layout is not GraphLayout.EDGE and (self.draft or self.calibrated):
            raise InputError("calibration, mixed weights and drafts need edge-run's own layout", "leave --layout out")
        if self.draft is not None and self.draft_head is not None:
            raise InputError("a model has one draft: a draft model or a draft head", "leave one of them out")
        if self.draft_head is not None and (self.layout is not GraphLayout.EDGE or self.npu is not None or self.gpu):
            raise InputError(
                "a draft head needs edge-run's own layout, on the CPU", "leave --layout and --device out, or the head"
            )
        if self.layout is not GraphLayout.EDGE and self.hidden_states:
            raise InputError("--hidden-states needs edge-run's own layout", "leave --layout or --hidden-states out")
        if self.layout is not GraphLayout.EDGE and (self.npu is not None or self.gpu):
            kind = "gpu" if self.npu is None else "npu"
            raise InputError(f"--device {kind} needs edge-run's own layout", "leave --layout or --device out")
        for weight_format in filter(None, (self.body, self.head_format)):
            _require_exportable(weight_format)
        if self.method is not None and {self.body, self.head_format} == {FP32}:
            raise InputError("--method has no effect on fp32 weights, which are not quantized", "leave --method out")
        if self.context is not None and self.context < MIN_CONTEXT:
            raise InputError(f"a context of {self.context} positions is too short", f"give at least {MIN_CONTEXT}")

    def require_expressible(self, config: DecoderConfig) -> None:
        """Refuse choices that a model with layers of different kinds cannot have.

        Raises:
            InputError: the recipe has one of them, and the model such layers.
        """
        if config.keeps_states:
            has = "convolution layers" if config.convolution is not None else "linear attention layers"
        elif not config.uniform:
            has = "layers that differ in their heads, caches or inputs"
        elif config.experts is not None and self.draft is not None and self.draft.source is None:
            raise InputError(
                f"--draft: a draft of its own layers is not supported for {config.family} models, which have experts",
                "leave it out, or give the checkpoint of a draft model",
            )
        else:
            return
        asked = {
            "calibration (--method gptq, --awq, --weights mixed)": self.calibrated and not config.keeps_states,
            "--draft": self.draft is not None and (self.draft.source is None or not config.keeps_states),
            "--report": self.report and not config.keeps_states,
            "--layout genai": self.layout is not GraphLayout.EDGE,
            "--device npu": self.npu is not None,
            "--device gpu": self.gpu and config.keeps_states,
        }
        for choice in (name for name, is_asked in asked.items() if is_asked):
            raise InputError(f"{choice}: not supported for {config.family} models, which have {has}", "leave it out")

    @property
    def calibrated(self) -> bool:
        """Whether weights are quantized with statistics of the linears' inputs."""
        return bool(self.calibration or self.awq or self.mixed_precision) or self.method is Method.GPTQ

    @property
    def data_free(self) -> bool:
        """Whether the export needs no text."""
        ranked = self.draft_head is not None and self.draft_head.needs_text
        return not (self.calibrated or self.draft or self.report or ranked)

    @property
    def methods(self) -> Mapping[int, Method]:
        """Quantization method by bit width, for linears whose plan entry does not name one."""
        if self.method is not None:
            return dict.fromkeys(QUANTIZED_BITS, self.method)
        return CALIBRATED_METHODS if self.calibrated else DEFAULT_METHODS

    @property
    def head_format(self) -> WeightFormat | None:
        """Format of the LM head and of the embedding, None as in `body`."""
        return self.body if self.head is None else self.head

    def require_default_scales(self, source: str) -> None:
        """Refuse zero points and scales in another form for a kind of source, such as "GGUF file".

        Raises:
            InputError: the recipe has one of them.
        """
        for weight_format in filter(None, (self.body, self.head_format)):
            asked = {
                "--zero-points": weight_format.zero_points,
                "--half-scales": weight_format.half_scales,
            }
            for option in (name for name, has in asked.items() if has):
                raise InputError(f"{option} is not supported for a {source}", f"leave {option} out")

    def context_for(self, config: DecoderConfig) -> int:
        """Number of positions that the exported graph of a model serves.

        Raises:
            InputError: the recipe's context is longer than can be exported.
        """
        if self.context is None:
            return min(config.default_positions, DEFAULT_CONTEXT_LIMIT)
        longest = max(config.max_positions, LONGEST_CONTEXT)
        if self.context > longest:
            raise InputError(f"a context of {self.context} positions is too long", f"give at most {longest}")
        return self.context

    def quant_plan(
        self, config: DecoderConfig, stored_format: Callable[[str], WeightFormat] = _float_format
    ) -> dict[str, WeightFormat]:
        """The quantization plan of a model; a linear that keeps its format takes the widest of its matrices.

        Args:
            config: the model's configuration.
            stored_format: returns the format nearest to how a checkpoint tensor is stored, by its name.

        Raises:
            InputError: the experts of a layer cannot have the format.
        """
        plan = {}
        for linear in fused_linears(config):
            requested = self.head_format if linear.name in _VOCABULARY_LINEARS else self.body
            weight_format = FP32 if linear.exact else requested or _widest(linear, stored_format)
            require_expert_format(linear, weight_format)
            plan[linear.name] = weight_format
        return plan


@dataclass(frozen=True)
class ExportRequest:
    """One export: what to read, where to write, and how."""

    source: Path
    """A checkpoint folder, a .gguf file (the first part of a split model), an .onnx file or a folder that holds one."""
    destination: Path
    """The bundle's folder; an earlier bundle there is replaced at the end, all at once."""
    recipe: ExportRecipe
    command: str = ""
    """The command line, recorded in the manifest."""


def with_methods(plan: QuantPlan, methods: Mapping[int, Method]) -> dict[str, WeightFormat]:
    """Fill in the quantization method of each linear: the one it has, or that of `methods` for its bit width."""
    return {
        linear: each if each.bits == FP32.bits else replace(each, method=each.method or methods.get(each.bits))
        for linear, each in plan.items()
    }


def require_expert_format(linear: FusedLinear, weight_format: WeightFormat) -> None:
    """Refuse a format of a linear of experts that their operator does not have.

    Raises:
        InputError: blocks do not divide the linear's columns, or the format has zero points or float16 scales.
    """
    if linear.experts and weight_format.block and linear.columns % weight_format.block:
        raise InputError(
            f"the experts of {linear.name} have {linear.columns} columns, "
            f"which is not a multiple of the block size {weight_format.block}",
            "choose smaller blocks, or fp32",
        )
    if linear.experts and (weight_format.zero_points or weight_format.half_scales):
        lacks, option = (
            ("zero points", "--zero-points") if weight_format.zero_points else ("float16 scales", "--half-scales")
        )
        raise InputError(f"{linear.name} has experts, whose operator does not support {lacks}", f"leave {option} out")


def _require_exportable(weight_format: WeightFormat) -> None:
    if weight_format.offsets:
        raise InputError(
            "weights with offsets cannot be requested", "they are only kept where a GGUF file already has them"
        )
    if weight_format.rank:
        raise InputError(
            "a low-rank correction cannot be requested for all weights",
            "use mixed weights, which choose the linears that get one",
        )
    if weight_format.bits == FP32.bits and weight_format.block == 0:
        return
    if weight_format.bits not in QUANTIZED_BITS or weight_format.block not in BLOCKS:
        raise InputError(
            f"{weight_format.bits}-bit weights in blocks of {weight_format.block} are not supported",
            "supported are fp32, and 2, 4 and 8 bits in blocks of " + ", ".join(map(str, BLOCKS)),
        )


def _widest(linear: FusedLinear, stored_format: Callable[[str], WeightFormat]) -> WeightFormat:
    widest = max(map(stored_format, linear.weights), key=lambda each: (each.bits, each.offsets))
    # The embedding's operator has no offsets, and the head may share the embedding.
    return INT8 if widest.offsets and linear.name in _VOCABULARY_LINEARS else widest
