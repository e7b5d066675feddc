"""Conversations that are longer than the context: errors, fewer turns, and windows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgerun
from edgerun import ContextError, Engine, FinishReason, GenerateOptions, InputError, Reply, Speculation
from edgerun.runtime.graph.cache_shift import CacheShift
from edgerun.runtime.overflow import answer_reserve, window
from edgerun.runtime.sampling.distribution import Purpose, uniforms_at
from edgerun.runtime.sampling.sampler import uniform_at
from edgerun.runtime.speculation.choice import DraftSampling
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layouts import LAYOUTS, write_layout

CONTEXT = 96
SYSTEM = {"role": "system", "content": "the one of the"}


def loaded(model: Path, context: int = CONTEXT, **options: Any) -> Engine:
    options = {"draft": None, **options}
    engine = edgerun.load(model, threads=1, context=context, cache=False, prefix_cache=0, **options)
    engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    return engine


def conversation(turns: int) -> list[dict[str, str]]:
    """A system message, turns with answers, and a question."""
    messages = [SYSTEM]
    for number in range(turns):
        messages += [{"role": "user", "content": f"{number} in the"}, {"role": "assistant", "content": f"{number} on"}]
    return [*messages, {"role": "user", "content": "and the"}]


def long_answer(engine: Engine, messages: list[dict[str, str]], tokens: int, **options: Any) -> Reply:
    return engine.generate(messages, max_tokens=tokens, ignore_eos=True, logprobs=0, **options)


def ids(reply: Reply) -> list[int]:
    return [token.token_id for token in reply.logprobs]


def continued(engine: Engine, token_ids: list[int], tokens: int) -> list[int]:
    """What plain decoding continues token ids with."""
    options = GenerateOptions(max_tokens=tokens, ignore_eos=True, logprobs=0, speculation=Speculation.OFF)
    return ids(Reply.of(engine.model.answer(None, token_ids, options)))


@pytest.mark.parametrize("speculation", [Speculation.OFF, Speculation.AUTO])
def test_a_trimmed_prompt_gives_the_text_of_a_conversation_without_its_first_turns(
    tiny_bundle: Path, speculation: Speculation
) -> None:
    messages = conversation(20)
    with loaded(tiny_bundle) as engine:
        room = CONTEXT - answer_reserve(CONTEXT, 8)
        first = next(start for start in range(1, 41, 2) if len(engine.encode_chat([SYSTEM, *messages[start:]])) <= room)
        expected = engine.generate([SYSTEM, *messages[first:]], max_tokens=8, speculation=speculation)
        reply = engine.generate(messages, max_tokens=8, overflow="trim", speculation=speculation)
        with pytest.raises(ContextError, match="and the model's context is 96"):
            engine.generate(messages, max_tokens=8)
    assert first > 1
    assert (reply.text, reply.stats.prompt_tokens) == (expected.text, expected.stats.prompt_tokens)


@pytest.mark.parametrize("speculation", [Speculation.OFF, Speculation.AUTO])
@pytest.mark.parametrize("exact", [False, True])
def test_an_answer_goes_on_without_the_first_turns(tiny_bundle: Path, speculation: Speculation, exact: bool) -> None:
    messages = conversation(4)
    with loaded(tiny_bundle, overflow="trim") as engine:  # a default leaves raw prompts alone
        prompt = engine.encode_chat(messages)
        reply = long_answer(engine, messages, 70, speculation=speculation, exact=exact)
        tokens, written = ids(reply), CONTEXT - len(prompt)
        assert (len(tokens), reply.stats.context_shifts) == (70, 1)
        left = next(
            start
            for start in range(1, 9, 2)
            if len(engine.encode_chat([SYSTEM, *messages[start:]])) + written + answer_reserve(CONTEXT, 70 - written)
            <= CONTEXT
        )
        trimmed = engine.encode_chat([SYSTEM, *messages[left:]])
        assert 1 < left < 9
        assert tokens[:written] == continued(engine, prompt, written)
        assert tokens[written:] == continued(engine, [*trimmed, *tokens[:written]], 70 - written)
        # One turn cannot be left out: the answer ends where the context does, and so it does by default.
        assert long_answer(engine, messages[-1:], 200).finish_reason is FinishReason.LENGTH
        assert len(ids(long_answer(engine, messages, 200, overflow="error"))) == written


@pytest.mark.parametrize("overflow", ["trim", "window"])
@pytest.mark.parametrize("draft_sampling", [DraftSampling.CHAIN, DraftSampling.TREE])
def test_every_random_number_of_a_draft_is_used_once(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, overflow: str, draft_sampling: DraftSampling
) -> None:
    used: list[tuple[int, int, Purpose, int]] = []

    def recorded(seed: int, position: int, count: int, purpose: Purpose, part: int = 0) -> Any:
        used.append((seed, position, purpose, part))
        return uniforms_at(seed, position, count, purpose, part)

    for module in ("sampled_speculator", "drafters.sampled"):
        monkeypatch.setattr(f"edgerun.runtime.speculation.{module}.uniforms_at", recorded)
    options: dict[str, Any] = {"seed": 3, "temperature": 0.9, "n": 3, "overflow": overflow}
    with loaded(tiny_bundle, draft=tiny_bundle) as engine:
        reply = long_answer(engine, conversation(6), 150, draft_sampling=draft_sampling, **options)
    assert reply.stats.context_shifts > 0
    assert reply.stats.accepted > 0
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT):
        of_purpose = [each for each in used if each[2] is purpose]
        assert len(of_purpose) == len(set(of_purpose)) > 10


@pytest.mark.parametrize("overflow", ["trim", "window"])
def test_every_random_number_is_used_once(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, overflow: str) -> None:
    """Also where a shortened sequence uses its positions again, and beside the answers of the next seeds."""
    used: list[tuple[int, int]] = []

    def recorded(seed: int, position: int) -> float:
        used.append((seed, position))
        return uniform_at(seed, position)

    monkeypatch.setattr("edgerun.runtime.sampling.sampler.uniform_at", recorded)
    options: dict[str, Any] = {"seed": 3, "temperature": 0.9, "n": 3, "overflow": overflow}
    with loaded(tiny_bundle) as engine:
        plain = long_answer(engine, conversation(6), 150, speculation=Speculation.OFF, **options)
        assert len(used) == len(set(used)) > 150
        drafted = long_answer(engine, conversation(6), 150, **options)
    assert plain.stats.context_shifts > 0
    assert [choice.text for choice in drafted.choices] == [choice.text for choice in plain.choices]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "mistral"])
def test_a_window_keeps_its_slots_and_rotates_their_keys(
    tiny_bundle_of: Callable[[str, str], Path], family: str
) -> None:
    """Keys equal those rotated in float64 from the keys without rotation, and so do the logits that follow."""
    with loaded(tiny_bundle_of(family, "fp32")) as engine:
        model = engine.model
        sequence, other = model.new_sequence(), model.new_sequence()
        tokens = np.random.default_rng(0).integers(5, 290, 60)
        for each in (sequence, other):
            each.bound.forward(tokens)
            each.arena.commit(60)
        shift = model._shift
        assert shift.drop(sequence.bound, 6, 30)
        assert sequence.arena.length == 36
        buffers = other.arena.buffers
        for array, rotation in zip(buffers.arrays, shift._rotations, strict=True):
            moved = array[:, :, 30:60].astype(np.float64)
            if rotation is not None:
                factor = np.asarray(rotation.cosines[0], np.float64)
                sines, cosines = (np.asarray(each[1], np.float64) for each in (rotation.sines, rotation.cosines))
                angles = np.arctan2(sines / factor, cosines / factor)
                turned = angles * np.arange(30, 60)[:, None]
                half = angles.size
                plane = moved[..., :half] + 1j * moved[..., half : 2 * half]
                unrotated = plane * np.exp(-1j * turned)
                again = unrotated * np.exp(1j * angles * np.arange(6, 36)[:, None])
                moved[..., :half], moved[..., half : 2 * half] = again.real, again.imag
            array[:, :, 6:36] = moved
        other.arena.rewind_to(36)
        for ours, oracle in zip(sequence.arena.snapshot(), other.arena.snapshot(), strict=True):
            np.testing.assert_allclose(ours, oracle, atol=2e-5)
        new, expected = (each.bound.forward([7])[0].copy() for each in (sequence, other))
        np.testing.assert_allclose(new, expected, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "int8 cache", "optimum"])
def test_a_long_answer_in_a_window_is_the_same_with_drafts(tiny_bundle: Path, tmp_path: Path, kind: str) -> None:
    model = write_layout(tmp_path / "model", LAYOUTS["optimum"]) if kind == "optimum" else tiny_bundle
    options: dict[str, Any] = {"max_tokens": 250, "ignore_eos": True, "logprobs": 0, "raw": True, "overflow": "window"}
    with loaded(model, kv="int8" if kind == "int8 cache" else "float") as engine:
        plain = engine.generate("the other", speculation=Speculation.OFF, **options)
        drafted = engine.generate("the other", speculation=Speculation.AUTO, **options)
        prompt = engine.tokenizer.encode("the other", add_special_tokens=True)
        tokens = ids(plain)
        assert ids(drafted) == tokens
        assert len(tokens) == 250
        assert plain.stats.context_shifts == drafted.stats.context_shifts > 5
        if kind == "llama":
            assert plain.stats.decode_passes == 249
        else:
            # The window is computed, so that the answer goes on as after a prompt of these tokens.
            assert engine.model._shift._checked is None or not engine.model._shift._checked
            whole = [*prompt, *tokens[: CONTEXT - len(prompt)]]
            kept = [*whole[:4], *whole[window(CONTEXT, 4, CONTEXT) :]]
            assert tokens[CONTEXT - len(prompt) :][:20] == continued(engine, kept, 20)


def test_a_cut_prompt_keeps_the_system_message_and_its_slots(tiny_bundle: Path) -> None:
    messages = conversation(30)
    with edgerun.load(tiny_bundle, threads=1, context=CONTEXT, cache=False, draft=None, overflow="window") as engine:
        prompt = engine.encode_chat(messages)
        first = len(engine.model.chat_prompt(messages, GenerateOptions()).beginning())
        newest = window(len(prompt), first, CONTEXT)
        reply = engine.generate(messages, max_tokens=4)
        assert reply.stats.prompt_tokens == first + len(prompt) - newest < CONTEXT
        expected = continued(engine, [*prompt[:first], *prompt[newest:]], 4)
        assert ids(long_answer(engine, messages, 4)) == expected
        longer = [*messages[:-1], {"role": "user", "content": "and the one"}]
        assert engine.generate(longer, max_tokens=4).stats.reused_tokens > first


def test_a_session_leaves_out_its_first_turns(tiny_bundle: Path) -> None:
    with loaded(tiny_bundle, overflow="trim") as engine, engine.session(system="the one") as session:
        for number in range(12):
            reply = session.send(f"{number} in the other", max_tokens=6)
        assert reply.text
        assert session.messages[0] == {"role": "system", "content": "the one"}
        assert len(session.messages) < 20
        assert session.messages[-2]["content"] == "11 in the other"


def test_what_cannot_be_shortened_is_refused(tiny_bundle: Path) -> None:
    question = [{"role": "user", "content": "and the other " * 30}]
    system = [{"role": "system", "content": "and the other " * 15}, {"role": "user", "content": "in the " * 20}]
    with loaded(tiny_bundle) as engine:
        for messages, options, message in (
            (question, {"overflow": "trim"}, "the last message does not fit the context"),
            (system, {"overflow": "window"}, "of which a window takes half"),
            ("the", {"overflow": "trim", "raw": True}, "a raw prompt has no turns to trim"),
            ("the", {"overflow": "window", "exact": True}, "exact answers have no window"),
            ("the", {"overflow": "cut"}, "overflow is 'cut'; it must be error, trim, window"),
        ):
            with pytest.raises((ContextError, InputError), match=message):
                engine.generate(messages, max_tokens=4, **options)


def test_a_graph_whose_rotation_is_not_known_is_computed(tiny_bundle: Path, tmp_path: Path) -> None:
    """Tables of another model's graph give other keys, which the check finds out."""
    with loaded(tiny_bundle) as engine:
        model = engine.model
        sequence = model.new_sequence()
        sequence.bound.forward(np.arange(20, 60))
        sequence.arena.commit(40)
        before = sequence.arena.snapshot()
        shift = CacheShift(tmp_path / "missing.onnx", engine.graph_io, model.new_arena)
        assert not shift.drop(sequence.bound, 4, 10)
        assert all(map(np.array_equal, before, sequence.arena.snapshot()))
