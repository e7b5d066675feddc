"""Beam search against transformers, where it is installed (the oracle extra).

Versions above 4.55 have no diverse beam search. That of older ones goes on a little longer where beams have ended, so
no beam ends in the comparison of groups.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import edgerun
from edgerun.runtime.sampling.sampler import SamplingParams
from edgerun.runtime.strategies.beams import BeamSearch
from support.enumeration import steps_of
from support.tiny_models import exported, write_checkpoint

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
torch.set_num_threads(1)

pytestmark = pytest.mark.filterwarnings("ignore")
PROMPT = [8, 30, 61, 9, 112]
EOS = (0, 7)
HAS_GROUPS = hasattr(transformers.GenerationMixin, "_group_beam_search")


class Bias:
    """Adds a number to the log-probability of the tokens that end a text, so that beams end at different places."""

    def __init__(self, bias: float) -> None:
        self._bias = bias

    def __call__(self, input_ids: object, scores: object) -> object:
        scores[:, list(EOS)] += self._bias
        return scores


def until_end(tokens: list[int]) -> list[int]:
    """The tokens up to the first one that ends a text; padding follows it."""
    ends = [index for index, token in enumerate(tokens) if token in EOS]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize(
    ("groups", "diversity", "length_penalty", "bias"),
    [(1, 0.0, 1.0, 1.5), (1, 0.0, 0.0, 2.5), (1, 0.0, 2.0, 0.0), (2, 0.8, 1.0, -20.0), (4, 0.3, 0.5, -20.0)],
)
def test_beams_have_the_tokens_of_transformers(
    tmp_path: Path, family: str, groups: int, diversity: float, length_penalty: float, bias: float
) -> None:
    if groups > 1 and not HAS_GROUPS:
        pytest.skip("this version of transformers has no diverse beam search")
    folder = write_checkpoint(tmp_path / "checkpoint", family, seed=5)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    grouped = {"num_beam_groups": groups, "diversity_penalty": diversity} if groups > 1 else {}
    rows = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones((1, len(PROMPT)), dtype=torch.long),
        num_beams=4,
        num_return_sequences=4,
        length_penalty=length_penalty,
        early_stopping=False,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=list(EOS),
        pad_token_id=299,
        logits_processor=transformers.LogitsProcessorList([Bias(bias)]),
        **grouped,
    )
    expected = [until_end(row[len(PROMPT) :].tolist()) for row in rows]
    search = BeamSearch(4, 4, groups, diversity, length_penalty)
    sampling = SamplingParams(logit_bias=tuple((token, bias) for token in EOS))
    with edgerun.load(exported(folder, tmp_path / "bundle"), threads=1) as engine:
        *_, step = steps_of(engine, search, PROMPT, eos=EOS, most_tokens=12, sampling=sampling)
    assert list(step.tokens) == [token for token in expected[0] if token not in EOS]
    assert [list(path.tokens) for path in search.found] == expected[1:]
