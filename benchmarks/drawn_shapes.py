"""A tiny model that sees: trained on drawn shapes, asked about others.

    python benchmarks/drawn_shapes.py train FOLDER --minutes 12   # needs torch, transformers 5 and Pillow
    edge-run export FOLDER BUNDLE
    python benchmarks/drawn_shapes.py draw PNG --layout 3         # a held-out picture, and questions with answers
    python benchmarks/drawn_shapes.py ask BUNDLE --questions 500  # needs edgerun and Pillow

A picture has 1 to 5 shapes of 3 kinds and 6 colours in 9 places. Questions are about colours, numbers and places. Every
tenth arrangement, by its hash, is held out.
"""

# ruff: noqa: PLC0415  training and asking need different packages
from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeAlias

from PIL import Image, ImageDraw

KINDS: Final = ("circle", "square", "triangle")
COLOURS: Final[Mapping[str, str]] = {
    "red": "#d62020",
    "green": "#20a040",
    "blue": "#2040d0",
    "yellow": "#f0e020",
    "purple": "#9020b0",
    "orange": "#f08010",
}
PLACES: Final = ("top left", "top", "top right", "left", "middle", "right", "bottom left", "bottom", "bottom right")
NUMBERS: Final = ("none", "one", "two", "three", "four", "five")
Layout: TypeAlias = dict[int, tuple[str, str]]
"""Kind and colour of the shapes by their places."""
SIDE: Final = 64
"""Pixels of the tower's image."""
TOKENS: Final = 16
"""Image tokens of a picture: 8 x 8 patches in squares of 2 x 2."""
AROUND: Final = "<fake_token_around_image>"
SPECIAL: Final = ("<|im_end|>", "<|im_start|>", "<image>", AROUND, "<global-img>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def layouts(seed: int, *, held_out: bool) -> Iterator[Layout]:
    """Random arrangements of one of the two parts, without end."""
    chance = random.Random(seed)
    while True:
        places = sorted(chance.sample(range(9), chance.randint(1, 5)))
        layout = {place: (chance.choice(KINDS), chance.choice(list(COLOURS))) for place in places}
        if (hashlib.sha256(json.dumps(layout).encode()).digest()[0] < 26) is held_out:
            yield layout


def drawn(layout: Layout, chance: random.Random, side: int = 2 * SIDE) -> Image.Image:
    """A picture of an arrangement; shapes differ in size and are a little off the middle of their places."""
    image = Image.new("RGB", (side, side), "white")
    draw, cell = ImageDraw.Draw(image), side / 3
    for place, (kind, colour) in layout.items():
        radius = cell * chance.uniform(0.3, 0.42)
        across, down = ((each + 0.5) * cell + chance.uniform(-0.08, 0.08) * cell for each in (place % 3, place // 3))
        box = (across - radius, down - radius, across + radius, down + radius)
        match kind:
            case "circle":
                draw.ellipse(box, fill=COLOURS[colour])
            case "square":
                draw.rectangle((*(each + 0.1 * radius for each in box[:2]), *box[2:]), fill=COLOURS[colour])
            case _:
                draw.polygon([(across, box[1]), (box[2], box[3]), (box[0], box[3])], fill=COLOURS[colour])
    return image


def questions(layout: Layout, chance: random.Random) -> list[tuple[str, str]]:
    """Questions about an arrangement with their answers, in random order."""
    counted = [sum(kind == each for kind, _ in layout.values()) for each in KINDS]
    single = [(place, kind, colour) for place, (kind, colour) in layout.items() if counted[KINDS.index(kind)] == 1]
    kind, place = chance.choice(KINDS), chance.choice(list(layout) if chance.random() < 0.7 else range(9))
    asked = [
        ("How many shapes are there?", f"{NUMBERS[len(layout)].capitalize()}."),
        (f"How many {kind}s are there?", f"{NUMBERS[counted[KINDS.index(kind)]].capitalize()}."),
        (f"What is at the {PLACES[place]}?", "A {1} {0}.".format(*layout[place]) if place in layout else "Nothing."),
    ]
    if single:
        place, kind, colour = chance.choice(single)
        asked += [
            (f"What colour is the {kind}?", f"{colour.capitalize()}."),
            (f"Where is the {kind}?", f"At the {PLACES[place]}."),
        ]
    chance.shuffle(asked)
    return asked


def train_tokenizer(folder: Path) -> Any:
    """A byte-level BPE for the questions, written into a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    chance, source = random.Random(0), layouts(0, held_out=False)
    asked = [f"user\n{q} assistant\n{a}" for _ in range(3000) for q, a in questions(next(source), chance)]
    tokenizer.train_from_iterator(asked, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]},
        "preprocessor_config.json": {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "do_image_splitting": False,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {"processor_class": "SmolVLMProcessor", "image_seq_len": TOKENS},
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tokenizer


def tiny_model(tokenizer: Any) -> Any:
    """SmolVLM with 0.9 million parameters."""
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    end = tokenizer.token_to_id(SPECIAL[0])
    text = {
        "model_type": "llama",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": end,
    }
    vision = {
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 8,
    }
    config = SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.token_to_id("<image>"),
        scale_factor=2,
        tie_word_embeddings=False,
        pad_token_id=end,
    )
    return SmolVLMForConditionalGeneration(config)


def batch(tokenizer: Any, source: Iterator[Layout], chance: random.Random, count: int) -> dict[str, Any]:
    """Conversations about pictures; only answers are learned."""
    import numpy as np
    import torch

    pixels = np.empty((count, SIDE, SIDE, 3), np.uint8)
    rows: list[tuple[list[int], list[int]]] = []
    seen = f"{AROUND}<global-img>{'<image>' * TOKENS}{AROUND}"
    for row, layout in zip(range(count), source, strict=False):
        pixels[row] = np.asarray(drawn(layout, chance).resize((SIDE, SIDE), Image.Resampling.LANCZOS))
        ids: list[int] = []
        labels: list[int] = []
        for number, (question, answer) in enumerate(questions(layout, chance)):
            asked = f"<|im_start|>user\n{'' if number else seen}{question}<|im_end|>\n<|im_start|>assistant\n"
            prompt, learned, rest = (tokenizer.encode(each).ids for each in (asked, f"{answer}<|im_end|>", "\n"))
            ids += prompt + learned + rest
            labels += [-100] * len(prompt) + learned + [-100] * len(rest)
        rows.append((ids, labels))
    longest = max(len(ids) for ids, _ in rows)
    values = torch.from_numpy(pixels).permute(0, 3, 1, 2)[:, None].float() / 127.5 - 1
    return {
        "pixel_values": values,
        "input_ids": torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
    }


def train(folder: Path, minutes: float, size: int, rate: float, start: Path | None) -> None:
    """Train for some minutes of processor time in one thread; writes a checkpoint each minute.

    Args:
        folder: where it is written.
        minutes: the time.
        size: pictures in a step.
        rate: learning rate.
        start: a checkpoint to go on from, with other pictures.
    """
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(folder)
    model = tiny_model(tokenizer)
    if start is not None:
        model = type(model).from_pretrained(start)
    seed = 1 if start is None else 10**6
    matrices = [each for name, each in model.named_parameters() if each.ndim == 2 and "embed" not in name]
    others = [each for each in model.parameters() if not any(each is matrix for matrix in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.98)),
    ]
    source, chance, saved, step, mean = layouts(seed, held_out=False), random.Random(seed), 0.0, 0, 0.0
    while (spent := time.process_time() / 60) < minutes:
        share = min(1.0, (step + 1) / 50) * min(1.0, 2 * (1 - spent / minutes))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate * share
        loss = model(**batch(tokenizer, source, chance, size), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        step, mean = step + 1, 0.95 * mean + 0.05 * loss.item()
        if step % 25 == 0:
            print(f"step {step}, {spent:.1f} min: loss {mean / (1 - 0.95**step):.4f}", flush=True)
        if spent > saved + 1:
            saved = spent
            model.save_pretrained(folder)
    model.save_pretrained(folder)


def picture(number: int) -> tuple[bytes, list[tuple[str, str]]]:
    """A held-out picture as PNG, and questions about it with their answers."""
    chance, source = random.Random(number), layouts(2 + number, held_out=True)
    layout = next(source)
    file = BytesIO()
    drawn(layout, chance, 4 * SIDE).save(file, "PNG")
    return file.getvalue(), questions(layout, chance)


def ask(bundle: Path, count: int, share: float) -> None:
    """Ask a bundle held-out questions, each in a new conversation, and print the share of right answers."""
    import edgerun

    right: list[bool] = []
    with edgerun.load(bundle, lossy_image_tokens=share) as model:
        for number in range(10**6):
            image, asked = picture(number)
            for question, answer in asked:
                content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
                told = model.generate([{"role": "user", "content": content}], max_tokens=12, temperature=0).text
                right.append(told == answer)
                if not right[-1]:
                    print(f"picture {number}: {question} {told} (not {answer})")
            if len(right) >= count:
                break
    print(f"{sum(right)} of {len(right)} held-out questions answered right: {sum(right) / len(right):.1%}")


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("command", choices=("train", "draw", "ask"))
    parser.add_argument("path", type=Path, help="folder of the checkpoint, file of the picture, or bundle")
    parser.add_argument("--minutes", type=float, default=12, help="of processor time")
    parser.add_argument("--batch", type=int, default=64, help="pictures in a step")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--start", type=Path, help="checkpoint to go on from")
    parser.add_argument("--layout", type=int, default=0, help="number of the held-out picture")
    parser.add_argument("--questions", type=int, default=500, help="how many are asked at least")
    parser.add_argument(
        "--share", type=float, default=1, help="share of the image tokens that stay (lossy_image_tokens)"
    )
    given = parser.parse_args()
    match given.command:
        case "train":
            train(given.path, given.minutes, given.batch, given.rate, given.start)
        case "draw":
            image, asked = picture(given.layout)
            given.path.write_bytes(image)
            print("\n".join(f"{question} {answer}" for question, answer in asked))
        case _:
            ask(given.path, given.questions, given.share)
    return 0


if __name__ == "__main__":
    sys.exit(main())
