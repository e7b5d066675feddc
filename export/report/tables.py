"""Tables and headline figures of a report as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from ..calibration.divergence import Divergence
from .figures import DraftFigures, LinearFigures, ModelReport, PlanFigures, PlanKind
from .text_tasks import TaskFigures, wilson

_MEGA: Final = 1e6
_NOTHING: Final = "-"
"""A cell without a value."""
_Item = TypeVar("_Item")


class Table(NamedTuple):
    """A table as text; without columns it is a list of names and values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    chosen: int | None = None
    """Index of the row of the exported model."""
    text_columns: tuple[str, ...] = ()
    """Columns besides the first that hold text and not numbers."""
    caption: str = ""
    """Explanation below the table."""
    collapsed: bool = False
    """Whether the rows are hidden until the reader opens them."""


class Headline(NamedTuple):
    """A figure that is shown large."""

    name: str
    value: str
    detail: str = ""
    tone: str = ""
    """`good` or `bad` for a comparison."""
    of_quality: bool = False
    """Whether `quality_text` says it too."""


def headlines(report: ModelReport) -> list[Headline]:
    """The headline figures of a report."""
    chosen, quality, predicted = report.chosen, report.shipped, report.speed.predicted.get(1)
    ratio, other = _gain(report)
    gained = "nats from the float32 model" if ratio is None else f"{_difference(ratio)} {other}"
    own, of_float = perplexities(quality.perplexity, quality.float_perplexity)
    found = [
        Headline(
            "weights read per token",
            f"{megabytes(chosen.bytes_read)} MB",
            bits_text(chosen.bits_per_weight, report.bits_per_weight_in_file),
        ),
        Headline("mean KL", f"{quality.mean_kl:#.3g}", gained, "" if ratio is None else _tone(ratio < 1), True),
        Headline(
            "top-1 agreement",
            f"{quality.top1_agreement:.1%}",
            f"KL below {quality.p99_kl:#.3g} at 99 % of positions",
            of_quality=True,
        ),
        Headline("perplexity", own, f"float32 model: {of_float}", of_quality=True),
        Headline(
            "tokens per second",
            f"{report.speed.rate:.1f}",
            "plain decoding" + ("" if predicted is None else f"; {1e3 / predicted:.1f} predicted"),
        ),
    ]
    if report.tasks:
        total, same = (sum(getattr(each, name) for each in report.tasks) for name in ("questions", "same"))
        worse = [each.name for each in report.tasks if each.is_worse]
        detail = f"95 % interval {_interval(same, total)}; worse at: {', '.join(worse) or 'no task'}"
        found.append(Headline("health", f"{same / total:.1%} of the float32 model's answers", detail, _tone(not worse)))
    for draft in report.drafts:
        gain = draft.benefit.plain_seconds / draft.benefit.speculative_seconds
        detail = f"{draft.benefit.tokens_per_pass:.2f} tokens per pass"
        found.append(Headline("speed-up with the draft", f"{gain:.2f}x", detail, _tone(gain >= 1)))
    return found


def tables_of(report: ModelReport) -> list[Table]:
    """All tables that the report has figures for."""
    drafts = [_drafts(report)] if report.drafts else []
    plans = [_plans(report)] if len(report.compared) > 1 else []
    tasks = [_tasks(report.tasks)] if report.tasks else []
    return [*plans, _quality(report), *tasks, _speed(report), *drafts, _linears(report.linears), _conditions(report)]


def _table(title: str, items: Sequence[_Item], columns: Mapping[str, Callable[[_Item], str]]) -> Table:
    """A table with a row for each item; columns in which no row has a value are left out."""
    cells = {name: [cell(item) for item in items] for name, cell in columns.items()}
    kept = {name: each for name, each in cells.items() if not name or set(each) != {_NOTHING}}
    return Table(title, tuple(kept), tuple(zip(*kept.values(), strict=True)))


def _gain(report: ModelReport) -> tuple[float | None, str]:
    """KL of the chosen plan relative to others of its size, and what these are; None where none was measured."""
    if (ratio := report.against(PlanKind.UNIFORM)) is not None:
        return ratio, "than uniform plans of its size"
    return report.against(PlanKind.NEAREST), "than round-to-nearest of its size"


def gain_text(report: ModelReport) -> str:
    """What calibration or the choice of formats gained, in words; empty where it was not compared."""
    ratio, other = _gain(report)
    return "" if ratio is None else f"KL is {_difference(ratio)} {other}"


