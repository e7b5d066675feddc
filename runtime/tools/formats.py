"""The forms in which models write calls, and which one a chat template is made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from ...errors import InputError
from .answer_parts import AUTO, NONE
from .call_regions import EitherRegion, JsonRegion, NamedJsonRegion, RegionMaker
from .markup_regions import BracedRegion, PythonRegion, XmlRegion


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls; docs/tools.md shows what they look like."""

    name: str
    is_for: Callable[[str], bool]
    """Whether a chat template, given as its text, is made for it."""
    open: RegionMaker
    """Begins to read a region that may be calls."""
    openings: tuple[str, ...] = ()
    """The signs that calls begin with."""
    closing: str = ""
    """The sign that ends them; empty where there is none."""
    marks: tuple[str, ...] = ()
    """Further texts that calls have in them, which may be special tokens of the model."""
    is_bare: bool = False
    """Whether an answer that begins with a brace may be a call."""
    is_harmony: bool = False
    """Whether an answer consists of messages with headers, which say whether they are calls."""

    @property
    def special(self) -> tuple[str, ...]:
        """The texts that have to be seen also where they are special tokens."""
        return (*self.openings, *filter(None, (self.closing,)), *self.marks)


def _has(*signs: str) -> Callable[[str], bool]:
    return lambda template: all(sign in template for sign in signs)


def _any(*tests: Callable[[str], bool]) -> Callable[[str], bool]:
    return lambda template: any(test(template) for test in tests)


_HARMONY_MARKS: Final = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)


def _braced(name: str, opening: str, closing: str, quote: str) -> ToolFormat:
    return ToolFormat(
        name,
        is_for=_has(opening),
        open=partial(BracedRegion, closing=closing, quote=quote),
        openings=(opening,),
        closing=closing,
        marks=(quote,),
    )


FORMATS: Final = (
    ToolFormat(
        "harmony",
        is_for=_has("<|channel|>", "<|message|>"),
        open=JsonRegion,
        marks=_HARMONY_MARKS,
        is_harmony=True,
    ),
    _braced("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
    _braced("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    ToolFormat(
        "tool-code",
        is_for=_has("```tool_code"),
        open=partial(PythonRegion, closing="```"),
        openings=("```tool_code\n",),
        closing="```",
    ),
    ToolFormat(
        "qwen3-coder",
        is_for=_has("<function=", "<parameter="),
        open=XmlRegion,
        openings=("<tool_call>", "<function="),
        closing="</tool_call>",
    ),
    ToolFormat(
        "phi4",
        is_for=_any(_has("<|/tool_call|>"), _has("<|tool|>", "<|/tool|>")),
        open=partial(JsonRegion, closing="<|/tool_call|>"),
        openings=("<|tool_call|>",),
        closing="<|/tool_call|>",
    ),
    ToolFormat(
        "granite",
        is_for=lambda template: (
            ("<|tool_call|>" in template or ("<tool_call>" in template and "<|start_of_role|>" in template))
            and "</tool_call>" not in template
        ),
        open=partial(JsonRegion, closing="</tool_call>", optional_closing=True),
        openings=("<|tool_call|>", "<tool_call>"),
        closing="</tool_call>",
    ),
    ToolFormat(
        "mistral",
        is_for=_has("[TOOL_CALLS]"),
        open=partial(EitherRegion, bracket="[", as_json=JsonRegion, otherwise=NamedJsonRegion),
        openings=("[TOOL_CALLS]",),
        marks=("[ARGS]", "[CALL_ID]"),
    ),
    ToolFormat(
        "hermes",
        is_for=_has("<tool_call>"),
        open=partial(JsonRegion, closing="</tool_call>"),
        openings=("<tool_call>",),
        closing="</tool_call>",
    ),
    ToolFormat(
        "llama3",
        is_for=_any(_has("<|python_tag|>"), _has("<|start_header_id|>", '"parameters": ')),
        open=partial(EitherRegion, bracket="{", as_json=partial(JsonRegion, alone=True), otherwise=PythonRegion),
        openings=("<|python_tag|>",),
        is_bare=True,
    ),
)
"""All formats; the first one that a template is made for is taken."""


def choose_format(wanted: str, template: str) -> ToolFormat | None:
    """The format in which a model writes calls.

    Args:
        wanted: its name, `auto` for the template's, or `none`.
        template: text of the chat template; empty if the model has none.

    Raises:
        InputError: there is no such format.
    """
    if wanted == NONE:
        return None
    if wanted == AUTO:
        return next((each for each in FORMATS if each.is_for(template)), None)
    by_name = {each.name: each for each in FORMATS}
    if wanted not in by_name:
        raise InputError(f"tool_format is {wanted!r:.60}", f"it must be one of {', '.join((AUTO, NONE, *by_name))}")
    return by_name[wanted]
