"""Engine, sessions and their guarantees, on a tiny exported model."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import edgerun
from edgerun import (
    BundleError,
    ContextError,
    DeviceError,
    EdgeError,
    Engine,
    FinishReason,
    GenerateOptions,
    InputError,
    TemplateError,
)
from edgerun.export import INT8
from support.tiny_models import write_bundle


@pytest.fixture
def engine(tiny_bundle: Path):
    with edgerun.load(tiny_bundle, threads=1) as engine:
        yield engine


def copy_of(bundle: Path, folder: Path) -> Path:
    """A copy without the manifest, so that files can be changed."""
    shutil.copytree(bundle, folder)
    (folder / "edge.json").unlink()
    return folder


def test_generate_streams_the_same_text(engine: Engine) -> None:
    reply = engine.generate("the other thing", max_tokens=20)
    chunks = list(engine.stream("the other thing", max_tokens=20))
    assert "".join(chunk.text for chunk in chunks) == reply.text
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert reply.finish_reason is chunks[-1].finish_reason is FinishReason.LENGTH
    stats = reply.stats
    assert stats.completion_tokens == 20
    assert stats.target_passes == 20 - stats.accepted
    assert stats.tokens_per_pass == 19 / stats.decode_passes
    assert 0 < stats.first_token_s <= stats.total_s


def test_an_answer_depends_on_nothing_asked_before(engine: Engine) -> None:
    first = engine.generate("in the", max_tokens=15).text
    engine.generate("in the other", max_tokens=15)
    assert engine.generate("in the", max_tokens=15).text == first


def test_a_seed_gives_one_text_and_none_gives_many(engine: Engine) -> None:
    options = GenerateOptions(max_tokens=25, temperature=1.5, raw=True)
    assert len({engine.generate("a", options, seed=3).text for _ in range(3)}) == 1
    assert len({engine.generate("a", options).text for _ in range(5)}) > 1


def test_stop_texts_end_the_answer_wherever_they_fall(engine: Engine) -> None:
    text = engine.generate("the", max_tokens=40).text
    for start in range(2, len(text) - 4, 3):
        stop = text[start : start + 4]
        reply = engine.generate("the", max_tokens=40, stop=stop)
        assert engine.generate("the", max_tokens=40, stop=["\0", stop]).text == reply.text
        assert reply.text == text[: text.index(stop)]
        assert reply.finish_reason is FinishReason.STOP


def test_options_are_checked_by_name_and_value(engine: Engine) -> None:
    with pytest.raises(InputError, match="unknown option 'temprature'; options are: .*max_tokens, min_p"):
        engine.generate("a", temprature=1)
    with pytest.raises(InputError, match="max_tokens is 0; it must be 1 or more"):
        engine.generate("a", max_tokens=0)
    with pytest.raises(InputError, match="top-p is 2; it must be above 0 and at most 1"):
        engine.generate("a", top_p=2)
    with pytest.raises(InputError, match="stop is ''; it must be text, or several texts, of at least one character"):
        engine.generate("a", stop="")
    for changes in ({"max_tokens": 2.5}, {"seed": 1.5}, {"top_k": "4"}, {"temperature": "hot"}, {"stop": (1,)}):
        with pytest.raises(InputError, match="it must be a"):
            engine.generate("a", **changes)
    with pytest.raises(InputError, match="the prompt is None; it must be text"):
        engine.generate(None)
    with pytest.raises(InputError, match="the prompt is empty"):
        engine.generate("", raw=True)
    with pytest.raises(InputError, match="a raw prompt has no system message"):
        engine.generate("a", raw=True, system="b")
    with pytest.raises(InputError, match="the text is not valid Unicode"):
        engine.generate("\ud800", raw=True)


def test_a_prompt_that_does_not_fit_is_refused_before_anything_runs(engine: Engine) -> None:
    with pytest.raises(ContextError, match=r"the prompt has \d+ tokens and the model's context is 256; shorten it"):
        engine.stream("x" * 300)


def test_context_can_be_made_shorter_but_not_longer(tiny_bundle: Path) -> None:
    with edgerun.load(tiny_bundle, context=16) as engine:
        assert engine.generate("abc", raw=True).stats.completion_tokens <= 13
    with pytest.raises(InputError, match="context is 257; this model allows at most 256"):
        edgerun.load(tiny_bundle, context=257)


def test_cancel_from_another_thread_keeps_what_was_written(engine: Engine) -> None:
    stream = engine.stream("the", temperature=1.0, seed=1, raw=True)
    next(stream)
    canceller = threading.Thread(target=engine.cancel)
    canceller.start()
    canceller.join()
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.CANCELLED
    assert engine.generate("the", max_tokens=3).finish_reason is FinishReason.LENGTH


def test_threads_take_turns(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=12).text
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(engine.generate("the", max_tokens=12).text)) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [expected] * 6


def test_a_second_answer_inside_the_first_is_refused_not_hung(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=5)
    next(stream)
    with pytest.raises(EdgeError, match="the reader is in the middle of another answer"):
        engine.generate("other")
    stream.close()
    assert engine.generate("the", max_tokens=5).text


def test_an_answer_asked_for_before_its_turn_starts_from_nothing(engine: Engine) -> None:
    """Also when its prompt begins as the running answer's text does."""
    ids = list(range(30, 40))
    options = GenerateOptions(max_tokens=10)
    first = engine.model.new_sequence()
    list(engine.model.answer(first, ids, options))
    continuation = first.token_ids[:-2]
    expected = "".join(chunk.text for chunk in engine.model.answer(None, continuation, options))
    running = engine.model.answer(None, ids, options)
    next(running)
    waiting = engine.model.answer(None, continuation, options)
    list(running)
    chunks = list(waiting)
    assert "".join(chunk.text for chunk in chunks) == expected
    assert chunks[-1].stats.reused_tokens == 0


