"""An ONNX language model that another tool exported, rewired to the graph contract.

The order of things (`pipeline`):

1. A merged decoder keeps its branch for a filled cache (`branches`); inputs that say what Optimum's do get its names
   (input_ids, attention_mask, position_ids), whatever they were called (`ports`).
2. A graph in plain operators gets fused ones (`plain`), among them one GroupQueryAttention a layer with inputs 3 and 4
   and outputs 1 and 2 the graph's own caches, and 5, 6, 9 and 10 left to step 3. Graphs that are fused skip this.
3. `fused.wire_attention`: lengths, positions and bias of every GroupQueryAttention come from the contract's inputs,
   caches get the contract's names and shapes; what made masks and positions from the old inputs is swept away.
4. `rows.select_rows`: only the rows asked for go through the last layer's MLP and the head.
5. What changes numbers or the layout of weights: half precision to float32 (`widen`), float matrices to few bits
   (`linears`), quantized linears that read the same value joined (`siblings`).

The graph after step 4 computes what the source computes. `parity` checks that before anything is rounded, or on the
written bundle where nothing is.
"""

from .foreign import holds_graph
from .pipeline import upgrade_model

__all__ = ["holds_graph", "upgrade_model"]
