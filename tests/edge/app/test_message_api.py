"""Messages of the app: edit, regenerate, continue, branch, delete, and what goes wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from edgerun.models.find import BUNDLED_MODEL
from support.app_server import Json, RunningApp, Window, messages_of, new_conversation, post, read, running_app, send
from support.tiny_models import write_bundle, write_json


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path, endless_bundle: Path) -> Iterator[RunningApp]:
    """An app with a model, one with a short context, one without a chat template, and one that never ends."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(tiny_bundle, folder / "plain")
    (folder / "plain" / "edge.json").unlink()
    (folder / "plain" / "chat_template.jinja").unlink(missing_ok=True)
    settings = folder / "plain" / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    write_json(settings, {name: value for name, value in config.items() if name != "chat_template"})
    shutil.copytree(endless_bundle, folder / "endless")
    short = write_bundle(folder / "short", max_position_embeddings=48)
    models = [tiny_bundle, folder / "plain", folder / "endless", short.rename(folder / "little")]
    with running_app(tmp_path_factory.mktemp("home"), *models, "--draft", "none") as started:
        yield started


def answered(page: Window, conversation: str, content: str = "hello", parent: str | None = None) -> Json:
    """Send a message, and return the whole answer."""
    return page.wait_for_end(send(page.client, conversation, content, parent)["id"])


def tokens_of(client: httpx.Client, message: str) -> list[Json]:
    tokens: list[Json] = client.get(f"/api/messages/{message}/tokens").json()["tokens"]
    return tokens


def error_of(client: httpx.Client, path: str, status: int, **body: Any) -> str:
    return str(post(client, path, status, **body)["error"]["message"])


def test_the_tokens_of_an_answer_are_kept_but_for_the_one_that_ends_it(page: Window) -> None:
    kinds: tuple[Json, ...] = ({"sampling": {"max_tokens": 8}}, {"model": BUNDLED_MODEL})
    answer, ended = (answered(page, new_conversation(page.client, **each), "list all folders") for each in kinds)
    tokens, listed = tokens_of(page.client, answer["id"]), tokens_of(page.client, ended["id"])
    assert answer["has_tokens"]
    assert len(tokens) == answer["stats"]["tokens"] == 8
    assert [token["kind"] for token in tokens] == ["prefill", *["decoded"] * 7]
    assert all(len(token["top"]) == 5 for token in tokens)
    page.client.patch("/api/settings", json={"token_details": False})
    try:
        other, again = (answered(page, new_conversation(page.client, **each), "list all folders") for each in kinds)
    finally:
        page.client.patch("/api/settings", json={"token_details": True})
    assert other["content"] == answer["content"]
    assert not other["has_tokens"]
    assert tokens_of(page.client, other["id"]) == []
    assert page.of("delta", other["id"])[-1]["rate"]["tokens"] > 1
    assert ended["state"] == again["state"] == "complete"
    assert "".join(token["text"] for token in listed) == ended["content"] == again["content"]
    assert ended["stats"]["tokens"] == again["stats"]["tokens"] == len(listed)


def test_regenerating_adds_another_answer(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 6, "temperature": 1.5})
    first = answered(page, conversation)
    path = f"/api/messages/{first['id']}/regenerate"
    second = post(page.client, path)["answer"]
    assert (second["parent"], second["model"]) == (first["parent"], first["model"])
    page.wait_for_end(second["id"])
    shown = read(page.client, conversation)
    assert shown["conversation"]["leaf"] == second["id"]
    assert len(shown["messages"]) == 3
    third = post(page.client, f"/api/messages/{first['parent']}/regenerate")["answer"]
    assert third["parent"] == first["parent"]
    page.wait_for_end(third["id"])
    back = page.client.patch(f"/api/conversations/{conversation}", json={"leaf": first["id"]}).json()
    assert back["conversation"]["leaf"] == first["id"]
    assert error_of(page.client, path, 404, model="none").startswith("there is no model 'none'; models are: ")
    other = post(page.client, path, model=BUNDLED_MODEL)["answer"]
    assert (other["parent"], other["model"]) == (first["parent"], BUNDLED_MODEL)
    page.wait_for_end(other["id"])


def test_several_answers_are_those_of_successive_seeds(page: Window) -> None:
    sampling = {"max_tokens": 6, "temperature": 1.5, "seed": 3}
    conversation = new_conversation(page.client, sampling=sampling)
    first = answered(page, conversation)
    found = post(page.client, f"/api/messages/{first['id']}/regenerate", count=3)
    assert found["answer"] == found["answers"][0]
    for answer in found["answers"]:
        page.wait_for_end(answer["id"])
    shown = read(page.client, conversation)
    assert shown["conversation"]["leaf"] == found["answer"]["id"]
    texts = [messages_of(page.client, conversation)[answer["id"]]["content"] for answer in found["answers"]]
    alone = [
        answered(page, new_conversation(page.client, sampling={**sampling, "seed": seed}))["content"] for seed in (4, 5)
    ]
    assert texts == [first["content"], *alone]
    assert len(tokens_of(page.client, found["answers"][2]["id"])) == 6


