"""`edge-run control-vector POSITIVE NEGATIVE OUT`: makes a control vector from pairs of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ...errors import InputError
from ...models.user_text import read_text
from ...runtime.arguments.load_options import MEASURING_OPTIONS
from ...runtime.engine_loading import load as open_model
from ...runtime.graph.session import SessionConfig
from ...runtime.options import GenerateOptions
from ..terminal.output import write_line
from .shared_options import OptionsOf, takes_options

_LOAD: Final = OptionsOf(MEASURING_OPTIONS.changed({"device": "cpu", "draft": "none"}), only=("threads", "tokenizer"))
_PROMPT: Final = OptionsOf(GenerateOptions(), only=("raw", "system"))


@takes_options(_PROMPT, _LOAD)
def control_vector(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder that edge-run has exported.")],
    positive: Annotated[Path, typer.Argument(metavar="POSITIVE", help="Prompts, one a line, to steer towards.")],
    negative: Annotated[Path, typer.Argument(metavar="NEGATIVE", help="Their opposites, in the same order.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The GGUF file to write.")],
    **given: Any,
) -> None:
    """Make a control vector: the mean difference of a model's hidden states after pairs of prompts.

    The file works with --control-vector of edge-run and of llama.cpp.

    Example: edge-run control-vector my-model calm.txt excited.txt calm.gguf
    """
    from ...runtime.steering.control_vectors import mean_differences, write_control_vector

    options = _PROMPT.record(given)
    texts = [[line for line in read_text(path).splitlines() if line.strip()] for path in (positive, negative)]
    if len(texts[0]) != len(texts[1]):
        what = f"{positive} has {len(texts[0])} prompts, and {negative} has {len(texts[1])}"
        raise InputError(what, "give pairs, one prompt a line")
    with open_model(model, _LOAD.record(given)) as engine:

        def encoded(text: str) -> Sequence[int]:
            if options.raw:
                return engine.tokenizer.encode(text, add_special_tokens=True)
            return engine.chat_prompt(text, options).ids

        pairs = [(encoded(one), encoded(other)) for one, other in zip(*texts, strict=True)]
        directions = mean_differences(engine.bundle, SessionConfig(engine.device, engine.threads), pairs)
    write_control_vector(out, directions)
    write_line(f"{out}: {len(directions)} layers, from {len(pairs)} pairs of prompts")
    write_line(f"to use it: edge-run {model} --control-vector NAME={out} --control NAME")
