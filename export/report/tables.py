"""Tables and headline figures of a report as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from ..calibration.divergence import Divergence
from .figures import DraftFigures, LinearFigures, ModelReport, PlanFigures, PlanKind, Speed

_MEGA: Final = 1e6
_NOTHING: Final = "-"
"""A cell without a value."""


@dataclass(frozen=True)
class Row:
    """A row of a table; `chosen` marks the exported model."""

    cells: tuple[str, ...]
    chosen: bool = False


@dataclass(frozen=True)
class Table:
    """A table as text; without columns it is a list of names and values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    text_columns: tuple[str, ...] = ()
    """Columns besides the first that hold text and not numbers."""
    caption: str = ""
    """Explanation below the table."""
    collapsed: bool = False
    """Whether the rows are hidden until the reader opens them."""


@dataclass(frozen=True)
class Headline:
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
    for draft in report.drafts:
        gain = draft.benefit.plain_seconds / draft.benefit.speculative_seconds
        detail = f"{draft.benefit.tokens_per_pass:.2f} tokens per pass"
        found.append(Headline("speed-up with the draft", f"{gain:.2f}x", detail, _tone(gain >= 1)))
    return found


def tables_of(report: ModelReport) -> list[Table]:
    """All tables that the report has figures for."""
    known = [_plans(report), _quality(report), _speed(report.speed), _drafts(report.drafts), _linears(report.linears)]
    return [*(_without_empty_columns(table) for table in known if table is not None), _conditions(report)]


def _gain(report: ModelReport) -> tuple[float | None, str]:
    """KL of the chosen plan relative to others of its size, and what these are; None where none was measured."""
    if report.against_uniform is not None:
        return report.against_uniform, "than uniform plans of its size"
    return report.against_nearest, "than round-to-nearest of its size"


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


def _without_empty_columns(table: Table) -> Table:
    """The table without columns in which no row has a value."""
    kept = [
        number
        for number in range(len(table.columns))
        if number == 0 or any(row.cells[number] != _NOTHING for row in table.rows)
    ]
    rows = tuple(replace(row, cells=tuple(row.cells[number] for number in kept)) for row in table.rows)
    return replace(table, columns=tuple(table.columns[number] for number in kept), rows=rows)


def _plans(report: ModelReport) -> Table | None:
    """Plans in ascending size; a column is left out if no plan has its figure."""
    if len(report.compared) < 2:
        return None
    plans = report.compared
    widths = sorted({width for plan in plans for width in plan.milliseconds})
    columns: tuple[str, ...] = ("", "bits per weight read", "MB per token", "KL, nats", "KL relative to this model")
    columns += tuple(f"ms, pass over {width} token{'s' * (width > 1)}" for width in widths)
    columns += tuple(f"tokens/s at {bandwidth:g} GB/s" for bandwidth in report.bandwidths)

    def cells(plan: PlanFigures) -> tuple[str, ...]:
        size = (plan.name, f"{plan.bits_per_weight:.2f}", megabytes(plan.bytes_read), f"{plan.kl:#.3g}")
        relative = plan.kl / report.chosen.kl if report.chosen.kl else None
        times = (_number(plan.milliseconds.get(width), "#.3g") for width in widths)
        rates = (f"{plan.memory_bound_rate(bandwidth):.1f}" for bandwidth in report.bandwidths)
        return (*size, _number(relative, ".3g"), *times, *rates)

    rows = tuple(Row(cells(plan), plan.kind is PlanKind.CHOSEN) for plan in plans)
    return Table("Quantization plans", columns, rows, caption=_comparisons(report))


