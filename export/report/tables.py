"""The report's tables and headline figures, in words, for a page and for a terminal alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .figures import DraftFigures, LinearFigures, ModelReport, PlanFigures, PlanKind, Speed

_MEGA: Final = 1e6


@dataclass(frozen=True)
class Row:
    """A line of a table; `chosen` marks the one that stands for the model itself."""

    cells: tuple[str, ...]
    chosen: bool = False


@dataclass(frozen=True)
class Table:
    """A table in words; without columns it is a list of names and values."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    words: tuple[str, ...] = ()
    """Columns besides the first that hold words and not numbers."""
    below: str = ""
    """What has to be known to read it."""
    folded: bool = False
    """Whether it is long and for those who look closer."""


@dataclass(frozen=True)
class Head:
    """A figure that is shown large."""

    name: str
    value: str
    beside: str = ""
    tone: str = ""
    """`good` or `bad`, where it is a comparison."""


def heads_of(report: ModelReport) -> list[Head]:
    """The headline figures."""
    chosen, quality, speed = report.chosen, report.shipped or report.quality, report.speed
    heads = [
        Head("bits a weight", f"{chosen.bits_per_weight:.2f}", f"{megabytes(chosen.bytes_read)} MB read for a token")
    ]
    if chosen.kl is not None:
        ratio, beside = report.against_uniform, "than uniform plans of its size"
        if ratio is None:
            ratio, beside = report.against_nearest, "than rounded to nearest"
        beside = "nats from the float32 model" if ratio is None else f"{_less(ratio)} {beside}"
        kl = chosen.kl if quality is None else quality.mean_kl
        heads.append(Head("mean KL", f"{kl:#.3g}", beside, "" if ratio is None else _tone(ratio < 1)))
    if quality is not None:
        heads.append(
            Head(
                "top-1 agreement", f"{quality.top1_agreement:.1%}", f"99 % of positions: KL below {quality.p99_kl:#.3g}"
            )
        )
        heads.append(Head("perplexity", f"{quality.perplexity:.4g}", f"float32 model: {quality.float_perplexity:.4g}"))
    if speed is not None and speed.rate is not None:
        predicted = speed.predicted_rate
        beside = "one token a pass" if predicted is None else f"{predicted:.1f} predicted"
        heads.append(Head("tokens a second", f"{speed.rate:.1f}", beside))
    for draft in report.drafts:
        gain = draft.acceptance.plain_seconds / draft.acceptance.speculative_seconds
        heads.append(
            Head(
                "with its draft",
                f"{gain:.2f} times",
                f"{draft.acceptance.tokens_per_pass:.2f} tokens a pass",
                _tone(gain >= 1),
            )
        )
    return heads


def tables_of(report: ModelReport) -> list[Table]:
    """All tables that the report has figures for."""
    found = [_plans(report), _quality(report), _speed(report.speed), _drafts(report.drafts)]
    return [*(table for table in found if table is not None), _linears(report.linears), _conditions(report)]


def _plans(report: ModelReport) -> Table | None:
    """Plans by bytes, each column only where a plan has the figure."""
    if len(report.compared) < 2:
        return None
    plans = report.compared
    rows = sorted({count for plan in plans for count in plan.milliseconds})
    columns: tuple[str, ...] = ("", "bits a weight", "MB a token", "KL, nats", "against this model")
    columns += tuple(f"ms, {count} token{'s' * (count > 1)}" for count in rows)
    columns += tuple(f"tokens/s at {bandwidth:g} GB/s" for bandwidth in report.bandwidths)

    def cells(plan: PlanFigures) -> tuple[str, ...]:
        size = (plan.name, f"{plan.bits_per_weight:.2f}", megabytes(plan.bytes_read), _number(plan.kl, "#.3g"))
        against = plan.kl / report.chosen.kl if plan.kl is not None and report.chosen.kl else None
        times = (_number(plan.milliseconds.get(count), "#.3g") for count in rows)
        bound = (f"{plan.memory_bound_rate(bandwidth):.1f}" for bandwidth in report.bandwidths)
        return (*size, _number(against, ".3g"), *times, *bound)

    return Table(
        "Plans",
        columns,
        tuple(Row(cells(plan), plan.kind is PlanKind.CHOSEN) for plan in plans),
        below=_comparisons(report),
    )


def _comparisons(report: ModelReport) -> str:
    """What the chosen plan gains, in sentences."""
    said = []
    if report.against_uniform is not None:
        said.append(
            f"KL is {_less(report.against_uniform)} than that of uniform plans at the same bytes, "
            "read off a line of log KL over bytes."
        )
    if report.against_nearest is not None:
        said.append(f"It is {_less(report.against_nearest)} than that of rounding to nearest at the same bytes.")
    if report.against_rule is not None:
        said.append(f"It is {_less(report.against_rule)} than that of a rule-based mix of the same bytes.")
    if report.quality is not None and any(plan.kind is PlanKind.UNIFORM for plan in report.plans):
        said.append(
            "Here every unit is rounded by itself, in all plans alike; in the model as written, units may make up for "
            f"those before them, and its mean KL is {report.quality.mean_kl:#.3g}."
        )
    if report.bandwidths:
        said.append("Rates at a bandwidth hold where reading weights is all that takes time.")
    return " ".join(said)


