"""What orders of columns are worth, before they are divided into blocks that share a scale.

Example: python benchmarks/column_orders.py CHECKPOINT --text conversations.jsonl --work work --blocks 128 32

The inputs of `down` and, within a head, of the output projection are permuted at no cost (local orders), and those of
all other linears by one order of the hidden channels. Random orders show what a ratio means. For columns and table see
`simulated_weights.py`. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

import numpy as np
from threadpoolctl import threadpool_limits

import edgerun
from edgerun.export import Method, WeightFormat
from edgerun.export.checkpoint.open import open_source
from edgerun.export.quantization.codes import InputStatistics, dequantized, second_moments
from edgerun.export.quantization.gptq import gptq_rows
from edgerun.export.quantization.methods import QUANTIZERS
from simulated_weights import Floats, Linear, Matrix, Order, Simulation, add_options


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 32])
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq", "yaqa"])
    parser.add_argument("--orders", nargs="+", default=ORDERS)
    options = parser.parse_args()
    with open_source(options.checkpoint) as (config, source), threadpool_limits(1, user_api="blas"):
        results = list(compare(Simulation(options, config, source), options))
    print(json.dumps({"benchmark": "column_orders", "edgerun": edgerun.__version__, "results": results}))


def ordered(linear: Linear, weight_format: WeightFormat, method: str, orders: Mapping[str, Order]) -> Matrix:
    """A linear quantized by the exporter's methods, its columns in another order if there is one for it."""
    order = orders.get(linear.layout.name, np.arange(linear.layout.columns))
    weights, known = linear.weights[:, order], linear.inputs
    moments = second_moments(known, len(order))[np.ix_(order, order)]
    inputs = InputStatistics(known.mean_square[order], known.mean_magnitude[order], moments)
    made = np.empty_like(weights)
    for part, outputs in linear.outputs:
        if method in ("gptq", "yaqa"):
            codes = gptq_rows(weights[part], weight_format, inputs, outputs if method == "yaqa" else None)
        else:
            codes = QUANTIZERS[Method(method)](weights[part], weight_format, inputs)
        made[part, order] = dequantized(codes, len(order), weight_format)
    return made