def test_cancelling_before_the_first_piece_is_remembered(engine: Engine) -> None:
    stream = engine.stream("the")
    stream.cancel()
    (chunk,) = stream
    assert chunk.finish_reason is FinishReason.CANCELLED
    assert engine.generate("the", max_tokens=2).text


def test_a_stream_may_change_threads(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=20)
    next(stream)
    rest: list[object] = []
    reader = threading.Thread(target=lambda: rest.extend(stream))
    reader.start()
    reader.join()
    assert rest
    assert engine.generate("the", max_tokens=2).text


def test_a_forgotten_stream_gives_its_turn_back(engine: Engine) -> None:
    stream = engine.stream("the", max_tokens=20)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate("the", max_tokens=2).text


def test_closing_the_engine_ends_a_suspended_answer(tiny_bundle: Path) -> None:
    engine = edgerun.load(tiny_bundle)
    stream = engine.stream("the", raw=True)
    next(stream)
    engine.close()
    assert list(stream) == []


def test_a_closed_engine_says_so(tiny_bundle: Path) -> None:
    engine = edgerun.load(tiny_bundle)
    engine.close()
    engine.close()
    with pytest.raises(EdgeError, match="this engine is closed; load the model again"):
        engine.generate("a")


def test_async_twins_give_the_same_text(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=12).text

    async def both() -> tuple[str, str]:
        reply = await engine.agenerate("the", max_tokens=12)
        return reply.text, "".join([chunk.text async for chunk in engine.astream("the", max_tokens=12)])

    assert asyncio.run(both()) == (expected, expected)


def test_cancelling_a_task_frees_the_engine(engine: Engine) -> None:
    async def abandon() -> None:
        begun = asyncio.Event()

        async def consume() -> None:
            async for _ in engine.astream("the", raw=True, max_tokens=50):
                begun.set()
                await asyncio.sleep(60)

        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(asyncio.wait_for(abandon(), 30))
    assert engine.generate("the", max_tokens=3).text


def test_cancelling_a_queued_task_leaves_the_running_answer_alone(engine: Engine) -> None:
    expected = engine.generate("the", max_tokens=20).text
    running = engine.stream("the", max_tokens=20)
    text = next(running).text

    async def queue_and_cancel() -> None:
        queued = asyncio.create_task(engine.agenerate("other", max_tokens=5))
        await asyncio.sleep(0.1)
        assert not queued.done()
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued

    asyncio.run(asyncio.wait_for(queue_and_cancel(), 30))
    assert text + "".join(chunk.text for chunk in running) == expected


def test_an_answer_inside_an_asyncio_stream_is_refused_not_hung(engine: Engine) -> None:
    async def scenario() -> None:
        stream = engine.astream("the", max_tokens=5)
        await anext(stream)
        with pytest.raises(EdgeError, match="the reader is in the middle of another answer"):
            await engine.agenerate("other")
        await stream.aclose()
        assert (await engine.agenerate("the", max_tokens=2)).text

    asyncio.run(asyncio.wait_for(scenario(), 30))


# Sessions