def _comparisons(report: ModelReport) -> str:
    """Gains of the chosen plan, in sentences."""
    sentences = []
    if report.against_uniform is not None:
        sentences.append(
            f"KL is {_difference(report.against_uniform)} than that of uniform plans at the same bytes, "
            "interpolated in log KL over bytes."
        )
    if report.against_nearest is not None:
        sentences.append(
            f"It is {_difference(report.against_nearest)} than that of round-to-nearest at the same bytes."
        )
    if report.against_rule is not None:
        sentences.append(f"It is {_difference(report.against_rule)} than that of a rule-based plan of the same bytes.")
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
    known = (("quantized weights", report.quality), ("as it runs, with 8-bit activations", report.shipped))
    rows = tuple(
        Row(
            (
                name,
                f"{found.mean_kl:#.4g}",
                f"{found.p99_kl:#.4g}",
                f"{found.top1_agreement:.2%}",
                *perplexities(found.perplexity, found.float_perplexity),
                str(found.tokens),
            )
        )
        for name, found in known
    )
    columns = (
        "",
        "mean KL, nats",
        "99th percentile of KL",
        "top-1 agreement",
        "perplexity",
        "perplexity of float32",
        "tokens",
    )
    return Table("Quality on held-out text", columns, rows)


def _speed(speed: Speed) -> Table:
    rows = []
    for width in sorted({*speed.predicted, *speed.measured}):
        predicted, measured = speed.predicted.get(width), speed.measured.get(width)
        error = predicted / measured - 1 if predicted is not None and measured is not None else None
        cells = (str(width), _number(predicted, "#.3g"), _number(measured, "#.3g"), _number(error, "+.1%"))
        rows.append(Row((*cells, _number(None if measured is None else 1e3 / measured, ".1f"))))
    columns = ("tokens in a pass", "predicted, ms", "measured, ms", "prediction error", "passes per second")
    return Table("Speed on this machine", columns, tuple(rows))


def _drafts(drafts: Sequence[DraftFigures]) -> Table | None:
    if not drafts:
        return None
    columns = (
        "",
        "tokens of its head",
        "their share of the text",
        "top-1 agreement",
        "tokens per pass",
        "tokens/s without it",
        "tokens/s with it",
        "speed-up",
    )
    rows = []
    for draft in drafts:
        benefit = draft.benefit
        cells = (
            draft.made_of,
            "all" if draft.vocabulary_size is None else str(draft.vocabulary_size),
            _number(draft.coverage, ".2%"),
            f"{benefit.agreement:.1%}",
            f"{benefit.tokens_per_pass:.2f}",
            f"{1 / benefit.plain_seconds:.1f}",
            f"{1 / benefit.speculative_seconds:.1f}",
            f"{benefit.plain_seconds / benefit.speculative_seconds:.2f}",
        )
        rows.append(Row(cells))
    return Table("Draft model", columns, tuple(rows))


def _linears(linears: Sequence[LinearFigures]) -> Table:
    timed = any(linear.milliseconds is not None for linear in linears)
    measured = any(linear.kl_alone is not None for linear in linears)
    columns: tuple[str, ...] = ("", "format", "method", "outputs", "inputs", "MB", "bits per weight read")
    columns += ("ms",) * timed + ("KL alone, nats",) * measured

    def cells(linear: LinearFigures) -> tuple[str, ...]:
        weight_format = linear.weight_format
        method = _NOTHING if weight_format.method is None else weight_format.method.value
        shape = (str(linear.rows), str(linear.columns), megabytes(linear.bytes_read), f"{linear.bits_per_weight:.2f}")
        found = (_number(linear.milliseconds, ".3f"),) * timed + (_number(linear.kl_alone, "#.3g"),) * measured
        return (linear.name, str(weight_format), method, *shape, *found)

    return Table(
        "Linears",
        columns,
        tuple(Row(cells(linear)) for linear in linears),
        text_columns=("format", "method"),
        caption="KL alone is the KL of the model with only that linear quantized." if measured else "",
        collapsed=True,
    )


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
    return Table("Conditions", (), tuple(Row((name, value)) for name, value in facts.items() if value))


def megabytes(size: int) -> str:
    """Bytes in megabytes, with three digits or one decimal."""
    return f"{size / _MEGA:.1f}" if size >= 100 * _MEGA else f"{size / _MEGA:#.3g}"


def _difference(ratio: float) -> str:
    """A ratio of KL as a relative difference, such as "50% less"."""
    return f"{1 - ratio:.0%} less" if ratio <= 1 else f"{ratio - 1:.0%} more"


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _number(value: float | None, spec: str) -> str:
    return _NOTHING if value is None else format(value, spec)
