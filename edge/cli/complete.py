"""`edge-run complete [MODEL]`: fills the gap between two texts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...errors import InputError
from ...models.user_text import read_text
from ...runtime.arguments.argument_types import option
from ...runtime.arguments.load_options import LoadOptions
from ...runtime.options import MOST_ANSWERS, GenerateOptions
from ...runtime.text.infill import SUGGESTION_TOKENS
from .ctrl_c import INTERRUPTED
from .run import RunOptions, answer_prompt, opened_model, read_standard_input
from .shared_options import AsJson, ModelArgument, OptionsOf, takes_options

_STANDARD_INPUT: Final = Path("-")


@dataclass(frozen=True)
class CompleteOptions:
    """Options of `edge-run complete` beside the options of the model and the suggestions."""

    prefix_file: Path = option(_STANDARD_INPUT, "The text before the gap; - for standard input.", metavar="FILE")
    suffix_file: Path | None = option(None, "The text after the gap; - for standard input.", metavar="FILE")
    extra_file: list[Path] | None = option(
        None, "Another file of the project; repeat it, the most important file last.", metavar="FILE"
    )
    choices: int = option(
        1, "Number of suggestions.", least=1, most=MOST_ANSWERS, flags=("-k", "--choices"), metavar="N"
    )


_COMPLETE: Final = OptionsOf(CompleteOptions())
_SHOWN: Final = OptionsOf(RunOptions(), only=("stats",))
_ANSWER: Final = OptionsOf(
    GenerateOptions(max_tokens=SUGGESTION_TOKENS),
    only=(
        *("max_tokens", "stop", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "least_confidence"),
        *("seed", "suffix_first", "speculation", "exact", "explain"),
    ),
)
_LOAD: Final = OptionsOf(
    LoadOptions(),
    without=("tool_format", "overflow", "prefix_cache", "prefix_disk", "learned", "parallel", "max_waiting"),
)


@takes_options(_COMPLETE, _SHOWN, _ANSWER, _LOAD, offline=True)
def complete(
    model: ModelArgument = None,
    as_json: AsJson = False,
    **given: Any,
) -> int:
    """Fill the gap between two texts with a model that was trained for it, such as Qwen/Qwen2.5-Coder-0.5B.

    Examples: edge-run complete my-coder --prefix-file before.py --suffix-file after.py -k 3; edge-run complete my-coder
    --suffix-file after.py < before.py
    """
    chosen, load = _COMPLETE.record(given), _LOAD.record(given)
    files = [chosen.prefix_file, chosen.suffix_file, *(chosen.extra_file or ())]
    if twice := next((path for path in files if path is not None and files.count(path) > 1), None):
        raise InputError(f"{twice} is given twice", "give each text once")
    prefix, suffix = ("" if path is None else _text(path) for path in (chosen.prefix_file, chosen.suffix_file))
    options = _ANSWER.record(
        given,
        suffix=suffix,
        extra=[{"filename": _name(path), "text": _text(path)} for path in chosen.extra_file or ()],
        n=chosen.choices,
        branch=chosen.choices > 1,
        document=_name(chosen.prefix_file),
    )
    with opened_model(model, load) as opened:
        return INTERRUPTED if answer_prompt(opened, prefix, _SHOWN.record(given), options, as_json=as_json) else 0


def _text(path: Path) -> str:
    return read_standard_input() if path == _STANDARD_INPUT else read_text(path, blank=True)


def _name(path: Path) -> str:
    """What the model is told that a file is called; nothing of standard input."""
    return "" if path == _STANDARD_INPUT else path.name