def _quality(report: ModelReport) -> Table | None:
    """The model with rounded weights, and the graph as it runs."""
    known = (("weights rounded", report.quality), ("as it runs, activations in 8 bits", report.shipped))
    rows = tuple(
        Row(
            (
                name,
                f"{found.mean_kl:#.4g}",
                f"{found.p99_kl:#.4g}",
                f"{found.top1_agreement:.2%}",
                f"{found.perplexity:#.5g}",
                f"{found.float_perplexity:#.5g}",
                str(found.tokens),
            )
        )
        for name, found in known
        if found is not None
    )
    columns = (
        "",
        "mean KL",
        "99 % of positions below",
        "top-1 agreement",
        "perplexity",
        "float32's perplexity",
        "tokens",
    )
    return Table("Quality on held-out text", columns, rows) if rows else None


def _speed(speed: Speed | None) -> Table | None:
    if speed is None:
        return None
    rows = []
    for count in sorted({*speed.predicted, *speed.measured}):
        predicted, measured = speed.predicted.get(count), speed.measured.get(count)
        off = predicted / measured - 1 if predicted is not None and measured is not None else None
        cells = (str(count), _number(predicted, "#.3g"), _number(measured, "#.3g"), _number(off, "+.1%"))
        rows.append(Row((*cells, _number(None if measured is None else 1e3 / measured, ".1f"))))
    columns = ("tokens in a pass", "predicted, ms", "measured, ms", "off by", "passes a second")
    return Table("Speed on this machine", columns, tuple(rows))


def _drafts(drafts: Sequence[DraftFigures]) -> Table | None:
    if not drafts:
        return None
    columns = (
        "",
        "head, tokens",
        "of the text",
        "top-1 agreement",
        "tokens a pass",
        "tokens/s plain",
        "tokens/s",
        "ratio",
    )
    rows = []
    for draft in drafts:
        found = draft.acceptance
        rows.append(
            Row(
                (
                    draft.made_of,
                    "all" if draft.vocabulary is None else str(draft.vocabulary),
                    _number(draft.coverage, ".2%"),
                    f"{found.agreement:.1%}",
                    f"{found.tokens_per_pass:.2f}",
                    f"{1 / found.plain_seconds:.1f}",
                    f"{1 / found.speculative_seconds:.1f}",
                    f"{found.plain_seconds / found.speculative_seconds:.2f}",
                )
            )
        )
    return Table("Draft", columns, tuple(rows))


def _linears(linears: Sequence[LinearFigures]) -> Table:
    timed, judged = (
        any(linear.milliseconds is not None for linear in linears),
        any(linear.solo_kl is not None for linear in linears),
    )
    columns: tuple[str, ...] = ("", "format", "rounded by", "outputs", "inputs", "MB", "bits a weight")
    columns += ("ms",) * timed + ("KL alone, nats",) * judged

    def cells(linear: LinearFigures) -> tuple[str, ...]:
        method = "-" if linear.form.method is None else linear.form.method.value
        shape = (str(linear.rows), str(linear.columns), megabytes(linear.bytes_read), f"{linear.bits_per_weight:.2f}")
        found = (_number(linear.milliseconds, ".3f"),) * timed + (_number(linear.solo_kl, "#.3g"),) * judged
        return (linear.name, str(linear.form), method, *shape, *found)

    return Table(
        "Matrices",
        columns,
        tuple(Row(cells(linear)) for linear in linears),
        words=("format", "rounded by"),
        folded=True,
    )


def _conditions(report: ModelReport) -> Table:
    facts = {"made by": report.command}
    if report.calibration is not None:
        text = report.calibration
        facts["calibration"] = (
            f"{text.origin}: {text.tokens} tokens, and {text.held_out_tokens} held out for these figures"
        )
        facts["input scales"] = "folded into norms and neighbouring matrices" if text.folded else "not folded"
    facts |= {
        "against the reference decoder": ", ".join(
            f"{name.replace('_', ' ')} {value:.3g}" for name, value in report.parity.items()
        ),
        "files": f"{megabytes(report.file_bytes)} MB",
        "export took": f"{report.seconds:.1f} s" if report.seconds else "",
        **report.machine,
    }
    return Table("What the numbers hold for", (), tuple(Row((name, value)) for name, value in facts.items() if value))


def megabytes(size: int) -> str:
    """Bytes in millions, to three digits or a tenth."""
    return f"{size / _MEGA:.1f}" if size >= 100 * _MEGA else f"{size / _MEGA:#.3g}"


def _less(ratio: float) -> str:
    """A ratio of KL in words."""
    return f"{1 - ratio:.0%} less" if ratio <= 1 else f"{ratio - 1:.0%} more"


def _tone(good: bool) -> str:
    return "good" if good else "bad"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
