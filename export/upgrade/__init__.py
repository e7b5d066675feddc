"""Upgrade of ONNX language models from other exporters to the graph contract.

The steps, in the order of `pipeline`:

1. Normalize the source: a merged decoder keeps its branch for a filled cache, stacked caches are split, and inputs get
   their usual names (`decoder_io`, `stacked_caches`).
2. Fuse plain operators (`attention_fusion`, with `attention_pattern`): the attention of a layer,
   with its rotation, becomes one GroupQueryAttention whose inputs 3 and 4 and outputs 1 and 2 are the graph's own
   caches. Fused graphs skip this step.
3. Wire attention (`contract_inputs`): lengths, positions and bias of every GroupQueryAttention come from the contract's
   inputs, caches get the contract's names and shapes, and the nodes that computed masks and positions are removed.
4. Select positions (`contract_inputs`): only the positions in `logit_rows` go through the last MLP and the LM head.
5. Change weights (`float_linears`, `quantized_linears`): half precision to float32, float matrices to few bits, and
   quantized linears with the same input joined.

After step 4 the graph computes what the source computes. `parity` checks that before anything is rounded, or on the
written bundle if nothing is.
"""
