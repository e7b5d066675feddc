"""The training recipe on a tiny model: learning, resuming, held-out pairs, files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors import safe_open  # noqa: E402

from edgerun.export.draft_training.torch_llama import CausalLM, ModelShape  # noqa: E402
from edgerun.export.draft_training.training_batches import LEAD, BatchStream, cut_by_cost  # noqa: E402
from edgerun.export.draft_training.training_loop import (  # noqa: E402
    Schedule,
    TrainingTask,
    TrainOptions,
    load_state,
    train,
)
from edgerun.training.checkpoint import load_model, save_model  # noqa: E402
from edgerun.training.corpus import (  # noqa: E402
    HELDOUT_FILE,
    NL2BASH_COMMANDS,
    NL2BASH_REQUESTS,
    TLDR_FILE,
    Pair,
    pair_key,
)
from edgerun.training.evaluate import agreement, by_group, compare, validate  # noqa: E402
from edgerun.training.everyday import load_everyday  # noqa: E402
from edgerun.training.examples import answer_cross_entropy, task_examples  # noqa: E402
from edgerun.training.generate import greedy  # noqa: E402
from edgerun.training.placeholders import fill  # noqa: E402
from edgerun.training.recipe import load_pairs, tokenizer_texts  # noqa: E402
from edgerun.training.tasks import TaskMaker, Turn  # noqa: E402
from edgerun.training.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, ChatCodec, train_tokenizer  # noqa: E402

TOOLS = {"ls": "List files.", "rm": "Remove files.", "cat": "Print files.", "wc": "Count lines.", "du": "Show sizes."}
VERBS = ("list", "remove", "print", "count", "measure")
SHAPE = ModelShape(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=96,
)


def toy_pairs() -> list[Pair]:
    return [
        Pair("tldr-pages", f"{verb} the {thing}", f"{tool} <path/to/{thing}>", tool, about)
        for verb, (tool, about) in zip(VERBS, TOOLS.items(), strict=True)
        for thing in ("file", "directory", "archive", "image", "log", "page", "table", "note")
    ]


@pytest.fixture
def codec() -> ChatCodec:
    return ChatCodec(train_tokenizer(tokenizer_texts(toy_pairs()), vocab_size=320))


def tiny_model(codec: ChatCodec, seed: int = 0) -> CausalLM:
    torch.manual_seed(seed)
    return CausalLM(dataclasses.replace(SHAPE, vocab_size=codec.tokenizer.get_vocab_size()), dropout=0.1)


def stream(codec: ChatCodec) -> BatchStream:
    pairs = toy_pairs()
    source = task_examples(pairs, TaskMaker(pairs, []), codec, seed=3)
    return BatchStream(source, pad=codec.end, batch_tokens=256, context=96, seed=3, pool=64)


def run(codec: ChatCodec, model: CausalLM, out: Path, steps: int, **more: object) -> None:
    options = TrainOptions(
        steps=steps,
        warmup=2,
        evaluate_every=1000,
        save_every=5,
        save_seconds=1e9,
        matrix_rate=5e-3,
        other_rate=1e-2,
        **more,  # type: ignore[arg-type]
    )
    task = TrainingTask(
        model,
        stream(codec).batch,
        answer_cross_entropy(model, 2.0),
        lambda: validate(model, codec, toy_pairs()[:8]),
        "first_word",
        lambda: save_model(out, model, codec.tokenizer),
    )
    train(task, options, out)


def test_loss_falls(codec: ChatCodec, tmp_path: Path) -> None:
    model = tiny_model(codec)
    before = validate(model, codec, toy_pairs())["loss"]
    run(codec, model, tmp_path, steps=30)
    history = json.loads((tmp_path / "training.json").read_text(encoding="utf-8"))["history"]
    assert history[-1]["loss"] < 0.8 * before


def test_time_budget_ends_a_run_and_counts_earlier_runs(codec: ChatCodec, tmp_path: Path) -> None:
    steps = []
    for _ in range(2):
        run(codec, tiny_model(codec), tmp_path, steps=100_000, minutes=0.02)
        steps.append(load_state(tmp_path)[1]["record"]["step"])
    assert 0 < steps[0] == steps[1] < 100_000


def test_schedule_follows_the_budget_that_ends_first() -> None:
    by_steps = Schedule(TrainOptions(steps=100, warmup=10))
    assert by_steps.progress(50) == 0.5
    assert by_steps.factor(0, 0.0) == pytest.approx(0.1)
    assert by_steps.factor(99, 1.0) == pytest.approx(0.0)
    by_time = Schedule(TrainOptions(steps=100, minutes=1.0), used_seconds=45.0)
    assert 0.75 <= by_time.progress(1) < 1.0


def test_batches_depend_only_on_their_number(codec: ChatCodec) -> None:
    forward, backward = stream(codec), stream(codec)
    count = 3 * forward.per_pool
    ahead = [forward.batch(k) for k in range(count)]
    behind = [backward.batch(k) for k in reversed(range(count))][::-1]
    assert all(
        torch.equal(a.ids, b.ids) and torch.equal(a.targets, b.targets) for a, b in zip(ahead, behind, strict=True)
    )


def test_loss_counts_at_answer_positions(codec: ChatCodec) -> None:
    batch = stream(codec).batch(0)
    for row in range(batch.ids.shape[0]):
        ids = batch.ids[row].tolist()
        marked = [i for i, flag in enumerate(batch.predicts[row].tolist()) if flag]
        assert ids[marked[0]] == codec.assistant
        assert ids[marked[-1] + 1] == codec.end
        leads = batch.leads[: len(marked)].tolist() if row == 0 else []
        assert leads == [True] * min(LEAD, len(leads)) + [False] * (len(leads) - LEAD)
    assert batch.targets.tolist() == batch.ids[:, 1:][batch.predicts[:, :-1]].tolist()


def test_cuts_cover_all_examples_without_empty_parts() -> None:
    for lengths in ([1] * 10, [1, 1, 1, 50], [5, 5], [3, 4, 80, 90, 100]):
        for parts in range(1, len(lengths) + 1):
            edges = cut_by_cost(lengths, parts)
            assert edges[0] == 0
            assert edges[-1] == len(lengths)
            assert all(a < b for a, b in itertools.pairwise(edges))


def write_corpus(data: Path) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """A small data folder in the real layout; returns (all pairs, held-out pairs)."""
    tldr = [(pair.request, pair.command) for pair in toy_pairs()]
    bash = [(f"Find files named {n}", f"find . -name {n}") for n in range(40)]
    held = [*tldr[::7], *bash[::7], ("make x executable", "chmod +x x")]
    for name in (TLDR_FILE, NL2BASH_REQUESTS, HELDOUT_FILE):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
    with (data / TLDR_FILE).open("w", encoding="utf-8") as file:
        for pair in toy_pairs():
            messages = [{"role": "user", "content": pair.request}, {"role": "assistant", "content": pair.command}]
            row = {"platform": "common", "command": pair.tool, "about": pair.about, "messages": messages}
            file.write(json.dumps(row) + "\n")
    # Copies that differ only in case, spacing and a full stop must be recognized too.
    (data / NL2BASH_REQUESTS).write_text("".join(f"{q.upper()} .\n" for q, _ in bash), encoding="utf-8")
    (data / NL2BASH_COMMANDS).write_text("".join(f" {c}\n" for _, c in bash), encoding="utf-8")
    with (data / HELDOUT_FILE).open("w", encoding="utf-8") as file:
        for request, command in held:
            file.write(json.dumps({"source": "tldr-pages", "request": request, "command": command}) + "\n")
    return tldr + bash, held


def check_no_leak(data: Path, draws: int) -> None:
    pairs = load_pairs(data)
    forbidden = {pair.key for pair in pairs.heldout + pairs.validation}
    assert pairs.heldout
    assert not forbidden & {pair.key for pair in pairs.train}
    assert not {pair.key for pair in pairs.heldout} & {pair.key for pair in pairs.validation}
    maker = TaskMaker(pairs.train, pairs.heldout + pairs.validation)
    rng = random.Random(0)
    for _ in range(draws):
        for turn in maker.make(rng.choice(pairs.train), rng):
            assert pair_key(turn.user, turn.assistant) not in forbidden
            assert pair_key(turn.assistant, turn.user.removeprefix("explain: ")) not in forbidden


def test_heldout_pairs_never_reach_training(tmp_path: Path) -> None:
    everything, held = write_corpus(tmp_path)
    check_no_leak(tmp_path, draws=3000)
    pairs = load_pairs(tmp_path)
    kept = [pair for pair in pairs.train + pairs.validation if pair.source != "everyday"]
    overlap = {pair_key(*pair) for pair in held} & {pair_key(*pair) for pair in everything}
    assert len(kept) == len(everything) - len(overlap)


def test_heldout_pairs_never_reach_training_on_the_real_corpora() -> None:
    data = Path(os.environ.get("EDGERUN_DATA", ""))
    if not os.environ.get("EDGERUN_DATA") or not (data / HELDOUT_FILE).exists():
        pytest.skip("EDGERUN_DATA names no folder with the corpora")
    check_no_leak(data, draws=20_000)


def test_heldout_rewordings_fall_back_to_the_plain_pair() -> None:
    pair = toy_pairs()[0]
    named = Pair(pair.source, f"{pair.request} using ls", pair.command, "ls")
    maker = TaskMaker([pair], [named])
    for seed in range(2000):
        assert all(maker.allowed(turn) for turn in maker.make(pair, random.Random(seed)))


def test_everyday_slots_are_the_same_in_request_and_command() -> None:
    pairs = load_everyday(copies=2, seed=1)
    assert len(pairs) > 500
    assert all("{file" not in pair.request + pair.command for pair in pairs)
    by_request = {pair.request: pair.command for pair in pairs}
    large = [
        request for request in by_request if request.startswith("find files larger than") and " in " not in request
    ]
    for request in large:
        number, linear = request.split()[4:6]
        assert by_request[request] == f"find . -type f -size +{number}{linear[0]}"


def test_placeholders_are_the_same_in_request_and_command() -> None:
    for seed in range(50):
        request, command = fill("Extract a specific archive", "tar xf <path/to/archive.tar>", random.Random(seed))
        value = command.removeprefix("tar xf ")
        assert "<" not in command
        assert value in request
    assert fill("Show the version", "tool <a|b>", random.Random(0)) == ("Show the version", "tool <a|b>")


def test_saved_folder_has_the_hugging_face_layout(codec: ChatCodec, tmp_path: Path) -> None:
    model = tiny_model(codec)
    save_model(tmp_path, model, codec.tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == 0
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == "BF16"
    assert "model.layers.1.self_attn.q_proj.weight" in names
    assert "lm_head.weight" not in names
    loaded, _ = load_model(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name].to(torch.bfloat16).float())


def test_chat_template_matches_the_codec_which_loses_no_text(codec: ChatCodec) -> None:
    jinja2 = pytest.importorskip("jinja2")
    template = jinja2.Template(CHAT_TEMPLATE.rstrip("\n"))
    messages = [{"role": "user", "content": "list the file"}]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    assert prompt == "<|user|>list the file<|assistant|>"
    assert codec.tokenizer.encode(prompt).ids == codec.encode_prompts(["list the file"])[0]
    messages.append({"role": "assistant", "content": "ls <path/to/file>"})
    ids, _ = codec.encode_chats([[Turn("list the file", "ls <path/to/file>")]])[0]
    assert codec.tokenizer.encode(template.render(messages=messages)).ids == ids
    assert [codec.tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    text = "find . -name '*.ünï' | wc -l\t# 数"
    assert codec.decode(codec.tokenizer.encode(text).ids) == text


def test_batches_are_decoded_like_single_texts(codec: ChatCodec) -> None:
    model = tiny_model(codec).eval()
    prompts = codec.encode_prompts([pair.request for pair in toy_pairs()[:12]])
    batched = greedy(model, prompts, end=codec.end, max_new=10, batch=4)
    for prompt, answer in zip(prompts, batched, strict=True):
        ids = list(prompt)
        for token in answer:
            logits = model(torch.tensor([ids]))[0, -1]
            # bfloat16 arithmetic may part ways only where two tokens are equally likely.
            assert logits.max() - logits[token] < 0.05
            ids.append(token)
        assert len(answer) == 10 or answer[-1] == codec.end


def test_a_model_agrees_with_itself(codec: ChatCodec) -> None:
    model, other = tiny_model(codec, seed=1), tiny_model(codec, seed=2)
    with torch.no_grad():
        # An untrained model with a tied head repeats its input; larger weights make its output depend on more.
        for each in (model, other):
            for name, parameter in each.named_parameters():
                parameter.mul_(20.0 if "proj" in name else 1.0)
    requests = [pair.request for pair in toy_pairs()]
    # bfloat16 arithmetic of another batch shape may decide near ties otherwise.
    assert agreement(model, model, codec, requests) > 0.97
    assert agreement(other, model, codec, requests) < 0.5


def test_scores_of_answers() -> None:
    pairs = toy_pairs()[:4]
    answers = [pairs[0].command, "ls something", "", pairs[3].command + " "]
    scored = compare(pairs, answers)
    assert (scored.count, scored.exact, scored.first_word) == (4, 0.5, 0.75)
    assert set(by_group(pairs, answers)) == {"all", "first_150", "tldr-pages"}


def test_importing_the_package_does_not_import_training_or_torch() -> None:
    code = "import sys, edgerun; sys.exit(any(m == 'torch' or 'edgerun.training' in m for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