def test_several_answers_differ_unless_greedy_decoding_was_chosen(page: Window) -> None:
    for sampling, number in (({}, 4), ({"temperature": 0}, 1)):
        first = answered(page, new_conversation(page.client, sampling={"max_tokens": 8, **sampling}))
        answers = post(page.client, f"/api/messages/{first['id']}/regenerate", count=4)["answers"]
        ended = [page.wait_for_end(answer["id"]) for answer in answers]
        assert len({answer["content"] for answer in ended}) == number
    assert "it must be at most 8" in error_of(page.client, f"/api/messages/{first['id']}/regenerate", 400, count=9)


def test_one_of_several_answers_is_stopped(page: Window) -> None:
    sampling = {"max_tokens": 400, "temperature": 1.0}
    first = answered(page, new_conversation(page.client, model="endless", sampling=sampling))
    answers = post(page.client, f"/api/messages/{first['id']}/regenerate", count=3)["answers"]
    post(page.client, f"/api/messages/{answers[2]['id']}/stop")
    assert [page.wait_for_end(answer["id"])["state"] for answer in answers] == ["length", "length", "stopped"]


def test_continuing_gives_the_text_of_an_answer_in_one_piece(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 6})
    first = answered(page, conversation)
    assert first["state"] == "length"
    page.client.patch(f"/api/conversations/{conversation}", json={"sampling": {"max_tokens": 10}})
    assert post(page.client, f"/api/messages/{first['id']}/continue")["answer"]["state"] == "writing"
    states = ["writing", "length", "writing", "length"]
    page.wait(
        lambda: [event["message"]["state"] for event in page.of("message", first["id"])] == states, "it ends again"
    )
    whole = messages_of(page.client, conversation)[first["id"]]
    assert whole["content"].startswith(first["content"])
    assert len(tokens_of(page.client, first["id"])) == whole["stats"]["tokens"] == 16
    straight = answered(page, new_conversation(page.client, sampling={"max_tokens": 16}))
    assert whole["content"] == straight["content"]


def test_continuing_a_rewritten_answer_begins_with_its_text(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 5})
    answer = answered(page, conversation)["id"]
    rewritten = post(page.client, f"/api/messages/{answer}/edit", content="I say: the", branch=False)["message"]
    assert rewritten["content"] == "I say: the"
    post(page.client, f"/api/messages/{answer}/continue")
    states = ["writing", "length", "length", "writing", "length"]
    page.wait(lambda: [event["message"]["state"] for event in page.of("message", answer)] == states, "it ends")
    kept = messages_of(page.client, conversation)[answer]
    assert kept["content"].startswith("I say: the")
    assert len(kept["content"]) > len("I say: the")
    # The tokens of the beginning are not known, so none are kept.
    assert tokens_of(page.client, answer) == []


def test_an_answer_that_cannot_go_on_keeps_what_it_has(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 200})
    answer = answered(page, conversation)
    tokens = tokens_of(page.client, answer["id"])
    assert len(tokens) == 200
    page.client.patch(f"/api/conversations/{conversation}", json={"system": "a long text " * 20})
    post(page.client, f"/api/messages/{answer['id']}/continue")
    page.wait(lambda: page.of("message", answer["id"])[-1]["message"]["state"] == "failed", "it fails")
    kept = messages_of(page.client, conversation)[answer["id"]]
    assert "does not fit the context" in kept["error"]
    assert kept["content"] == answer["content"]
    assert tokens_of(page.client, answer["id"]) == tokens


def test_a_branch_begins_with_the_chosen_token(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 6})
    answer = answered(page, conversation)
    tokens = tokens_of(page.client, answer["id"])
    index, chosen = next(
        (place, each)
        for place, token in enumerate(tokens)
        for each in token["top"][1:]
        if place and "�" not in each["text"] and not each.get("special")
    )
    path = f"/api/messages/{answer['id']}/branch"
    branch = post(page.client, path, index=index, alternative=chosen["id"])["answer"]
    assert branch["parent"] == answer["parent"]
    begun = [*tokens[:index], chosen]
    assert branch["content"] == "".join(each["text"] for each in begun if not each.get("special"))
    ended = page.wait_for_end(branch["id"])
    now = tokens_of(page.client, branch["id"])
    assert now[:index] == tokens[:index]
    assert (now[index]["id"], now[index]["kind"], now[index]["top"]) == (chosen["id"], "chosen", tokens[index]["top"])
    assert now[index]["rejected"] == tokens[index]["text"]
    assert len(now) == index + 1 + 6
    assert ended["content"] == "".join(token["text"] for token in now if not token.get("special"))
    assert "token 299" in error_of(page.client, path, 400, index=0, alternative=299)
    assert "index is 99, but 6 tokens" in error_of(page.client, path, 400, index=99, alternative=0)


