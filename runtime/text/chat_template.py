"""Chat templates: Jinja text from a model's files, rendered in a sandbox.

The dialect is `transformers`' own: trimmed blocks, loop controls, a `tojson` filter that keeps non-ASCII text, the
functions `raise_exception` and `strftime_now`, and a second template for tools where a model has one. Templates are
untrusted: they run in Jinja's immutable sandbox, which gives no access to Python internals, and within a budget of time
and memory (`template_budget`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from io import StringIO
from typing import Any, Final, TypeAlias

from jinja2 import Template
from jinja2 import TemplateError as JinjaError

from ...errors import TemplateError
from ...models.bundle import Bundle
from .template_budget import MAX_CHARACTERS, Budget, BudgetError, NotAllowedError
from .template_sandbox import BudgetContext, template_environment
from .tokenizer import TextTokenizer

Message: TypeAlias = Mapping[str, Any]
"""One message: `{"role": "user", "content": "..."}`, and whatever else the template reads."""

SPECIAL_TOKENS: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Variables of templates that are texts of special tokens."""
_MAX_REASON: Final = 300
_HINT: Final = "repair the model's chat template, or use --raw"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, with_tools: str | None = None
    ) -> None:
        """Compile a template.

        Args:
            source: the template.
            special_tokens: texts of `bos_token`, `eos_token` and so on, by name.
            with_tools: the template to use instead when there are tools; None to use `source`.

        Raises:
            TemplateError: a template is not valid Jinja.
        """
        self._variables = dict(special_tokens or {})
        self.written: Final = "".join((source, with_tools or "", *map(str, self._variables.values())))
        """Everything that the template may write by itself."""
        self._template = _compiled(source)
        self._with_tools = self._template if with_tools is None else _compiled(with_tools)

    @cached_property
    def reads_parts_alone(self) -> bool:
        """Whether it leaves out contents that are text and writes those that are lists of parts, as SmolVLM's does."""
        text = "edge-run asks"
        parts = [{"type": "text", "text": text}]
        try:
            rendered = [self.render([{"role": "user", "content": content}]) for content in (text, parts)]
        except TemplateError:
            return False
        return [text in each for each in rendered] == [False, True]

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        mark: str = "",
        **variables: Any,
    ) -> str:
        """Render the prompt of a conversation.

        Args:
            messages: messages so far. One of an assistant may have `tool_calls`, and one of a `tool` answers them.
            tools: functions the model may call, as JSON schemas: `{"type": "function", "function": {"name": ...}}`.
            documents: documents to answer from, usually each with a `title` and a `text`.
            add_generation_prompt: whether to end with the header of the assistant's answer.
            mark: a character to keep as it is wherever text is escaped; empty for none.
            variables: whatever else the template reads, such as `enable_thinking` or `date_string`.

        Raises:
            TemplateError: the template rejects the messages, leaves the sandbox, or its output is too long.
        """
        context = {
            **self._variables,
            **variables,
            "messages": [dict(message) for message in messages],
            "tools": None if tools is None else list(tools),
            "documents": None if documents is None else list(documents),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _rendered(self._template if tools is None else self._with_tools, context, mark)
        except Exception as error:
            raise TemplateError(f"the chat template failed: {_reason(error)}", _HINT) from error


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[Template, Mapping[str, int]] | NotAllowedError:
    """Compile a template: it and the costs of its bodies, or why it is refused; the model still continues plain text.

    Raises:
        TemplateError: it is not valid Jinja.
    """
    environment = template_environment()
    try:
        tree, body_costs = environment.parse_within_limits(source)
        return environment.from_string(tree), body_costs
    except NotAllowedError as error:
        return error
    except Exception as error:
        raise TemplateError(f"the chat template is not valid: {_reason(error)}", _HINT) from error


def _rendered(
    compiled: tuple[Template, Mapping[str, int]] | NotAllowedError, variables: Mapping[str, Any], mark: str
) -> str:
    """Render within a budget; may raise anything."""
    if isinstance(compiled, NotAllowedError):
        raise compiled
    template, body_costs = compiled
    context = template.new_context(dict(variables))
    assert isinstance(context, BudgetContext)  # noqa: S101  the environment makes no others
    context.budget = Budget(variables.values(), body_costs)
    context.mark = mark
    written = StringIO()
    for piece in template.root_render_func(context):
        if written.tell() + len(piece) > MAX_CHARACTERS:
            raise BudgetError(f"it writes over {MAX_CHARACTERS} characters")
        written.write(piece)
    return written.getvalue()


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    text = " ".join(str(error)[: 4 * _MAX_REASON].split())[:_MAX_REASON]
    return text if isinstance(error, JinjaError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def load_template(bundle: Bundle, tokenizer: TextTokenizer) -> ChatTemplate | None:
    """Load the chat template: `chat_template.jinja`, or the one in tokenizer_config.json, or None.

    Raises:
        TemplateError: the template cannot be read or is not valid Jinja.
    """
    named = _named_sources(tokenizer.config.get("chat_template"))
    for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
        if (path := bundle.file(file)) is not None:
            try:
                named[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise TemplateError(f"{path} cannot be read: {error}", _HINT) from error
    if "default" not in named:
        return None
    special = {name: text for name in SPECIAL_TOKENS if (text := tokenizer.token_text(name))}
    return ChatTemplate(named["default"], special, with_tools=named.get("tool_use"))


def _named_sources(value: Any) -> dict[str, str]:
    """Templates by name: tokenizer_config.json holds one, or a list of named ones such as default and tool_use."""
    entries = value if isinstance(value, list) else [] if value is None else [{"name": "default", "template": value}]
    named: dict[Any, Any] = {entry.get("name"): entry.get("template") for entry in entries if isinstance(entry, dict)}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise TemplateError("chat_template in tokenizer_config.json is not text", _HINT)
    return named
