"""How a model's answers are taken apart: the tags of its reasoning, and the form of its calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from ...errors import InputError
from ...models.json_file import shown
from ..text.detokenizer import StreamDecoder
from ..text.tokenizer import TextTokenizer
from .answer_parts import AUTO, AnswerParts, ReasoningTags, in_reasoning, reasoning_tags
from .calls import OfferedTools, required_tools

if TYPE_CHECKING:
    from ..structure.response_format import ResponseFormat
    from .answer_parts import AnswerParser
    from .formats import ToolFormat

_HARMONY: Final = "harmony"
_HARMONY_SIGNS: Final = ("<|channel|>", "<|message|>")
_PROMPT_END: Final = 24
"""Number of last tokens of a prompt in which the beginning of an answer is looked for."""


class AnswerFormat:
    """How the answers of one model are written.

    Args:
        template: text of its chat template; empty if it has none.
        tool_format: name of the form of its calls, `auto` for the template's, or `none`.
        tokenizer: its tokenizer.

    Raises:
        InputError: there is no such form.
    """

    def __init__(self, template: str, tool_format: str, tokenizer: TextTokenizer) -> None:
        self._template: Final = template
        self._wanted: Final = tool_format
        self._tokenizer: Final = tokenizer
        self.tags: Final = reasoning_tags(template)
        """What stands around reasoning; None for nothing."""
        if tool_format != AUTO:
            self.tool_format  # noqa: B018  says now whether there is one of that name
        in_template = all(sign in template for sign in _HARMONY_SIGNS)
        self._is_harmony: Final = in_template if tool_format == AUTO else tool_format == _HARMONY

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written; None if they are not looked for.

        Raises:
            InputError: no format has the name that was given.
        """
        from .formats import choose_format  # noqa: PLC0415 -- most answers have no calls, and patterns are compiled

        return choose_format(self._wanted, self._template)

    def reading(
        self,
        tools: Sequence[Mapping[str, Any]],
        prompt_ids: Sequence[int],
        start_ids: Sequence[int] = (),
        *,
        several: bool = True,
    ) -> AnswerReading | None:
        """How one answer is read; None where it is text alone.

        Args:
            tools: definitions of the functions that may be called.
            prompt_ids: the prompt.
            start_ids: the tokens that the answer was given to begin with.
            several: whether the answer may have several calls.
        """
        if not tools and self.tags is None and not self._is_harmony:
            return None
        tool_format = self.tool_format if tools or self._is_harmony else None
        if tool_format is None and self.tags is None:
            return None
        texts = () if tool_format is None else tool_format.special
        texts += () if self.tags is None else (self.tags.opening.strip(), self.tags.closing)
        tokenizer = self._tokenizer
        # A tag may be written with several tokens, of which the first is special.
        texts += tuple(text[: text.index(">") + 1] for text in texts if ">" in text)
        marks = {token: text for text in texts if (token := tokenizer.special_id(text)) is not None}
        prompt_end = self._prompt_end(prompt_ids)
        decoder = StreamDecoder(tokenizer, marks)
        start_text = "".join([decoder.push((token,)) for token in start_ids])
        return AnswerReading(tool_format, OfferedTools.of(tools), self.tags, marks, prompt_end, start_text, several)

    def required_calls(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any],
        prompt_ids: Sequence[int],
        other: ResponseFormat | None,
        *,
        several: bool,
        raw: bool,
    ) -> ResponseFormat | None:
        """The format of an answer that has to call a function; None where none has to.

        Args:
            tools: definitions of the functions that may be called.
            tool_choice: which of them has to be called, if one has to.
            prompt_ids: the prompt.
            other: another format of the answer.
            several: whether there may be several calls.
            raw: whether the prompt is a text without a template.

        Raises:
            InputError: there is no such function, calls cannot be enforced, or the answer has another format.
        """
        required = required_tools(tool_choice, OfferedTools.of(tools))
        if required is None:
            return None
        if self.tool_format is None or raw:
            raise InputError(
                f"tool_choice is {shown(tool_choice)}, but the model has no format for calls",
                "name one with tool_format (--tool-format), or leave tool_choice out",
            )
        if other is not None:
            raise InputError("response_format and tool_choice are both given", "leave one of them out")
        from ..structure.response_format import ResponseFormat  # noqa: PLC0415 -- options import this module
        from .call_grammar import CallGrammar  # noqa: PLC0415 -- few answers have to call

        reasoning = in_reasoning(self.tags, self._prompt_end(prompt_ids))
        grammar = CallGrammar(required, self.tool_format, self.tags, self._tokenizer.special_id, reasoning)
        return ResponseFormat.grammar(grammar.lark(self._template, several=several))

    def _prompt_end(self, prompt_ids: Sequence[int]) -> str:
        """The last characters of a prompt, with its special tokens."""
        return "".join(map(self._tokenizer.token_bytes.shown, prompt_ids[-_PROMPT_END:]))


@dataclass(frozen=True)
class AnswerReading:
    """How one answer is read."""

    tool_format: ToolFormat | None
    tools: OfferedTools
    tags: ReasoningTags | None
    marks: Mapping[int, str]
    """Special tokens whose text is to be seen, by their ids."""
    prompt_end: str
    """The last characters of the prompt, with its special tokens."""
    start_text: str = ""
    """What the answer was given to begin with, with these special tokens. The chunks do not repeat it."""
    several: bool = True
    """Whether the answer may have several calls; otherwise it ends with the first one."""

    @property
    def start_parts(self) -> AnswerParts:
        """The parts of what the answer was given to begin with, without what later text decides on."""
        return self.begin()[1]

    def begin(self) -> tuple[AnswerParser | None, AnswerParts]:
        """A parser for the rest of the answer, None where it is text alone, and `start_parts`."""
        from .answer_parser import answer_parser  # noqa: PLC0415 -- most answers are text alone

        most = None if self.several else 1
        parser = answer_parser(self.tool_format, self.tools, self.tags, self.prompt_end, max_calls=most)
        if parser is None or not self.start_text:
            return parser, AnswerParts(self.start_text)
        return parser, parser.push(self.start_text)
