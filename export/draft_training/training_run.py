"""Trains a draft for a target: lets the target answer prompts, then trains on the answers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError

from ...errors import InputError
from ...models.atomic import write_atomically
from ...models.bundle import TOKENIZER_AND_CONFIG_FILES
from ...models.json_file import is_finite, read_json_object
from ...models.progress import Progress, silent
from ...runtime.engine import Engine
from ...runtime.engine_loading import load
from .draft_tasks import SCORE, head_acceptance, head_loss, model_acceptance, model_loss, with_states
from .eagle_head import EagleNetwork
from .request import DraftTrainingRequest
from .target_data import AnswerOptions, TargetStates, TargetText
from .torch_llama import CausalLM
from .training_batches import POOL_EXAMPLES, BatchStream, Example, in_epochs
from .training_loop import TrainingTask, read_checkpoint, train, write_checkpoint

WORK_FOLDER: Final = "training"
"""Folder in the checkpoint's with the answers of the target and the state of the run."""
_SETTINGS_NAME: Final = "request.json"


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
        torch.manual_seed(request.training.seed)
        task_of = _model_task if request.head is None else _head_task
        task = task_of(request, engine, answered, held_out)
        task.model.to(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        return train(task, request.training, work, progress, report)


def _model_task(
    request: DraftTrainingRequest, engine: Engine, answered: Sequence[Example], held_out: Sequence[Example]
) -> TrainingTask:
    """Training of a draft model."""
    bundle, ends = engine.bundle, sorted(engine.tokenizer.eos)
    files = {name: path for name in TOKENIZER_AND_CONFIG_FILES if (path := bundle.file(name)) and name != "config.json"}
    if "tokenizer.json" not in files:
        raise InputError(f"{bundle.folder} has no tokenizer.json, which the draft needs", "add it")
    contents = {name: path.read_bytes() for name, path in files.items()}
    vocabulary = engine.graph_io.input_vocab
    if request.init is None:
        model = CausalLM(request.model_shape(bundle, vocabulary, engine.context), request.dropout)
    else:
        model = _initial_model(request.init, vocabulary, request.dropout)
    model.round_weights(request.rounding)
    context = model.shape.max_position_embeddings
    clipped, stream = [each.clipped(context) for each in held_out], _stream(request, answered, engine, context)
    return TrainingTask(
        model,
        stream.batch,
        model_loss(model, request.loss, request.hard),
        lambda: model_acceptance(model, clipped, stream.pad),
        SCORE,
        lambda: write_checkpoint(request.out, model, contents, ends),
    )


def _head_task(
    request: DraftTrainingRequest, engine: Engine, answered: Sequence[Example], held_out: Sequence[Example]
) -> TrainingTask:
    """Training of an EAGLE-3 head."""
    if request.rounding is not None or request.init is not None:
        raise InputError("--round and --init are for draft models", "leave them out with --head")
    source = TargetStates(engine.bundle, max(len(each.ids) for each in (*answered, *held_out)))
    kept = head_tokens(answered, sorted(engine.tokenizer.eos), request.vocabulary)
    settings = engine.bundle.config
    parameters = settings.get("rope_parameters")
    # The head takes over the base of the target's rotary positions without any scaling.
    theta = settings.get("rope_theta", parameters.get("rope_theta") if isinstance(parameters, dict) else None)
    theta = float(theta) if theta is not None and is_finite(theta) else 10000.0
    head = EagleNetwork(
        source.architecture, source.layers, torch.from_numpy(kept), theta, settings.get("rms_norm_eps", 1e-5)
    )
    if source.architecture.tied_head:
        # The head's LM head begins as the target's, whose matrix is the embedding.
        with torch.no_grad():
            head.lm_head.weight.copy_(torch.from_numpy(source.embeddings(kept)))
    stream = _stream(request, answered, engine, source.architecture.context)
    return TrainingTask(
        head,
        lambda number: with_states(stream.examples(number), source, stream.pad),
        head_loss(head, request.loss, request.depth, request.hard),
        lambda: head_acceptance(head, held_out, source, stream.pad),
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


def _stream(request: DraftTrainingRequest, examples: Sequence[Example], engine: Engine, context: int) -> BatchStream:
    """The same examples in every epoch, in a new order."""
    seed = request.training.seed
    return BatchStream(
        lambda places: [examples[index] for index in in_epochs(len(examples), seed, places)],
        pad=min(engine.tokenizer.eos, default=0),
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
    except (OSError, ValueError, LookupError, TypeError, AttributeError, SafetensorError) as error:
        raise InputError(f"{folder} is not a draft model to start from: {error}", "give one of train-draft") from error
    if model.shape.vocab_size != vocabulary:
        raise InputError(
            f"{folder} has {model.shape.vocab_size} tokens, but the target {vocabulary}",
            "start from a draft with the target's tokenizer",
        )
    return model


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
