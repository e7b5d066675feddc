"""Compiles response formats to grammars over a model's tokens, within limits of time and memory."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Final

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import gbnf_to_lark

from ...errors import BundleError, BusyError, InputError
from ..graph.memory import trim_heap
from ..scheduling.work_thread import WorkThread
from ..text.tokenizer import TextTokenizer
from .grammar_state import GrammarMatcher, GrammarState, Matcher, MatcherAfterText, first_line
from .response_format import CLIENT, COMPILER_STACK_BYTES, FormatKind, ResponseFormat, check_limits, is_gbnf

_JSON_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as most programs write it and models have read it: the separators are forced tokens, and no model
goes on with white space for ever. `x-guidance` in a schema changes it."""
_BOOLEAN_SCHEMAS: Final = {"true": "{}", "false": '{"allOf": [false]}'}
"""Objects that mean the same, since llguidance sets the layout of objects alone."""
_UNSUPPORTED: Final = re.compile(r"Unimplemented keys: (\[.*\])")
_KEPT: Final = 16
"""Largest number of compiled grammars that an engine keeps."""
_KEPT_CHARACTERS: Final = 1 << 17
"""Largest number of characters of the formats that they were compiled from; the last one stays, whatever its size. A
compiled grammar takes 0.1 to 2.5 KB of memory a character."""
_COMPILE_S: Final = 10.0
"""Longest time that compiling a grammar may take, in seconds; usually it takes milliseconds."""
_PLACE_S: Final = 3.0
"""Longest time that a format waits until others are compiled, in seconds."""
_AT_ONCE: Final = 3
"""Number of large formats, and of others, that are compiled at the same time, with those that take too long."""
_BY_CLIENT: Final = 2
"""Number of them that one client may have, so that there is a place for another one."""
_LARGE: Final = 1 << 14
"""Number of characters from which on a format is a large one: these may take seconds, and the others do not wait for
them."""
_WHITE_SPACE: Final = ("\n", "\n\n", "\n\n\n", " ", "  ", "\r\n", "\r\n\r\n", " \n", "\t")


class Grammar:
    """A compiled response format.

    Args:
        matcher: llguidance's, at the beginning; it is copied for every answer.
        response_format: what it was compiled from.
        engine: the grammars of the engine, which have what belongs to its tokens.
    """

    def __init__(self, matcher: llguidance.LLMatcher, response_format: ResponseFormat, engine: Grammars) -> None:
        self.response_format: Final = response_format
        self._matcher: Final = matcher
        self._idle: list[llguidance.LLMatcher] = []
        """Matchers of answers that have ended, at the beginning again."""
        self._engine: Final = engine

    def start(self, token_ids: Sequence[int] = ()) -> GrammarState:
        """Begin an answer.

        Args:
            token_ids: tokens that the answer has already.

        Raises:
            InputError: the grammar does not allow them.
        """
        described, after = self.response_format.described, self.response_format.after
        engine, own = self._engine, GrammarMatcher(self._fresh, described)
        matcher: Matcher = engine.after_text(own, after) if after else own
        for token in token_ids:
            if not matcher.consume(token):
                raise InputError(
                    f"the {described} of the answer does not allow what the answer begins with",
                    "change answer_start, or leave it out",
                )
        return GrammarState(
            matcher, engine.vocab_size, engine.ends, engine.thread.submit, lambda: self._ended(own.matcher)
        )

    def _fresh(self) -> llguidance.LLMatcher:
        """A matcher at the beginning."""
        with suppress(IndexError):  # another answer may take the last one at the same time
            return self._idle.pop()
        return self._matcher.deep_copy()

    def _ended(self, matcher: llguidance.LLMatcher) -> None:
        """Keep the matcher of an answer that has ended for the next one: it knows parts of the grammar already."""
        if not matcher.is_error() and matcher.reset():
            self._idle.append(matcher)


