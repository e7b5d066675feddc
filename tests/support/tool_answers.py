"""Answers with text, reasoning and calls of functions, and chat templates that write them in every format."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from edgerun.runtime.text.chat_template import ChatTemplate
from edgerun.runtime.tools.answer_parser import answer_parser
from edgerun.runtime.tools.answer_parts import AnswerParser, AnswerParts, joined_parts, reasoning_tags
from edgerun.runtime.tools.calls import OfferedTools
from edgerun.runtime.tools.formats import choose_format
from support.shared_data import data_path

Call = tuple[str, dict[str, Any]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """Definition of a function."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters}}


_TEXT: Final = {"type": "string"}
TOOLS: Final = [
    tool("get_weather", city=_TEXT, days={"type": "integer"}, celsius={"type": "boolean"}),
    tool("write_file", path=_TEXT, content=_TEXT),
    tool(
        "plan",
        steps={"type": "array", "items": {"type": "object"}},
        budget={"type": "number"},
        note={"type": ["string", "null"]},
    ),
    tool("now"),
]


@dataclass(frozen=True)
class Answer:
    """An answer by its parts."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    unparsed: bool = False
    """Whether it has what looks like a call and is none."""

    def message(self) -> dict[str, Any]:
        """The answer as chat templates read it."""
        calls = [
            {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for index, (name, arguments) in enumerate(self.calls)
        ]
        fields = {"reasoning_content": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", "content": self.text, **{key: value for key, value in fields.items() if value}}


_WEATHER: Final = ("get_weather", {"city": "Paris"})
_CODE: Final = 'def f():\n    return {"a": [1, 2]}  # "quoted" \\ back\n\n\nprint(f())'
ANSWERS: Final = (
    Answer(calls=(_WEATHER,)),
    Answer(calls=(("get_weather", {"city": "Köln, “am Rhein” 🌧", "days": 3, "celsius": True}),)),
    Answer(calls=(("get_weather", {"city": "", "days": -1, "celsius": False}),)),
    Answer(calls=(("now", {}),)),
    Answer(calls=(("write_file", {"path": "a/b c.py", "content": _CODE}),)),
    Answer(calls=(("write_file", {"path": "x.html", "content": "<div class='a'>\n  <b>1 < 2</b> & more\n</div>"}),)),
    Answer(calls=(("write_file", {"path": "t", "content": "{[(,:]})" * 9}),)),
    Answer(calls=(("write_file", {"path": "tab\there", "content": "  leading and trailing  "}),)),
    Answer(calls=(("plan", {"steps": [{"do": "walk", "for": 2.5}, {"do": ["sit", {"x": None}]}], "budget": 1e-05}),)),
    Answer(calls=(("plan", {"steps": [], "budget": 12.0, "note": "it's “fine”"}),)),
    Answer(calls=(_WEATHER, ("now", {}))),
    Answer(calls=(_WEATHER, ("get_weather", {"city": "Rome"}), ("write_file", {"path": "p", "content": "c"}))),
    Answer("Let me look that up.", calls=(_WEATHER,)),
    Answer("Two things:\n\n1. the weather", calls=(_WEATHER, ("now", {}))),
    Answer("It is sunny."),
    Answer("Use `<b>` tags, or a < b; braces {like: this} and [lists] are text."),
    Answer("Line one.\n\nLine two, with ```code```."),
    Answer("The answer is 4.", reasoning="2 + 2\n\nis easy: <b>4</b>."),
    Answer("", reasoning="I should look.", calls=(_WEATHER,)),
    Answer(
        "I look it up.", reasoning="They ask for {weather}.", calls=(("get_weather", {"city": "Oslo"}), ("now", {}))
    ),
)
"""Twenty answers."""


@dataclass(frozen=True)
class Family:
    """A chat template and the format of its answers."""

    tool_format: str
    source: str
    """The template, or the name of a file with a real one."""
    end: str
    """What the template writes after an answer."""
    text_with_calls: bool = True
    """Whether an answer with calls may have text."""
    one_call: bool = False
    """Whether an answer has one call at most."""
    reasons: bool = False
    """Whether the template writes reasoning."""
    is_real: bool = False

    @cache  # noqa: B019  there are a dozen families
    def template(self) -> ChatTemplate:
        """The template; skips the test if it is a real one that is not at hand."""
        source = self.source
        if self.is_real:
            source = data_path(f"tokenizers/chat_templates/{source}.jinja").read_text(encoding="utf-8")
        return ChatTemplate(source, {"eos_token": "</s>", "bos_token": "<s>"})

    def fitted(self, answer: Answer) -> Answer:
        """The answer without what the template cannot write."""
        calls = answer.calls[:1] if self.one_call else answer.calls
        text = answer.text if self.text_with_calls or not calls else ""
        return Answer(text, answer.reasoning if self.reasons else "", calls)

    def written(self, answer: Answer) -> tuple[str, str]:
        """The end of the prompt, and an answer as the model writes it."""
        template = self.template()
        asked = [{"role": "user", "content": "What is the weather?"}]
        prompt = template.render(asked, tools=TOOLS)
        whole = template.render([*asked, answer.message()], tools=TOOLS, add_generation_prompt=False)
        assert whole.startswith(prompt)
        assert whole.rstrip("\n").endswith(self.end)
        return prompt, whole[len(prompt) :].rstrip("\n").removesuffix(self.end)

    def parser(self, prompt: str = "", tools: Sequence[dict[str, Any]] = tuple(TOOLS)) -> AnswerParser:
        """A parser for an answer to the prompt."""
        written = self.template().written
        tool_format = choose_format("auto", written)
        assert tool_format.name == self.tool_format
        return answer_parser(tool_format, OfferedTools.of(tools), reasoning_tags(written), prompt)


def parsed(parser: AnswerParser, pieces: Iterable[str]) -> Answer:
    """What a parser reads of the pieces of an answer."""
    return answer_of([*map(parser.push, pieces), parser.finish()])


def answer_of(pieces: Sequence[AnswerParts]) -> Answer:
    """The parts of an answer."""
    parts = AnswerParts(**joined_parts(pieces))
    assert [call.index for call in parts.tool_calls] == list(range(len({call.id for call in parts.tool_calls})))
    calls = tuple((call.name, call.values) for call in parts.tool_calls)
    return Answer(parts.text, parts.reasoning, calls, parts.unparsed)


_PARTS: Final = (
    "{% set calls = m.tool_calls | default([], true) | map(attribute='function') | list %}"
    "{% set thought = m.reasoning_content | default('', true) %}"
)
_TURN: Final = "{%- for m in messages %}{% if m.role != 'assistant' %}<|turn|>{{ m.role }}\n{{ m.content }}<|done|>"
_OTHERWISE: Final = "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"


def _template(answer: str) -> str:
    """A template whose answers are written by `answer`, a part of a template that reads `m`."""
    return f"{_TURN}{{%- else %}}{_PARTS}<|turn|>assistant\n{answer}<|done|>{_OTHERWISE}"


_XML: Final = _template(
    "{{ m.content }}{% for c in calls %}\n<tool_call>\n<function={{ c.name }}>\n"
    "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson if v is mapping or v is sequence else v | string }}\n"
    "</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)
_PHI: Final = "{# <|tool|><|/tool|> #}" + _template(
    "{{ m.content }}{% if calls %}<|tool_call|>["
    "{% for c in calls %}{{ c | tojson }}{{ ', ' if not loop.last }}{% endfor %}]<|/tool_call|>{% endif %}"
)
_SINGLE_PHI: Final = "{# <|tool|><|/tool|> #}" + _template(
    "{{ m.content }}{% for c in calls %}<|tool_call|>{{ c | tojson }}<|/tool_call|>{% endfor %}"
)
_HERMES: Final = _template(
    "{% if thought %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for c in calls %}\n<tool_call>\n{{ c | tojson }}\n</tool_call>{% endfor %}"
)
_GRANITE: Final = _template(
    "{% if thought %}<think>{{ thought }}</think>{% endif %}{{ m.content }}"
    "{% if calls %}<|tool_call|>["
    "{% for c in calls %}{{ c | tojson }}{{ ', ' if not loop.last }}{% endfor %}]{% endif %}"
)
_NEW_MISTRAL: Final = _template(
    "{% if thought %}[THINK]{{ thought }}[/THINK]{% endif %}{{ m.content }}"
    "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}{% endfor %}"
)
_VALUE: Final = (
    "{%- macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is boolean %}{{ 'true' if v else 'false' }}"
    "{% elif v is mapping %}{{ '{' }}"
    "{% for k, x in v | dictsort %}{{ k }}:{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}}"
    "{% elif v is sequence %}[{% for x in v %}{{ value(x) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ v }}{% endif %}{% endmacro %}"
)


def _gemma(opening: str, closing: str, quote: str) -> str:
    return _VALUE.replace("QUOTE", quote) + _template(
        "{% if thought %}<|channel>thought\n{{ thought }}<channel|>{% endif %}{{ m.content }}"
        f"{{% for c in calls %}}{opening}call:{{{{ c.name }}}}{{{{ value(c.arguments) }}}}"
        f"{closing}{{% endfor %}}"
    )


_TOOL_CODE: Final = _template(
    "{{ m.content }}{% if calls %}\n```tool_code\n{% for c in calls %}print({{ c.name }}("
    "{% for k, v in c.arguments.items() %}{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}))\n"
    "{% endfor %}```{% endif %}"
)
_HARMONY: Final = (
    "{%- for m in messages %}{% if m.role != 'assistant' %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    f"{{%- else %}}{_PARTS}"
    "{% if thought %}<|start|>assistant<|channel|>analysis<|message|>{{ thought }}"
    "<|end|>{% endif %}{% if calls %}{% if m.content %}<|start|>assistant<|channel|>commentary<|message|>"
    "{{ m.content }}<|end|>{% endif %}<|start|>assistant<|channel|>commentary to=functions.{{ calls[0].name }}"
    " <|constrain|>json<|message|>{{ calls[0].arguments | tojson }}<|call|>"
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>{% endif %}"
    "{%- endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_BARE: Final = "{# <|python_tag|> #}" + _template(
    "{{ m.content }}{% for c in calls %}{{ {'name': c.name, 'parameters': c.arguments} | tojson }}"
    "{{ '; ' if not loop.last }}{% endfor %}"
)

FAMILIES: Final = {
    "qwen2.5": Family("hermes", "Qwen-Qwen2.5-7B-Instruct", "<|im_end|>", is_real=True),
    "qwen3": Family("hermes", "Qwen-Qwen3-0.6B", "<|im_end|>", reasons=True, is_real=True),
    "llama3.2": Family(
        "llama3", "meta-llama-Llama-3.2-3B-Instruct", "<|eot_id|>", text_with_calls=False, one_call=True, is_real=True
    ),
    "mistral-nemo": Family(
        "mistral", "mistralai-Mistral-Nemo-Instruct-2407", "</s>", text_with_calls=False, is_real=True
    ),
    "mistral, newer": Family("mistral", _NEW_MISTRAL, "<|done|>", reasons=True),
    "llama3, several": Family("llama3", _BARE, "<|done|>", text_with_calls=False),
    "hermes": Family("hermes", _HERMES, "<|done|>", reasons=True),
    "qwen3-coder": Family("qwen3-coder", _XML, "<|done|>"),
    "phi4": Family("phi4", _PHI, "<|done|>"),
    "phi4, single": Family("phi4", _SINGLE_PHI, "<|done|>"),
    "granite": Family("granite", _GRANITE, "<|done|>", reasons=True),
    "gemma": Family("gemma", _gemma("<|tool_call>", "<tool_call|>", '<|"|>'), "<|done|>", reasons=True),
    "function-gemma": Family(
        "function-gemma", _gemma("<start_function_call>", "<end_function_call>", "<escape>"), "<|done|>"
    ),
    "tool-code": Family("tool-code", _TOOL_CODE, "<|done|>"),
    "harmony": Family("harmony", _HARMONY, "", one_call=True, reasons=True),
}
"""Templates by name; those with the format's style alone are small ones, where no real one is at hand."""
