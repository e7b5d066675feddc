"""Tiny encoders in the form of Optimum's exports, written node by node, and what they compute in NumPy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper, parser
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from support.tiny_models import write_json

Array = npt.NDArray[np.float32]
WORDS: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "query", "passage", ":", *"abcdefghijklmnopqrstuvwxyz0123456789.-")
SIZE: Final = 16
CONTEXT: Final = 64
_random = np.random.default_rng(3)
WEIGHTS: Final[dict[str, Array]] = {
    name: (_random.standard_normal(shape) / len(shape) ** 2).astype(np.float32)
    for name, shape in {
        "words": (2 * len(WORDS), SIZE),
        "types": (2, SIZE),
        "positions": (CONTEXT, SIZE),
        "mix": (SIZE, SIZE),
        "head": (SIZE, 1),
    }.items()
}
_GRAPH: Final = """
<ir_version: 8, opset_import: ["": 17]>
encoder (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask%s) => (float[%s] %s) {
    axis = Constant<value = int64 {1}>()
    two = Constant<value = int64[1] {2}>()
    middle = Constant<value = int64[1] {1}>()
    zero = Constant<value = int64 {0}>()
    counted = CumSum<exclusive = 1>(attention_mask, axis)
    word = Gather(words, input_ids)
    type = Gather(types, %s)
    position = Gather(positions, counted)
    typed = Add(word, type)
    embedded = Add(typed, position)
    mixed = MatMul(embedded, mix)
    hidden = Tanh(mixed)
    mask2 = Cast<to = 1>(attention_mask)
    mask = Unsqueeze(mask2, two)
    masked = Mul(hidden, mask)
    sum = ReduceSum(masked, middle)
    tokens = ReduceSum(mask, middle)
    mean = Div(sum, tokens)
    last_hidden_state = Add(hidden, mean)
    first = Gather<axis = 1>(last_hidden_state, zero)
    logits = MatMul(first, head)
    unpadded = Mul(last_hidden_state, mask)
    total = ReduceSum<keepdims = 0>(unpadded, middle)
    counts = ReduceSum<keepdims = 0>(mask, middle)
    sentence_embedding = Div(total, counts)
}
"""
_SHAPES: Final = {
    "last_hidden_state": f"batch, sequence, {SIZE}",
    "sentence_embedding": f"batch, {SIZE}",
    "logits": "batch, 1",
}


def states_of(token_ids: Sequence[int], type_ids: Sequence[int] | None = None) -> Array:
    """The hidden states float32 `[n, d]` of a text."""
    types = [0] * len(token_ids) if type_ids is None else list(type_ids)
    embedded = WEIGHTS["words"][list(token_ids)] + WEIGHTS["types"][types] + WEIGHTS["positions"][: len(token_ids)]
    hidden = np.tanh(embedded @ WEIGHTS["mix"])
    return np.asarray(hidden + hidden.mean(axis=0), np.float32)


def encoder_tokenizer() -> Tokenizer:
    """A WordPiece tokenizer in the form of BERT's, of letters."""
    letters = [f"##{word}" for word in WORDS]
    vocabulary = {word: index for index, word in enumerate((*WORDS, *letters))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    tokenizer.enable_truncation(8)  # as published tokenizers have it; it must not count
    tokenizer.enable_padding(length=12)
    return tokenizer


def write_encoder(
    folder: Path,
    output: str = "last_hidden_state",
    *,
    pooling: str | None = None,
    types: bool = True,
    changes: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """Write an encoder whose graph lies in a folder below its configuration, and return its folder.

    Args:
        folder: where to write.
        output: the output of the graph.
        pooling: the flag in the pooling config of sentence-transformers that is true; None for no such file.
        types: whether the graph takes type ids.
        changes: what to replace in the text of the graph, and by what.
    """
    (folder / "onnx").mkdir(parents=True, exist_ok=True)
    taken = ", int64[batch, sequence] token_type_ids" if types else ""
    zeros = "token_type_ids" if types else "zeros"
    text = _GRAPH % (taken, _SHAPES[output], output, zeros)
    if not types:
        text = text.replace("counted =", "zeros = Sub(attention_mask, attention_mask)\n    counted =")
    for found, instead in changes.items():
        text = text.replace(found, instead)
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in WEIGHTS.items())
    onnx.save(model, folder / "onnx" / "model.onnx")
    encoder_tokenizer().save(str(folder / "tokenizer.json"))
    kind = "BertForSequenceClassification" if output == "logits" else "BertModel"
    sizes = {"vocab_size": 2 * len(WORDS), "hidden_size": SIZE, "max_position_embeddings": CONTEXT}
    write_json(folder / "config.json", {"architectures": [kind], "model_type": "bert", **sizes})
    write_json(folder / "tokenizer_config.json", {"model_max_length": 60, "cls_token": "[CLS]", "sep_token": "[SEP]"})
    if pooling is not None:
        (folder / "1_Pooling").mkdir(exist_ok=True)
        names = (
            "pooling_mode_cls_token",
            "pooling_mode_mean_tokens",
            "pooling_mode_lasttoken",
            "pooling_mode_max_tokens",
        )
        write_json(folder / "1_Pooling" / "config.json", {name: name == pooling for name in names})
    return folder
