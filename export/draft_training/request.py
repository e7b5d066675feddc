"""What to train, for which target, on which prompts."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.bundle import Bundle
from ...models.json_file import is_whole
from .target_data import AnswerOptions, PromptConversation
from .torch_llama import BlockRounding, ModelShape
from .training_loop import TrainOptions
from .training_options import DraftTrainingOptions

_HEAD_MULTIPLE: Final = 128
_SMALL: Final = 512
"""Hidden size below which heads of 32 channels are used."""


@dataclass(frozen=True, kw_only=True)
class DraftTrainingRequest(DraftTrainingOptions):
    """A draft to train, with the options of its training."""

    target: str | None
    """The model to draft for, as for `edgerun.load`."""
    out: Path
    """Folder of the checkpoint; a run in it is continued."""
    conversations: tuple[PromptConversation, ...]
    """What the target answers, and the draft learns."""
    held_out: tuple[PromptConversation, ...]
    """What acceptance is measured on; always answered greedily."""
    hard: float = 0.0
    """Weight of the cross-entropy beside KL, 0 to 1, as in `draft_loss`."""
    dropout: float = 0.0
    rounding: BlockRounding | None = None
    """Weight format to train a draft model for; None for float weights."""
    training: TrainOptions = field(default_factory=TrainOptions)

    @property
    def answers(self) -> AnswerOptions:
        """How the target answers."""
        return AnswerOptions(self.max_tokens, self.temperature, self.seed)

    def model_shape(self, target: Bundle, vocab_size: int, context: int) -> ModelShape:
        """The shape of the draft model of a target.

        Raises:
            InputError: the size does not divide into heads, or nothing says how large the target is.
        """
        hidden = self.hidden_size
        if hidden is None:
            of_target = target.config.get("hidden_size")
            if of_target is None or not is_whole(of_target, 1):
                raise InputError(f"nothing in {target.folder} says the target's hidden size", "give --hidden-size")
            hidden = max(_HEAD_MULTIPLE, int(0.4 * of_target) // _HEAD_MULTIPLE * _HEAD_MULTIPLE)
        head_dim = 64 if hidden >= _SMALL else 32
        if hidden % head_dim:
            raise InputError(f"--hidden-size is {hidden}", f"give a multiple of {head_dim}, better of {_HEAD_MULTIPLE}")
        return ModelShape(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=-(-8 * hidden // 24) * 8,
            num_hidden_layers=self.layers,
            num_attention_heads=hidden // head_dim,
            num_key_value_heads=hidden // head_dim,
            head_dim=head_dim,
            max_position_embeddings=context,
        )

    def settings(self, target: Bundle) -> dict[str, Any]:
        """What has to be the same when a run is continued, as JSON values."""
        prompts = [[each.system, *each.turns] for each in (*self.conversations, *self.held_out)]
        settings = {
            **{name: getattr(self, name) for name in ("loss", "hard", "vocabulary", "dropout")},
            "kind": "model" if self.head is None else self.head,
            "depths": self.depth,
            "target": target.fingerprint,
            "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
            "held_out": len(self.held_out),
            "answers": asdict(self.answers),
            "size": {"layers": self.layers, "hidden_size": self.hidden_size},
            "initial": None if self.init is None else str(self.init),
            "rounding": None if self.rounding is None else asdict(self.rounding),
            "seed": self.training.seed,
            "batch_tokens": self.training.batch_tokens,
        }
        values: dict[str, Any] = json.loads(json.dumps(settings))
        return values
