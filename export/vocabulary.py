"""The two ends of the graph: the embedding of tokens, and the head that makes logits of rows."""

from __future__ import annotations

from ..models.manifest import WeightFormat
from . import contract
from .layout import Unit, embedding_layout, head_layout
from .nodes import MICROSOFT, Nodes
from .quantization.codes import blocks_of


class Vocabulary:
    """Appends embedding and head, which may share one matrix."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._table: tuple[str, ...] = ()
        """The embedding's initializers, for a tied head: the matrix, or codes and scales."""

    def append_embedding(self) -> str:
        """Rows of the embedding, scaled, [1, M, hidden]."""
        # The scale is a node of its own, not part of the matrix, which may be the head's too.
        return self._nodes.scaled(
            self._rows(), self._nodes.config.embedding_scale, "embedding.scale", "embedded.scaled"
        )

    def _rows(self) -> str:
        nodes, unit = self._nodes, embedding_layout(self._nodes.config)
        form = nodes.plan[unit.name]
        if form.bits == 32:
            self._table = (nodes.weights.plain(unit),)
            return nodes.add("Gather", [*self._table, "input_ids"], "embedded", axis=0)
        codes, scales = self._table = nodes.weights.quantized(unit, form, gathered=True)
        gathered = nodes.add(
            "GatherBlockQuantized",
            [codes, "input_ids", scales],
            "embedded.blocks",
            domain=MICROSOFT,
            bits=form.bits,
            block_size=form.block,
            gather_axis=0,
            quantize_axis=2,
        )
        joined = nodes.add("Reshape", [gathered, nodes.integers("embedded.shape", 0, 0, -1)], "embedded.joined")
        columns = unit.columns
        if columns % form.block == 0:
            return joined
        bounds = [
            nodes.integers("embedded.starts", 0),
            nodes.integers("embedded.ends", columns),
            nodes.integers("embedded.axes", 2),
        ]
        return nodes.add("Slice", [joined, *bounds], "embedded")

    def append_head(self, normed: str) -> None:
        """Logits, [R, vocabulary], of normed rows [1, R, hidden]."""
        nodes, config = self._nodes, self._nodes.config
        rows = nodes.add("Squeeze", [normed, nodes.integers("head.axes", 0)], "head.rows")
        cap = config.logits_softcap
        # What divides the logits may as well divide the rows, which are shorter. In float arithmetic that differs by
        # rounding alone, and not at all for Granite's powers of two.
        rows = nodes.scaled(rows, config.logits_scale / (cap or 1.0), "head.scale", "head.scaled")
        if cap is None:
            self._product(rows, contract.LOGITS)
        else:
            bounded = nodes.add("Tanh", [self._product(rows, "head.product")], "head.tanh")
            nodes.add("Mul", [bounded, nodes.scalar("head.cap", cap)], contract.LOGITS)

    def _product(self, rows: str, output: str) -> str:
        nodes, unit, tied = self._nodes, head_layout(self._nodes.config), self._nodes.config.tied_head
        form = nodes.plan[unit.name]
        if form.bits == 32:
            (matrix,) = self._table if tied else (nodes.weights.plain(unit),)
            return nodes.add("Gemm", [rows, matrix], output, transB=1)
        codes, scales = self._tied_table(unit, form) if tied else nodes.weights.quantized(unit, form)
        return nodes.matmul_nbits(unit.shape, form, [rows, codes, scales], output)

    def _tied_table(self, unit: Unit, form: WeightFormat) -> tuple[str, str]:
        """The embedding's codes and scales as MatMulNBits wants them: the same bytes, in the file and in memory."""
        codes, scales = self._table
        shape = (unit.shape[0], blocks_of(unit.columns, form))
        return codes, self._nodes.weights.reshaped(scales, "head.scales", shape)