def test_a_branch_at_the_end_token_ends_there(page: Window) -> None:
    conversation = new_conversation(page.client, sampling={"max_tokens": 40})
    for seed in range(50):
        changes = {"sampling": {"max_tokens": 40, "temperature": 2.0, "seed": seed}}
        page.client.patch(f"/api/conversations/{conversation}", json=changes)
        answer = answered(page, conversation)
        tokens = tokens_of(page.client, answer["id"])
        ends = [place for place, token in enumerate(tokens) if place and any(each["id"] == 0 for each in token["top"])]
        if ends:
            break
    else:
        pytest.fail("no answer has the end token among its alternatives")
    branch = post(page.client, f"/api/messages/{answer['id']}/branch", index=ends[0], alternative=0)["answer"]
    ended = page.wait_for_end(branch["id"])
    assert ended["state"] == "complete"
    assert tokens_of(page.client, branch["id"]) == tokens[: ends[0]]


@pytest.mark.parametrize("deleted", ["message", "conversation"])
def test_an_answer_that_is_written_is_changed_by_nobody_and_ends_when_deleted(page: Window, deleted: str) -> None:
    conversation = new_conversation(page.client, model="endless")
    answer = send(page.client, conversation, "hello")
    page.wait(lambda: page.of("delta", answer["id"]), "the answer begins")
    for action, body in (("edit", {"content": "x"}), ("continue", {}), ("branch", {"index": 0, "alternative": 0})):
        path = f"/api/messages/{answer['id']}/{action}"
        assert error_of(page.client, path, 409, **body) == "the answer is being written; stop it first"
    paths = {"message": f"/api/messages/{answer['parent']}", "conversation": f"/api/conversations/{conversation}"}
    assert page.client.delete(paths[deleted]).json() == {}
    assert page.wait_for_end(answer["id"])["state"] == "stopped"
    page.wait(lambda: page.of(f"{deleted}_deleted"), "the window is told")
    gone = page.client.get("/api/conversations?deleted=1").json()["conversations"]
    assert (conversation in {each["id"] for each in gone}) == (deleted == "conversation")
    post(page.client, f"{paths[deleted]}/restore")
    assert len(messages_of(page.client, conversation)) == 2


@pytest.mark.parametrize(
    ("model", "content", "message"),
    [
        ("plain", "hello", "plain has no chat template, so it cannot chat; choose another model"),
        ("little", "a long message " * 20, "the last message does not fit the context"),
        ("missing", "hello", "there is no model 'missing'"),
    ],
)
def test_an_answer_that_cannot_be_generated_says_why(page: Window, model: str, content: str, message: str) -> None:
    conversation = new_conversation(page.client, model=model)
    answer = answered(page, conversation, content)
    assert answer["state"] == "failed"
    assert message in answer["error"]
    assert "\n" not in answer["error"]
    assert messages_of(page.client, conversation)[answer["id"]]["error"] == answer["error"]


def test_turns_are_left_out_and_it_is_said(page: Window) -> None:
    conversation = new_conversation(page.client, model="little", sampling={"max_tokens": 4})
    first = answered(page, conversation, "the first message")
    second = answered(page, conversation, "the second message, which is longer", first["id"])
    assert second["stats"]["trimmed"] == [first["parent"], first["id"]]
    assert page.of("trimmed") == [
        {
            "type": "trimmed",
            "conversation": conversation,
            "message": second["id"],
            "turns": [first["parent"], first["id"]],
        }
    ]
    assert read(page.client, conversation)["trimmed"] == [first["parent"], first["id"]]
    context = post(page.client, f"/api/conversations/{conversation}/context", content="and then")
    assert context["trimmed"][:2] == [first["parent"], first["id"]]
    assert context["context"] == 48
    assert 0 < context["tokens"] <= 48 - context["reserve"]
    too_long = post(page.client, f"/api/conversations/{conversation}/context", content="a long message " * 20)
    assert "does not fit" in too_long["problem"]


def test_what_an_empty_or_unknown_message_is_answered_with(client: httpx.Client) -> None:
    conversation = new_conversation(client)
    path = f"/api/conversations/{conversation}/messages"
    assert "the message is empty" in error_of(client, path, 400, content=" \n")
    assert "content is missing" in error_of(client, path, 400)
    assert "unknown field" in error_of(client, path, 400, content="x", role="assistant")
    for method, other in (
        ("POST", "/api/conversations/none/messages"),
        ("GET", "/api/conversations/none"),
        ("DELETE", "/api/conversations/none"),
        ("POST", "/api/messages/none/stop"),
        ("POST", "/api/messages/none/regenerate"),
        ("GET", "/api/messages/none/tokens"),
        ("DELETE", "/api/messages/none"),
    ):
        body = None if method in {"GET", "DELETE"} else {"content": "x"} if "messages" in other[-8:] else {}
        response = client.request(method, other, json=body)
        assert response.status_code == 404, other
        assert "there is no" in response.json()["error"]["message"]
    assert "there is no message 'none'" in error_of(client, path, 400, content="x", parent="none")
