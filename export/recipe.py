"""The choices of one export: each is an option of `edge-run export`, declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..errors import InputError
from ..models.manifest import MIN_CONTEXT, GraphLayout, Method, WeightFormat
from ..runtime.arguments.argument_types import documented, option, options_of
from .allocation.plan_costs import Budget, parse_budget
from .checkpoint.config import DecoderConfig
from .npu.static_shapes import StaticShape, parse_sizes, static_shapes
from .quantization.methods import (
    CALIBRATED_METHODS,
    DEFAULT_METHODS,
    FP32,
    INT4,
    INT8,
    formats_of_linears,
    require_exportable,
)
from .quantization.option_values import (
    PRESETS,
    ActivationsChoice,
    DeviceChoice,
    MethodChoice,
    PresetChoice,
    VisionChoice,
    WeightChoice,
)

DEFAULT_BLOCK: Final = 32
"""Weights that share a scale by default; also what GGUF files have."""
DEFAULT_CONTEXT_LIMIT: Final = 32768
"""Longest context exported by default: the rotary table costs 4 * head_dim bytes a position."""
LONGEST_CONTEXT: Final = 1 << 20
"""Longest context exported at all, unless the checkpoint itself has a longer one."""
NO_DRAFT: Final = "none"
OWN_MODULE: Final = "mtp"
"""Values of `draft` for none, and for the multi-token-prediction module of the checkpoint itself."""
DraftTokens = int | str | None
"""A number of tokens of a draft's LM head; `auto` for the fastest one, `all`, or None for the default."""
_OF_MIXED_WEIGHTS: Final = ("budget", "time_limit", "bandwidth")


