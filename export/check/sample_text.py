"""Quality of an exported graph on a short text, compared with the weights that it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from threadpoolctl import threadpool_limits

from ...errors import BundleError
from ...models.bundle import GRAPH_NAME, Bundle
from ...runtime.measure.exactness import SAMPLE_TEXT
from ...runtime.text.tokenizer import TextTokenizer
from ..bundle_content import BundleContent
from ..calibration.divergence import Divergence
from ..checkpoint.json_fields import read_json
from .contract_session import ContractSession
from .parity import log_softmax
from .reference import TokenArray, reference_logits

MAX_TOKENS: Final = 64
"""Number of tokens at most: the reference decoder takes as long for them as a parity check does."""


def quality_on_sample_text(folder: Path, content: BundleContent) -> Divergence | None:
    """Compare the graph in `folder`, as shipped, with the reference decoder on the weights that it was made from.

    Returns:
        The figures; None where the model's tokenizer cannot be used or gives fewer than two tokens.

    Raises:
        CheckpointError: a tensor cannot be read.
        ExportError: the graph cannot be loaded or run.
    """
    tokens = _tokens(folder, content)
    if len(tokens) < 2:
        return None
    settings = read_json(content.source.folder / "config.json")
    with threadpool_limits(1, user_api="blas"):
        original = log_softmax(reference_logits(content.original, settings, tokens, content.context))
    session = ContractSession(folder, content.config, len(tokens))
    shipped = log_softmax(session.forward(tokens, np.arange(len(tokens))).astype(np.float64))
    kl = np.sum(np.exp(original) * (original - shipped), axis=-1)
    before, following = np.arange(len(tokens) - 1), tokens[1:]
    return Divergence(
        mean_kl=float(kl.mean()),
        p99_kl=float(np.quantile(kl, 0.99)),
        top1_agreement=float(np.mean(shipped.argmax(-1) == original.argmax(-1))),
        perplexity=float(np.exp(-shipped[before, following].mean())),
        float_perplexity=float(np.exp(-original[before, following].mean())),
        tokens=len(tokens),
    )


def _tokens(folder: Path, content: BundleContent) -> TokenArray:
    """The first tokens of the text; none where the tokenizer cannot be used."""
    try:
        tokenizer = TextTokenizer(Bundle(folder, folder / GRAPH_NAME, None), content.config.vocab_size)
        ids = tokenizer.encode(SAMPLE_TEXT, add_special_tokens=True)
    except BundleError:
        ids = []
    return np.array(ids[: min(MAX_TOKENS, content.context)], np.int64)
