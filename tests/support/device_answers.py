"""A program: answers of engines on a GPU and on the CPU, one after another and side by side.

It is started by `support.devices.run_json_script` with a model in float32, a folder to write to, a number of
tokens and a device. It prints, as a line of JSON, the texts of both devices and what was counted.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import edgerun
from edgerun import Engine, GenerateOptions, Speculation
from support.adversarial_drafters import NEARLY_FREE, FixedCost

PROMPT = "the other and the thing in the other " * 2
MANY = 100
"""Number of tokens from which answers are exact too, for which wide passes are measured first."""
TURNS = ("one in the other", "and another")


def answers(engine: Engine, tokens: int) -> dict[str, Any]:
    """Answers of every kind of request: the best logits suffice for some, others need all of them."""
    plain = GenerateOptions(raw=True, max_tokens=tokens, ignore_eos=True, speculation=Speculation.OFF)
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "drafted": {"speculation": Speculation.AUTO},
        "best of 20": {"temperature": 0.9, "top_k": 20, "seed": 5},
        "all": {"temperature": 0.9, "seed": 5},
        "penalized": {"repeat_penalty": 1.3},
        "logprobs": {"logprobs": 2},
    }
    if tokens >= MANY:
        kinds["exact"] = {"speculation": Speculation.AUTO, "exact": True}
    return {name: engine.generate(PROMPT, plain, **changes) for name, changes in kinds.items()}


def conversation(first: Engine, second: Engine, file: Path, tokens: int) -> list[str]:
    """A conversation that begins on one engine, is saved, and goes on with another."""
    options = GenerateOptions(max_tokens=tokens, speculation=Speculation.OFF)
    with first.session() as session:
        begun = session.send(TURNS[0], options)
        session.save(file)
    with second.session(resume=file) as session:
        reply = session.send(TURNS[1], options)
    assert reply.stats.reused_tokens > begun.stats.prompt_tokens
    return [begun.text, reply.text]


def at_the_same_time(engines: list[Engine], tokens: int) -> list[str]:
    """The greedy text of every engine, all of them in threads."""

    def run(engine: Engine) -> str:
        options = GenerateOptions(raw=True, max_tokens=tokens, ignore_eos=True, speculation=Speculation.OFF)
        for _ in range(2):  # the first arena is freed while others run
            text = engine.generate(PROMPT, options).text
            engine.model.prefixes.clear()
        return text

    with ThreadPoolExecutor(len(engines)) as pool:
        return list(pool.map(run, engines))


def main(bundle: str, folder: str, count: str, device_name: str) -> None:
    """Compare the devices and print what was found."""
    tokens = int(count)
    settings: dict[str, Any] = {"cache": False, "threads": 1, "draft": None}
    cpu, device = edgerun.load(bundle, device="cpu", **settings), edgerun.load(bundle, device=device_name, **settings)
    for engine in (cpu, device):
        engine.model.drafters._pass_cost = FixedCost(NEARLY_FREE)
    expected, replies = answers(cpu, tokens), answers(device, tokens)
    stats = {name: reply.stats for name, reply in replies.items()}
    other = edgerun.load(bundle, device=device_name, **settings)
    file = Path(folder) / "conversation"
    found = {
        "cpu": {name: reply.text for name, reply in expected.items()},
        "device": {name: reply.text for name, reply in replies.items()},
        "reused": [each.reused_tokens for each in stats.values()],
        "drafted": stats["drafted"].drafted,
        "conversations": [
            conversation(one, another, file, tokens)
            for one, another in ((cpu, cpu), (device, cpu), (cpu, device), (device, device))
        ],
        "side by side": at_the_same_time([device, cpu, other], tokens),
    }
    for engine in (cpu, device, other):
        engine.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
