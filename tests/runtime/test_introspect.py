"""What a graph's ports say: every kind that cannot work is refused by name, in one line that says what to do."""

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
from support.broken_layouts import UNFIT, write_unfit
from support.layouts import LIMITED, write_layout

ANOTHER = "choose another variant of it"
OURS = f"export the model with edge-run export, or {ANOTHER}"
FOR_CPU = "choose a variant of the model for the CPU"
ATTENTION_ONLY = "choose a model whose layers are all attention"
NO_PAGES = "export it again without paged attention"
TEXT_ONLY = "choose a text-only model"
ONE_GRAPH = "edge-run runs decoders of text that are one graph; look for a text-only export of this model"
CUT_UP = (
    "takes embeddings (inputs_embeds) instead of token ids: it is one part of a model that was split up; "
    "choose an export whose decoder takes input_ids"
)

REFUSALS = {
    "no-cache": (
        "{graph} has no key/value cache among its inputs: it processes the whole text for every token, or keeps "
        f"its cache where it cannot be rewound; export it with a cache "
        f"(Optimum's task text-generation-with-past), or {ANOTHER}"
    ),
    "openvino-stateful": (
        "{graph} keeps its cache inside (it takes beam_idx), where it cannot be rewound; "
        "choose an export whose cache is inputs and outputs (past_key_values.N.key)"
    ),
    "encoder": "{graph} is an encoder (it takes token_type_ids), not a language model; choose a decoder",
    "lfm2": f"{{graph}} keeps convolution or recurrent state (past_conv.0), which cannot be rewound; {ATTENTION_ONLY}",
    "genai-recurrent": (
        f"{{graph}} keeps convolution or recurrent state (past.0.conv), which cannot be rewound; {ATTENTION_ONLY}"
    ),
    "mamba": (
        "{graph} keeps convolution or recurrent state (past_conv_states.0), which cannot be rewound; "
        f"{ATTENTION_ONLY}"
    ),
    "paged": f"{{graph}} keeps its cache in pages (it takes block_table), as servers do; {NO_PAGES}",
    "paged-slots": f"{{graph}} keeps its cache in pages (it takes slot_mapping), as servers do; {NO_PAGES}",
    "encoder-decoder": f"{{folder}} is an encoder-decoder model (encoder_model.onnx says so); {ONE_GRAPH}",
    "encoder-decoder-with-past": (
        "{graph} is part of an encoder-decoder model (it takes past_key_values.0.decoder.key); "
        "edge-run runs decoder-only language models"
    ),
    "embeddings-in": f"{{graph}} {CUT_UP}",
    "embeddings-in-parts": f"{{folder}} is a model of images and text (vision_encoder.onnx says so); {ONE_GRAPH}",
    "pixels-in": f"{{graph}} is part of a model for images or audio (it takes pixel_values); {TEXT_ONLY}",
    "genai-vision": f"{{graph}} {CUT_UP}",
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


@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_work_is_named(name: str, tmp_path: Path) -> None:
    folder = write_unfit(tmp_path, UNFIT[name])
    with pytest.raises(BundleError) as caught:
        edgerun.load(folder)
    message = str(caught.value)
    assert "\n" not in message
    if name == "unknown-operator":  # ONNX Runtime's own words
        assert message.startswith(f"{folder / 'model.onnx'} cannot be loaded: ")
        assert "No Op registered for Frobnicate" in message
    else:
        assert message == REFUSALS[name].format(folder=folder, graph=folder / UNFIT[name].file)


def test_operators_in_branches_and_functions_count(tmp_path: Path) -> None:
    """A program for one device is found wherever a graph hides it; a function of the model's own is no library."""
    folder = write_unfit(tmp_path, UNFIT["compiled-qnn"])
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


# Ports alone

TEXT = ("batch_size", "sequence_length")
WHOLE = ("batch_size", "total_sequence_length")
PAST = ("batch_size", 2, "past_sequence_length", 16)
PRESENT = ("batch_size", 2, "total_sequence_length", 16)


def port(name: str, shape: Sequence[int | str | None], type_: str = "tensor(float)") -> GraphValue:
    return GraphValue(name, type_, tuple(shape))


INS = {
    each.name: each
    for each in (
        port("input_ids", TEXT, "tensor(int64)"),
        port("attention_mask", WHOLE, "tensor(int64)"),
        port("position_ids", TEXT, "tensor(int64)"),
        port("past_key_values.0.key", PAST),
        port("past_key_values.0.value", PAST),
    )
}
OUTS = {
    each.name: each
    for each in (
        port("logits", (*TEXT, 300)),
        port("present.0.key", PRESENT),
        port("present.0.value", PRESENT),
    )
}


def spec_of(ins: dict[str, GraphValue], outs: dict[str, GraphValue], metadata: ModelMetadata | None = None):
    return introspect(list(ins.values()), list(outs.values()), "F", metadata or ModelMetadata())


def changed(ports: dict[str, GraphValue], name: str, **changes: object) -> dict[str, GraphValue]:
    return {**ports, name: replace(ports[name], **changes)}


def without(ports: dict[str, GraphValue], *names: str) -> dict[str, GraphValue]:
    return {name: each for name, each in ports.items() if name not in names}


def added(ports: dict[str, GraphValue], *more: GraphValue) -> dict[str, GraphValue]:
    return ports | {each.name: each for each in more}


def test_the_usual_ports_are_read() -> None:
    graph_io = spec_of(INS, OUTS)
    assert (graph_io.vocab_size, graph_io.layers, graph_io.capacity) == (300, 1, None)
    assert graph_io.cache_mode is CacheMode.GROWING
    assert graph_io.logits_mode is LogitsMode.ALL
    assert set(graph_io.inputs) == {InputRole.TOKENS, InputRole.MASK, InputRole.POSITIONS}
    assert [(tensor.past, tensor.present) for tensor in graph_io.cache] == [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.0.value", "present.0.value"),
    ]
    assert [tensor.tensor_type.shape_of(7) for tensor in graph_io.cache] == [(1, 2, 7, 16)] * 2


@pytest.mark.parametrize(
    ("ins", "outs", "message"),
    [
        (without(INS, "input_ids"), OUTS, f"F has no input for token ids (input_ids); {OURS}"),
        (
            without(INS, "past_key_values.0.key", "past_key_values.0.value"),
            OUTS,
            REFUSALS["no-cache"].format(graph="F"),
        ),
        (
            INS,
            without(OUTS, "present.0.value"),
            f"F has no output for its cache input past_key_values.0.value; {OURS}",
        ),
        (
            INS,
            changed(OUTS, "present.0.key", type="tensor(float16)"),
            f"F takes past_key_values.0.key as tensor(float) and gives present.0.key as tensor(float16); {OURS}",
        ),
        (
            changed(INS, "past_key_values.0.key", type="tensor(string)"),
            changed(OUTS, "present.0.key", type="tensor(string)"),
            f"F has a cache of type tensor(string) (past_key_values.0.key), which is not supported; {OURS}",
        ),
        (
            changed(INS, "past_key_values.0.key", shape=("n", 16)),
            changed(OUTS, "present.0.key", shape=("n", 16)),
            f"F has a cache of 2 dimensions (past_key_values.0.key): ['n', 16]; {OURS}",
        ),
        (
            changed(INS, "past_key_values.0.key", shape=("b", "h", "t", "d")),
            changed(OUTS, "present.0.key", shape=("b", "h", "t", "d")),
            "F leaves the sizes of its cache open: past_key_values.0.key is [b, h, t, d]; "
            "put the model's config.json beside it",
        ),
        (
            changed(INS, "past_key_values.0.key", shape=(4, 2, "t", 16)),
            OUTS,
            f"F has a fixed batch size of 4 (past_key_values.0.key is [4, 2, t, 16]); {OURS}",
        ),
        (
            changed(INS, "past_key_values.0.key", shape=(1, 2, 63, 16)),
            changed(OUTS, "present.0.key", shape=(1, 2, 64, 16)),
            "F takes a cache of exactly 63 slots (past_key_values.0.key) and returns one of another size; "
            "choose a variant of the model for the CPU",
        ),
        (
            added(INS, port("past_key_0", PAST)),
            OUTS,
            f"F has two cache tensors for the same layer and content: past_key_values.0.key and past_key_0; {OURS}",
        ),
        (added(INS, port("tokens", TEXT)), OUTS, f"F has two inputs of the same meaning: input_ids and tokens; {OURS}"),
        (added(INS, port("z", TEXT), port("a", TEXT)), OUTS, f"F has inputs that edge-run does not know: a, z; {OURS}"),
        (
            changed(INS, "input_ids", type="tensor(float)"),
            OUTS,
            f"F takes input_ids as tensor(float) of 2 dimensions, which is not supported; {OURS}",
        ),
        (
            changed(INS, "attention_mask", shape=("a", "b", "c")),
            OUTS,
            f"F takes attention_mask as tensor(int64) of 3 dimensions, which is not supported; {OURS}",
        ),
        (
            changed(INS, "attention_mask", type="tensor(string)"),
            OUTS,
            f"F takes attention_mask as tensor(string) of 2 dimensions, which is not supported; {OURS}",
        ),
        (changed(INS, "input_ids", shape=(2, "n")), OUTS, f"F has a fixed batch size of 2 (input_ids); {OURS}"),
        (
            changed(INS, "attention_mask", shape=(1, 4096)),
            OUTS,
            f"F takes exactly 4096 tokens per pass (attention_mask), as models for an NPU do; {FOR_CPU}",
        ),
        (
            INS,
            added(without(OUTS, "logits"), port("hidden", (*TEXT, 64)), port("scores", (*TEXT, 300))),
            "F has no output for logits of 2 or 3 dimensions; beside its cache it gives hidden, scores; " + OURS,
        ),
        (
            INS,
            changed(OUTS, "logits", type="tensor(int64)"),
            "F has no output for logits of 2 or 3 dimensions; beside its cache it gives logits; " + OURS,
        ),
        (
            INS,
            changed(OUTS, "logits", shape=(*TEXT, "vocab_size")),
            "F leaves the size of its vocabulary open; put the model's config.json beside it",
        ),
    ],
)
def test_ports_that_do_not_fit_are_refused(
    ins: dict[str, GraphValue], outs: dict[str, GraphValue], message: str
) -> None:
    with pytest.raises(BundleError) as caught:
        spec_of(ins, outs)
    assert str(caught.value) == message


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
def test_caches_are_known_by_many_names(keys: str, values: str) -> None:
    """Layers are counted, not sorted as text: the tenth comes after the second."""
    ins = without(INS, "past_key_values.0.key", "past_key_values.0.value")
    outs = without(OUTS, "present.0.key", "present.0.value")
    for layer in (10, 2, 0):
        for kind, name in (("key", keys), ("value", values)):
            ins = added(ins, port(name.format(layer), PAST))
            outs = added(outs, port(f"present.{layer}.{kind}", PRESENT))
    graph_io = spec_of(ins, outs)
    assert graph_io.layers == 3
    assert [(tensor.past, tensor.present) for tensor in graph_io.cache] == [
        *((keys.format(layer), f"present.{layer}.key") for layer in (0, 2, 10)),
        *((values.format(layer), f"present.{layer}.value") for layer in (0, 2, 10)),
    ]


def test_settings_fill_in_what_ports_leave_open() -> None:
    ins, outs = dict(INS), changed(OUTS, "logits", shape=(*TEXT, "vocab_size"))
    for name in ("past_key_values.0.key", "past_key_values.0.value"):
        ins = changed(ins, name, shape=("b", "heads", "t", "width"))
    for name in ("present.0.key", "present.0.value"):
        outs = changed(outs, name, shape=(None, None, None, None))
    config = {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    genai = {"vocab_size": 300, "decoder": {"num_key_value_heads": 2, "head_size": 16}}
    for metadata in (
        ModelMetadata(config=config),
        ModelMetadata(config={**config, "head_dim": 16, "hidden_size": 1}),
        ModelMetadata(genai=genai),
    ):
        graph_io = spec_of(ins, outs, metadata)
        assert graph_io.vocab_size == 300
        assert [tensor.tensor_type.shape_of(5) for tensor in graph_io.cache] == [(1, 2, 5, 16)] * 2


def test_what_the_graph_says_counts_more_than_what_lies_beside_it() -> None:
    metadata = ModelMetadata(config={"vocab_size": 7, "num_key_value_heads": 9, "head_dim": 99})
    graph_io = spec_of(INS, OUTS, metadata)
    assert graph_io.vocab_size == 300
    assert graph_io.cache[0].tensor_type.shape_of(1) == (1, 2, 1, 16)


@pytest.mark.parametrize(
    "genai", [{"decoder": 3}, {"decoder": {"inputs": 3, "outputs": []}}, {"decoder": {"inputs": {"a": 1}}}]
)
def test_settings_that_make_no_sense_are_passed_over(genai: dict[str, object]) -> None:
    assert spec_of(INS, OUTS, ModelMetadata(genai=genai)).layers == 1


@pytest.mark.parametrize("name", LIMITED)
def test_a_cache_that_evicts_limits_the_context(name: str, tmp_path: Path) -> None:
    layout = LIMITED[name]
    assert layout.window_rows is not None
    with edgerun.load(write_layout(tmp_path, layout), cache=False) as engine:
        assert engine.context == layout.window_rows
        reply = engine.generate("the", raw=True, max_tokens=layout.window_rows)
        assert reply.stats.prompt_tokens + reply.stats.completion_tokens <= layout.window_rows
        with pytest.raises(ContextError, match=f"the model's context is {layout.window_rows}; shorten it"):
            engine.generate("the " * layout.window_rows * 2, raw=True)