def test_turns_of_a_session_reuse_the_cache_and_change_no_text(engine: Engine) -> None:
    with engine.session(system="a system") as chat:
        first = chat.send("the other", max_tokens=8)
        second = chat.send("in the end", max_tokens=8)
        assert first.stats.reused_tokens == 0
        assert second.stats.reused_tokens > 8
        messages = list(chat.messages)
    ids = engine.model.encode_chat(messages[:-1])
    fresh = engine.model.answer(engine.model.new_sequence(), ids, GenerateOptions(max_tokens=8))
    assert "".join(chunk.text for chunk in fresh) == second.text
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]


def test_an_abandoned_turn_keeps_what_was_said(engine: Engine) -> None:
    chat = engine.session()
    stream = chat.stream("the", max_tokens=30)
    said = next(stream).text
    stream.close()
    assert chat.messages == [{"role": "user", "content": "the"}, {"role": "assistant", "content": said}]
    assert chat.send("on", max_tokens=4).text


def test_turns_asked_for_together_follow_each_other(engine: Engine) -> None:
    chat = engine.session()
    first, second = chat.stream("the", max_tokens=4), chat.stream("other", max_tokens=4)
    list(first)
    list(second)
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["the", "other"]


def test_a_reset_in_mid_answer_stays(engine: Engine) -> None:
    chat = engine.session()
    stream = chat.stream("the", max_tokens=20)
    next(stream)
    chat.reset()
    list(stream)
    assert chat.messages == []


def test_saving_in_mid_answer_is_refused_not_hung(engine: Engine, tmp_path: Path) -> None:
    chat = engine.session()
    stream = chat.stream("the", max_tokens=20)
    next(stream)
    with pytest.raises(EdgeError, match="finish or close that stream first"):
        chat.save(tmp_path / "chat.kv")
    stream.close()
    chat.save(tmp_path / "chat.kv")


def test_a_turn_that_fails_leaves_the_conversation_as_it_was(engine: Engine) -> None:
    chat = engine.session()
    chat.send("the", max_tokens=4)
    before = list(chat.messages)
    with pytest.raises(ContextError, match=r"start again with reset \(/reset in the terminal\)"):
        chat.send("x" * 300)
    with pytest.raises(InputError, match="raw and system belong to a single answer"):
        chat.send("x", raw=True)
    assert chat.messages == before


def test_a_saved_conversation_goes_on_as_if_never_closed(engine: Engine, tiny_bundle: Path, tmp_path: Path) -> None:
    chat = engine.session(system="s")
    chat.send("the other", max_tokens=10)
    chat.save(tmp_path / "chat.kv")
    expected = chat.send("again", max_tokens=10)
    with edgerun.load(tiny_bundle) as other, other.session(resume=tmp_path / "chat.kv") as resumed:
        assert resumed.system == "s"
        reply = resumed.send("again", max_tokens=10)
        assert reply.text == expected.text
        assert reply.stats.reused_tokens == expected.stats.reused_tokens
        resumed.reset()
        assert resumed.messages == [{"role": "system", "content": "s"}]


def test_what_is_no_saved_conversation_is_refused(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "chat.kv"
    with pytest.raises(InputError, match=r"chat\.kv cannot be read: No such file"):
        engine.session(resume=path)
    path.write_text("hello")
    with pytest.raises(InputError, match="is not a saved conversation"):
        engine.session(resume=path)
    chat = engine.session()
    chat.send("the", max_tokens=5)
    chat.save(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="is not a saved conversation"):
        engine.session(resume=path)
    with edgerun.load(write_bundle(tmp_path / "other", seed=1)) as other:
        chat.save(path)
        with pytest.raises(InputError, match="belongs to another model or another version"):
            other.session(resume=path)


def test_a_closed_session_says_so(engine: Engine) -> None:
    chat = engine.session()
    chat.close()
    with pytest.raises(InputError, match="this session is closed"):
        chat.send("a")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("messages", "hi"),
        ("messages", [1, 2]),
        ("messages", [{"role": "user"}]),
        ("tokens", np.zeros((), np.int64)),
        ("tokens", np.array([1.5, 2.5])),
        ("tokens", np.array([-1, 2])),
        ("tokens", np.array([299, 300])),
        ("tokens", np.array([1])),
        ("rows.0", np.full((4, 1, 2, 2, 16), np.nan, np.float32)),
        ("rows.0", np.zeros((4, 1, 2, 2, 15), np.float32)),
        ("rows.1", np.zeros((4, 1, 2, 2, 16), np.float32)),
    ],
)
def test_a_saved_conversation_with_nonsense_in_it_is_refused(engine: Engine, tmp_path: Path, field, value) -> None:
    about = {"format": 2, "model": engine.bundle.fingerprint, "messages": [{"role": "user", "content": "a"}]}
    arrays = {"tokens": np.array([5, 6]), "rows.0": np.zeros((4, 1, 2, 2, 16), np.float32)}
    path = tmp_path / "chat.kv"

    def store() -> None:
        with path.open("wb") as file:
            np.savez(file, about=np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays)

    store()
    engine.session(resume=path).close()
    if field == "messages":
        about["messages"] = value
    else:
        arrays[field] = value
    store()
    with pytest.raises(InputError, match="is damaged|is not a saved conversation"):
        engine.session(resume=path)


