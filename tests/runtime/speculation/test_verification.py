from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from edgerun.runtime.sampling.logit_stage import Logits
from edgerun.runtime.sampling.sampler import Sampler, SamplingParams
from edgerun.runtime.speculation.replay import ReplaySampler
from edgerun.runtime.speculation.tree import Source, Tree
from edgerun.runtime.speculation.verification import VerifyResult, verify_tree
from support.adversarial_drafters import chain_tree
from support.nightly import examples

NOBODY = frozenset[int]()
PROMPT = (2, 0, 2)
Model = Callable[[Sequence[int]], Logits]
"""float32 logits `[V]` after a sequence."""


def toy_model(vocab: int, seed: int = 0) -> Model:
    """Logits that depend on the whole sequence, in quarter steps, so that ties occur."""

    def logits_after(text: Sequence[int]) -> Logits:
        random = np.random.default_rng([seed, len(text), *text])
        return (random.integers(-8, 9, vocab) / 4).astype(np.float32)

    return logits_after


def tree_logits(model: Model, text: Sequence[int], tree: Tree) -> Logits:
    """float32 `[n, V]`: each node's logits after its own path; `text` ends before the anchor."""
    return np.stack([model([*text, *tree.tokens[list(tree.path_to(node))].tolist()]) for node in range(len(tree))])


def started(sampler: Sampler, text: Sequence[int]) -> Sampler:
    sampler.observe(list(text))
    return sampler


def plain(model: Model, sampler: Sampler, text: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens one by one."""
    chosen: list[int] = []
    for _ in range(count):
        token = sampler.choose(model([*text, *chosen]), len(text) + len(chosen))
        sampler.observe((token,))
        chosen.append(token)
    return chosen


def chain(anchor: int, tokens: Sequence[int]) -> Tree:
    return chain_tree(anchor, tokens, [0.5] * len(tokens), Source.OTHER)


@st.composite
def trees(draw: st.DrawFn, vocab: int, anchor: int) -> Tree:
    tokens, parents = [anchor], [-1]
    for _ in range(draw(st.integers(0, 12))):
        key = (draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, vocab - 1)))
        if key not in zip(parents, tokens, strict=True):
            parents.append(key[0])
            tokens.append(key[1])
    return Tree.of(tokens, parents, [1.0] * len(tokens), [Source.OTHER] * len(tokens))


PARAMS = st.one_of(
    st.builds(SamplingParams, repeat_penalty=st.sampled_from([1.0, 1.5])),
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.3, 1.0]),
        top_k=st.sampled_from([0, 2]),
        top_p=st.sampled_from([0.8, 1.0]),
        min_p=st.sampled_from([0.0, 0.2]),
        repeat_penalty=st.sampled_from([1.0, 1.5]),
        seed=st.integers(0, 1000),
    ),
)


@given(
    tree=trees(4, PROMPT[-1]),
    params=PARAMS,
    ends=st.frozensets(st.integers(0, 3), max_size=1),
    max_tokens=st.integers(1, 6),
    seed=st.integers(0, 50),
)
@settings(max_examples=examples(300))
def test_any_tree_gives_the_tokens_of_plain_decoding(tree, params, ends, max_tokens, seed) -> None:
    model = toy_model(4, seed)
    logits = tree_logits(model, PROMPT[:-1], tree)
    result = verify_tree(tree, logits, started(Sampler(params, 4), PROMPT), len(PROMPT), ends, max_tokens)
    expected = plain(model, started(Sampler(params, 4), PROMPT), PROMPT, max_tokens)
    emitted = result.emitted(tree)
    assert list(emitted) == expected[: len(emitted)]
    assert 1 <= len(emitted) == len(result.accepted_path) <= max_tokens
    assert not set(emitted[:-1]) & ends
    # The walk ends for a reason: an end, the limit, or no child to go to.
    last = result.accepted_path[-1]
    assert emitted[-1] in ends or len(emitted) == max_tokens or tree.child(last, emitted[-1]) is None
    assert result.accepted_path == tree.path_to(last)


def test_only_logits_on_the_accepted_path_are_read() -> None:
    class Watching:
        def __init__(self) -> None:
            self.seen: list[tuple[float, int]] = []

        def choose(self, logits: Logits, position: int) -> int:
            self.seen.append((float(logits[0]), position))
            return int(logits.argmax())

        def observe_prompt(self, tokens: Sequence[int]) -> None:
            pass

        def observe(self, tokens: Sequence[int]) -> None:
            pass

    tree = Tree.of([0, 1, 2, 1, 3], [-1, 0, 0, 2, 3], [1.0] * 5, [Source.OTHER] * 5)
    logits = np.zeros((5, 4), np.float32)
    logits[:, 0] = -np.arange(5)
    logits[0, 2] = logits[2, 1] = logits[3, 2] = 1
    sampler = Watching()
    assert verify_tree(tree, logits, sampler, 10, NOBODY, 9) == VerifyResult((0, 2, 3), 2)
    assert sampler.seen == [(0.0, 10), (-2.0, 11), (-3.0, 12)]


def test_a_replay_sampler_gives_the_recorded_answer() -> None:
    replay = ReplaySampler([3, 1, 2], 5, SamplingParams(repeat_penalty=2.0), 4)
    assert verify_tree(chain(0, [3, 1, 0]), np.zeros((4, 4), np.float32), replay, 5, NOBODY, 3) == VerifyResult(
        (0, 1, 2), 2
    )
