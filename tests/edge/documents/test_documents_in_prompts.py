"""What of documents goes into prompts, through the command line, the chat and the store."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.edge.conversations.answering import fit_context, read_with_passages
from edgerun.edge.conversations.records import (
    MessageState,
    Passage,
    Role,
    StoredMessage,
    message_text,
    with_passages,
)
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.documents.retrieval import MAX_PASSAGES, find_passages, fitting, fused
from edgerun.models.progress import silent
from edgerun.runtime.scheduling.request_run import Cancellation
from support.commands import Capture, fails, json_of
from support.processes import EDGE_RUN
from support.terminal_screen import terminal_screen

QUESTION = "Which street is the bakery in?"
ANSWER = "The bakery is in Canal Street."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGERUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path / "home"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents that are more than the context of the model."""
    folder = tmp_path / "town"
    folder.mkdir()
    for number in range(40):
        text = f"Report number {number} about the market and the harbour.\n" * 20
        (folder / f"{number}.txt").write_text(text + ANSWER * (number == 23), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def engine(long_bundle: Path) -> Iterator[Engine]:
    with edgerun.load(long_bundle, cache=False, draft=None) as loaded:
        yield loaded


def test_a_folder_is_answered_from_on_the_command_line(long_bundle: Path, folder: Path, capsys: Capture) -> None:
    arguments = [long_bundle, "-p", QUESTION, "-n", "4", "--documents", folder]
    found = json_of(capsys, *arguments, "--json")
    passages = found["passages"]
    assert (passages[0]["source"], ANSWER in passages[0]["text"]) == ("town/23.txt", True)
    assert 1 < len(passages) <= MAX_PASSAGES
    prompt = with_passages(QUESTION, [Passage(**each) for each in passages])
    same = json_of(capsys, long_bundle, "-p", prompt, "-n", "4", "--json")
    assert (same["text"], same["usage"]["prompt_tokens"]) == (found["text"], found["usage"]["prompt_tokens"])
    assert main([str(each) for each in arguments]) == 0
    out, err = capsys.readouterr()
    assert "[1]" not in out
    assert err.splitlines()[0] == f"[1] town/23.txt:{passages[0]['line']}"


def test_documents_that_fit_go_in_whole_and_several_are_given(
    long_bundle: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    for name, text in (("one.md", "# One\n\n" + ANSWER), ("two.md", "nothing about it\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    small = ["--documents", tmp_path / "one.md", "--documents", tmp_path / "two.md"]
    asked = [long_bundle, "-p", QUESTION, "-n", "2", "--json"]
    found = json_of(capsys, *asked, *small)["passages"]
    assert found == [
        {"source": "one.md", "line": 1, "text": "# One\n\n" + ANSWER},
        {"source": "two.md", "line": 1, "text": "nothing about it\n"},
    ]
    both = json_of(capsys, *asked, *small, "--documents", folder)["passages"]
    assert {each["source"] for each in both[:2]} == {"one.md", "town/23.txt"}


def test_what_cannot_be_used_is_one_clear_line(long_bundle: Path, tmp_path: Path, capsys: Capture) -> None:
    missing = tmp_path / "missing"
    error = fails(capsys, long_bundle, "-p", "in", "--documents", missing)
    assert error == f"the documents '{missing}' do not exist; name a folder or a file"
    assert "'~nosuchuser/x' do not exist" in fails(capsys, "--documents", "~nosuchuser/x", "-p", "hi")
    error = fails(capsys, long_bundle, "-p", "in", "--raw", "--documents", tmp_path)
    assert error == "--documents needs the chat template, which --raw leaves out; leave out one of them"


def test_the_prompt_fits_the_context_beside_the_answer(engine: Engine, folder: Path) -> None:
    for options in (GenerateOptions(), GenerateOptions(max_tokens=900, system="Be brief. " * 100)):
        found = find_passages(engine, [folder], QUESTION, options)
        assert ANSWER in found[0].text
        tokens = engine.count_tokens(with_passages(QUESTION, found), options)
        assert tokens + (options.max_tokens or 256) <= engine.context
    assert find_passages(engine, [folder], QUESTION * 120, GenerateOptions()) == ()
    assert find_passages(engine, [folder], "zzz", GenerateOptions()) == ()


def test_passages_leave_room_for_a_resumed_conversation(
    engine: Engine, long_bundle: Path, folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    with engine.session(system="Be brief.") as session:
        session.continue_from([{"role": "user", "content": "in " * 700}, {"role": "assistant", "content": "to " * 700}])
        session.save(tmp_path / "saved")
        earlier = session.messages
    resumed = [long_bundle, "--resume", tmp_path / "saved", "-p", QUESTION, "-n", "4", "--documents", folder, "--json"]
    found = json_of(capsys, *resumed)
    assert ANSWER in found["passages"][0]["text"]
    prompt = with_passages(QUESTION, [Passage(**each) for each in found["passages"]])
    tokens = engine.count_tokens([*earlier, {"role": "user", "content": prompt}])
    assert found["usage"]["prompt_tokens"] == tokens > 2_000


@pytest.mark.parametrize(("words", "trimmed"), [(150, 0), (1_400, 2)])
def test_passages_take_what_a_conversation_leaves_or_half(
    engine: Engine, folder: Path, words: int, trimmed: int
) -> None:
    """Earlier turns are left out for passages only where these would have less than half."""
    options = GenerateOptions()
    with ConversationStore.in_memory() as store:
        conversation = store.create(documents=[str(folder)])
        parent = None
        for role, text in (("user", "in " * words), ("assistant", "to " * words), ("user", QUESTION)):
            parent = store.add_message(conversation.id, parent, role, text).id
        answer = store.add_message(conversation.id, parent, "assistant", "", state=MessageState.WRITING)
        messages, none = read_with_passages(engine, store, [answer], options, silent, Cancellation(), "none")
        fit = fit_context(engine, "", messages, options)
    assert not none
    assert ANSWER in messages[-1].passages[0].text
    assert (len(messages), len(fit.trimmed)) == (3, trimmed)


def test_a_passage_that_does_not_fit_is_passed_over(engine: Engine) -> None:
    small, large = Passage("a", 1, "to"), Passage("b", 1, "to " * 500)
    assert fitting(engine, [large, small], 50) == [small]


def test_reciprocal_rank_fusion() -> None:
    a, b, c = (Passage(name, 1, "") for name in "abc")
    assert fused([[a, b], [b, c]]) == [b, a, c]
    assert fused([]) == []


def test_the_model_reads_sources_and_fences_and_names_cannot_leave_their_line() -> None:
    passages = (Passage("a\n[9] fake.txt", 3, "has ``` a fence"), Passage("b.py", 1, "x = 1"))
    question = StoredMessage("1", "c", None, Role.USER, "What?", passages=passages)
    before, *lines = message_text(question).split("\n")
    assert before.startswith("Answer from these passages")
    assert lines == [
        *("", "[1] a\ufffd[9] fake.txt:3", "````", "has ``` a fence", "````", ""),
        *("[2] b.py:1", "```", "x = 1", "```", "", "What?"),
    ]
    answer = StoredMessage("2", "c", "1", Role.ASSISTANT, "This.", passages=passages)
    assert message_text(answer) == "This."


def test_passages_and_documents_are_kept_and_exported(tmp_path: Path) -> None:
    passages = (Passage("town/23.txt", 7, ANSWER),)
    with ConversationStore(tmp_path / "a.sqlite3", pytest.fail) as store:
        conversation = store.create(documents=["/notes", "/notes", "/b"])
        question = store.add_message(conversation.id, None, "user", QUESTION)
        answer = store.add_message(conversation.id, question.id, "assistant", "Canal Street [1]")
        store.set_passages(answer.id, passages)
    with ConversationStore(tmp_path / "a.sqlite3", pytest.fail) as store:
        assert store.conversation(conversation.id).documents == ("/notes", "/b")
        assert store.message(answer.id).passages == passages
        exported = store.export_json()
        assert store.export_markdown(conversation.id).endswith("Canal Street [1]\n\nSources: [1] town/23.txt:7\n")
        (imported,) = store.import_json(exported)
        assert imported.documents == ()  # a file of others must not name what is read here
        assert [each.passages for each in store.messages(imported.id)] == [(), passages]
        hostile = json.loads(exported)
        hostile["conversations"][0]["documents"] = ["/etc"]
        with pytest.raises(edgerun.InputError, match="documents"):
            store.import_json(json.dumps(hostile))
        too_many = [str(number) for number in range(33)]
        with pytest.raises(edgerun.InputError, match="documents have 33 folders and files; at most 32 are kept"):
            store.change(conversation.id, documents=too_many)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_the_chat_answers_from_documents(long_bundle: Path, folder: Path, tmp_path: Path) -> None:
    program, option, code = EDGE_RUN
    command = [program, option, code, str(long_bundle), "-n", "4", "--spec", "off", "--ignore-eos"]
    (folder / "picture.bin").write_bytes(b"\0")

    def say(line: str, wanted: str) -> None:
        screen.type(line + "\n")
        screen.wait_for(lambda: wanted in screen.output)

    with terminal_screen(command, columns=200, environment={"TERM": "dumb"}) as screen:
        say("/documents " + str(tmp_path / "missing"), "cannot be read")
        say(f"/documents {folder}", "40 documents, 1 not text")
        say(QUESTION, "[1] town/23.txt:")
        say("zzz", "no passage of the documents fits the question")
        say("/documents", "answers are not found in documents")
        screen.type("/quit\n")
        assert screen.end() == 0
    with ConversationStore(notice=pytest.fail) as store:
        (conversation,) = store.conversations()
        question, answer, _, other = store.messages(conversation.id)
        assert (other.passages, (other.stats or {})["no_passage"]) == ((), True)
        assert "no_passage" not in (answer.stats or {})
        assert (question.content, question.passages, conversation.documents) == (QUESTION, (), ())
        assert answer.passages[0].source == "town/23.txt"
