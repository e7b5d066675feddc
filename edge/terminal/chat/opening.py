"""Opens a chat, with its conversation and its model, and reads what the user types."""

from __future__ import annotations

from contextlib import ExitStack, closing

from ....errors import ConversationError, EdgeError, InputError
from ....models.find import BUNDLED_MODEL
from ....models.progress import ProgressDisplay
from ....models.user_folders import data_folder
from ....runtime.options import GenerateOptions
from ...cli.run import RunOptions
from ...conversations.records import Conversation
from ...conversations.store import ConversationStore
from ...tools.tool_servers import ToolServers
from ...tools.tool_settings import configured_servers
from ..interrupt import Interrupts
from ..output import can_draw, write_warning
from .chat import Chat
from .chat_model import ChatModel, OpenModel, is_here, source_of
from .conversation_commands import ChatCommands
from .prompt_reader import keys_kept_for_the_prompt


def open_chat(open_model: OpenModel, model: str | None, chosen: RunOptions, options: GenerateOptions) -> int:
    """Chat until the user leaves; returns the exit code.

    Args:
        open_model: loads a model.
        model: the model that is named; None for the model of the conversation, or the bundled one.
        chosen: what the chat begins with.
        options: options of its answers.

    Raises:
        EdgeError: the model or the conversation cannot be opened.
    """
    if sum(map(bool, (chosen.resume, chosen.conversation, chosen.continue_))) > 1:
        raise InputError("more than one conversation is named", "give one of --resume, --continue and --conversation")
    if not chosen.save and (chosen.conversation or chosen.continue_):
        raise InputError("a conversation that is kept cannot go on without being saved", "leave out --no-save")
    servers = configured_servers(chosen.tools) if chosen.tools else ()
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(keys_kept_for_the_prompt())
        store = stack.enter_context(_open_store(chosen))
        conversation = _conversation(store, chosen)
        if conversation is not None and model is None:
            name = conversation.model  # where it is not on this machine, the bundled model answers
            model = None if name is None or name == BUNDLED_MODEL or not is_here(name) else source_of(name)
        progress = stack.enter_context(ProgressDisplay(transient=True))
        with interrupts.raising():
            chat_model = stack.enter_context(closing(ChatModel(open_model, model, progress)))
        tools = stack.enter_context(closing(ToolServers(data_folder(), servers=servers)))
        return _until_left(Chat(chat_model, store, interrupts, chosen, options, conversation, tools))


def _until_left(chat: Chat) -> int:
    """Read messages and commands until `/quit` or the end of the input; returns the exit code."""
    commands = ChatCommands(chat)
    if can_draw():
        from .line_editor import ChatCompleter, LineEditor, PromptHistory  # noqa: PLC0415

        history = PromptHistory(data_folder() / "typed.jsonl", writing=chat.chosen.save)
        chat.reader = LineEditor(chat.interrupts, history, ChatCompleter(commands.by_name, commands), chat.status)
    chat.introduce_model()
    chat.open(chat.conversation)
    if chat.chosen.tools:
        commands.run("/tools all")
    while True:
        try:
            draft, chat.draft = chat.draft, ""
            text = commands.without_dropped_images(chat.reader.read(draft).strip())
            if text.split(" ")[0] in {"/quit", "/exit"}:
                return 0
            if text and not commands.run(text):
                chat.say(text)
        except EOFError:
            return 0
        except KeyboardInterrupt:
            chat.interrupts.take()
            chat.note(f"to leave: /quit or {chat.reader.end_key}")
        except EdgeError as error:
            chat.note(str(error), "red")


def _open_store(chosen: RunOptions) -> ConversationStore:
    """The store of conversations; one in memory if nothing is to be kept, or nothing can be."""
    if chosen.save:
        try:
            return ConversationStore(notice=write_warning)
        except ConversationError as error:
            if chosen.conversation is not None or chosen.continue_:
                raise
            write_warning(f"this chat is not saved: {error}")
    return ConversationStore.in_memory()


def _conversation(store: ConversationStore, chosen: RunOptions) -> Conversation | None:
    """The stored conversation that the options name.

    Raises:
        ConversationError: there is none.
    """
    if chosen.conversation is not None:
        return store.conversation(chosen.conversation)
    if not chosen.continue_:
        return None
    if conversations := store.conversations():
        return max(conversations, key=lambda each: each.updated)
    raise ConversationError("there is no conversation yet", "leave out --continue")
