"""Calls of tools and reasoning in answers that are kept, and what models read of them."""

from __future__ import annotations

import msgspec

from edgerun.edge.conversations.answering import model_messages
from edgerun.edge.conversations.records import (
    CallRound,
    CallState,
    ReasoningText,
    Role,
    StoredCall,
    StoredMessage,
    records_of,
    split_reasoning,
)

DONE = StoredCall("call00001", "now", "{}", CallState.DONE, "12:00")
RUNNING = StoredCall("call00002", "now", '{"zone": "CET"}', CallState.RUNNING)
ROUND = CallRound("<think>\nThe time?\n</think>\n\nI look.", (DONE, RUNNING))
MESSAGES = [
    StoredMessage("1", "c", None, Role.USER, "What time is it?"),
    StoredMessage("2", "c", "1", Role.ASSISTANT, "<think>\nNoon.\n</think>\n\nIt is noon.", rounds=(ROUND,)),
    StoredMessage("3", "c", "2", Role.USER, "Thanks."),
]


def test_reasoning_is_written_in_tags_and_rounds_are_read_unless_they_are_damaged() -> None:
    text = ReasoningText()
    pieces = [("The ", ""), ("time?", ""), ("", "I "), ("", "look.")]
    written = "".join(text.push(*piece) for piece in pieces)
    assert written == ROUND.text
    assert split_reasoning(written) == ("The time?", "I look.")
    assert ReasoningText().push("all", "at once") == "<think>\nall\n</think>\n\nat once"
    assert split_reasoning("no <think>\nhere</think>") == ("", "no <think>\nhere</think>")
    assert split_reasoning("<think>\nnot finished") == ("not finished", "")
    assert records_of(CallRound, msgspec.to_builtins([ROUND])) == (ROUND,)
    for damaged in (None, [{}], 3, "rounds", [{"text": "", "calls": [{"id": 1}]}]):
        assert records_of(CallRound, damaged) == ()


def test_models_read_calls_and_results() -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    other = {"id": "call00002", "type": "function", "function": {"name": "now", "arguments": '{"zone": "CET"}'}}
    assert model_messages("", MESSAGES) == [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "The time?", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "call00001", "name": "now", "content": "12:00"},
        {"role": "tool", "tool_call_id": "call00002", "name": "now", "content": "error: this call was not made"},
        {"role": "assistant", "content": "It is noon.", "reasoning_content": "Noon."},
        {"role": "user", "content": "Thanks."},
    ]
    assert model_messages("", MESSAGES, calls=False) == [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "I look.\n\nIt is noon."},
        {"role": "user", "content": "Thanks."},
    ]