def quality_text(quality: Divergence) -> str:
    """The quality of a quantized model in words."""
    own, other = perplexities(quality.perplexity, quality.float_perplexity)
    return (
        f"mean KL {quality.mean_kl:#.3g}, top-1 agreement {quality.top1_agreement:.1%}, perplexity {own} "
        f"(float32: {other})"
    )


def bits_text(read: float | None, in_file: float | None) -> str:
    """Bits per weight in words: as a pass reads them, packed for the kernels, and as the file has them."""
    known = (("as read per token", read), ("in the file", in_file))
    return "bits per weight: " + ", ".join(f"{bits:.2f} {place}" for place, bits in known if bits is not None)


def perplexities(model: float, other: float) -> tuple[str, str]:
    """Two perplexities with as many digits, up to seven, as it takes to tell them apart."""
    digits = next((each for each in range(4, 8) if f"{model:#.{each}g}" != f"{other:#.{each}g}"), 7)
    return f"{model:#.{digits}g}", f"{other:#.{digits}g}"


def _plans(report: ModelReport) -> Table:
    """Plans in ascending size."""
    plans, own = report.compared, report.chosen.kl
    widths = sorted({width for plan in plans for width in plan.milliseconds})

    def milliseconds(width: int) -> Callable[[PlanFigures], str]:
        return lambda plan: _number(plan.milliseconds.get(width), "#.3g")

    def rate(bandwidth: float) -> Callable[[PlanFigures], str]:
        """Tokens per second where reading the weights takes all the time."""
        return lambda plan: f"{bandwidth * 1e9 / plan.bytes_read:.1f}"

    columns: dict[str, Callable[[PlanFigures], str]] = {
        "": lambda plan: plan.name,
        "bits per weight read": lambda plan: f"{plan.bits_per_weight:.2f}",
        "MB per token": lambda plan: megabytes(plan.bytes_read),
        "KL, nats": lambda plan: f"{plan.kl:#.3g}",
        "KL relative to this model": lambda plan: _number(plan.kl / own if own else None, ".3g"),
    }
    columns |= {f"ms, pass over {width} token{'s' * (width > 1)}": milliseconds(width) for width in widths}
    columns |= {f"tokens/s at {bandwidth:g} GB/s": rate(bandwidth) for bandwidth in report.bandwidths}
    table = _table("Quantization plans", plans, columns)
    return table._replace(chosen=plans.index(report.chosen), caption=_comparisons(report))


def _comparisons(report: ModelReport) -> str:
    """Gains of the chosen plan, in sentences."""
    compared = {
        PlanKind.UNIFORM: "KL is {} than that of uniform plans at the same bytes, interpolated in log KL over bytes.",
        PlanKind.NEAREST: "It is {} than that of round-to-nearest at the same bytes.",
        PlanKind.RULE: "It is {} than that of a rule-based plan of the same bytes.",
    }
    ratios = {kind: report.against(kind) for kind in compared}
    sentences = [compared[kind].format(_difference(ratio)) for kind, ratio in ratios.items() if ratio is not None]
    if any(plan.kind is PlanKind.UNIFORM for plan in report.plans):
        sentences.append(
            "In this comparison every linear is quantized independently, in all plans alike; in the model as written, "
            f"linears may compensate for those before them, and its mean KL is {report.quality.mean_kl:#.3g}."
        )
    if report.bandwidths:
        sentences.append("Rates at a bandwidth assume that reading the weights takes all the time.")
    return " ".join(sentences)


def _quality(report: ModelReport) -> Table:
    """Quality with quantized weights alone, and of the graph as it runs."""
    known = {"quantized weights": report.quality, "as it runs, with 8-bit activations": report.shipped}
    columns: dict[str, Callable[[tuple[str, Divergence]], str]] = {
        "": lambda each: each[0],
        "mean KL, nats": lambda each: f"{each[1].mean_kl:#.4g}",
        "99th percentile of KL": lambda each: f"{each[1].p99_kl:#.4g}",
        "top-1 agreement": lambda each: f"{each[1].top1_agreement:.2%}",
        "perplexity": lambda each: perplexities(each[1].perplexity, each[1].float_perplexity)[0],
        "perplexity of float32": lambda each: perplexities(each[1].perplexity, each[1].float_perplexity)[1],
        "tokens": lambda each: str(each[1].tokens),
    }
    return _table("Quality on held-out text", list(known.items()), columns)