def test_a_flipped_bit_in_a_saved_conversation_ends_in_one_line(engine: Engine, tmp_path: Path) -> None:
    """Wherever it is: the archive's own records have no checksum, and reading them fails in many ways."""
    with engine.session() as session:
        session.send("in the", max_tokens=2)
        session.save(tmp_path / "chat")
    saved = (tmp_path / "chat").read_bytes()
    records = [at for at in range(len(saved)) if saved[at : at + 4] in (b"PK\1\2", b"PK\3\4", b"PK\5\6")]
    for record in records:
        for at in range(record, min(record + 30, len(saved))):
            damaged = bytearray(saved)
            damaged[at] ^= 1 << at % 8
            (tmp_path / "chat").write_bytes(damaged)
            with suppress(InputError):
                engine.session(resume=tmp_path / "chat").close()
            damaged[at] = saved[at] ^ (1 << (at + 5) % 8)
            (tmp_path / "chat").write_bytes(damaged)
            with suppress(InputError):
                engine.session(resume=tmp_path / "chat").close()


# Model folders


def test_defaults_come_from_generation_config(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m")
    config = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "eos_token_id": [0, 7],
    }
    (folder / "generation_config.json").write_text(json.dumps(config))
    with edgerun.load(folder) as engine:
        params = GenerateOptions().sampling(engine.defaults)
        assert (params.temperature, params.top_k, params.top_p, params.repeat_penalty) == (0.7, 5, 0.9, 1.2)
        assert GenerateOptions(temperature=0).sampling(engine.defaults).greedy
        assert engine.tokenizer.eos == {0, 7}


