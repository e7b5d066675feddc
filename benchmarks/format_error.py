"""What number formats are worth at their bits per weight, among them formats that no operator reads.

Example: python benchmarks/format_error.py CHECKPOINT formats --text conversations.jsonl --work work

`formats`: codebooks and block scales, rounded to nearest and by GPTQ, and single weights kept in 8 bits (PB-LLM).
`splits`: within budgets of bits, each linear in the format that the budget is best spent on; without linears of two
formats, and with them: the hottest columns in one format and the others in another. For columns of the table see
`simulated_weights.py`. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from threadpoolctl import threadpool_limits

import edgerun
from edgerun.export.checkpoint.open import open_source
from simulated_weights import Floats, Linear, Matrix, Order, Simulation, TextDivergence, add_options

RoundColumn = Callable[[Floats, int], Floats]
"""Rounds targets [N] of a column."""

_GROUP: Final = 32
"""Columns that are processed together; hot columns are a multiple of it."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"formats": compare_formats, "splits": compare_splits}
    add_options(parser)
    parser.add_argument("part", choices=parts)
    parser.add_argument("--budgets", type=float, nargs="+", default=[3.0, 3.5, 4.25, 4.5, 5.0], help="bits per weight")
    options = parser.parse_args()
    with open_source(options.checkpoint) as (config, source), threadpool_limits(1, user_api="blas"):
        results = list(parts[options.part](Simulation(options, config, source), options))
    print(json.dumps({"benchmark": "format_error", "edgerun": edgerun.__version__, "results": results}))


class Codebook(NamedTuple):
    """A format of values times a scale per block."""

    values: Floats
    """What codes stand for, ascending."""
    block: int
    scale: str = "float16"
    """Kind of scales: float16; e8m0, powers of two; e4m3, within a scale of the matrix; 6 bits, in groups of 8."""

    @property
    def bits(self) -> float:
        """Bits per weight."""
        of_scale = {"float16": 16.0, "e8m0": 8.0, "e4m3": 8.0, "6 bits": 8.0}[self.scale]
        return float(np.ceil(np.log2(len(self.values)))) + of_scale / self.block

    def rounded_scales(self, scales: Floats) -> Floats:
        """Scales [N, blocks] as they are stored."""
        if self.scale == "float16":
            return scales.astype(np.float16).astype(np.float64)
        if self.scale == "e8m0":
            return np.exp2(np.rint(np.log2(np.maximum(np.abs(scales), 1e-30))))
        if self.scale == "e4m3":
            whole = max(float(np.abs(scales).max()) / 448, 1e-30)
            exponents = np.maximum(np.frexp(scales / whole)[1], -5)
            mantissas: Floats = np.rint(np.ldexp(scales / whole, 4 - exponents))
            return np.asarray(np.ldexp(mantissas, exponents - 4) * whole)
        groups = np.pad(scales, ((0, 0), (0, -scales.shape[1] % 8))).reshape(len(scales), -1, 8)
        steps = np.abs(groups).max(axis=2, keepdims=True) / 31
        steps = np.maximum(steps.astype(np.float16).astype(np.float64), 1e-12)
        rounded: Floats = np.clip(np.rint(groups / steps), -32, 31) * steps
        return rounded.reshape(len(scales), -1)[:, : scales.shape[1]]

    def nearest(self, targets: Floats, scales: Floats) -> Floats:
        """The values nearest to targets at scales of the same shape, without the scale."""
        steps = np.divide(targets, scales, out=np.zeros_like(targets), where=scales != 0)
        if np.array_equal(np.diff(self.values), np.ones(len(self.values) - 1)):
            return np.clip(np.rint(steps), self.values[0], self.values[-1])
        return self.values[np.searchsorted((self.values[1:] + self.values[:-1]) / 2, steps)]

    def fitted_scales(self, weights: Floats, importance: Floats) -> Floats:
        """Scales of blocks [N, blocks] with the least error weighted by the importance of columns."""
        rows, columns = weights.shape
        spare = -columns % self.block
        blocks = np.pad(weights, ((0, 0), (0, spare))).reshape(rows, -1, self.block)
        costs = np.pad(importance, (0, spare)).reshape(-1, self.block)
        costs = costs / np.maximum(costs.max(axis=1, keepdims=True), 1e-300) + 1e-6
        peaks = np.abs(blocks).max(axis=2)
        best, least = np.zeros_like(peaks), np.full(peaks.shape, np.inf)

        def offer(scales: Floats) -> Floats:
            stored = self.rounded_scales(scales)
            codes = self.nearest(blocks, np.broadcast_to(stored[..., None], blocks.shape))
            errors = (costs * (blocks - codes * stored[..., None]) ** 2).sum(axis=2)
            better = errors < least
            best[better], least[better] = stored[better], errors[better]
            return codes

        signs = (1,) if np.allclose(self.values, -self.values[::-1]) or self.scale == "e8m0" else (1, -1)
        for sign in signs:
            widest = self.values[-1] if sign == 1 else -self.values[0]
            for factor in (0.55, 0.7, 0.8, 0.87, 0.94, 1.0, 1.07):
                offer(peaks * (sign * factor / widest))
        codes = self.nearest(blocks, np.broadcast_to(best[..., None], blocks.shape))
        powers = (costs * codes**2).sum(axis=2)
        offer(np.divide((costs * codes * blocks).sum(axis=2), powers, out=np.zeros_like(powers), where=powers > 0))
        return self.rounded_scales(best) if self.scale == "6 bits" else best