def sorted_order(scores: Floats, head: int, kv_heads: int) -> Order:
    """Columns by descending scores; within heads where `head` is not 0, all heads of one key-value head alike."""
    if head == 0:
        return np.argsort(-scores, kind="stable")
    shared = scores.reshape(kv_heads, -1, head).mean(axis=1)
    own = np.argsort(-shared, axis=1, kind="stable")
    queries = len(scores) // head
    starts = np.arange(queries)[:, None] * head
    return (starts + np.repeat(own, queries // kv_heads, axis=0)).ravel()


SCORES: Final[Mapping[str, Callable[[Linear], Floats]]] = {
    "scale": lambda linear: np.sqrt(np.square(linear.weights, dtype=np.float64).mean(axis=0)),
    "peak": lambda linear: np.abs(linear.weights).max(axis=0).astype(np.float64),
    "salience": lambda linear: linear.inputs.mean_square.astype(np.float64),
    "conditional salience": lambda linear: linear.importance.astype(np.float64),
    "salience times scale": lambda linear: linear.inputs.mean_square * np.square(linear.weights).mean(axis=0),
}


def searched_order(start: Order, linears: Sequence[Linear], block: int, sweeps: int = 3) -> Order:
    """Swap columns of two blocks while that lowers the sum over rows and blocks of the squared largest weight times the
    importance of the block's columns."""
    squares, costs, of_linear = [], [], []
    for number, linear in enumerate(linears):
        step = max(1, linear.layout.shape[0] * len(linears) // 512)
        rows = np.square(linear.weights[::step].astype(np.float32)) * linear.row_importance[::step, None]
        squares.append(rows.astype(np.float32))
        costs.append(linear.importance.astype(np.float32))
        of_linear.append(np.full(len(rows), number))
    weights, importance, owner = np.concatenate(squares), np.stack(costs), np.concatenate(of_linear)
    order = start.copy()
    blocks = [order[at : at + block] for at in range(0, len(order), block)]
    for _ in range(sweeps):
        changed = False
        for one, other in combinations(blocks, 2):
            changed |= _swap(one, other, weights, importance, owner)
        if not changed:
            break
    return order


def _swap(one: Order, other: Order, weights: Matrix, importance: Matrix, owner: Order) -> bool:
    """Make the best swap of columns of two blocks in place; False if none helps."""

    def without(block: Order) -> tuple[Matrix, Matrix]:
        own = weights[:, block]
        top = np.partition(own, -2, axis=1)[:, -2:]
        return np.where(own == top[:, 1:], top[:, :1], top[:, 1:]), importance[:, block].sum(1)

    (rest_one, sum_one), (rest_other, sum_other) = without(one), without(other)
    own, theirs = weights[:, one], weights[:, other]
    gain = importance[:, other][:, None] - importance[:, one][:, :, None]  # [linears, one, other]
    before = (own.max(1) * sum_one[owner] + theirs.max(1) * sum_other[owner]).sum()
    first, second = np.maximum(rest_one[:, :, None], theirs[:, None]), np.maximum(rest_other[:, None], own[:, :, None])
    after = np.zeros(first.shape[1:])
    for number in range(len(importance)):
        rows = owner == number
        after += first[rows].sum(0) * (sum_one[number] + gain[number]) + second[rows].sum(0) * (
            sum_other[number] - gain[number]
        )
    best = np.unravel_index(after.argmin(), after.shape)
    if after[best] >= before * (1 - 1e-5):
        return False
    one[best[0]], other[best[1]] = other[best[1]], one[best[0]]
    return True


def local_orders(simulation: Simulation, kind: str, block: int) -> dict[str, Order]:
    """An order of the inputs of each `down` and output projection."""
    config, found = simulation.config, dict[str, Order]()
    random = np.random.default_rng(sum(map(ord, kind)))
    for linear in simulation.linears:
        name, columns = linear.layout.name, linear.layout.columns
        if not name.endswith(("down", "o", "output", "o_proj", "down_proj")):
            continue
        head = 0 if "down" in name else config.head_dim
        if kind == "searched":
            found[name] = np.arange(columns)
            if head == 0:
                starts = [sorted_order(SCORES[each](linear), 0, 1) for each in ("scale", "peak")]
                found[name] = searched_order(starts[1], [linear], block)
            else:
                found[name] = sorted_order(SCORES["peak"](linear), head, config.kv_heads)
        else:
            scores = random.random(columns) if kind.startswith("random") else SCORES[kind](linear)
            found[name] = sorted_order(scores, head, config.kv_heads)
    return found


def hidden_orders(simulation: Simulation, kind: str, block: int) -> dict[str, Order]:
    """One order of the hidden channels, for all linears that read them."""
    readers = [
        each
        for each in simulation.linears
        if each.layout.columns == simulation.config.hidden_size
        and not any(part in each.layout.name for part in ("down", ".o", "output"))
    ]
    random = np.random.default_rng(sum(map(ord, kind)))
    if kind.startswith("random"):
        order = np.argsort(random.random(simulation.config.hidden_size))
    else:
        scores = [SCORES["peak" if kind == "searched" else kind](each) for each in readers]
        order = np.argsort(-np.mean([each / each.mean() for each in scores], axis=0), kind="stable")
        if kind == "searched":
            order = searched_order(order, readers, block)
    return {each.layout.name: order for each in readers}


ORDERS: Final = tuple(f"{place}: {kind}" for place in ("local", "hidden") for kind in ("random", *SCORES, "searched"))


def compare(simulation: Simulation, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the table of orders."""
    for block in options.blocks:
        form = WeightFormat(4, block, half_scales=True)
        plans: list[tuple[str, dict[str, Order]]] = [("as it is", {})]
        for name in options.orders:
            place, _, kind = name.partition(": ")
            plans.append((name, {"local": local_orders, "hidden": hidden_orders}[place](simulation, kind, block)))
        for method in options.methods:
            for name, orders in plans:
                weights = simulation.all(partial(ordered, weight_format=form, method=method, orders=orders))
                yield simulation.show(f"{form} {method}, {name}", weights, first=not orders)


if __name__ == "__main__":
    main()