def test_a_filter_asks_for_sampling(engine: Engine) -> None:
    assert GenerateOptions().sampling(engine.defaults).greedy
    params = GenerateOptions(top_p=0.5).sampling(engine.defaults)
    assert (params.temperature, params.top_p) == (1.0, 0.5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("generation_config.json", '{"temperature": "hot"}', "temperature is 'hot'; it must be a number"),
        ("generation_config.json", '{"top_p": 7}', "top-p is 7.0; it must be above 0"),
        ("generation_config.json", '{"top_k": Infinity}', "top_k is inf; it must be a number"),
        ("generation_config.json", '{"temperature": 1' + "0" * 400 + "}", "it must be a number"),
        ("tokenizer_config.json", '{"eos_token": 5}', "tokenizer_config.json: eos_token is 5; it must be text"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template in tokenizer_config.json is not text"),
        ("config.json", "[" * 100_000, "config.json"),
        ("generation_config.json", '{"eos_token_id": 300}', "eos_token_id is 300; it must be an id"),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("generation_config.json", "{", "is not valid JSON"),
        ("tokenizer.json", "{}", "tokenizer.json cannot be read"),
        ("model.onnx", "just text", "model.onnx is not an ONNX model"),
        ("chat_template.jinja", "{% if %}", "the chat template is not valid"),
    ],
)
def test_damaged_companions_are_named(tiny_bundle: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m")
    (folder / name).write_text(content)
    with pytest.raises((BundleError, TemplateError)) as caught:
        edgerun.load(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_template_that_is_not_text_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TemplateError, match=r"chat_template\.jinja cannot be read"):
        edgerun.load(folder)


def test_a_tokenizer_of_another_model_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m")
    larger = write_bundle(tmp_path / "larger", vocab_size=301)
    shutil.copy(larger / "tokenizer.json", folder)
    with pytest.raises(BundleError, match="has token ids up to 300, but the model's vocabulary has 300"):
        edgerun.load(folder)


def test_a_path_that_leads_to_no_tokenizer_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    for path, said in (
        (tmp_path / "absent", r"absent does not exist; give a tokenizer\.json, or a folder with one"),
        (tmp_path, r"holds no tokenizer\.json; give a tokenizer\.json, or a folder with one"),
        (tiny_bundle / "edge.json", r"edge\.json cannot be read: .*; give the tokenizer\.json of this model"),
    ):
        with pytest.raises(BundleError, match=said):
            edgerun.load(tiny_bundle, tokenizer=path)


@pytest.mark.skipif(sys.platform != "linux", reason="file names are text elsewhere")
def test_a_path_that_is_no_text_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m\udcff")
    with pytest.raises(BundleError, match=r"m.* is not UTF-8, which ONNX Runtime cannot open; rename it"):
        edgerun.load(folder)


def test_missing_files_are_named(tiny_bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not exist; give an .onnx file or a model folder"):
        edgerun.load(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"holds no \.onnx file; give an .onnx file or a model folder"):
        edgerun.load(tmp_path)
    with pytest.raises(BundleError, match="it looks like a checkpoint: run edge-run export"):
        edgerun.load(tiny_bundle.parent / "checkpoint")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(BundleError, match="is not an .onnx file"):
        edgerun.load(tmp_path / "notes.txt")
    folder = copy_of(tiny_bundle, tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(
        BundleError, match=r"holds no tokenizer\.json; put the model's tokenizer\.json beside the graph"
    ):
        edgerun.load(folder)


def test_a_model_without_a_template_continues_plain_text_only(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = copy_of(tiny_bundle, tmp_path / "m")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with edgerun.load(folder) as engine:
        assert engine.generate("a", raw=True, max_tokens=2).text
        with pytest.raises(TemplateError, match=r"has no chat template; continue plain text: --raw -p TEXT"):
            engine.generate("a")
        with pytest.raises(TemplateError, match="has no chat template"):
            engine.session()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_corrupt_bundle_is_refused_by_its_checksums(tiny_bundle: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_bundle, folder)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(BundleError, match="is damaged: its checksum is not the one recorded"):
        edgerun.load(folder)
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(BundleError, match=r"is damaged: \d+ bytes, \d+ expected; copy the bundle again"):
        edgerun.load(folder)
    (folder / name).unlink()
    with pytest.raises(BundleError, match=r"is missing|holds no \.onnx file"):
        edgerun.load(folder)


def test_a_large_file_is_hashed_again_when_it_changes(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path, hidden_size=512, intermediate_size=2048)
    weights = bundle / "model.onnx.data"
    assert weights.stat().st_size > 8 << 20
    edgerun.load(bundle).close()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    time.sleep(0.01)  # for file systems that keep coarse times
    weights.write_bytes(data)
    with pytest.raises(BundleError, match="is damaged"):
        edgerun.load(bundle)


def test_a_manifest_of_a_later_format_asks_for_an_upgrade(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_bundle, folder)
    manifest = json.loads((folder / "edge.json").read_text())
    (folder / "edge.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(BundleError, match="is of format 99, contract 1; .*upgrade edge-run"):
        edgerun.load(folder)
    (folder / "edge.json").write_text(json.dumps({"format": 1, "contract": 1}))
    with pytest.raises(BundleError, match=r"edge\.json cannot be read"):
        edgerun.load(folder)
    manifest["files"]["../../etc/passwd"] = {"bytes": 1, "sha256": "0"}
    (folder / "edge.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match="which lies outside the bundle"):
        edgerun.load(folder)


def test_external_data_outside_the_bundle_is_refused(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    folder = copy_of(write_bundle(tmp_path, weights=INT8), tmp_path / "m")
    shutil.move(folder / "model.onnx.data", tmp_path / "elsewhere.data")
    for location in ("../elsewhere.data", str(tmp_path / "elsewhere.data")):
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = location
        (folder / "model.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(BundleError, match=r"model\.onnx keeps weights in '.*', outside its folder"):
            edgerun.load(folder)


def test_unknown_devices_name_those_there_are(tiny_bundle: Path) -> None:
    with pytest.raises(DeviceError, match="this machine has no device 'abacus'; available: .*CPU"):
        edgerun.load(tiny_bundle, device="abacus")
    with pytest.raises(InputError, match="threads is 0; it must be 1 or more, and at most 1024"):
        edgerun.load(tiny_bundle, threads=0)
    with edgerun.load(tiny_bundle, device="CPUExecutionProvider") as engine:
        assert str(engine.device) == "CPU"


def test_the_public_face_is_deliberate() -> None:
    assert edgerun.__all__ == sorted(edgerun.__all__, key=str.lower) or edgerun.__all__ == sorted(edgerun.__all__)
    assert all(hasattr(edgerun, name) for name in edgerun.__all__)