@documented
@dataclass(frozen=True)
class ExportRecipe:
    """The choices of one export.

    Raises:
        InputError: a value is out of range or cannot be exported, or two choices exclude each other.
    """

    weights: WeightFormat | str | None = option(
        None,
        "Format of the weights; mixed chooses one for each linear.",
        choices=WeightChoice,
        unset="int4; weights that a .gguf or .onnx file has quantized stay as they are",
    )
    block: int | None = option(
        None,
        "Number of weights that share a scale: 32, 64 or 128. Short rows that it does not divide have smaller blocks.",
        metavar="N",
        unset=str(DEFAULT_BLOCK),
    )
    head: WeightFormat | str | None = option(
        None, "Format of the LM head and the embedding.", choices=WeightChoice, unset="as --weights"
    )
    method: str | None = option(
        None,
        "Quantization method; all but rtn and k-quant need calibration text, yaqa and learned also the extra train.",
        choices=MethodChoice,
        unset="k-quant for int4 and int2, rtn for int8",
    )
    preset: str | None = option(
        None,
        "Settings of weights, block, head, method and budget for a purpose, in place of those options.",
        choices=PresetChoice,
    )
    zero_points: bool = option(False, "Give each block a zero point.")
    half_scales: bool = option(False, "Store scales in float16, as GGUF files do: smaller, equally fast.")
    vision_weights: str | None = option(
        None,
        "Format of the weights of a vision tower; none leaves the tower out.",
        choices=VisionChoice,
        unset="int8, or fp32 with --weights fp32",
    )
    context: int | None = option(
        None,
        "Longest context to serve, in tokens.",
        metavar="N",
        least=1,
        unset="that of the checkpoint, at most 32768",
    )
    layout: GraphLayout = option(
        GraphLayout.EDGE, "Graph layout: edge-run's own, or that of ONNX Runtime GenAI.", choices=GraphLayout
    )
    device: str | None = option(
        None,
        "Also write graphs for a kind of device over the same weights: gpu, or npu with fixed shapes.",
        choices=DeviceChoice,
    )
    widths: tuple[int, ...] | str | None = option(
        None, "NPU: tokens of a pass, one graph for each.", metavar="N,N,...", unset="1,4,128"
    )
    contexts: tuple[int, ...] | str | None = option(
        None,
        "NPU: cached tokens, one graph of each width for each.",
        metavar="N,N,...",
        unset="512,2048,8192, as far as the model's context goes",
    )
    activations: str | None = option(
        None,
        "NPU: type of the inputs and outputs of linears; int16 and int8 need calibration text.",
        choices=ActivationsChoice,
        unset="float16",
    )
    hidden_states: bool = option(False, "Let the graph give hidden states too, for embeddings.")
    report: bool = option(
        False,
        "Write report.html and report.json, as calibrated and mixed exports do, and measure each matrix alone for it.",
    )
    eval: Path | None = option(
        None, "Text file from which the report's questions are made, answered beside the float model.", metavar="FILE"
    )
    budget: Budget | str | None = option(
        None,
        "Mixed weights: size or time that they may take, such as 3.5bpw, 300MB, 300MB@file or 9ms.",
        metavar="BUDGET",
    )
    plan: Path | None = option(
        None, "Mixed weights: follow this plan file, which an earlier export wrote.", metavar="FILE"
    )
    time_limit: float | None = option(
        None, "Mixed weights: time limit of the search, in minutes.", metavar="MINUTES", least=0, unset="10"
    )
    bandwidth: float | None = option(
        None,
        "Mixed weights: memory bandwidth of another machine whose speed the report predicts.",
        metavar="GB/S",
        least=0.1,
    )
    calibration: Path | None = option(
        None,
        "Calibration text: a text file, a .jsonl file of conversations, or text that the model generates.",
        metavar="FILE|self",
        unset="self, where calibration is needed",
    )
    calibration_tokens: int | None = option(
        None,
        "Maximum tokens of calibration text.",
        metavar="N",
        least=1,
        unset="16384, fewer for tiny models",
    )
    seed: int = option(0, "Seed of the generated text and of the part that is held out.", metavar="N", least=0)
    work: Path | None = option(
        None,
        "Folder for intermediate results, which make the next export faster.",
        metavar="DIR",
        unset="a temporary folder in the cache",
    )
    draft: Path | str | None = option(
        None,
        "Checkpoint of a draft model or of a draft head, on disk or on the hub; it becomes part of OUT. "
        "mtp: the multi-token-prediction module of the target; none: no draft.",
        metavar="SRC|mtp|none",
        unset="mtp, where the checkpoint has one",
    )
    draft_weights: WeightFormat | str | None = option(
        None, "Format of the draft's weights.", choices=WeightChoice, unset="as --weights, or int4"
    )
    draft_vocab: int | str | None = option(
        None,
        "Number of tokens in the LM head of the draft model, or of the multi-token-prediction module: those "
        "that the target uses most. auto: as many as are fastest on this machine.",
        metavar="N|auto|all",
        unset="all; 65536 of large vocabularies for a module, in exports that read text",
    )

    def __post_init__(self) -> None:
        if self.context is not None and self.context < MIN_CONTEXT:
            raise InputError(f"a context of {self.context} positions is too short", f"give at least {MIN_CONTEXT}")
        for name, declared in options_of(type(self)).items():
            value = getattr(self, name)
            if not isinstance(value, WeightFormat):
                declared.check(f"--{name.replace('_', '-')}", value)
        object.__setattr__(self, "layout", GraphLayout(self.layout))  # which may be given by its name
        self._apply_preset()
        self._check_weights()
        if self.device == DeviceChoice.NPU:
            parse_sizes(self.widths, self.contexts)
        else:
            self._refuse(("widths", "contexts", "activations"), "without --device npu", "add --device npu")
        if self.draft == NO_DRAFT:
            self._refuse(("draft_vocab", "draft_weights"), "on --draft none", "leave it out")
        _ = self.draft_tokens  # raises for another value of --draft-vocab
        self._check_layout()

    def _apply_preset(self) -> None:
        """Set the options of the preset, which may not have other values."""
        for name, value in {} if self.preset is None else PRESETS[PresetChoice(self.preset)].items():
            if getattr(self, name) not in (None, False, value):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"--preset {self.preset} and {flag} exclude each other", "leave one of them out")
            object.__setattr__(self, name, value)

    def _check_weights(self) -> None:
        """Check that options of mixed weights come with them, and options of a single format without them."""
        if self.mixed:
            if self.weights not in (None, WeightChoice.MIXED):
                raise InputError(f"--plan and --weights {self.weights} exclude each other", "leave one of them out")
            # The search chooses the blocks too, but not for the draft's weights.
            others = ("head",) if self.draft_weights is not None else ("head", "block")
            self._refuse(others, "with mixed weights", "leave it out")
            if (self.budget is None) == (self.plan is None):
                raise InputError(
                    "mixed weights need either a budget or a plan, not both", "add --budget 3.5bpw, or --plan FILE"
                )
            if isinstance(self.budget, str):
                parse_budget(self.budget)
        else:
            self._refuse(_OF_MIXED_WEIGHTS, "without mixed weights", "add --weights mixed")
        for weight_format in filter(None, (self.body, self.head_format, self.draft_format)):
            require_exportable(weight_format)
        if {self.body, self.head_format} == {FP32}:
            # Drafts have blocks and scales too, but no method.
            of_blocks = ("block", "zero_points", "half_scales") if self.draft_format == FP32 else ()
            self._refuse(("method", *of_blocks), "on fp32 weights, which are not quantized", "leave it out")

    def _check_layout(self) -> None:
        if self.layout is GraphLayout.EDGE:
            return
        if self.draft not in (None, NO_DRAFT) or self.calibrated or self.report or self.eval is not None:
            what = "calibration, mixed weights, drafts and reports need edge-run's own layout"
            raise InputError(what, "leave --layout out")
        if self.hidden_states:
            raise InputError("--hidden-states needs edge-run's own layout", "leave --layout or --hidden-states out")
        if self.device is not None:
            raise InputError(f"--device {self.device} needs edge-run's own layout", "leave --layout or --device out")

    def _refuse(self, names: Iterable[str], where: str, hint: str) -> None:
        """Refuse these fields where one has a value."""
        for name in names:
            if getattr(self, name) is not None and getattr(self, name) is not False:
                raise InputError(f"--{name.replace('_', '-')} has no effect {where}", hint)

    @property
    def mixed(self) -> bool:
        """Whether each linear gets a format of its own."""
        return self.weights == WeightChoice.MIXED or self.plan is not None

    @property
    def body(self) -> WeightFormat | None:
        """Format of the linears inside the layers; None for the format nearest to how each one is stored."""
        return self._format(WeightChoice.INT4 if self.mixed else self.weights)

    @property
    def head_format(self) -> WeightFormat | None:
        """Format of the LM head and of the embedding, None as in `body`."""
        return self.body if self.head is None else self._format(self.head)

    @property
    def vision_format(self) -> WeightFormat | None:
        """Format of the weights of a vision tower; None to leave it out."""
        chosen = self.vision_weights or (VisionChoice.FP32 if self.body == FP32 else VisionChoice.INT8)
        return {"fp32": FP32, "fp16": WeightFormat(16), "int8": INT8}.get(chosen)

    @property
    def draft_format(self) -> WeightFormat | None:
        """Format of the draft's weights; None where they have their checkpoint's."""
        if self.draft_weights is not None:
            return self._format(self.draft_weights)
        return INT4 if self.mixed else self.body

    def _format(self, weights: WeightFormat | str | None) -> WeightFormat | None:
        if weights is None or isinstance(weights, WeightFormat):
            return weights
        if weights == WeightChoice.MIXED:
            raise InputError("only --weights can be mixed", "give fp32, int8, int4 or int2")
        if weights == WeightChoice.FP32:
            return FP32
        bits, block = int(weights.removeprefix("int")), DEFAULT_BLOCK if self.block is None else self.block
        return WeightFormat(bits, block, zero_points=self.zero_points, half_scales=self.half_scales)

    @property
    def awq(self) -> bool:
        """Whether AWQ scaling precedes quantization."""
        return self.method is not None and self.method.startswith(MethodChoice.AWQ)

    @property
    def rounding(self) -> Method | None:
        """The method that chooses codes and scales; None for the default of each bit width."""
        if self.method is None:
            return None
        name = self.method.removeprefix("awq+")
        return {"awq": Method.RTN, "yaqa": Method.GPTQ, "learned": Method.GPTQ}.get(name) or Method(name)

    @property
    def gradients(self) -> bool:
        """Whether GPTQ weighs errors by gradients."""
        return self.learns or self.method in (MethodChoice.YAQA, MethodChoice.AWQ_YAQA)

    @property
    def learns(self) -> bool:
        """Whether the codes of GPTQ with gradients are learned further."""
        return self.method in (MethodChoice.LEARNED, MethodChoice.AWQ_LEARNED)

    @property
    def methods(self) -> Mapping[int, Method]:
        """Quantization method by bit width, for linears whose plan entry does not name one."""
        if self.rounding is not None:
            return dict.fromkeys(DEFAULT_METHODS, self.rounding)
        return CALIBRATED_METHODS if self.calibrated else DEFAULT_METHODS

    @property
    def calibrated(self) -> bool:
        """Whether inputs of linears are measured: for AWQ, GPTQ, mixed weights, integers, or by calibration or seed."""
        asked = self.calibration is not None or self.calibration_tokens is not None or self.seed != 0
        return asked or self.awq or self.mixed or self.rounding is Method.GPTQ or self.activations is not None

    @property
    def calibration_file(self) -> Path | None:
        """The file with calibration text; None for text that the model itself generates."""
        return None if self.calibration in (None, Path("self")) else self.calibration

    @property
    def parsed_budget(self) -> Budget | None:
        """What mixed weights may take; None where a plan is followed."""
        return parse_budget(self.budget) if isinstance(self.budget, str) else self.budget

    def static_shapes(self, context: int) -> tuple[StaticShape, ...]:
        """Sizes of the graphs for NPUs, of a model that serves `context` positions; empty for no such graphs.

        Raises:
            InputError: a graph's context is longer.
        """
        return static_shapes(self.widths, self.contexts, context) if self.device == DeviceChoice.NPU else ()

    @property
    def draft_tokens(self) -> DraftTokens:
        """Number of tokens in the draft's LM head.

        Raises:
            InputError: the value is neither a positive number nor a known word.
        """
        typed = self.draft_vocab
        if typed in (None, "auto", "all"):
            return typed
        if not str(typed).isascii() or not str(typed).isdigit() or int(typed) == 0:
            raise InputError(
                f"--draft-vocab must be a positive number of tokens, not {typed!r}", "give such a number, auto or all"
            )
        return int(typed)

    def require_default_scales(self, source: str) -> None:
        """Refuse zero points and scales in another form for a kind of source, such as "GGUF file".

        Raises:
            InputError: the recipe has one of them.
        """
        for name in ("zero_points", "half_scales"):
            if any(getattr(each, name, False) for each in (self, self.body, self.head_format)):
                flag = f"--{name.replace('_', '-')}"
                raise InputError(f"{flag} is not supported for a {source}", f"leave {flag} out")

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
        self, config: DecoderConfig, stored_format: Callable[[str], WeightFormat] = lambda _: FP32
    ) -> dict[str, WeightFormat]:
        """The quantization plan of a model with the formats of body and head; see `formats_of_linears`."""
        return formats_of_linears(config, self.body, self.head_format, stored_format)