def integers(bits: int, block: int, scale: str = "float16") -> Codebook:
    """Equally spaced values, as the operators have them."""
    return Codebook(np.arange(-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)), block, scale)


def symmetric(values: Sequence[float]) -> Floats:
    """Values with both signs, once each."""
    return np.unique([sign * value for value in values for sign in (-1.0, 1.0)])


E2M1: Final = symmetric((0, 0.5, 1, 1.5, 2, 3, 4, 6))
E3M0: Final = symmetric((0, 0.25, 0.5, 1, 2, 4, 8, 16))
NF4: Final = np.array(
    [
        -1,
        -0.6962,
        -0.5251,
        -0.3949,
        -0.2844,
        -0.1848,
        -0.0911,
        0,
        0.0796,
        0.1609,
        0.2461,
        0.3379,
        0.4407,
        0.5626,
        0.723,
        1,
    ]
)
IQ4: Final = np.array([-127.0, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FORMATS: Final[Mapping[str, Codebook]] = {
    "int4/128": integers(4, 128),
    "MXFP4: E2M1/32, scales E8M0": Codebook(E2M1, 32, "e8m0"),
    "int4/32, scales E8M0": integers(4, 32, "e8m0"),
    "FP4: E2M1/64": Codebook(E2M1, 64),
    "FP4: E3M0/64": Codebook(E3M0, 64),
    "NF4/64": Codebook(NF4, 64),
    "IQ4 values/64": Codebook(IQ4, 64),
    "int4/64": integers(4, 64),
    "IQ4_XS: IQ4 values/32, scales of 6 bits": Codebook(IQ4, 32, "6 bits"),
    "int4/32, scales of 6 bits": integers(4, 32, "6 bits"),
    "NVFP4: E2M1/16, scales E4M3": Codebook(E2M1, 16, "e4m3"),
    "FP4: E2M1/32": Codebook(E2M1, 32),
    "IQ4 values/32": Codebook(IQ4, 32),
    "int4/32": integers(4, 32),
}


_CHOOSING_TEXTS: Final = 20
"""Calibration texts on which linears are measured alone."""
BOOKS: Final = {
    "int2/64": integers(2, 64),
    "int4/128": integers(4, 128),
    "int4/64": integers(4, 64),
    "int4/32": integers(4, 32),
    "int8/128": integers(8, 128),
}
SPLITS: Final = {name: ("int8/128", 0.0, name) for name in BOOKS} | {
    f"{share} in {hot}, {cold}": (hot, share, cold)
    for hot, cold, shares in (
        ("int8/128", "int4/128", (1 / 16, 1 / 8, 1 / 4)),
        ("int8/128", "int4/32", (1 / 16, 1 / 8)),
        ("int4/128", "int2/64", (1 / 8, 1 / 4, 1 / 2)),
    )
    for share in shares
}
"""Format of the hot columns, their share, and format of the others."""


def compensated(linear: Linear, order: Order, round_column: RoundColumn) -> Matrix:
    """Round columns in the order of GPTQ, each after adding the errors so far; `order` places columns in blocks."""
    columns, position = linear.layout.columns, np.argsort(order)
    exact = np.ascontiguousarray(linear.weights.T[linear.order], np.float64)
    errors, made = np.empty_like(exact), np.empty_like(linear.weights)
    for start in range(0, columns, _GROUP):
        stop = min(start + _GROUP, columns)
        targets = exact[start:stop] + linear.upper[:start, start:stop].T @ errors[:start]
        for at in range(start, stop):
            column = linear.order[at]
            rounded = round_column(targets[at - start], int(position[column]))
            made[:, column], errors[at] = rounded, exact[at] - rounded
            targets[at - start + 1 :] += linear.upper[at, at + 1 : stop, None] * errors[at]
    return made


def in_parts(linear: Linear, order: Order, parts: Sequence[tuple[Codebook, int]], gptq: bool = True) -> Matrix:
    """Quantize a linear whose columns in an order are divided into parts, each a format and a number of columns."""
    columns = linear.layout.columns
    importance = (linear.importance if gptq else linear.inputs.mean_square).astype(np.float64)
    weights, importance = linear.weights[:, order].astype(np.float64), importance[order]
    books, scales, first = list[Codebook](), np.empty((columns, len(weights))), 0
    for book, width in parts:
        part = slice(first, first + width)
        if width:
            fitted = book.fitted_scales(weights[:, part], importance[part])
            scales[part] = np.repeat(fitted, book.block, axis=1)[:, :width].T
        books += [book] * width
        first += width

    def round_column(targets: Floats, at: int) -> Floats:
        return np.asarray(books[at].nearest(targets, scales[at]) * scales[at])

    if gptq:
        return compensated(linear, order, round_column)
    made = np.empty_like(linear.weights)
    for at, column in enumerate(order.tolist()):
        made[:, column] = round_column(weights[:, at], at)
    return made


def pb_llm(linear: Linear, share: float, gptq: bool = True) -> Matrix:
    """PB-LLM (Shang et al., 2024): weights of large w ** 2 times importance in 8 bits, others one of two per row."""
    weights = linear.weights.astype(np.float64)
    salience = np.abs(weights) * np.sqrt(linear.importance)
    kept = salience >= np.quantile(salience, 1 - share)
    rest = np.where(kept, np.nan, weights)
    means = np.nan_to_num(np.nanmean(rest, axis=1))
    sizes = np.nan_to_num(np.nanmean(np.abs(rest - means[:, None]), axis=1))
    steps = np.maximum(np.abs(weights).max(axis=1) / 127, 1e-30)

    def round_column(targets: Floats, at: int) -> Floats:
        fine = np.clip(np.rint(targets / steps), -128, 127) * steps
        return np.asarray(np.where(kept[:, at], fine, means + np.where(targets >= means, sizes, -sizes)))

    if gptq:
        return compensated(linear, np.arange(linear.layout.columns), round_column)
    return np.stack([round_column(weights[:, at], at) for at in range(weights.shape[1])], axis=1).astype(np.float32)


def uniform(linear: Linear, book: Codebook, gptq: bool) -> Matrix:
    """Quantize a linear in one format."""
    return in_parts(linear, np.arange(linear.layout.columns), [(book, linear.layout.columns)], gptq)


def compare_formats(simulation: Simulation, _: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table of formats."""
    low = {"int2/64": integers(2, 64), "int3/128": integers(3, 128)}
    for gptq in (False, True):
        way = "GPTQ" if gptq else "nearest"
        for name, book in {**FORMATS, **low}.items():
            made = simulation.all(partial(uniform, book=book, gptq=gptq))
            yield simulation.show(f"{name}, {way}", made, bits=book.bits)
        for share in (0.05, 0.1, 0.2):
            made = simulation.all(partial(pb_llm, share=share, gptq=gptq))
            # A bit for each weight says which it is.
            yield simulation.show(f"PB-LLM, {share:.0%} in 8 bits, {way}", made, bits=2 + 7 * share)


def compare_splits(simulation: Simulation, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table of budgets."""
    linears, folder = simulation.linears, options.work / "chosen"
    chosen = TextDivergence(simulation.model, simulation.text.calibration[:_CHOOSING_TEXTS], folder)
    made: dict[str, dict[str, Matrix]] = {}
    alone: dict[tuple[str, str], float] = {}
    bits: dict[tuple[str, str], float] = {}
    """KL of a linear in a format alone, and bits of its weights."""
    for label, (hot, share, cold) in SPLITS.items():
        made[label] = simulation.all(partial(split, hot=BOOKS[hot], share=share, cold=BOOKS[cold]))
        for linear in linears:
            key, size = (linear.layout.name, label), linear.layout.weight_count
            found = chosen.of({key[0]: made[label][key[0]]})
            alone[key] = float(found[0].sum() / found[1].sum())
            part = hot_columns(linear, share) / linear.layout.columns
            bits[key] = size * (part * BOOKS[hot].bits + (1 - part) * BOOKS[cold].bits)
    names, total = [each.layout.name for each in linears], sum(each.layout.weight_count for each in linears)
    for budget in options.budgets:
        for labels in ([each for each, (_, share, _) in SPLITS.items() if share == 0], list(SPLITS)):
            plan = cheapest(names, labels, alone, bits, budget * total)
            way = f"{budget} bits, " + ("with splits" if len(labels) == len(SPLITS) else "whole linears")
            weights = {name: made[label][name] for name, label in plan.items()}
            spent = sum(bits[each] for each in plan.items()) / total
            yield simulation.show(way, weights, first=len(labels) < len(SPLITS), bits=spent)


def hot_columns(linear: Linear, share: float) -> int:
    """Number of hot columns: at least one group, if any."""
    return 0 if share == 0 else max(1, round(share * linear.layout.columns / _GROUP)) * _GROUP


def split(linear: Linear, hot: Codebook, share: float, cold: Codebook) -> Matrix:
    """A linear whose hottest columns have one format and the others another; each part keeps its columns' order.

    A column's heat is what rounding costs there: its importance times the squares of its blocks' scales.
    """
    count, columns = hot_columns(linear, share), linear.layout.columns
    blocks = np.split(np.square(linear.weights), range(cold.block, columns, cold.block), axis=1)
    peaks = np.stack([part.max(axis=1) for part in blocks], axis=1)
    of_blocks = (peaks * linear.row_importance[:, None]).sum(axis=0)
    by_heat = np.argsort(-linear.importance * np.repeat(of_blocks, cold.block)[:columns], kind="stable")
    order = np.concatenate([np.sort(by_heat[:count]), np.sort(by_heat[count:])])
    return in_parts(linear, order, [(hot, count), (cold, columns - count)])


def cheapest(
    names: Sequence[str],
    labels: Sequence[str],
    alone: Mapping[tuple[str, str], float],
    bits: Mapping[tuple[str, str], float],
    budget: float,
) -> dict[str, str]:
    """The format of each linear with the least sum of KL within a budget of bits: the Lagrangian, then greedily."""

    def best(price: float) -> dict[str, str]:
        return {name: min(labels, key=lambda each: alone[name, each] + price * bits[name, each]) for name in names}

    def cost(plan: Mapping[str, str]) -> float:
        return sum(bits[each] for each in plan.items())

    low, high = -30.0, 5.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if cost(best(10**middle)) <= budget else (middle, high)
    plan = best(10**high)
    while True:
        steps = [
            (alone[name, plan[name]] - alone[name, label], name, label)
            for name in names
            for label in labels
            if alone[name, label] < alone[name, plan[name]] and cost({**plan, name: label}) <= budget
        ]
        if not steps:
            return plan
        _, name, label = max(steps)
        plan[name] = label


if __name__ == "__main__":
    main()
