"""Prompt files, recordings, and the prompts that come with edge-run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from edgerun.edge.bench.prompt_sets import (
    SHELL,
    Conversation,
    Exchange,
    bundled_prompts,
    limit_per_category,
    read_prompts,
    read_recording,
)
from edgerun.errors import InputError
from support.shared_data import data_path


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_prompt_formats_are_recognized_by_content(tmp_path: Path) -> None:
    spec_bench = lines(
        tmp_path / "a",
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"question_id": 200, "category": "rag", "turns": ["third"]},
    )
    assert read_prompts(spec_bench) == [
        Conversation("mt_bench", (Exchange("first"), Exchange("second"))),
        Conversation("rag", (Exchange("third"),)),
    ]
    ours = lines(tmp_path / "b", {"category": "writing", "turns": ["one"]}, {"turns": ["two"]})
    assert [each.category for each in read_prompts(ours)] == ["writing", "prompts"]
    humaneval = lines(tmp_path / "c", {"task_id": "HumanEval/0", "prompt": "def f():\n"})
    assert read_prompts(humaneval) == [Conversation("humaneval", (Exchange("def f():\n"),))]
    gsm8k = lines(tmp_path / "d", {"question": "how many?", "answer": "4"})
    assert read_prompts(gsm8k) == [Conversation("questions", (Exchange("how many?"),))]
    requests = lines(tmp_path / "e", {"request": "list files", "command": "ls", "source": "tldr"})
    assert read_prompts(requests) == [Conversation(SHELL, (Exchange("list files"),))]


def test_plain_text_is_split_into_paragraphs_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert [each.exchanges[0].prompt for each in read_prompts(path)] == ["one", "two"]
    path.write_text("one\nstill one\n\n\ntwo\n", encoding="utf-8")
    assert [each.exchanges[0].prompt for each in read_prompts(path)] == ["one\nstill one", "two"]


BAD_PROMPTS = [
    (b"", "is empty"),
    (b" \n\n", "is empty"),
    (b"\xff\xfe", "is not UTF-8 text"),
    (b"a\0b", "is not text"),
    (b'{"turns": ["a"]}\n{"turns": [', "line 2: not JSON"),
    (b'{"turns": ["a"]}\n[]\n', "line 2: not an object"),
    (b'{"turns": ["a"]}\n{"prompt": "a"}\n', "row 2: turns is None"),
    (b'{"turns": []}', "row 1: turns is []; it must be a list of at least one"),
    (b'{"turns": [1]}', "row 1: a turn is 1; it must be a text that is not blank"),
    (b'{"turns": [" "]}', "row 1: a turn is ' '"),
    (b'{"turns": ["a"], "category": 3}', "row 1: category is 3"),
    (b'{"turns": [{"prompt": "a", "response": "b"}]}', "is a recording; give it with --replay"),
    (b'{"prompt": null}', "row 1: prompt is None"),
    (b'{"text": "a"}', "its first line has text; give lines with turns, prompt, question or request"),
    (b"{}", "its first line has no fields"),
    (b'{"turns":' + b"[" * 100_000, "line 1: not JSON"),
]
BAD_RECORDINGS = [
    (b'{"turns": ["a"]}', "row 1: a turn without an answer; give prompts alone with --prompts"),
    (b'{"turns": [{"prompt": "a"}]}', "row 1: response is None"),
    (b'{"turns": [{"prompt": "a", "response": ""}]}', "row 1: response is ''"),
    (b"just text", "is not a recording; give JSON lines"),
    (b"# aider chat started at 2024-08-05 19:33:02\n\n#### hi  \n", "contains no answer"),
]


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [*((read_prompts, *each) for each in BAD_PROMPTS), *((read_recording, *each) for each in BAD_RECORDINGS)],
)
def test_a_bad_file_raises_a_one_line_error(
    tmp_path: Path, read: Callable[[Path], object], content: bytes, message: str
) -> None:
    path = tmp_path / "file.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_json_recording_has_an_answer_to_every_prompt(tmp_path: Path) -> None:
    turns = [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}]
    path = lines(tmp_path / "a", {"id": 1, "category": "stem", "turns": turns}, {"turns": turns[:1]})
    assert read_recording(path) == [
        Conversation("stem", (Exchange("a", "b"), Exchange("c", "d"))),
        Conversation("recorded", (Exchange("a", "b"),)),
    ]


AIDER = """
# aider chat started at 2024-08-05 19:33:02

