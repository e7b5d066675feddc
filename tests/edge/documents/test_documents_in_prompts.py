"""What of documents goes into prompts, through the command line, the chat and the store."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgerun
from edgerun import Engine, GenerateOptions
from edgerun.edge.cli.main import main
from edgerun.edge.conversations.answering import fit_answers, without_long_files
from edgerun.edge.conversations.records import (
    Attachment,
    MessageState,
    Passage,
    Role,
    StoredMessage,
    message_text,
    with_passages,
)
from edgerun.edge.conversations.store import ConversationStore
from edgerun.edge.documents.document_index import DocumentIndex, index_path, with_index
from edgerun.edge.documents.retrieval import MAX_PASSAGES, attached_file, find_passages, fitting, fused
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
        fit = fit_answers(engine, store, [answer], options, silent, Cancellation(), "none", ())
    assert not fit.no_passage
    assert ANSWER in fit.passages[0].text
    assert (len(fit.prompt.messages), len(fit.trimmed)) == (3 - trimmed, trimmed)


def test_files_of_messages_that_do_not_fit_are_documents(engine: Engine) -> None:
    """Also those that do not fit together; others stay, and so does a message that is too long by itself."""

    def asked(name: str, *texts: str) -> StoredMessage:
        return StoredMessage(name, "c", None, Role.USER, "What?", tuple(Attachment(name, text) for text in texts))

    short, long, several = asked("a", "to " * 900), asked("b", "to " * 9_000), asked("c", *["to " * 900] * 3)
    typed = StoredMessage("d", "c", None, Role.USER, "to " * 9_000)
    kept, files = without_long_files(engine, "", [short, long, several, typed], GenerateOptions())
    assert [len(each.attachments) for each in kept] == [1, 0, 0, 0]
    assert (files, kept[3]) == ([*long.attachments, *several.attachments], typed)


@pytest.mark.parametrize("name", ["../../x.txt", "/etc/passwd", "a\0b", "", "..", "Größe 1.csv", "漢" * 300])
def test_attached_files_lie_in_the_cache_folder_whatever_their_names(tmp_path: Path, name: str) -> None:
    path = attached_file(name, "text")
    assert path.parent.parent == tmp_path / "cache" / "documents"
    assert path.read_text(encoding="utf-8") == "text"
    assert attached_file(name, "text") == path != attached_file(name, "other")
    if sys.platform != "win32":
        assert [stat.S_IMODE(each.stat().st_mode) for each in (path, *path.parents[:2])] == [0o600, 0o700, 0o700]


def test_what_nobody_has_used_for_a_month_is_removed(folder: Path, tmp_path: Path) -> None:
    used, unused = attached_file("a.txt", "one"), attached_file("b.txt", "two")
    for path in (folder, used, unused):
        with_index(path, DocumentIndex.update)
    others = unused.parent.parent / "holiday"
    others.mkdir()
    for path in (index_path(unused)[1], unused.parent, index_path(used)[1], used.parent, others):
        os.utime(path, (time.time() - 31 * 86_400,) * 2)
    assert attached_file("a.txt", "one") == used
    with_index(used, DocumentIndex.update)
    assert (used.exists(), unused.exists(), others.exists()) == (True, False, True)
    indexes = {path.name for path in (tmp_path / "cache" / "documents").glob("*.sqlite3*")}
    assert indexes == {index_path(each)[1].name for each in (folder, used)}


@pytest.mark.skipif(sys.platform == "win32", reason="needs a terminal")
def test_the_chat_reads_a_long_file_in_passages(long_bundle: Path, tmp_path: Path) -> None:
    lines = ["A report about the market and the harbour."] * 1_000
    (tmp_path / "report.txt").write_text("\n".join([*lines, ANSWER, *lines]), encoding="utf-8")
    program, option, code = EDGE_RUN
    command = [program, option, code, str(long_bundle), "-n", "4", "--spec", "off", "--ignore-eos"]
    with terminal_screen(command, columns=200, environment={"TERM": "dumb"}) as screen:
        for line, wanted in (
            (f"/load {tmp_path / 'report.txt'}", "passages of it that fit the next message go with it"),
            (QUESTION, "[1] report.txt:"),
            ("Is it Canal Street?", "[1] report.txt:"),
        ):
            before = screen.output.count(wanted)
            screen.type(line + "\n")
            screen.wait_for(lambda wanted=wanted, before=before: screen.output.count(wanted) > before)
        screen.type("/quit\n")
        assert screen.end() == 0


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