class Grammars:
    """Compiles response formats for the tokens of one engine, and keeps what was used last.

    Args:
        tokenizer: the model's.
        vocab_size: number of logits.

    Raises:
        BundleError: llguidance cannot read the tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self.vocab_size: Final = vocab_size
        self.thread: Final = WorkThread("edge-run grammar")
        self.ends: Final = tokenizer.eos
        self._text_tokenizer: Final = tokenizer
        self._tokenizer: Final = _matcher_tokenizer(tokenizer)
        # Errors leave out what the grammar has matched, because it is the text of an answer.
        self._limits: Final = llguidance.LLParserLimits(verbose_errors=False)
        self._kept: OrderedDict[ResponseFormat, Grammar] = OrderedDict()
        self._compiling: dict[ResponseFormat, Future[Grammar]] = {}
        self._places: Final[list[tuple[bool, str]]] = []
        """For each format that is being compiled, whether it is a large one, and the client who asked for it."""
        self._lock: Final = threading.Condition()
        """Held while one of the three is read or changed."""

    def compile(self, response_format: ResponseFormat) -> Grammar:
        """Compile a format in another thread, or return what was compiled from it before.

        Raises:
            InputError: the format is wrong, has parts that are not supported, or is too large.
            BusyError: others are being compiled, as many as may be at a time, or as one client may have.
        """
        with self._lock:
            known = self._kept.get(response_format)
            if known is not None:
                self._kept.move_to_end(response_format)
                return known
            compiling = self._compiling.get(response_format)
        try:
            return (compiling or self._begin(response_format)).result(_COMPILE_S)
        except TimeoutError:
            raise InputError(
                f"the {response_format.described} of the answer takes longer than {_COMPILE_S:g} s to compile",
                "simplify it",
            ) from None

    def _begin(self, response_format: ResponseFormat) -> Future[Grammar]:
        """Begin to compile a format; its grammar is kept also if nobody waits for it any more."""
        check_limits(response_format)
        place = len(response_format.text) >= _LARGE, CLIENT.get()
        compiled: Future[Grammar] = Future()
        with self._lock:
            if not self._lock.wait_for(lambda: self._is_free(*place), _PLACE_S):
                raise BusyError("other response formats are still being compiled", "try again later")
            if (begun := self._compiling.get(response_format)) is not None:
                return begun
            self._places.append(place)
            self._compiling[response_format] = compiled

        def end() -> None:
            with self._lock:
                self._compiling.pop(response_format, None)
                self._places.remove(place)
                self._lock.notify_all()

        def work() -> None:
            try:
                grammar = Grammar(self._matcher(response_format), response_format, self)
                with self._lock:  # keep it, and drop those that were used longest ago
                    self._kept[response_format] = grammar
                    characters = sum(len(each.text) for each in self._kept)
                    while len(self._kept) > _KEPT or (characters > _KEPT_CHARACTERS and len(self._kept) > 1):
                        characters -= len(self._kept.popitem(last=False)[0].text)
                compiled.set_result(grammar)
            except Exception as error:  # noqa: BLE001  raised where the grammar is waited for
                compiled.set_exception(error)
            finally:
                end()
                if len(response_format.text) >= _LARGE:
                    trim_heap()

        try:
            _start_compiler(work)
        except RuntimeError as error:
            end()
            raise BusyError(
                f"no thread can be started to compile a response format: {error}", "try again later"
            ) from error
        return compiled

    def _is_free(self, large: bool, client: str) -> bool:
        """Whether a client may have another format compiled."""
        clients = [each for is_large, each in self._places if is_large == large]
        return len(clients) < _AT_ONCE and clients.count(client) < _BY_CLIENT

    def _matcher(self, response_format: ResponseFormat) -> llguidance.LLMatcher:
        """Compile a format until its first mask is known.

        Raises:
            InputError: the format is refused.
        """
        text = grammar_text(response_format)
        matcher = llguidance.LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(response_format, matcher.get_error())
        return matcher

    def after_text(self, matcher: GrammarMatcher, text: str) -> MatcherAfterText:
        """A matcher that begins after a text of the answer."""
        tokenizer = self._text_tokenizer
        not_end = np.ones(self.vocab_size, np.uint8)
        not_end[sorted(tokenizer.eos)] = 0
        spaces = [tokenizer.encode_plain(each) for each in _WHITE_SPACE]
        return MatcherAfterText(
            matcher,
            text.encode(),
            lambda token: tokenizer.token_bytes.shown(token).encode(),
            np.packbits(not_end, bitorder="little"),
            frozenset(ids[0] for ids in spaces if len(ids) == 1),
        )

    def close(self) -> None:
        """End the thread; calling it again does nothing."""
        self.thread.close()


_stack_lock = threading.Lock()
"""Held while new threads have the compiler's stack."""


