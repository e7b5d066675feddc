"""What a chat does: answers messages, and shows answers while they are generated."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from rich.text import Text

from ....errors import CancelledError, EdgeError
from ....models.user_text import on_one_line
from ....runtime.conversation import Session
from ....runtime.options import GenerateOptions
from ....runtime.overflow import turns_of
from ....runtime.result import Stats
from ...cli.run import RunOptions
from ...conversations.answering import (
    END_STATES,
    fit_answers,
    is_small_talk,
    model_messages,
    stats_object,
    takes_calls,
    without_long_files,
)
from ...conversations.records import (
    NO_PASSAGE,
    Attachment,
    Conversation,
    MessageState,
    Role,
    StoredMessage,
    answer_of,
    parted,
    source_lines,
)
from ...conversations.store import ConversationStore
from ...documents.retrieval import document_paths
from ...tools.tool_servers import ToolServers
from ..answer_report import show_rounds, stats_line
from ..interrupt import Interrupts
from ..output import SafeConsole, can_draw, waiting_shown, write_out
from .answer_view import AnswerMarkdown, MarkdownView, RawView
from .chat_conversation import (
    INTRODUCTION,
    NO_CHAT,
    ChatAnswer,
    ChatConversation,
    ChatModel,
    is_bundled,
    is_here,
    model_name_of,
    short_name,
)
from .prompt_reader import CONTINUATION, PROMPT, PlainReader

if TYPE_CHECKING:  # a plain prompt needs none of it
    from .line_editor import LineEditor

_SHOWN_MESSAGES: Final = 4
"""Number of messages that are shown of a conversation that goes on."""
_SHOWN_LINES: Final = 8
"""Number of lines that are shown of a message in it."""


class Chat:
    """A conversation with a model in the terminal.

    Args:
        model: the model that answers.
        store: where the conversation is kept.
        interrupts: gives Ctrl-C to what the chat is doing.
        chosen: how the chat begins, and what it keeps and shows.
        options: options of its answers, and the system message of a new conversation.
        stored: the stored conversation to go on with.
        tools: the MCP servers.

    Raises:
        EdgeError: the conversation to go on with cannot be read.
    """

    def __init__(
        self,
        model: ChatModel,
        store: ConversationStore,
        interrupts: Interrupts,
        chosen: RunOptions,
        options: GenerateOptions,
        stored: Conversation | None = None,
        tools: ToolServers | None = None,
    ) -> None:
        self.tools: Final = tools or ToolServers()
        self.model: Final = model
        self.store: Final = store
        self.chosen: Final = chosen
        self._options: Final = replace(options, system=None)
        self.console: Final = SafeConsole()
        self.interrupts: Final = interrupts
        self.attachments: list[Attachment] = []
        """Files that go with the next message."""
        self.last_stats: Stats | None = None
        self.raw: bool = not can_draw() or is_bundled(model.engine)
        """Whether answers are shown as they are; the bundled model writes commands, not Markdown."""
        self._messages: Final = SafeConsole(stderr=True)
        self._used_tokens: int | None = None
        """Tokens of the conversation, once they have been counted."""
        self._trimmed = 0
        self._explained = False
        self.draft = ""
        """What the next prompt begins with."""
        if chosen.resume is not None:
            self.conversation = self._imported(model.engine.session(system=options.system, resume=chosen.resume))
        else:
            self.conversation = ChatConversation(store, options.system or "", stored)
            if stored is not None and options.system is not None:
                self.conversation.change(system=options.system)
        if chosen.documents:
            self.conversation.change(documents=document_paths(chosen.documents))
        self.reader: PlainReader | LineEditor = PlainReader(interrupts)
        """What the user types is read from it."""

    def say(self, text: str) -> None:
        """Answer a message of the user.

        Raises:
            EdgeError: it cannot be answered; see `send`.
        """
        branch = self.conversation.branch()
        attachments, self.attachments = self.attachments, []
        self.send(text, attachments, branch[-1].id if branch else None)
        if is_bundled(self.model.engine) and is_small_talk(text) and not self._explained:
            self._explained = True
            self.note(NO_CHAT)

    def send(self, content: str, attachments: Sequence[Attachment], parent: str | None) -> None:
        """Add a message of the user after another one, and answer it.

        Raises:
            EdgeError: it cannot be answered. The conversation is as before, and the next prompt begins with the message
                and its attachments; but if a part of the answer was written, the message and that part are kept.
        """
        kept = False
        try:
            question = self.conversation.add_question(content, attachments, parent, model_name_of(self.model.engine))
            try:
                self.answer(question)
            finally:
                branch = self.conversation.branch()
                kept = not branch or branch[-1].id != question.id
                if not kept:
                    self.store.delete_message(question.id)
        except EdgeError:
            if not kept:
                self.draft, self.attachments = content, [*attachments]
            raise

    def answer(self, question: StoredMessage) -> None:
        """Generate an answer to a message of the user, beside the answers that it has; one without text is not kept.

        Raises:
            EdgeError: it cannot be answered.
        """
        message = self.conversation.add_answer(question, model_name_of(self.model.engine))
        answer = ChatAnswer(self.store, message, self.reader.ask, self.note)
        try:
            self._write(answer)
        finally:
            if not answer.content and not answer.rounds and answer.state is not MessageState.COMPLETE:
                self.store.delete_message(answer.message.id)

    def continue_answer(self, message: StoredMessage) -> None:
        """Let an answer go on where it ended.

        Raises:
            EdgeError: it cannot go on.
        """
        self.show_message(message)
        answer = ChatAnswer(self.store, message, self.reader.ask, self.note)
        self._write(answer)
        if (answer.content, answer.rounds) == (message.content, message.rounds):
            self.note("nothing follows: the model ends its answer here")

    def options(self) -> GenerateOptions:
        """The options of an answer in this conversation."""
        return self._options.changed(self.conversation.fields.sampling)

    def open(self, conversation: ChatConversation) -> None:
        """Go on with a conversation, and show its last messages."""
        self.conversation = conversation
        self.attachments = []
        self._trimmed = 0
        self.count_tokens()
        branch = conversation.branch()
        if not branch:
            return
        earlier = len(branch) - _SHOWN_MESSAGES
        stored = conversation.stored
        if stored is not None and (stored.titled_by_user or earlier > 0):  # other titles are the first message
            self.console.print(on_one_line(stored.title), style="bold", soft_wrap=True)
        if earlier > 0:
            self.note(f"... {earlier} earlier messages")
        for message in branch[-_SHOWN_MESSAGES:]:
            self.show_message(message)
        model = next((each.model for each in reversed(branch) if each.model), None)
        if model is not None and model != model_name_of(self.model.engine):
            hint = f"; /model {model} goes on with that" if is_here(model) else ""
            self.note(f"the answers are of {short_name(model)}; {self.model.name} answers now{hint}")

    def show_message(self, message: StoredMessage) -> None:
        """Show a message that is stored already, the beginning of a long one."""
        if message.role is Role.USER:
            for attachment in message.attachments:
                self.note(f"[{on_one_line(attachment.name)}]")
        lines = message.content.rstrip("\n").split("\n")
        text = "\n".join(lines[:_SHOWN_LINES])
        if message.role is Role.USER:
            self.console.print(Text(PROMPT + text.replace("\n", f"\n{CONTINUATION}"), "bold"))
        elif self.raw:
            write_out(f"{text}\n")
        else:
            self.console.print(AnswerMarkdown(text))
        if len(lines) > _SHOWN_LINES:
            self.note(f"... {len(lines) - _SHOWN_LINES} more lines")

    def count_tokens(self) -> None:
        """Count the tokens of the conversation for the line below the prompt."""
        branch, engine, system = self.conversation.branch(), self.model.engine, self.conversation.fields.system
        try:
            shown, _ = without_long_files(engine, system, branch, self.options())
            messages = model_messages(system, shown, calls=takes_calls(engine))
            self._used_tokens = len(engine.encode_chat(messages)) if branch else 0
        except EdgeError:  # what is wrong is said when it is answered
            self._used_tokens = None

    def status(self, columns: int) -> str:
        """The line below the prompt: the model, how full the context is, and the speed of the last answer."""
        engine = self.model.engine
        parts = [on_one_line(self.model.name)]
        if self._used_tokens is not None:
            parts.append(f"{self._used_tokens} of {engine.context} tokens ({self._used_tokens / engine.context:.0%})")
        if self.last_stats is not None and self.last_stats.decode_tokens:
            parts.append(f"{self.last_stats.decode_tokens_per_second:.0f} tokens/s")
        if self.attachments:
            parts.append(f"{len(self.attachments)} file{'s' * (len(self.attachments) > 1)} attached")
        if not self.chosen.save:
            parts.append("not saved")
        while len(parts) > 2 and len(" | ".join(parts)) > columns:
            parts.pop()
        line = " | ".join(parts)
        return line if len(line) <= columns else parts[-1][:columns]

    def model_changed(self) -> None:
        """Take account of another model."""
        self.raw = not can_draw() or is_bundled(self.model.engine)
        self.last_stats = None
        self._trimmed = 0
        self.count_tokens()
        self.introduce_model()

    def note(self, text: str, style: str = "dim") -> None:
        """Show a remark, or in another style what went wrong."""
        self._messages.print(text, style=style, soft_wrap=not can_draw())

    def show_stats(self) -> None:
        """Show the statistics of the last answer."""
        self.note("no answer yet" if self.last_stats is None else stats_line(self.last_stats, self.model.engine))

    def _imported(self, session: Session) -> ChatConversation:
        """A new conversation with the messages of a file that `/save` wrote."""
        model = model_name_of(self.model.engine)
        conversation = ChatConversation(self.store, session.system or "")
        parent: str | None = None
        for first, *rest in turns_of(session.messages, lambda message: message["role"]):
            if first["role"] != Role.USER:
                continue
            text, images = parted(first["content"])
            question = conversation.add_question(text, images, parent, model)
            parent = question.id
            if rest:
                answer = conversation.add_answer(question, model)
                content, rounds = answer_of(rest)
                self.store.write_answer(answer.id, content, rounds=rounds)
                parent = self.store.finish_answer(answer.id, content, MessageState.COMPLETE).id
        return conversation

    def introduce_model(self) -> None:
        """Show what the user talks to."""
        banner = Text(on_one_line(self.model.name), "bold")
        banner.append(f" on {self.model.engine.device}. /help for help, /quit to leave.", "not bold")
        self._messages.print(banner)
        if is_bundled(self.model.engine):
            self.note(INTRODUCTION)

    def _write(self, answer: ChatAnswer) -> None:
        """Write an answer, and make the calls of tools that it asks for.

        Raises:
            EdgeError: it failed; what was generated is kept.
        """
        error, chosen = None, self.conversation.fields.tools
        try:
            with self.interrupts.calling(answer.cancellation.cancel):
                with waiting_shown("starting the tools"):
                    answer.tools = self.tools.offered(chosen, answer.cancellation)
                if len(answer.tools) < len(chosen) or (chosen and not takes_calls(self.model.engine)):
                    self.note("not all tools of this conversation are offered; /tools says why")
                answer.generate_with_calls(self.tools, lambda: self._generate(answer))
        except CancelledError:
            answer.state = MessageState.STOPPED
        except EdgeError as problem:
            answer.state, error = MessageState.FAILED, str(problem)
            raise
        finally:
            self.interrupts.take()
            answer.finish(error)
        self._report(answer)
        for line in source_lines(self.store.message(answer.message.id).passages):
            self.note(line)
        if (answer.stats or {}).get("no_passage"):
            self.note(NO_PASSAGE)

    def _generate(self, answer: ChatAnswer) -> None:
        """Generate the next text of an answer, and show it.

        Raises:
            EdgeError: it failed; what was generated is kept.
        """
        engine = self.model.engine
        answer.state, answer.last_stats, answer.stats = None, None, None
        tools = [tool.definition(name) for name, tool in answer.tools.items()] if takes_calls(engine) else []
        # Without tools, what is stored is what the model writes, because it goes on later.
        parts = {"answer_start": answer.content, "tools": tools, "parse_answer": bool(tools)}
        options = self.options().changed(parts)
        progress, embedding_model = self.model.progress, self.chosen.embedding_model
        asked, cancellation = [answer.message], answer.cancellation
        with progress:
            fit = fit_answers(
                engine, self.store, asked, options, progress, cancellation, embedding_model, answer.rounds
            )
        before, self._trimmed = self._trimmed, len(fit.trimmed)
        if self._trimmed > before:
            self.note(
                f"the conversation is longer than the context of {fit.context} tokens: the model no longer reads the "
                f"first {self._trimmed} messages"
            )
        stream = engine.answer(fit.prompt, options)
        view = RawView() if self.raw else MarkdownView(self.console)
        answer.begin(stream.start_parts, None)
        with self.model.progress, answer.cancellation.reading(stream), closing(view):
            for chunk in stream:
                view.write(answer.add(chunk))
                if chunk.stats is not None and chunk.finish_reason is not None:
                    answer.last_stats, answer.state = chunk.stats, END_STATES[chunk.finish_reason]
                    answer.stats = stats_object(chunk.stats, fit.trimmed, no_passage=fit.no_passage)

    def _report(self, answer: ChatAnswer) -> None:
        """Say how an answer ended."""
        stats, options = answer.last_stats, self.options()
        if answer.state is MessageState.STOPPED:
            self.note("stopped")
        elif answer.calls and answer.state is MessageState.LENGTH:
            self.note("it has asked for calls again and again; /continue goes on")
        elif answer.state is MessageState.LENGTH and options.max_tokens is None:
            self.note("the context is full; /continue goes on with less of what was said before")
        if stats is None:
            return
        self.last_stats = stats
        self._used_tokens = stats.prompt_tokens + stats.completion_tokens
        if options.explain:
            show_rounds(stats.rounds, self.model.engine.graph_io)
        if self.chosen.stats:
            self.show_stats()
