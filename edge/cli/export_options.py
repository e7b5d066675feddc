"""The options of `edge-run export`, and the export request made of them."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from ...errors import InputError
from ...models.draft_heads import HeadKind
from ...models.find import is_on_hub
from ...models.hub.downloaded_model import parse_hub_id
from ...models.manifest import GraphLayout, Method, WeightFormat

if TYPE_CHECKING:
    from ...export import (
        CalibrationRequest,
        DraftRequest,
        ExportRequest,
        HeadRequest,
        MixedPrecisionRequest,
        NpuRequest,
    )

DEFAULT_BLOCK: Final = 32
"""Weights that share a scale by default; also what GGUF files have."""
_OF_MIXED_WEIGHTS: Final = ("budget", "time_limit", "low_rank", "bandwidth")
_UNRECORDED: Final = ("offline", "debug", "work")
"""Options that do not change what is written, so the manifest leaves them out."""
NO_DRAFT: Final = Path("none")
"""Value of `--draft` for none."""
OWN_MODULE: Final = Path("mtp")
"""Value of `--draft` for the multi-token-prediction module of the checkpoint itself."""


class WeightChoice(StrEnum):
    """Values of `--weights`, `--head` and `--draft-weights`."""

    FP32 = "fp32"
    INT8 = "int8"
    INT4 = "int4"
    INT2 = "int2"
    MIXED = "mixed"

    def weight_format(self, block: int, *, zero_points: bool = False, half_scales: bool = False) -> WeightFormat:
        """The format with blocks of this many weights; fp32 has no blocks.

        Raises:
            InputError: the value is `mixed`, which is not a single format.
        """
        if self is WeightChoice.MIXED:
            raise InputError("only --weights can be mixed", "give fp32, int8, int4 or int2")
        if self is WeightChoice.FP32:
            return WeightFormat(32)
        bits = int(self.value.removeprefix("int"))
        return WeightFormat(bits, block, zero_points=zero_points, half_scales=half_scales)


class MethodChoice(StrEnum):
    """Values of `--method`."""

    RTN = "rtn"
    K_QUANT = "k-quant"
    GPTQ = "gptq"
    AWQ = "awq"
    AWQ_K_QUANT = "awq+k-quant"
    AWQ_GPTQ = "awq+gptq"

    @property
    def rounding(self) -> Method:
        """The method that chooses codes and scales."""
        return Method(self.value.removeprefix("awq+")) if self is not MethodChoice.AWQ else Method.RTN

    @property
    def awq(self) -> bool:
        """Whether AWQ scaling precedes it."""
        return self.value.startswith("awq")


class LayersChoice(StrEnum):
    """Values of `--draft-layers`."""

    AUTO = "auto"


class DeviceChoice(StrEnum):
    """Values of `--device`."""

    GPU = "gpu"
    NPU = "npu"


class CommandLine:
    """What was typed after `edge-run export`."""

    def __init__(self, context: typer.Context) -> None:
        self._context = context

    def has(self, name: str) -> bool:
        """Whether the option of that parameter was typed."""
        source = self._context.get_parameter_source(name)
        return source is not None and source.name == "COMMANDLINE"

    def typed(self, names: Collection[str]) -> list[str]:
        """The options, such as `--head`, of those of the parameters that were typed."""
        parameters = self._context.command.params
        return [each.opts[0] for each in parameters if each.name in names and self.has(each.name)]

    def recorded(self, model: str, defaults: Mapping[str, object]) -> str:
        """The command for the manifest: what was typed, and `defaults` that were not.

        Paths are shortened to their last name, so that no private path is published.
        """
        words = ["edge-run", "export", model, _real_name(self._context.params["destination"])]
        for parameter in self._context.command.params:
            if parameter.name is None or not parameter.opts[0].startswith("--") or parameter.name in _UNRECORDED:
                continue
            if parameter.name in defaults or self.has(parameter.name):
                value = defaults.get(parameter.name, self._context.params[parameter.name])
                words.append(parameter.opts[0])
                words += [] if value is True else [_spelled(value)]
        return shlex.join(words)


def _real_name(path: Path) -> str:
    """The last name of a path, also of `.`; other than `Path.resolve`, no error for links that lead to each other."""
    return os.path.basename(os.path.realpath(path))


def _spelled(value: object) -> str:
    return value.name if isinstance(value, Path) else str(value)


@dataclass(frozen=True)
class ExportOptions:
    """The options of one export, by the names of the command's parameters."""

    source: Path
    destination: Path
    weights: WeightChoice | None
    block: int
    head: WeightChoice | None
    method: MethodChoice | None
    zero_points: bool
    half_scales: bool
    context: int | None
    layout: GraphLayout
    device: DeviceChoice | None
    widths: str | None
    contexts: str | None
    hidden_states: bool
    report: bool
    budget: str | None
    plan: Path | None
    time_limit: float | None
    low_rank: bool
    bandwidth: float | None
    calibration: Path | None
    calibration_tokens: int | None
    seed: int
    work: Path | None
    draft: Path | None
    draft_weights: WeightChoice | None
    draft_vocab: str | None
    draft_layers: LayersChoice | None

    @property
    def mixed(self) -> bool:
        """Whether each linear gets a format of its own."""
        return self.weights is WeightChoice.MIXED or self.plan is not None

    def request(self, command_line: CommandLine) -> ExportRequest:
        """The export that these options ask for; checkpoints on the hub are downloaded.

        Raises:
            InputError: options contradict each other, or a value cannot be used.
            EdgeError: the hub does not give a checkpoint.
        """
        from ...export import ExportRecipe, ExportRequest, find_source, may_be_quantized

        given = self.source.as_posix()
        name = given if is_on_hub(given) else _real_name(self.source)
        source = find_source(_on_disk(self.source))
        self._check_mixed(command_line)
        weights = self.weights
        if weights is None and not self.mixed and not may_be_quantized(source):
            weights = WeightChoice.INT4
        if weights is None and not self.mixed and self.head is None and self.block != DEFAULT_BLOCK:
            raise InputError(
                f"--block {self.block} has no effect without --weights or --head", "add --weights int8, int4 or int2"
            )
        head = self._draft_head(source)
        recipe = ExportRecipe(
            body=self._format(WeightChoice.INT4 if self.mixed else weights),
            head=self._format(self.head),
            context=self.context,
            method=None if self.method is None else self.method.rounding,
            layout=self.layout,
            hidden_states=self.hidden_states,
            npu=self._npu(),
            gpu=self.device is DeviceChoice.GPU,
            calibration=self._calibration(),
            awq=self.method is not None and self.method.awq,
            mixed_precision=self._mixed_precision() if self.mixed else None,
            draft=None if head is not None or self.draft == NO_DRAFT else self._draft(),
            draft_head=head,
            report=self.report,
            work_folder=self.work,
        )
        # The weights are recorded even if they are the default, which another version may change.
        recorded: dict[str, object] = {}
        if weights is not None and not self.mixed:
            recorded["weights"] = weights
            if any(choice not in (None, WeightChoice.FP32) for choice in (weights, self.head)):
                recorded["block"] = self.block
        return ExportRequest(source, self.destination, recipe, command_line.recorded(name, recorded))

    def _check_mixed(self, command_line: CommandLine) -> None:
        """Check that options of mixed weights come with them, and options of a single format without them."""
        if self.mixed and self.weights not in (None, WeightChoice.MIXED):
            raise InputError(f"--plan and --weights {self.weights.value} exclude each other", "leave one of them out")
        if self.mixed:
            # The search chooses the blocks too, but not those of the draft's weights.
            names = ("head",) if command_line.has("draft_weights") else ("head", "block")
            if unused := command_line.typed(names):
                raise InputError(f"{unused[0]} has no effect with mixed weights", "leave it out")
        elif unused := command_line.typed(_OF_MIXED_WEIGHTS):
            raise InputError(f"{unused[0]} has no effect without mixed weights", "add --weights mixed")

    def _format(self, choice: WeightChoice | None) -> WeightFormat | None:
        if choice is None:
            return None
        return choice.weight_format(self.block, zero_points=self.zero_points, half_scales=self.half_scales)

    def _mixed_precision(self) -> MixedPrecisionRequest:
        from ...export import MixedPrecisionRequest, parse_budget

        return MixedPrecisionRequest(
            budget=None if self.budget is None else parse_budget(self.budget),
            plan=self.plan,
            max_seconds=None if self.time_limit is None else 60 * self.time_limit,
            low_rank_correction=self.low_rank,
            zero_points=self.zero_points,
            half_scales=self.half_scales,
            bandwidth=None if self.bandwidth is None else self.bandwidth * 1e9,
        )

    def _npu(self) -> NpuRequest | None:
        from ...export import NpuRequest

        if self.device is not DeviceChoice.NPU:
            for option, typed in (("--widths", self.widths), ("--contexts", self.contexts)):
                if typed is not None:
                    raise InputError(f"{option} has no effect without --device npu", "add --device npu")
            return None
        contexts = None if self.contexts is None else _numbers("--contexts", self.contexts)
        return (
            NpuRequest(contexts=contexts)
            if self.widths is None
            else NpuRequest(_numbers("--widths", self.widths), contexts)
        )

    def _calibration(self) -> CalibrationRequest | None:
        from ...export import CalibrationRequest

        if self.calibration is None and self.calibration_tokens is None and not self.seed:
            return None
        file = None if self.calibration == Path("self") else self.calibration
        return CalibrationRequest(file, self.calibration_tokens, self.seed)

    def _draft_head(self, target: Path) -> HeadRequest | None:
        """The draft head that `--draft` names, or the target's own where no draft is named; None for none."""
        from ...export import HeadRequest, has_mtp_module, read_head_kind

        if self.draft is None:
            possible = self.draft_layers is None and self.layout is GraphLayout.EDGE and self.device is None
            return self._own_module(optional=self.draft_vocab is None) if possible and has_mtp_module(target) else None
        if self.draft == NO_DRAFT:
            sizes = ("--draft-vocab", self.draft_vocab), ("--draft-layers", self.draft_layers)
            self._refuse_with_draft("--draft none", *sizes, ("--draft-weights", self.draft_weights))
            return None
        if self.draft == OWN_MODULE:
            self._refuse_with_draft("--draft mtp", ("--draft-layers", self.draft_layers))
            return self._own_module(optional=False)
        source = _on_disk(self.draft)
        kind = read_head_kind(source)
        if kind is None:
            return None
        sizes = ("--draft-vocab", self.draft_vocab), ("--draft-layers", self.draft_layers)
        self._refuse_with_draft(f"the draft head {self.draft}, whose size is that of its checkpoint", *sizes)
        return HeadRequest(source, kind, self._format(self.draft_weights))

    def _own_module(self, *, optional: bool) -> HeadRequest:
        """The request for the target's multi-token-prediction module."""
        from ...export import HeadRequest, HeadVocabulary

        vocabulary: int | HeadVocabulary = HeadVocabulary.DEFAULT
        if self.draft_vocab is not None:
            size = _vocabulary_size(self.draft_vocab)
            vocabulary = HeadVocabulary.ALL if size is None else size or HeadVocabulary.FASTEST
        return HeadRequest(None, HeadKind.MTP, self._format(self.draft_weights), optional, vocabulary)

    def _refuse_with_draft(self, draft: str, *others: tuple[str, object]) -> None:
        """Refuse options that a draft does not have."""
        for option, typed in others:
            if typed is not None:
                raise InputError(f"{option} has no effect on {draft}", "leave it out")

    def _draft(self) -> DraftRequest | None:
        from ...export import DraftRequest, find_source

        if self.draft is not None and self.draft_layers is not None:
            raise InputError("--draft and --draft-layers exclude each other", "give one of them")
        if self.draft is None and self.draft_layers is None:
            if self.draft_vocab is None and self.draft_weights is None:
                return None
            option = "--draft-weights" if self.draft_vocab is None else "--draft-vocab"
            raise InputError(f"{option} has no effect without a draft", "add --draft SRC, or --draft-layers auto")
        if self.draft is None and self.draft_weights is not None:
            raise InputError(
                "--draft-weights has no effect with --draft-layers, which takes the weights of the target",
                "leave it out",
            )
        vocabulary = None if self.draft_vocab is None else _vocabulary_size(self.draft_vocab)
        weight_format = self._format(self.draft_weights)
        source = None if self.draft is None else find_source(_on_disk(self.draft))
        return DraftRequest(source, vocabulary, weight_format)


def _vocabulary_size(typed: str) -> int | None:
    """The number of tokens; 0 for `auto`, None for `all`."""
    if typed in ("auto", "all"):
        return 0 if typed == "auto" else None
    if not typed.isascii() or not typed.isdigit() or int(typed) == 0:
        raise InputError(
            f"--draft-vocab must be a positive number of tokens, not {typed!r}", "give such a number, auto or all"
        )
    return int(typed)


def _numbers(option: str, typed: str) -> tuple[int, ...]:
    """The numbers of a list such as `1,4,128`."""
    words = [word.strip() for word in typed.split(",")]
    if not all(word.isascii() and word.isdigit() and len(word) < 10 for word in words):
        raise InputError(
            f"{option} must be whole numbers with commas between them, not {typed!r}", "give 1,4,128 or so"
        )
    return tuple(map(int, words))


def _on_disk(source: Path) -> Path:
    """The path itself, or the folder to which a checkpoint of the hub was downloaded.

    Raises:
        EdgeError: the hub does not give the checkpoint.
    """
    name = source.as_posix()
    if not is_on_hub(name):
        return source
    from ...models.hub.fetch import fetch_checkpoint

    return fetch_checkpoint(parse_hub_id(name))