def _start_compiler(work: Callable[[], None]) -> None:
    """Start a thread with a stack that is large enough for what the limits of formats allow.

    Raises:
        RuntimeError: it cannot be started.
    """
    thread = threading.Thread(target=work, name="edge-run grammar compiler", daemon=True)
    with _stack_lock:
        before = threading.stack_size(COMPILER_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


def grammar_text(response_format: ResponseFormat) -> str:
    """A format as llguidance reads it.

    Raises:
        InputError: the grammar cannot be read.
    """
    matcher, text = llguidance.LLMatcher, response_format.text
    kind = response_format.kind
    if kind is FormatKind.JSON_SCHEMA:
        text = _BOOLEAN_SCHEMAS.get(text.strip(), text)
        try:
            return matcher.grammar_from_json_schema(text, defaults=_JSON_LAYOUT)  # type: ignore[arg-type]
        except ValueError as error:
            raise _refused(response_format, str(error)) from error
    if kind is FormatKind.REGEX:
        return matcher.grammar_from_regex(text)
    if kind is FormatKind.CHOICE:
        choices: list[str] = json.loads(text)
        # One lexeme: as rules of their own, more than 2,000 would be too many for the parser.
        return matcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)))
    if is_gbnf(text):
        try:
            text = gbnf_to_lark(text)
        except Exception as error:
            why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
            raise _refused(response_format, why) from error
    return matcher.grammar_from_lark(text)


def _refused(response_format: ResponseFormat, why: str) -> InputError:
    described = f"the {response_format.described} of the answer"
    if keys := _UNSUPPORTED.match(why):
        names = ", ".join(json.loads(keys[1]))
        what, hint = f"the JSON schema of the answer has keywords that are not supported: {names}", "leave them out"
    elif why.startswith("oneOf constraints"):
        what = "the JSON schema of the answer has oneOf with alternatives that may be true of one value"
        hint = "use anyOf, or make them exclude each other by their types or constants"
    elif why.startswith("NoExtensionBias"):
        what, hint = f"nothing can follow {described}", "correct it"
    else:
        what, hint = f"{described} is refused: {first_line(why)}", "correct or simplify it"
    return InputError(what, hint)


def _matcher_tokenizer(tokenizer: TextTokenizer) -> llguidance.LLTokenizer:
    """The tokens of a model as llguidance knows them.

    A model without an end-of-sequence token gets one behind those that it has, because llguidance needs one.

    Raises:
        BundleError: llguidance cannot read the tokenizer.
    """
    source, ends = tokenizer.source(), sorted(tokenizer.eos)
    if not ends:
        parsed = json.loads(source)
        end = {"id": tokenizer.size, "content": "<|edge-run end|>", "special": True, "normalized": False}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        parsed["added_tokens"] = [*(parsed.get("added_tokens") or ()), end]
        source, ends = json.dumps(parsed), [tokenizer.size]
    try:
        return llguidance.LLTokenizer(source, eos_token=ends)
    except Exception as error:
        raise BundleError(
            f"grammars cannot be used with this tokenizer: {first_line(str(error))}", "leave the response format out"
        ) from error
