"""Introspection of inputs and outputs; unsupported graphs are rejected with one line that says what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest

import edgerun
from edgerun import BundleError, ContextError
from edgerun.runtime.graph.graph_io import CacheMode, GraphValue, InputRole, LogitsMode
from edgerun.runtime.graph.introspection import introspect
from edgerun.runtime.graph.model_metadata import ModelMetadata
from support.layouts import LIMITED, write_layout
from support.unsupported_graphs import UNSUPPORTED, write_unsupported

ANOTHER = "choose another variant of it"
OURS = f"export the model with edge-run export, or {ANOTHER}"
FOR_CPU = "choose a variant of the model for the CPU"
NO_PAGES = "export it again without paged attention"
TEXT_ONLY = "choose a text-only model"
ONE_GRAPH = "edge-run runs text decoders of one graph; look for a text-only export of this model"
SPLIT_MODEL = (
    "takes embeddings (inputs_embeds) instead of token ids: it is one part of a model that was split up; "
    "choose an export whose decoder takes input_ids"
)

EXPECTED_ERRORS = {
    "no-cache": (
        "{graph} has no key/value cache among its inputs: it processes the whole text for every token, or keeps "
        f"its cache where it cannot be rewound; export it with a cache "
        f"(Optimum's task text-generation-with-past), or {ANOTHER}"
    ),
    "openvino-stateful": (
        "{graph} keeps its cache inside (it takes beam_idx), where it cannot be rewound; "
        "choose an export whose cache is inputs and outputs (past_key_values.N.key)"
    ),
    "encoder": (
        "{graph} is an encoder (it takes token_type_ids), not a language model; open it with edgerun.load_encoder"
    ),
    "mamba": (
        "{graph} keeps states alone (past_conv_states.0), no keys and values: no layer has attention; "
        "choose a model with attention in some of its layers"
    ),
    "paged": f"{{graph}} keeps its cache in pages (it takes block_table), as servers do; {NO_PAGES}",
    "paged-slots": f"{{graph}} keeps its cache in pages (it takes slot_mapping), as servers do; {NO_PAGES}",
    "encoder-decoder": f"{{folder}} is an encoder-decoder model (encoder_model.onnx says so); {ONE_GRAPH}",
    "encoder-decoder-with-past": (
        "{graph} is part of an encoder-decoder model (it takes past_key_values.0.decoder.key); "
        "edge-run runs decoder-only language models"
    ),
    "embeddings-in": f"{{graph}} {SPLIT_MODEL}",
    "embeddings-in-parts": (
        "{folder}/embed_tokens.onnx does not turn token ids into embeddings: it takes input_ids, attention_mask and "
        "gives logits; choose an export whose decoder takes input_ids"
    ),
    "pixels-in": f"{{graph}} is part of a model for images or audio (it takes pixel_values); {TEXT_ONLY}",
    "genai-vision": f"{{graph}} {SPLIT_MODEL}",
    "audio-in": f"{{graph}} is part of a model for images or audio (it takes audio_features); {TEXT_ONLY}",
    "hidden-states-in": (
        "{graph} continues from another model's hidden states (it takes hidden_states): it is a draft head; "
        "give the model it belongs to"
    ),
    "custom-operator": (
        f"{{graph}} needs a custom operator library that edge-run does not have (com.ryzenai.SSMLP); {FOR_CPU}"
    ),
    "compiled-qnn": f"{{graph}} was compiled for one kind of device (it has EPContext operators); {FOR_CPU}",
    "compiled-openvino": f"{{graph}} was compiled for one kind of device (it has EPContext operators); {FOR_CPU}",
    "fixed-window-1": f"{{graph}} takes exactly 1 token per pass (input_ids), as models for an NPU do; {FOR_CPU}",
    "fixed-window-64": f"{{graph}} takes exactly 64 tokens per pass (input_ids), as models for an NPU do; {FOR_CPU}",
    "genai-pipeline": (
        f"{{folder}} is a model cut into stages for an NPU (genai_config.json has a decoder.pipeline); {FOR_CPU}"
    ),
    "scales-per-token": (
        "{graph} keeps a scale for every cached token (past_key_values.0.key_scale); "
        "choose a variant of the model whose cache is not quantized token by token"
    ),
    "batch-of-four": f"{{graph}} has a fixed batch size of 4 (input_ids); {OURS}",
    "image-classifier": f"{{graph}} is part of a model for images or audio (it takes pixel_values); {TEXT_ONLY}",
    "no-logits": (
        f"{{graph}} has no output for logits of 2 or 3 dimensions; beside its cache it gives nothing; {OURS}"
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_graphs_are_rejected(name: str, tmp_path: Path) -> None:
    folder = write_unsupported(tmp_path, UNSUPPORTED[name])
    with pytest.raises(BundleError) as caught:
        edgerun.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    if name == "unknown-operator":  # the message is ONNX Runtime's
        assert message.startswith(f"{folder / 'model.onnx'} cannot be loaded: ")
        assert "No Op registered for Frobnicate" in message
    else:
        assert message == EXPECTED_ERRORS[name].format(folder=folder, graph=folder / UNSUPPORTED[name].file)


def test_operators_in_branches_are_checked(tmp_path: Path) -> None:
    """An operator compiled for one device is found in a branch of an `If` too."""
    folder = write_unsupported(tmp_path, UNSUPPORTED["compiled-qnn"])
    model = onnx.load(folder / "model.onnx")
    hidden = next(node for node in model.graph.node if node.op_type == "EPContext")
    inner = onnx.helper.make_graph([hidden], "branch", [], [onnx.ValueInfoProto(name=hidden.output[0])])
    model.graph.node.remove(hidden)
    flag = onnx.numpy_helper.from_array(np.array([True]), "flag")
    model.graph.initializer.append(flag)
    choice = onnx.helper.make_node("If", ["flag"], list(hidden.output), then_branch=inner, else_branch=inner)
    model.graph.node.append(choice)
    onnx.save(model, folder / "model.onnx")
    with pytest.raises(BundleError, match="was compiled for one kind of device"):
        edgerun.load(folder)


# Inputs and outputs alone

NEW = ("batch_size", "sequence_length")
TOTAL = ("batch_size", "total_sequence_length")
PAST = ("batch_size", 2, "past_sequence_length", 16)
PRESENT = ("batch_size", 2, "total_sequence_length", 16)


def value(name: str, shape: Sequence[int | str | None], type_: str = "tensor(float)") -> GraphValue:
    return GraphValue(name, type_, tuple(shape))


INPUTS = {
    **{name: value(name, shape, "tensor(int64)") for name, shape in (("input_ids", NEW), ("attention_mask", TOTAL))},
    "position_ids": value("position_ids", NEW, "tensor(int64)"),
    **{name: value(name, PAST) for name in ("past_key_values.0.key", "past_key_values.0.value")},
}
OUTPUTS = {
    "logits": value("logits", (*NEW, 300)),
    **{name: value(name, PRESENT) for name in ("present.0.key", "present.0.value")},
}


def graph_io_of(inputs: dict[str, GraphValue], outputs: dict[str, GraphValue], metadata: ModelMetadata | None = None):
    return introspect(list(inputs.values()), list(outputs.values()), "F", metadata or ModelMetadata())


def changed(values: dict[str, GraphValue], name: str, **changes: object) -> dict[str, GraphValue]:
    return {**values, name: replace(values[name], **changes)}


def without(values: dict[str, GraphValue], *names: str) -> dict[str, GraphValue]:
    return {name: each for name, each in values.items() if name not in names}


def added(values: dict[str, GraphValue], *more: GraphValue) -> dict[str, GraphValue]:
    return values | {each.name: each for each in more}


def test_usual_inputs_and_outputs() -> None:
    graph_io = graph_io_of(INPUTS, OUTPUTS)
    assert (graph_io.vocab_size, graph_io.layers, graph_io.capacity) == (300, 1, None)
    assert graph_io.cache_mode is CacheMode.GROWING
    assert graph_io.logits_mode is LogitsMode.ALL
    assert set(graph_io.inputs) == {InputRole.TOKENS, InputRole.MASK, InputRole.POSITIONS}
    assert [(tensor.past, tensor.present) for tensor in graph_io.cache] == [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.0.value", "present.0.value"),
    ]
    assert [tensor.tensor_type.shape_of(7) for tensor in graph_io.cache] == [(1, 2, 7, 16)] * 2


KEY, VALUE = "past_key_values.0.key", "past_key_values.0.value"


def both(**changes: object) -> tuple[dict[str, GraphValue], dict[str, GraphValue]]:
    """Inputs and outputs whose cached keys are of another type or shape."""
    return changed(INPUTS, KEY, **changes), changed(OUTPUTS, "present.0.key", **changes)


def refusal(inputs: dict[str, GraphValue], outputs: dict[str, GraphValue]) -> str:
    with pytest.raises(BundleError) as caught:
        graph_io_of(inputs, outputs)
    return str(caught.value)


def expected(message: str) -> str:
    """The whole text of an error, with the usual hint unless it has one."""
    return f"F {message}" if ";" in message else f"F {message}; {OURS}"


CONFIG_HINT = "put the model's config.json beside it"
NO_LOGITS = "has no output for logits of 2 or 3 dimensions; beside its cache it gives"


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (without(INPUTS, "input_ids"), OUTPUTS, "has no input for token ids (input_ids)"),
        (INPUTS, without(OUTPUTS, "present.0.value"), f"has no output for its cache input {VALUE}"),
        (
            INPUTS,
            changed(OUTPUTS, "present.0.key", type="tensor(float16)"),
            f"takes {KEY} as tensor(float) and gives present.0.key as tensor(float16)",
        ),
        (*both(type="tensor(string)"), f"has a cache of type tensor(string) ({KEY}), which is not supported"),
        (*both(shape=("n", 16)), f"has a cache of 2 dimensions ({KEY}): ['n', 16]"),
        (
            *both(shape=("b", "h", "t", "d")),
            f"leaves the sizes of its cache open: {KEY} is [b, h, t, d]; {CONFIG_HINT}",
        ),
        (
            changed(INPUTS, KEY, shape=(4, 2, "t", 16)),
            OUTPUTS,
            f"has a fixed batch size of 4 ({KEY} is [4, 2, t, 16])",
        ),
        (
            changed(INPUTS, KEY, shape=(1, 2, 63, 16)),
            changed(OUTPUTS, "present.0.key", shape=(1, 2, 64, 16)),
            f"takes a cache of exactly 63 slots ({KEY}) and returns one of another size; {FOR_CPU}",
        ),
        (
            added(INPUTS, value("past_key_0", PAST)),
            OUTPUTS,
            f"has two cache tensors for the same layer and content: {KEY} and past_key_0",
        ),
        (added(INPUTS, value("tokens", NEW)), OUTPUTS, "has two inputs of the same meaning: input_ids and tokens"),
        (added(INPUTS, value("z", NEW), value("a", NEW)), OUTPUTS, "has inputs that edge-run does not know: a, z"),
        (
            changed(INPUTS, "input_ids", type="tensor(float)"),
            OUTPUTS,
            "takes input_ids as tensor(float) of 2 dimensions, which is not supported",
        ),
        (
            changed(INPUTS, "attention_mask", shape=("a", "b", "c")),
            OUTPUTS,
            "takes attention_mask as tensor(int64) of 3 dimensions, which is not supported",
        ),
        (
            changed(INPUTS, "attention_mask", type="tensor(string)"),
            OUTPUTS,
            "takes attention_mask as tensor(string) of 2 dimensions, which is not supported",
        ),
        (
            INPUTS,
            added(without(OUTPUTS, "logits"), value("hidden", (*NEW, 64)), value("scores", (*NEW, 300))),
            f"{NO_LOGITS} hidden, scores; {OURS}",
        ),
        (INPUTS, changed(OUTPUTS, "logits", type="tensor(int64)"), f"{NO_LOGITS} logits; {OURS}"),
        (
            INPUTS,
            changed(OUTPUTS, "logits", shape=(*NEW, "vocab_size")),
            f"leaves the size of its vocabulary open; {CONFIG_HINT}",
        ),
    ],
)
def test_unsupported_inputs_and_outputs_are_rejected(
    inputs: dict[str, GraphValue], outputs: dict[str, GraphValue], message: str
) -> None:
    assert refusal(inputs, outputs) == expected(message)


FLOAT, SIZES = "tensor(float)", ("batch_size", 64, 3)


@pytest.mark.parametrize(
    ("past", "present", "message"),
    [
        ((SIZES, FLOAT), None, "has no output for its state input past_conv.0"),
        ((("batch_size", "h", "l"), FLOAT), ((None, 64, None), FLOAT), "leaves the size of its state open: {}"),
        (((2, 64, 3), FLOAT), (SIZES, FLOAT), "has a fixed batch size of 2 ({})"),
        ((("batch_size",), FLOAT), (SIZES, FLOAT), "leaves the size of its state open: {}"),
        (
            (SIZES, FLOAT),
            (("batch_size", 64, 4), FLOAT),
            "takes past_conv.0 as [batch_size, 64, 3] and gives present_conv.0 as [batch_size, 64, 4]",
        ),
        # A window of states, as exported for CUDA.
        (
            (SIZES, FLOAT),
            ((4, *SIZES), FLOAT),
            "takes past_conv.0 as [batch_size, 64, 3] and gives present_conv.0 as [4, batch_size, 64, 3]",
        ),
        (
            (SIZES, "tensor(int8)"),
            (SIZES, "tensor(int8)"),
            "has a state of type tensor(int8) (past_conv.0), which is not supported",
        ),
        (
            (SIZES, FLOAT),
            (SIZES, "tensor(float16)"),
            "has a state of type tensor(float) and tensor(float16) (past_conv.0), which is not supported",
        ),
    ],
)
def test_unsupported_states_are_rejected(past: tuple, present: tuple | None, message: str) -> None:
    outputs = added(OUTPUTS, value("present_conv.1" if present is None else "present_conv.0", *(present or past)))
    shown = f"past_conv.0 is [{', '.join(map(str, past[0]))}]"
    assert refusal(added(INPUTS, value("past_conv.0", *past)), outputs) == expected(message.format(shown))


@pytest.mark.parametrize(
    ("past", "present", "kind"),
    [
        ("past_conv.{}", "present_conv.{}", "convolution"),
        ("past.{}.conv", "present.{}.conv", "convolution"),
        ("past_conv_states.{}", "present_conv_states.{}", "convolution"),
        ("past_recurrent.{}", "present_recurrent.{}", "recurrent"),
        ("past_key_values.{}.recurrent_state", "present.{}.recurrent_state", "recurrent"),
        ("cache_params.past.ssm.{}", "cache_params.present.ssm.{}", "ssm"),
        ("past_state_{}", "present_state_{}", "state"),
        ("past_conv.{}.query", "present_conv.{}.query", "convolution query"),
    ],
)
def test_states_are_recognised_by_many_names(past: str, present: str, kind: str) -> None:
    """Layers are sorted as numbers. The last output only looks like one of logits or hidden states."""
    inputs, outputs = dict(INPUTS), without(OUTPUTS, "logits")
    for layer in (10, 2, 1):
        inputs = added(inputs, value(past.format(layer), ("batch_size", 4, 8), "tensor(float16)"))
        outputs = added(outputs, value(present.format(layer), (None, 4, 8), "tensor(float16)"))
    graph_io = graph_io_of(inputs, added(outputs, value("scores", (*NEW, 300))))
    assert [(tensor.layer, tensor.kind, tensor.past, tensor.present) for tensor in graph_io.states] == [
        (layer, kind, past.format(layer), present.format(layer)) for layer in (1, 2, 10)
    ]
    (state_type,) = graph_io.state_types
    assert (state_type.layers, state_type.shape, state_type.of_every_token) == (3, (4, 8), False)
    assert state_type.dtype == np.float16
    assert graph_io.layers == 1
    assert not graph_io.supports_trees


def test_states_of_several_shapes_are_of_several_types() -> None:
    shapes = {"past_conv.1": (1, 4, 8), "past_conv.2": (1, 6, 8), "past_conv.3": (1, 4, 8)}
    shapes["past_recurrent.1"] = (1, 4, 8)
    inputs = added(INPUTS, *(value(name, shape) for name, shape in shapes.items()))
    outputs = added(OUTPUTS, *(value(name.replace("past", "present"), shape) for name, shape in shapes.items()))
    graph_io = graph_io_of(inputs, outputs)
    past = [tensor.past for tensor in graph_io.states]
    assert past == ["past_conv.1", "past_conv.3", "past_conv.2", "past_recurrent.1"]
    assert [(each.layers, each.shape) for each in graph_io.state_types] == [(2, (4, 8)), (1, (6, 8)), (1, (4, 8))]


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ("past_key_values.{}.key", "past_key_values.{}.value"),
        ("past_key_values_{}_key", "past_key_values_{}_value"),
        ("past_key_{}", "past_value_{}"),
        ("past_keys_{}", "past_values_{}"),
        ("past_{}_key", "past_{}_value"),
        ("key_cache_{}", "value_cache_{}"),
        ("k_cache.{}", "v_cache.{}"),
        ("cache_{}_k", "cache_{}_v"),
        ("kv_cache.{}.key", "kv_cache.{}.value"),
        ("input_past_key_values.{}.key", "input_past_key_values.{}.value"),
    ],
)
def test_caches_are_recognised_by_many_names(keys: str, values: str) -> None:
    """Layers are sorted as numbers: the tenth comes after the second."""
    inputs = without(INPUTS, "past_key_values.0.key", "past_key_values.0.value")
    outputs = without(OUTPUTS, "present.0.key", "present.0.value")
    for layer in (10, 2, 0):
        for kind, name in (("key", keys), ("value", values)):
            inputs = added(inputs, value(name.format(layer), PAST))
            outputs = added(outputs, value(f"present.{layer}.{kind}", PRESENT))
    graph_io = graph_io_of(inputs, outputs)
    assert graph_io.layers == 3
    assert [(tensor.past, tensor.present) for tensor in graph_io.cache] == [
        *((keys.format(layer), f"present.{layer}.key") for layer in (0, 2, 10)),
        *((values.format(layer), f"present.{layer}.value") for layer in (0, 2, 10)),
    ]


def test_settings_give_sizes_that_the_graph_leaves_open() -> None:
    inputs, outputs = dict(INPUTS), changed(OUTPUTS, "logits", shape=(*NEW, "vocab_size"))
    for name in ("past_key_values.0.key", "past_key_values.0.value"):
        inputs = changed(inputs, name, shape=("b", "heads", "t", "width"))
    for name in ("present.0.key", "present.0.value"):
        outputs = changed(outputs, name, shape=(None, None, None, None))
    config = {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    genai = {"vocab_size": 300, "decoder": {"num_key_value_heads": 2, "head_size": 16}}
    for metadata in (
        ModelMetadata(config=config),
        ModelMetadata(config={**config, "head_dim": 16, "hidden_size": 1}),
        ModelMetadata(genai=genai),
    ):
        graph_io = graph_io_of(inputs, outputs, metadata)
        assert graph_io.vocab_size == 300
        assert [tensor.tensor_type.shape_of(5) for tensor in graph_io.cache] == [(1, 2, 5, 16)] * 2


@pytest.mark.parametrize(
    "metadata",
    [
        ModelMetadata(config={"vocab_size": 7, "num_key_value_heads": 9, "head_dim": 99}),
        *(ModelMetadata(genai={"decoder": each}) for each in (3, {"inputs": 3, "outputs": []}, {"inputs": {"a": 1}})),
    ],
)
def test_the_graph_takes_precedence_over_settings_and_invalid_ones_are_ignored(metadata: ModelMetadata) -> None:
    assert graph_io_of(INPUTS, OUTPUTS, metadata) == graph_io_of(INPUTS, OUTPUTS)


@pytest.mark.parametrize("name", LIMITED)
def test_a_cache_that_evicts_slots_limits_the_context(name: str, tmp_path: Path) -> None:
    layout = LIMITED[name]
    with edgerun.load(write_layout(tmp_path, layout), cache=False) as engine:
        assert engine.context == layout.window_slots
        reply = engine.generate("the", raw=True, max_tokens=layout.window_slots)
        assert reply.stats.prompt_tokens + reply.stats.completion_tokens <= layout.window_slots
        with pytest.raises(ContextError, match=f"the model's context is {layout.window_slots}; shorten it"):
            engine.generate("the " * layout.window_slots * 2, raw=True)
