"""The forms in which models write calls, and which one a chat template is made for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

from ...errors import InputError
from .answer_parts import AUTO, NONE
from .call_regions import CallReading, CallText, RegionReader, json_calls, named_json_call
from .calls import OfferedTools
from .markup_regions import braced_call, python_calls, xml_call

_HARMONY_MARKS: Final = (
    *("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls; docs/tools.md shows what they look like."""

    name: str
    reader: RegionReader
    """Reads a region that may be calls."""
    openings: tuple[str, ...] = ()
    """The signs that calls begin with."""
    closing: str = ""
    """The sign that ends them; empty where there is none."""
    marks: tuple[str, ...] = ()
    """Further texts that calls have in them, which may be special tokens of the model."""
    signs: tuple[tuple[str, ...], ...] = ()
    """What a chat template that is made for it has: all texts of one of these; none for the first opening."""
    lacks: str = ""
    """What such a template does not have; empty for nothing."""
    bracket: str = ""
    """The character that calls begin with where they may have another form; empty where they have one form."""
    otherwise: RegionReader | None = None
    """Reads a region of that other form."""
    is_bare: bool = False
    """Whether an answer that begins with a brace may be a call."""
    is_harmony: bool = False
    """Whether an answer consists of messages with headers, which say whether they are calls."""

    @property
    def special(self) -> tuple[str, ...]:
        """The texts that have to be seen also where they are special tokens."""
        return (*self.openings, *filter(None, (self.closing,)), *self.marks)

    def is_for(self, template: str) -> bool:
        """Whether a chat template, given as its text, is made for it."""
        has_signs = any(all(sign in template for sign in each) for each in self.signs or (self.openings[:1],))
        return has_signs and not (self.lacks and self.lacks in template)

    def read(self, opening: str, tools: OfferedTools, text: str) -> tuple[CallText, CallReading]:
        """Begin to read what may be calls: a sign, and a text that follows it, of which the first character counts."""
        reader, rest = self.reader, text.lstrip()
        space = ""
        if self.otherwise is not None:
            reader = reader if rest[:1] == self.bracket else self.otherwise
            space = text[: len(text) - len(rest)]
        region = CallText(opening + space, tools, self.closing)
        region.text = opening + text
        return region, reader(region)


FORMATS: Final = (
    ToolFormat("harmony", json_calls, marks=_HARMONY_MARKS, signs=(("<|channel|>", "<|message|>"),), is_harmony=True),
    *(
        ToolFormat(name, partial(braced_call, quote=quote), (opening,), closing, (quote,))
        for name, opening, closing, quote in (
            ("gemma", "<|tool_call>", "<tool_call|>", '<|"|>'),
            ("function-gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
        )
    ),
    ToolFormat("tool-code", python_calls, ("```tool_code\n",), "```", signs=(("```tool_code",),)),
    ToolFormat(
        "qwen3-coder",
        xml_call,
        ("<tool_call>", "<function="),
        "</tool_call>",
        signs=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        "phi4",
        json_calls,
        ("<|tool_call|>",),
        "<|/tool_call|>",
        signs=(("<|/tool_call|>",), ("<|tool|>", "<|/tool|>")),
    ),
    ToolFormat(
        "granite",
        partial(json_calls, optional_closing=True),
        ("<|tool_call|>", "<tool_call>"),
        "</tool_call>",
        signs=(("<|tool_call|>",), ("<tool_call>", "<|start_of_role|>")),
        lacks="</tool_call>",
    ),
    ToolFormat(
        "mistral",
        json_calls,
        ("[TOOL_CALLS]",),
        marks=("[ARGS]", "[CALL_ID]"),
        bracket="[",
        otherwise=named_json_call,
    ),
    ToolFormat("hermes", json_calls, ("<tool_call>",), "</tool_call>"),
    ToolFormat(
        "llama3",
        partial(json_calls, alone=True),
        ("<|python_tag|>",),
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters": ')),
        bracket="{",
        otherwise=python_calls,
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
