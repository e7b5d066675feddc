"""`edge-run export SRC OUT`: exports a model to a folder that edge-run runs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ...errors import InputError
from ...models.find import record_export
from ...models.manifest import GraphLayout
from ...models.progress import ProgressDisplay
from ..terminal.output import SafeConsole, write_line
from ..terminal.report_summary import show_export
from .export_options import (
    DEFAULT_BLOCK,
    CommandLine,
    DeviceChoice,
    ExportOptions,
    LayersChoice,
    MethodChoice,
    WeightChoice,
)
from .shared_options import Debug, Offline


def export(
    context: typer.Context,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC",
            help="A checkpoint folder, a .gguf file, an .onnx file or its folder, or org/name on the Hugging Face Hub.",
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="The model folder to write.")],
    weights: Annotated[
        WeightChoice | None,
        typer.Option(
            help="Format of the weights; mixed chooses one for each linear.",
            show_default="int4; weights that a .gguf or .onnx file has quantized stay as they are",
        ),
    ] = None,
    block: Annotated[
        int, typer.Option(metavar="N", help="Number of weights that share a scale: 32, 64 or 128.")
    ] = DEFAULT_BLOCK,
    head: Annotated[
        WeightChoice | None,
        typer.Option(help="Format of the LM head and the embedding.", show_default="as --weights"),
    ] = None,
    method: Annotated[
        MethodChoice | None,
        typer.Option(
            help="Quantization method; gptq and awq need calibration text.",
            show_default="k-quant for int4 and int2, rtn for int8",
        ),
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="Give each block a zero point.")] = False,
    half_scales: Annotated[
        bool, typer.Option("--half-scales", help="Store scales in float16, as GGUF files do: smaller, equally fast.")
    ] = False,
    longest: Annotated[
        int | None,
        typer.Option(
            "--context",
            metavar="N",
            min=1,
            help="Longest context to serve, in tokens.",
            show_default="that of the checkpoint, at most 32768",
        ),
    ] = None,
    layout: Annotated[
        GraphLayout, typer.Option(help="Graph layout: edge-run's own, or that of ONNX Runtime GenAI.")
    ] = GraphLayout.EDGE,
    device: Annotated[
        DeviceChoice | None,
        typer.Option(
            help="Also write graphs for a kind of device over the same weights: gpu, or npu with fixed shapes."
        ),
    ] = None,
    widths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="NPU: tokens of a pass, one graph for each.", show_default="1,4,128"),
    ] = None,
    contexts: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="NPU: cached tokens, one graph of each width for each.",
            show_default="512,2048,8192, as far as the model's context goes",
        ),
    ] = None,
    hidden_states: Annotated[
        bool,
        typer.Option("--hidden-states", help="Let the graph give hidden states too, for embeddings."),
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report", help="Write report.html and report.json, as every calibrated or mixed export does."),
    ] = False,
    budget: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET",
            help="Mixed weights: size or time that they may take, such as 3.5bpw, 300MB, 300MB@file or 9ms.",
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Mixed weights: follow this plan file, which an earlier export wrote."),
    ] = None,
    time_limit: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES", min=0, help="Mixed weights: time limit of the search, in minutes.", show_default="10"
        ),
    ] = None,
    low_rank: Annotated[
        bool,
        typer.Option(
            "--low-rank", help="Mixed weights: add low-rank corrections (QERA) to 2-bit linears where they pay."
        ),
    ] = False,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=0.1,
            help="Mixed weights: memory bandwidth of another machine whose speed the report predicts.",
        ),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|self",
            help="Calibration text: a text file, a .jsonl file of conversations, or text that the model generates.",
            show_default="self, where calibration is needed",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Maximum tokens of calibration text.", show_default="16384, fewer for tiny models"
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the generated text and of the search.")] = 0,
    work: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for intermediate results, which make the next export faster.",
            show_default="a temporary folder in the cache",
        ),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            metavar="SRC|mtp|none",
            help="Checkpoint of a draft model or of a draft head, on disk or on the hub; it becomes part of OUT. "
            "mtp: the multi-token-prediction module in CHECKPOINT itself; none: no draft.",
            show_default="mtp, where the checkpoint has one",
        ),
    ] = None,
    draft_weights: Annotated[
        WeightChoice | None,
        typer.Option(help="Format of the draft's weights.", show_default="as --weights, or int4"),
    ] = None,
    draft_vocab: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto|all",
            help="Number of tokens in the LM head of the draft model, or of the multi-token-prediction module: those "
            "that the target uses most. auto: as many as are fastest on this machine.",
            show_default="all; 65536 of large vocabularies for a module, in exports that read text",
        ),
    ] = None,
    draft_layers: Annotated[
        LayersChoice | None,
        typer.Option(help="Draft with the target itself, leaving out some of its layers."),
    ] = None,
    offline: Offline = False,  # noqa: ARG001  its callback acts
    debug: Debug = False,  # noqa: ARG001  main reads it
) -> None:
    """Export a checkpoint or a GGUF file, or upgrade an ONNX model that another tool exported.

    OUT appears whole or not at all. It replaces an earlier model only after passing its check against a reference
    decoder, or against the original ONNX model.

    Examples:

    \b
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights int4 --block 64 --head int8
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 3.5bpw
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 280MB@file --half-scales --zero-points
    edge-run export Qwen/Qwen2.5-1.5B-Instruct my-model --draft Qwen/Qwen2.5-0.5B-Instruct
    edge-run export Qwen/Qwen3.5-0.8B my-model --draft mtp --draft-weights int8
    edge-run export Qwen/Qwen3.5-0.8B my-model --draft-vocab 65536 --calibration chats.jsonl
    edge-run export Qwen/Qwen3-1.7B my-model --draft AngelSlim/Qwen3-1.7B_eagle3
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --device gpu
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model --device npu --widths 1,4,128 --contexts 512,2048
    edge-run export ./Phi-3-mini-4k-instruct-onnx/cpu-int4 my-model
    edge-run export optimum-export/model.onnx my-model --weights int4
    edge-run export Qwen/Qwen2.5-0.5B-Instruct my-model
    """
    try:
        from ...export import export_model
    except ModuleNotFoundError as error:
        raise InputError(f"export needs the package {error.name}", 'pip install "edge-run[export]"') from error
    options = ExportOptions(
        source=source,
        destination=destination,
        weights=weights,
        block=block,
        head=head,
        method=method,
        zero_points=zero_points,
        half_scales=half_scales,
        context=longest,
        layout=layout,
        device=device,
        widths=widths,
        contexts=contexts,
        hidden_states=hidden_states,
        report=report,
        budget=budget,
        plan=plan,
        time_limit=time_limit,
        low_rank=low_rank,
        bandwidth=bandwidth,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        seed=seed,
        work=work,
        draft=draft,
        draft_weights=draft_weights,
        draft_vocab=draft_vocab,
        draft_layers=draft_layers,
    )
    request = options.request(CommandLine(context))
    with ProgressDisplay(lines=True) as progress:
        result = export_model(request, progress)
    record_export(result.bundle)
    show_export(SafeConsole(), result)
    write_line(f"to run it: edge-run {shlex.quote(str(destination))}")
