"""Trains a draft for a target: lets the target answer prompts, then trains on the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ...errors import InputError
from ...models.atomic import write_atomically
from ...models.json_file import is_finite, read_json_object
from ...models.progress import Progress, silent
from ...runtime.engine import Engine
from ...runtime.engine_loading import load
from .draft_tasks import SCORE, head_acceptance, head_loss, model_acceptance, model_loss, with_states
from .eagle_head import EagleNetwork, EagleShape
from .request import DraftKind, DraftTrainingRequest, checkpoint_files
from .target_data import AnswerOptions, TargetStates, TargetText
from .torch_llama import CausalLM
from .training_batches import POOL_EXAMPLES, BatchStream, Example, in_epochs
from .training_loop import TrainingTask, read_checkpoint, train, write_checkpoint

WORK_FOLDER: Final = "training"
"""Folder in the checkpoint's with the answers of the target and the state of the run."""
_SETTINGS_NAME: Final = "request.json"


class _Texts(NamedTuple):
    """What the target answered."""

    train: list[Example]
    held_out: list[Example]
    pad: int
    ends: list[int]
    """Tokens that end a text."""


def train_draft(
    request: DraftTrainingRequest, progress: Progress = silent, report: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Train a draft, and write its checkpoint in Hugging Face layout.

    Args:
        request: what to train.
        progress: receives the stages "answers of the target", "held-out answers" and "training".
        report: receives a line for each evaluation.

    Returns:
        The run's record, as `train` returns it.

    Raises:
        EdgeError: the target cannot be opened or cannot answer.
        InputError: the target does not suit the request, or the folder has a run of another request.
        OSError: the disk refused a write.
    """
    work = request.out / WORK_FOLDER
    with load(request.target, device="cpu", learned=False, prefix_cache=0, prefix_disk=0) as engine:
        _claim(work / _SETTINGS_NAME, request.settings(engine.bundle))
        writer = TargetText(engine)
        greedy = AnswerOptions(request.answers.max_tokens, 0.0, request.answers.seed)
        held_out = writer.answered(request.held_out, greedy, work / "held-out", progress, "held-out answers")
        answered = writer.answered(request.conversations, request.answers, work / "answers", progress)
        if not answered or not held_out:
            raise InputError("the target answered none of the prompts", "give prompts that fit its context")
        ends = sorted(engine.tokenizer.eos)
        texts = _Texts(answered, held_out, ends[0] if ends else 0, ends)
        device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.manual_seed(request.training.seed)
        task_of = _model_task if request.kind is DraftKind.MODEL else _head_task
        return train(task_of(request, engine, texts, device), request.training, work, progress, report)


def _model_task(request: DraftTrainingRequest, engine: Engine, texts: _Texts, device: torch.device) -> TrainingTask:
    """Training of a draft model."""
    files = checkpoint_files(engine.bundle)
    vocabulary = engine.graph_io.input_vocab
    if request.initial is None:
        model = CausalLM(request.size.shape(engine.bundle, vocabulary, engine.context), request.dropout)
    else:
        model = _initial_model(request.initial, vocabulary, request.dropout)
    model.to(device)
    model.round_weights(request.rounding)
    context = model.shape.max_position_embeddings
    held_out = [each.clipped(context) for each in texts.held_out]
    return TrainingTask(
        model,
        _stream(request, texts, context).batch,
        model_loss(model, request.loss, request.hard),
        lambda: model_acceptance(model, held_out, texts.pad),
        SCORE,
        lambda: write_checkpoint(request.out, model, files, texts.ends),
    )


def _head_task(request: DraftTrainingRequest, engine: Engine, texts: _Texts, device: torch.device) -> TrainingTask:
    """Training of an EAGLE-3 head."""
    if request.rounding is not None or request.initial is not None:
        raise InputError("--round and --init are for draft models", "leave them out with --head")
    source = TargetStates(engine.bundle, max(len(each.ids) for each in (*texts.train, *texts.held_out)))
    kept = head_tokens(texts.train, texts.ends, request.vocabulary)
    settings = engine.bundle.config
    theta, eps = _rotary_base(settings), settings.get("rms_norm_eps", 1e-5)
    head = EagleNetwork(EagleShape(source.architecture, source.layers, len(kept), theta, eps), torch.from_numpy(kept))
    if source.architecture.tied_head:
        # The head's LM head begins as the target's, whose matrix is the embedding.
        with torch.no_grad():
            head.lm_head.weight.copy_(torch.from_numpy(source.embeddings(kept)))
    head.to(device)
    stream = _stream(request, texts, source.architecture.context)
    return TrainingTask(
        head,
        lambda number: with_states(stream.examples(number), source, texts.pad),
        head_loss(head, request.loss, request.depths, request.hard),
        lambda: head_acceptance(head, texts.held_out, source, texts.pad),
        SCORE,
        lambda: head.write(request.out),
    )


def head_tokens(examples: Sequence[Example], ends: Sequence[int], most: int) -> npt.NDArray[np.int64]:
    """The token ids of a head, ascending, int64: the most frequent ones of the target's answers, and its end tokens."""
    counts = Counter(
        token for each in examples for token, answered in zip(each.ids, each.answer, strict=True) if answered
    )
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    chosen = list(dict.fromkeys((*(token for token in ends if token in counts), *ranked)))[:most]
    return np.array(sorted(chosen), np.int64)


def _stream(request: DraftTrainingRequest, texts: _Texts, context: int) -> BatchStream:
    """The same examples in every epoch, in a new order."""
    examples, seed = texts.train, request.training.seed
    return BatchStream(
        lambda places: [examples[index] for index in in_epochs(len(examples), seed, places)],
        pad=texts.pad,
        batch_tokens=request.training.batch_tokens,
        context=context,
        seed=seed,
        pool=min(len(examples), POOL_EXAMPLES),
    )


def _initial_model(folder: Path, vocabulary: int, dropout: float) -> CausalLM:
    """Read the draft model to start from.

    Raises:
        InputError: it cannot be read, or has another vocabulary.
    """
    try:
        model = read_checkpoint(folder, dropout)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{folder} is not a draft model to start from: {error}", "give one of train-draft") from error
    if model.shape.vocab_size != vocabulary:
        raise InputError(
            f"{folder} has {model.shape.vocab_size} tokens, but the target {vocabulary}",
            "start from a draft with the target's tokenizer",
        )
    return model


def _rotary_base(config: dict[str, Any]) -> float:
    """The base of a target's rotary positions, which its head takes over without any scaling."""
    parameters = config.get("rope_parameters")
    value = config.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, dict) else None)
    return float(value) if value is not None and is_finite(value) else 10000.0


def _claim(path: Path, settings: dict[str, Any]) -> None:
    """Write the settings of a new run, or check them against the settings of the run in the folder.

    Raises:
        InputError: that run has other settings.
    """
    if not path.is_file():
        write_atomically(path, json.dumps(settings, indent=2).encode())
        return
    earlier = read_json_object(path, InputError, "give another folder")
    changed = [name for name in settings if settings[name] != earlier.get(name)]
    if changed:
        raise InputError(
            f"{path.parent.parent} has a run with other settings: {', '.join(changed)}",
            "give the same options to continue it, or another folder",
        )
