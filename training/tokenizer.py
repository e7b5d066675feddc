"""The shell helper's tokenizer: training, chat template, encoding of chats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from .tasks import Turn

END, SYSTEM, USER, ASSISTANT = "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, SYSTEM, USER, ASSISTANT)

CHAT_TEMPLATE = """\
{#- A request stands for itself: the model is too small to follow a conversation, so earlier turns are left out. -#}
{%- set turn = namespace(start=0) -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{%- set turn.start = loop.index0 -%}
{%- elif message['role'] not in ('system', 'assistant') -%}
{{ raise_exception("roles are system, user and assistant; found " ~ message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if messages and messages[0]['role'] == 'system' -%}
<|system|>{{ messages[0]['content'] }}
{%- endif -%}
{%- for message in messages[turn.start:] -%}
{%- if message['role'] == 'user' -%}
<|user|>{{ message['content'] }}
{%- elif message['role'] == 'assistant' -%}
<|assistant|>{{ message['content'] }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|assistant|>
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> Tokenizer:
    """Train a byte-level BPE whose first ids are the special tokens; it can encode any text without loss."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class ChatCodec:
    """Encodes chats as token ids, and marks those that the model is trained to produce."""

    end, system, user, assistant = range(len(SPECIAL_TOKENS))

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        found = [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS]
        if found != list(range(len(SPECIAL_TOKENS))):
            raise ValueError(f"expected {', '.join(SPECIAL_TOKENS)} to be tokens 0 to 3, found {found}")

    @classmethod
    def from_folder(cls, folder: Path) -> ChatCodec:
        """Read `tokenizer.json` from a checkpoint folder."""
        return cls(Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode_prompts(self, requests: Sequence[str]) -> list[list[int]]:
        """Token ids of `<|user|>REQUEST<|assistant|>` for each request."""
        encoded = self.tokenizer.encode_batch(list(requests), add_special_tokens=False)
        return [[self.user, *item.ids, self.assistant] for item in encoded]

    def encode_chats(self, chats: Sequence[Sequence[Turn]]) -> list[tuple[list[int], list[bool]]]:
        """Token ids of chats, and for each id whether the model is trained to produce it."""
        flat = [text for chat in chats for turn in chat for text in turn]
        encoded = iter(self.tokenizer.encode_batch(flat, add_special_tokens=False))
        result = []
        for chat in chats:
            ids: list[int] = []
            answer: list[bool] = []
            for _ in chat:
                request, reply = next(encoded).ids, next(encoded).ids
                ids += [self.user, *request, self.assistant, *reply, self.end]
                answer += [False] * (len(request) + 2) + [True] * (len(reply) + 1)
            result.append((ids, answer))
        return result

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids up to the first end token."""
        kept = list(ids)
        if self.end in kept:
            kept = kept[: kept.index(self.end)]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=True)
        return text


def tokenizer_config(context: int) -> str:
    """Contents of `tokenizer_config.json`; the chat template has its own file, `chat_template.jinja`."""
    return json.dumps(
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "pad_token": END,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
        indent=2,
    )