> Aider v0.47.2-dev
> Added aider/utils.py to the chat.

#### Use the Spinner instead
#### of the inlined one

Certainly! Here it is:

aider/utils.py
```python
<<<<<<< SEARCH
>>>>>>> REPLACE
```

> Tokens: 5,244 sent, 604 received. Cost: $0.02 request.
> Applied edit to aider/utils.py
> error: no such name

To fix the error, rename it.

> Tokens: 5 sent, 6 received.

#### /diff

diff --git a/aider/utils.py

> a note

#### /clear

#### now something else

Another answer.

> Tokens: 1 sent, 2 received.

# aider chat started at 2024-08-05 20:39:59

> Here are summaries of some files

LICENSE.txt

#### hi

Cut off before its end
"""


def test_an_aider_history_is_split_by_speaker(tmp_path: Path) -> None:
    path = tmp_path / ".aider.chat.history.md"
    path.write_text(AIDER, encoding="utf-8")
    first, second = read_recording(path)
    assert first.category == second.category == "code editing"
    edited, repaired = first.exchanges
    assert edited.prompt == "Use the Spinner instead\nof the inlined one"
    assert edited.answer.startswith("Certainly! Here it is:\n\naider/utils.py\n```python\n<<<<<<< SEARCH\n")
    assert edited.answer.endswith(">>>>>>> REPLACE\n```")
    assert repaired == Exchange("Applied edit to aider/utils.py\nerror: no such name", "To fix the error, rename it.")
    assert second.exchanges == (Exchange("now something else", "Another answer."),)


def by_category(conversations: list[Conversation]) -> Counter[str]:
    return Counter(each.category for each in conversations)


def test_limited_conversations_alternate_between_categories() -> None:
    def conversation(category: str, text: str) -> Conversation:
        return Conversation(category, (Exchange(text),))

    every = [conversation("a", "1"), conversation("a", "2"), conversation("a", "3"), conversation("b", "4")]
    assert [each.exchanges[0].prompt for each in limit_per_category(every, None)] == ["1", "4", "2", "3"]
    assert [each.exchanges[0].prompt for each in limit_per_category(every, 2)] == ["1", "4", "2"]
    assert by_category(every) == {"a": 3, "b": 1}


def test_bundled_prompts_separate_shell_requests_from_the_rest() -> None:
    assert by_category(bundled_prompts(for_shell=True)) == {SHELL: 20}
    ours = by_category(bundled_prompts(for_shell=False))
    assert SHELL not in ours
    assert len(ours) == 7
    assert all(count >= 3 for count in ours.values())
    assert any(len(each.exchanges) > 1 for each in bundled_prompts(for_shell=False))


def test_real_prompt_files_and_recordings() -> None:
    categories = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
    assert by_category(read_prompts(data_path("prompts/spec_bench.jsonl"))) == dict.fromkeys(categories, 40)
    assert len(read_prompts(data_path("prompts/humaneval.jsonl"))) == 82
    assert len(read_prompts(data_path("text/wiki.test.raw"))) > 1000
    recorded = read_recording(data_path("replay/mt_redundant_qwen2.5-7b.jsonl"))
    assert len(recorded) == 80
    assert all(exchange.answer for each in recorded for exchange in each.exchanges)
    aider = read_recording(data_path("replay/aider_sessions.md"))
    answers = [exchange for each in aider for exchange in each.exchanges]
    assert 350 < len(answers) < 400
    assert sum("<<<<<<< SEARCH" in (each.answer or "") for each in answers) > 150
    assert not any(line.startswith("> Tokens:") for each in answers for line in (each.answer or "").split("\n"))
