"""Encoders: models that make vectors of texts, or score pairs of texts, and generate nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt

from ...errors import BundleError, EdgeError, InputError
from ...models.bundle import SENTENCE_PROMPTS, Bundle, open_bundle
from ...models.find import find_model, model_name
from ...models.json_file import is_whole
from ...models.progress import Progress, silent
from ..arguments.argument_types import checked_arguments
from ..arguments.load_options import LoadOptions
from ..arguments.option_keywords import LoadKeywords
from ..devices.providers import choose_device, cpu_device
from ..embedding import checked_token_ids, pooling_of, unit_vector
from ..engine import Engine
from ..engine_loading import load, usable_threads
from ..graph.encoder_graph import SCORE, VECTOR, EncoderGraph, encoder_output
from ..graph.session import SessionConfig
from ..prefill import never
from ..ranking import Relevance, probability
from ..text.tokenizer import TextTokenizer

_POOLING: Final = ("mean", "cls", "lasttoken")
"""Pooling that encoders have; the first one where no file says it, as in sentence-transformers."""
_DENSE: Final = "2_Dense/config.json"
"""A layer of sentence-transformers behind the pooling, which a graph of hidden states lacks."""
_CONTEXT: Final = 512
"""Largest number of tokens where no file says it, as BERT has."""


class Encoder:
    """An encoder in memory, on the CPU. Make one with `load_encoder`; close it, or use it in a `with` block.

    Several threads may use it at a time. Texts of similar length share a forward pass where the graph has an attention
    mask and an open batch axis, and does not quantize activations by the range of all of them.

    Args:
        bundle: the model.
        threads: number of compute threads; 0 for the default.

    Raises:
        BundleError: the model is damaged or not an encoder, or lacks its config.json or tokenizer.json.
        InputError: the model wants a pooling that edge-run does not have.
    """

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        graph = EncoderGraph(bundle, SessionConfig(cpu_device(), threads))
        self._graph: EncoderGraph | None = graph
        self.name: Final = model_name(bundle.folder)
        self.fingerprint: Final = bundle.fingerprint
        """What the vectors of one model have in common, and only those."""
        self._pooling: Final = pooling_of(bundle, _POOLING)
        if bundle.input_vocab is None:
            raise BundleError(
                f"{bundle.graph} leaves the size of its vocabulary open", "put the model's config.json beside it"
            )
        if graph.output not in (VECTOR, SCORE) and bundle.file(_DENSE) is not None:
            raise BundleError(
                f"{bundle.graph} lacks the layer of {_DENSE}, which its vectors go through",
                f"export it with sentence-transformers installed, so that it gives {VECTOR}",
            )
        self.vocab_size: Final = bundle.input_vocab
        self.tokenizer: Final = TextTokenizer(bundle, self.vocab_size)
        limits: tuple[Any, ...] = (bundle.context, self.tokenizer.config.get("model_max_length"))
        self.context: Final[int] = min((each for each in limits if is_whole(each, 1)), default=_CONTEXT)
        """Largest number of tokens of a text, or of a pair of texts."""
        prompts = bundle.json_file(SENTENCE_PROMPTS).get("prompts")
        self.prompts: Final[Mapping[str, Any]] = prompts if isinstance(prompts, dict) else {}
        """What the model wants before a `query` and a `document`, as far as its files say it."""

    @checked_arguments
    def embed(
        self, texts: Sequence[str | Sequence[int]], *, cancelled: Callable[[], bool] = never
    ) -> npt.NDArray[np.float32]:
        """Embed texts: vectors whose dot products say how similar the texts are.

        Hidden states are pooled as the model's `1_Pooling/config.json` says (mean, cls or lasttoken), or by their mean
        without that file; some graphs give the vector itself.

        Args:
            texts: the texts with the prompts that the model wants before them (`query: `), or their token ids.
            cancelled: called for every text; True ends the work with an error.

        Returns:
            float32 `[n, d]`, rows of length 1.

        Raises:
            ContextError: a text does not fit the context.
            EdgeError: `cancelled` returned True, or the encoder is closed.
            InputError: the model gives scores, or a text is empty.
        """
        graph = self._open(scores=False)
        encode = partial(self.tokenizer.encode, add_special_tokens=True)
        given = checked_token_ids(texts, encode, "text", self.context, self.vocab_size)
        vectors = {}
        for index, output in graph.run([(each, [0] * len(each)) for each in given]):
            if cancelled():
                raise EdgeError("the embedding was cancelled")
            vectors[index] = unit_vector(self._pooled(output))
        ordered = [vectors[index] for index in range(len(given))]
        return np.stack(ordered) if ordered else np.empty((0, graph.size), np.float32)

    @checked_arguments
    def score(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        cancelled: Callable[[], bool] = never,
    ) -> Relevance:
        """Say how relevant documents are to a query, with a cross-encoder: the logistic function of its logit.

        Args:
            query: what is searched.
            documents: the texts, each of which must fit the context together with the query.
            instruction: for models that are asked in words, as `Engine.score`; not for this one.
            cancelled: called for every document; True ends the work with an error.

        Raises:
            ContextError: a document does not fit the context.
            EdgeError: `cancelled` returned True, or the encoder is closed.
            InputError: the model gives no score, or several, for a pair, or there is an instruction.
        """
        graph = self._open(scores=True)
        if instruction is not None:
            raise InputError(f"{self.name} takes no instruction", "leave it out")
        pairs = [self.tokenizer.encode_pair(query, each) for each in documents]
        encode, given = self.tokenizer.encode_plain, [token_ids for token_ids, _ in pairs]
        checked_token_ids(given, encode, "the pair of document", self.context, self.vocab_size)
        scores = np.empty(len(pairs), np.float32)
        for index, logits in graph.run(pairs):
            if cancelled():
                raise EdgeError("the ranking was cancelled")
            if logits.size != 1:
                raise InputError(f"{self.name} gives {logits.size} numbers for a pair", "a reranker gives one")
            scores[index] = probability(logits.item())
        tokens = sum(len(token_ids) for token_ids, _ in pairs)
        return Relevance(scores, tokens, tokens)

    def close(self) -> None:
        """Free the memory; calling it again does nothing."""
        self._graph = None

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pooled(self, found: npt.NDArray[np.float32]) -> npt.NDArray[np.floating[Any]]:
        if found.ndim == 1:
            return found
        states = {"cls": found[:1], "lasttoken": found[-1:]}.get(self._pooling, found)
        pooled: npt.NDArray[np.float64] = states.mean(axis=0, dtype=np.float64)
        return pooled

    def _open(self, *, scores: bool) -> EncoderGraph:
        """The graph, which must give scores of pairs, or vectors.

        Raises:
            EdgeError: the encoder is closed.
            InputError: it gives the other.
        """
        if self._graph is None:
            raise EdgeError("this encoder is closed", "load the model again")
        if (self._graph.output == SCORE) is not scores:
            made, other = ("vectors", "scores of pairs") if scores else ("scores of pairs", "vectors")
            raise InputError(f"{self.name} makes {made} of texts, not {other}", "choose another model")
        return self._graph


@checked_arguments
def load_encoder(model: str | os.PathLike[str], *, threads: int | None = None) -> Encoder:
    """Load an encoder: an embedding model, or a reranker with a score for a query and a document (cross-encoder).

    Args:
        model: an .onnx file, a model folder, or `org/name[:variant][@revision]` on the Hugging Face Hub.
        threads: number of compute threads; None for one a core.

    Raises:
        BundleError: there is no such model, or it is damaged or not an encoder.
        InputError: the model wants a pooling that edge-run does not have.
    """
    return Encoder(open_bundle(find_model(model)), usable_threads(threads))


AnyModel: TypeAlias = Engine | Encoder
"""What a path may hold."""


def load_either(
    model: str, options: LoadOptions | None = None, *, progress: Progress = silent, **changes: Unpack[LoadKeywords]
) -> AnyModel:
    """Load a language model, with all options, or an encoder, with those that it has; errors as for `load`."""
    wanted = (options or LoadOptions()).changed(changes)
    kind = choose_device(wanted.device).kind
    bundle = open_bundle(find_model(model, kind), kind=kind)
    if encoder_output(bundle) is not None:
        return Encoder(bundle, usable_threads(wanted.threads))
    return load(model, wanted, progress=progress)
