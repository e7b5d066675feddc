"""An export report of a made-up model, with every optional part."""

from __future__ import annotations

from edgerun.export.calibration.divergence import Divergence
from edgerun.export.report.figures import (
    DraftFigures,
    LinearFigures,
    ModelReport,
    PlanFigures,
    PlanKind,
    Speed,
)
from edgerun.export.report.text_tasks import TaskFigures
from edgerun.models.manifest import Calibration, Method, WeightFormat
from edgerun.runtime.measure.draft_benefit import DraftBenefit

SHAPES = {"qkv": (1152, 896), "o": (896, 896), "gate_up": (9728, 896), "down": (896, 4864)}
BITS = ((2, 128), (2, 64), (4, 128), (4, 64), (4, 32), (8, 128), (8, 64), (8, 32))


def linear(name: str, shape: tuple[int, int], weight_format: WeightFormat, kl: float | None = None) -> LinearFigures:
    read = round(shape[0] * shape[1] * (weight_format.bits + 64 / weight_format.block) / 8)
    return LinearFigures(name, *shape, weight_format, read, kl, None if kl is None else read / 25e6)


def plan(name: str, kind: PlanKind, bits: float, kl: float) -> PlanFigures:
    read = round(494e6 * bits / 8)
    return PlanFigures(name, kind, read, bits, kl, {1: read / 25e6, 4: read / 16e6})


def log_kl(bits: float) -> float:
    """KL of a uniform plan, which falls to a tenth with every two bits."""
    return 0.5 * 10 ** (-(bits - 2.5) / 2)


def whole_report(layers: int = 24) -> ModelReport:
    linears = [linear("embedding", (151936, 896), WeightFormat(8, 128, method=Method.RTN), 4e-4)]
    for layer in range(layers):
        for at, (part, shape) in enumerate(SHAPES.items()):
            weight_format = WeightFormat(*BITS[(layer * 5 + at * 3) % 7], method=Method.GPTQ)
            linears.append(
                linear(f"layers.{layer}.{part}", shape, weight_format, 10 ** (-2 - 0.1 * ((layer * 7 + at * 11) % 23)))
            )
    plans = [
        plan("this model", PlanKind.CHOSEN, 3.5, 0.5 * log_kl(3.5)),
        *(
            plan(f"int{bits}/{block}", PlanKind.UNIFORM, bits + 64 / block, log_kl(bits + 64 / block))
            for bits, block in BITS
        ),
        plan("head and outer layers int8, rest int2/64", PlanKind.RULE, 3.5, 0.75 * log_kl(3.5)),
        *(plan("search step", PlanKind.SEARCHED, bits / 10, 0.5 * log_kl(bits / 10)) for bits in range(28, 60, 2)),
    ]
    return ModelReport(
        model="Qwen2.5-0.5B-Instruct",
        command="edge-run export Qwen2.5-0.5B-Instruct my-model --weights mixed --budget 3.5bpw",
        linears=linears,
        plans=plans,
        file_bytes=230_400_000,
        parity={"max_abs_diff": 2.1e-4, "mean_kl": 0.0813, "top1_agreement": 0.91},
        bits_per_weight_in_file=3.0553,
        calibration=Calibration("text sampled from the model itself", 14_336, 2_048, awq=True),
        quality=Divergence(0.0791, 0.913, 0.9144, 9.1234, 8.7654, 2048),
        shipped=Divergence(0.0812, 0.922, 0.9121, 9.1301, 8.7654, 2048),
        tasks=[TaskFigures("copying", 40, 30, 39, 31), TaskFigures("arithmetic", 40, 12, 13, 36)],
        speed=Speed({1: 8.6, 2: 9.4, 4: 13.5, 8: 22.0}, {1: 8.8, 2: 9.3, 4: 13.9, 8: 22.6}),
        bandwidths=(25.0, 100.0),
        drafts=[DraftFigures("Qwen2.5-0.1B", DraftBenefit(0.71, 2.34, 0.0088, 0.0052), 16_384, 0.9931)],
        budget="3.5bpw",
        seconds=913.0,
        machine={"processor": "a processor", "onnxruntime": "1.31.0"},
        notes=["A note."],
    )
