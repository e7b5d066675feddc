"""Answers that share passes say what each says alone, whoever joins, leaves or is cancelled meanwhile."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import edgerun
from edgerun import Engine, GenerateOptions, Reply
from edgerun.runtime.graph.shared_passes import PackedPasses
from edgerun.runtime.speculation.choice import Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost
from support.layouts import LAYOUTS, write_layout
from support.nightly import some_nightly
from support.tiny_models import write_bundle
from support.waiting import wait_until

CONTEXT = 160
PARALLEL = 3
# Of few tokens, no two are so close that sums of another order choose the other one.
OPTIONS = (
    GenerateOptions(max_tokens=20),
    GenerateOptions(max_tokens=16, speculation=Speculation.OFF),
    GenerateOptions(max_tokens=20, temperature=0.9, top_k=4, seed=3),
    GenerateOptions(max_tokens=12, temperature=0.7, top_k=4, top_p=0.9, repeat_penalty=1.2, seed=4),
    GenerateOptions(max_tokens=12, exact=True),
    GenerateOptions(max_tokens=12, temperature=1.0, top_k=4, seed=5, n=3),
    GenerateOptions(max_tokens=16, strategies=(edgerun.strategy("cad", text="of the sea"),)),
    GenerateOptions(max_tokens=12, temperature=0.9, seed=6, n=2, strategies=(edgerun.strategy("negative-prompt"),)),
)
MODELS = ("llama", "gemma3_text", "qwen3_5_text", "lfm2", "genai")


@pytest.fixture(scope="module", params=MODELS)
def engines(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[tuple[Engine, Engine]]:
    """An engine whose answers share passes, and one that generates one answer at a time."""
    folder: Path = tmp_path_factory.mktemp("model")
    bundle = (
        write_layout(folder / "model", LAYOUTS["genai"])
        if request.param == "genai"
        else write_bundle(folder, request.param)
    )
    options: dict[str, Any] = {"threads": 1, "context": CONTEXT, "cache": False}
    with (
        edgerun.load(bundle, parallel=PARALLEL, **options) as engine,
        edgerun.load(bundle, parallel=1, prefix_cache=0, **options) as alone,
    ):
        for each in (engine, alone):
            each.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
        if request.param == "genai":
            assert engine.model.shared_passes == "no input of the graph says which logits it returns"
        yield engine, alone


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Number of shared passes by their number of texts."""
    counted: Counter[int] = Counter()
    run = PackedPasses.run

    def counting(packed: PackedPasses, texts: Any, options: Any) -> None:
        counted[len(texts)] += 1
        run(packed, texts, options)

    monkeypatch.setattr(PackedPasses, "run", counting)
    return counted


def read(
    engine: Engine, prompt: list[int], options: GenerateOptions, rng: random.Random, expected: Reply
) -> str | None:
    """Read an answer, perhaps not to its end; returns what is wrong with it."""
    stream = engine.model.answer(None, prompt, options)
    fate, pieces = rng.random(), rng.randrange(1, 8)
    if fate < 0.7:
        texts, wanted = ([each.text for each in reply.choices] for reply in (Reply.of(stream), expected))
        return None if texts == wanted else f"{texts}, not {wanted}"
    chunks = list(islice(stream, pieces))
    if fate < 0.8:
        stream.close()
    elif fate < 0.9:
        stream.cancel()
        chunks += stream
    text = "".join(chunk.text for chunk in chunks if chunk.index == 0).rstrip("\ufffd")
    return None if expected.text.startswith(text) else text


@pytest.mark.parametrize("seed", some_nightly(range(100), every=50))
def test_answers_that_come_and_go_say_what_they_say_alone(
    engines: tuple[Engine, Engine], passes: Counter[int], seed: int
) -> None:
    engine, alone = engines
    rng = random.Random(seed)
    vocab = engine.graph_io.vocab_size
    system = [rng.randrange(5, vocab) for _ in range(20)]
    prompts = [
        [*system[: rng.choice((0, 20))], *(rng.randrange(5, vocab) for _ in range(rng.choice((2, 30, 90))))]
        for _ in range(3)
    ]
    asked = [(rng.choice(prompts), rng.choice(OPTIONS), rng.randrange(1 << 30)) for _ in range(12)]
    expected = {
        number: Reply.of(alone.model.answer(None, prompt, options)) for number, (prompt, options, _) in enumerate(asked)
    }
    numbers, wrong = iter(range(len(asked))), list[object]()

    def ask() -> None:
        for number in numbers:
            prompt, options, fate = asked[number]
            try:
                if (found := read(engine, prompt, options, random.Random(fate), expected[number])) is not None:
                    wrong.append((number, options, found, expected[number].text))
            except Exception as error:  # noqa: BLE001  reported by the assertion
                wrong.append((number, error))

    threads = [threading.Thread(target=ask) for _ in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, "\n".join(f"{number} {found!r}" for number, *_, found, _ in wrong)
    assert bool(passes) != isinstance(engine.model.shared_passes, str)
    # The thread of a dropped answer may be about to end it.
    wait_until(lambda: engine.activity().active == 0)
