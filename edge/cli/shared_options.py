"""Command-line options that several commands share, and options from the fields of records."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Generic, TypeVar, get_type_hints

import typer

from ...errors import InputError
from ...models.user_text import parse_bytes
from ...runtime.arguments.argument_types import option, options_of
from ...runtime.speculation.choice import Speculation
from ...runtime.strategies.strategy import parse_strategy

_Command = TypeVar("_Command", bound=Callable[..., Any])
_Record = TypeVar("_Record")

_BIAS: Final = re.compile(r"([0-9]{1,9})=([+-]?[0-9]{1,9}(?:\.[0-9]{1,18})?)")


def _go_offline(wanted: bool) -> bool:
    # The hub library, and every program that uses it, reads this variable, so no function has to pass the choice on.
    if wanted:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return wanted


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="An .onnx file, a model folder, or org/name on the Hugging Face Hub.",
        show_default="the bundled model",
    ),
]
PROMPTS_HELP: Final = "Prompts: JSON lines of Spec-Bench, HumanEval or GSM8K, or plain text."
OWN_PROMPTS: Final = "the prompts that come with edge-run"
Prompts = Annotated[Path | None, typer.Option(metavar="FILE", help=PROMPTS_HELP, show_default=OWN_PROMPTS)]
Offline = Annotated[bool, typer.Option("--offline", help="Do not contact the Hugging Face Hub.", callback=_go_offline)]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def embedding_option() -> Any:
    """The option of commands that answer from documents."""
    about = "Embedding model that finds passages by their meaning, beside their words; none for words alone."
    return option(None, about, metavar="NAME", unset="the first encoder that edge-run models lists")


@dataclass(frozen=True)
class OptionsOf(Generic[_Record]):
    """The fields of an option record that are options of a command."""

    base: _Record
    """The defaults."""
    only: Sequence[str] = ()
    """The fields that are options; empty for all."""
    without: Sequence[str] = ()
    """Fields that are not."""

    @property
    def names(self) -> list[str]:
        """The fields that are options; those that the record has from another one come last."""
        fields = [each.name for each in dataclasses.fields(self.base)]  # type: ignore[arg-type]
        fields.sort(key=lambda name: name not in type(self.base).__annotations__)
        return [name for name in fields if name not in self.without and (not self.only or name in self.only)]

    def parameters(self) -> list[inspect.Parameter]:
        """The fields as parameters of a function, in the form of typer."""
        hints = get_type_hints(type(self.base))
        return [self._parameter(name, hints[name]) for name in self.names]

    def record(self, given: Mapping[str, Any], **others: Any) -> _Record:
        """The record of what a command line gives, and of `others`; its defaults where that is nothing.

        Raises:
            InputError: a value is out of range.
        """
        written = {name: given[name] for name in self.names if given[name] is not None and given[name] != []}
        values = {name: _PARSERS[name](value) if name in _PARSERS else value for name, value in written.items()}
        return dataclasses.replace(self.base, **values, **others)  # type: ignore[type-var]

    def _parameter(self, name: str, hint: Any) -> inspect.Parameter:
        option, default = options_of(type(self.base))[name], getattr(self.base, name)
        flags = option.flags or ((f"--{name.replace('_', '-')}",) if default is False else ())
        if option.choices is not None:
            hint = option.choices if default is not None else option.choices | None
            default = None if default is None else option.choices(default)
        elif name in _WRITTEN:
            hint = _WRITTEN[name]
            default = str(default) if hint is str and default is not None else None
        declared = typer.Option(
            *flags,
            metavar=option.metavar,
            min=None if name in _WRITTEN else option.least,
            max=None if name in _WRITTEN else option.most,
            help=option.help,
            show_default=option.unset or True if default is None else True,
        )
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Parameter(name, kind, default=default, annotation=Annotated[hint, declared])


def takes_options(*records: OptionsOf[Any], offline: bool = False) -> Callable[[_Command], _Command]:
    """Decorate a command so that fields of records are options of it, and so is --debug, which `main` reads.

    The command collects them with `**`, and `OptionsOf.record` makes the records. `offline` adds --offline, whose
    callback acts.
    """

    def decorated(command: _Command) -> _Command:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        last = [each for each in own if each.name == "as_json"]
        flag = partial(inspect.Parameter, kind=inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False)
        parameters = [
            *(each for each in own if each not in last),
            *(each for record in records for each in record.parameters()),
            *([flag("offline", annotation=Offline)] if offline else ()),
            *last,
            flag("debug", annotation=Debug),
        ]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return command

    return decorated


def _logit_bias(given: Sequence[str]) -> dict[int, float]:
    """What is added to the logits of which token ids, from arguments such as `42=-1.5`.

    Raises:
        InputError: an argument is something else.
    """
    biases: dict[int, float] = {}
    for text in given:
        match = _BIAS.fullmatch(text)
        if match is None:
            raise InputError(f"--logit-bias is {text!r:.60}", "give a token id and what to add, such as 42=-1.5")
        biases[int(match[1])] = float(match[2])
    return biases


_WRITTEN: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("stop", "logit_bias", "strategies", "lora", "control_vectors"), list[str] | None),
    **dict.fromkeys(
        ("prefix_cache", "prefix_disk", "widths", "contexts", "budget", "draft_vocab", "anchor"), str | None
    ),
    **dict.fromkeys(("speculation", "draft"), str),
    **dict.fromkeys(("lossy", "block_rule"), str | None),
    "tokenizer": Path | None,
}
"""Types that options are written in, where the types of their fields cannot be."""
_PARSERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    **dict.fromkeys(("stop", "lora", "control_vectors"), tuple),
    "logit_bias": _logit_bias,
    "strategies": lambda given: tuple(map(parse_strategy, given)),
    "prefix_cache": lambda size: parse_bytes(size, "--prefix-cache"),
    "prefix_disk": lambda size: parse_bytes(size, "--prefix-disk"),
    "speculation": Speculation.parse,
}
