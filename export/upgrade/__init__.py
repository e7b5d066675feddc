"""An ONNX language model that another tool exported, rewired to the graph contract.

The order of things (`pipeline`):

1. `ports.settle_ports`: inputs that say the same as Optimum's get its names (input_ids, attention_mask, position_ids),
   whatever they were called.
2. A graph in plain operators gets fused ones (`plain.fuse_operators`): attention becomes one GroupQueryAttention a
   layer, with inputs 3 and 4 and outputs 1 and 2 the graph's own caches (`stacked` has given keys and values one each),
   and 5, 6, 9 and 10 left to step 3. Graphs that are fused already skip this.
3. `fused.wire_attention`: lengths, positions and bias of every GroupQueryAttention come from the contract's inputs,
   caches get the contract's names and shapes; what made masks and positions from the old inputs is swept away.
4. `rows.select_rows`: only the rows asked for go through the last layer's MLP and the head.
5. What changes numbers or only layout of weights: float16 to float32 (`widen`), matrices to MatMulNBits (`linears`),
   linears that read the same value joined (`siblings`).

The graph after step 4 computes what the source computes; `parity` checks that before anything is rounded.
"""

from .foreign import holds_graph
from .pipeline import upgrade_model

__all__ = ["holds_graph", "upgrade_model"]