def _tasks(tasks: Sequence[TaskFigures]) -> Table:
    """Answers to questions about the user's text."""
    columns: dict[str, Callable[[TaskFigures], str]] = {
        "": lambda task: task.name,
        "questions": lambda task: str(task.questions),
        "right": lambda task: f"{task.right / task.questions:.1%}",
        "95 % interval": lambda task: _interval(task.right, task.questions),
        "right, float32 model": lambda task: f"{task.float_right / task.questions:.1%}",
        "its 95 % interval": lambda task: _interval(task.float_right, task.questions),
        "same answer": lambda task: f"{task.same / task.questions:.1%}",
    }
    table = _table("Questions about your text", tasks, columns)
    return table._replace(
        caption="Each has four choices, ranked by mean log-probability: choosing blindly is right at 25 %."
    )


def _interval(count: int, total: int) -> str:
    low, high = wilson(count, total)
    return f"{low:.1%} to {high:.1%}"


def _speed(report: ModelReport) -> Table:
    predicted, measured = report.speed.predicted, report.speed.measured
    columns: dict[str, Callable[[int], str]] = {
        "tokens in a pass": str,
        "predicted, ms": lambda width: _number(predicted.get(width), "#.3g"),
        "measured, ms": lambda width: _number(measured.get(width), "#.3g"),
        "prediction error": lambda width: _number(
            predicted[width] / measured[width] - 1 if width in predicted and width in measured else None, "+.1%"
        ),
        "passes per second": lambda width: _number(1e3 / measured[width] if width in measured else None, ".1f"),
    }
    return _table("Speed on this machine", sorted({*predicted, *measured}), columns)


def _drafts(report: ModelReport) -> Table:
    columns: dict[str, Callable[[DraftFigures], str]] = {
        "": lambda draft: draft.made_of,
        "tokens of its head": lambda draft: "all" if draft.vocabulary_size is None else str(draft.vocabulary_size),
        "their share of the text": lambda draft: _number(draft.coverage, ".2%"),
        "top-1 agreement": lambda draft: f"{draft.benefit.agreement:.1%}",
        "tokens per pass": lambda draft: f"{draft.benefit.tokens_per_pass:.2f}",
        "tokens/s without it": lambda draft: f"{1 / draft.benefit.plain_seconds:.1f}",
        "tokens/s with it": lambda draft: f"{1 / draft.benefit.speculative_seconds:.1f}",
        "speed-up": lambda draft: f"{draft.benefit.plain_seconds / draft.benefit.speculative_seconds:.2f}",
    }
    return _table("Draft model", report.drafts, columns)


def _linears(linears: Sequence[LinearFigures]) -> Table:
    columns: dict[str, Callable[[LinearFigures], str]] = {
        "": lambda linear: linear.name,
        "format": lambda linear: str(linear.weight_format),
        "method": lambda linear: _number(linear.weight_format.method, ""),
        "outputs": lambda linear: str(linear.rows),
        "inputs": lambda linear: str(linear.columns),
        "MB": lambda linear: megabytes(linear.bytes_read),
        "bits per weight read": lambda linear: f"{linear.bits_per_weight:.2f}",
        "ms": lambda linear: _number(linear.milliseconds, ".3f"),
        "KL alone, nats": lambda linear: _number(linear.kl_alone, "#.3g"),
    }
    table = _table("Linears", linears, columns)
    caption = "KL alone is the KL of the model with only that linear quantized."
    measured = "KL alone, nats" in table.columns
    return table._replace(text_columns=("format", "method"), caption=caption if measured else "", collapsed=True)


def _conditions(report: ModelReport) -> Table:
    text = report.calibration
    facts = {
        "command": report.command,
        "calibration text": f"{text.origin}: {text.tokens} tokens, "
        f"and {text.held_out_tokens} held out for these figures",
        "AWQ scaling": "applied" if text.awq else "not applied",
        "difference from the reference decoder": ", ".join(
            f"{name.replace('_', ' ')} {value:.3g}" for name, value in report.parity.items()
        ),
        "model files": f"{megabytes(report.file_bytes)} MB",
        "duration of the export": f"{report.seconds:.1f} s",
        **report.machine,
    }
    return Table("Conditions", (), tuple(each for each in facts.items() if each[1]))


def megabytes(size: int) -> str:
    """Bytes in megabytes, with three digits or one decimal."""
    return f"{size / _MEGA:.1f}" if size >= 100 * _MEGA else f"{size / _MEGA:#.3g}"


def _difference(ratio: float) -> str:
    """A ratio of KL as a relative difference, such as "50% less"."""
    return f"{1 - ratio:.0%} less" if ratio <= 1 else f"{ratio - 1:.0%} more"


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _number(value: float | str | None, spec: str) -> str:
    return _NOTHING if value is None else format(value, spec)
