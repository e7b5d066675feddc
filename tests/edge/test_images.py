"""Images in messages: over HTTP in four APIs, over rpc, in saved conversations, in the terminal and in the app."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("starlette", reason="needs the serve extra")

from PIL import Image

import edgerun
from edgerun import Engine
from edgerun.edge.conversations.records import Attachment
from edgerun.edge.conversations.store import ConversationStore
from edgerun.runtime.images.decoding import kept_image
from support.app_server import ask, new_conversation, post, read, running_app, window
from support.commands import Capture, Patch, json_of, output_of
from support.processes import EDGE_RUN
from support.rpc_client import rpc
from support.serving import Served, served
from support.terminal_screen import terminal_screen
from support.vision_models import random_image, seeing_bundle

IMAGES = [random_image(number) for number in range(3)]
TEXT = "the sea and the sand"
PLAIN: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_bundle(tmp_path_factory.mktemp("models")).rename(tmp_path_factory.getbasetemp() / "seeing")


@pytest.fixture(scope="module")
def engine(bundle: Path) -> Iterator[Engine]:
    with edgerun.load(bundle, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(bundle: Path, tiny_bundle: Path) -> Iterator[Served]:
    with served([bundle, tiny_bundle], "--threads", "1") as server:
        yield server


def parts(image: bytes, text: str = TEXT) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image}, {"type": "text", "text": text}]


def answer(engine: Engine, image: bytes, text: str = TEXT) -> str:
    return engine.generate([{"role": "user", "content": parts(image, text)}], **PLAIN).text


def encoded(image: bytes) -> str:
    return base64.b64encode(image).decode()


def openai_body(url: str) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
    return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": TEXT}]}]}


def over_http(server: Served, api: str, data: str, model: str = "seeing") -> Any:
    """The response to a message with an image in base64, in the form of an API."""
    url, said = f"data:image/png;base64,{data}", {"role": "user", "content": TEXT}
    path, body = {
        "openai": ("/v1/chat/completions", openai_body(url) | PLAIN),
        "responses": (
            "/v1/responses",
            {
                "input": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "input_image", "image_url": url},
                            {"type": "input_text", "text": TEXT},
                        ],
                    }
                ],
                "max_output_tokens": 8,
                "temperature": 0,
                "ignore_eos": True,
            },
        ),
        "anthropic": (
            "/v1/messages",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
                            {"type": "text", "text": TEXT},
                        ],
                    }
                ],
                **PLAIN,
            },
        ),
        "ollama chat": (
            "/api/chat",
            {"messages": [{**said, "images": [data]}], "stream": False, "options": {**PLAIN, "num_predict": 8}},
        ),
        "ollama generate": (
            "/api/generate",
            {"prompt": TEXT, "images": [data], "stream": False, "options": {**PLAIN, "num_predict": 8}},
        ),
    }[api]
    body.get("options", {}).pop("max_tokens", None)
    return server.request("POST", path, {"model": model, **body})


def text_of(response: Any) -> str:
    """The text of an answer in any of the APIs."""
    found = response.json()
    if "choices" in found:
        found = found["choices"][0]["message"]
    elif "output" in found:
        found = found["output"][0]["content"][0]
    found = found.get("message", found)
    content = found.get("content", found.get("response", found.get("text")))
    return str(content[0]["text"] if isinstance(content, list) else content)


APIS = ("openai", "responses", "anthropic", "ollama chat", "ollama generate")


@pytest.mark.parametrize("api", APIS)
def test_each_api_takes_images(api: str, server: Served, engine: Engine) -> None:
    expected = [answer(engine, image) for image in IMAGES[:2]]
    assert expected[0] != expected[1]
    assert [text_of(over_http(server, api, encoded(image))) for image in IMAGES[:2]] == expected


@pytest.mark.parametrize("api", APIS)
def test_each_api_says_what_is_wrong_with_an_image(api: str, server: Served) -> None:
    wrong = {
        "?": "not base64",
        encoded(b"<html></html>"): "an image cannot be read",
        encoded(IMAGES[0][:200]): "an image cannot be read",
    }
    for data, what in wrong.items():
        response = over_http(server, api, data)
        assert response.status == 400
        assert what in response.body.decode()
    blind = over_http(server, api, encoded(IMAGES[0]), "bundle")
    assert (blind.status, "reads text alone" in blind.body.decode()) == (400, True)


def test_other_urls_and_too_many_images_are_refused(server: Served) -> None:
    for url in ("http://127.0.0.1:1/a.png", "https://example.org/a.png", "file:///etc/passwd", "/etc/passwd"):
        refused = server.request("POST", "/v1/chat/completions", {"model": "seeing", **openai_body(url)})
        assert refused.status == 400
        error = refused.json()["error"]
        assert (error["param"], "data: URLs" in error["message"]) == ("messages[0].content[0]", True)
    image = {"type": "image_url", "image_url": {"url": "data:;base64,aGk="}}
    body = {"model": "seeing", "messages": [{"role": "user", "content": [image] * 1001}]}
    assert "1001 images" in server.request("POST", "/v1/chat/completions", body).body.decode()
    source = {"type": "url", "url": "http://127.0.0.1:1/a.png"}
    body = {"model": "seeing", "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}]}
    assert "images come in base64" in server.request("POST", "/v1/messages", body | {"max_tokens": 1}).body.decode()
    body = {"model": "seeing", "prompt": "a", "raw": True, "images": [encoded(IMAGES[0])]}
    assert "images and raw are both given" in server.request("POST", "/api/generate", body).body.decode()


def test_after_a_restart_an_image_is_read_from_disk(tmp_path: Path) -> None:
    """The second server cannot load the tower, and answers another question about the image that the first one read."""
    model, cache, file = seeing_bundle(tmp_path), tmp_path / "cache", tmp_path / "request.json"

    def messages(image: bytes) -> list[dict[str, Any]]:
        content = [
            *openai_body(f"data:;base64,{encoded(image)}")["messages"][0]["content"],
            {"type": "text", "text": 3 * TEXT},
        ]
        return [{"role": "user", "content": content}, {"role": "assistant", "content": "there"}]

    def ask(server: Served, image: bytes, text: str) -> Any:
        body = {"messages": [*messages(image), {"role": "user", "content": text}], **PLAIN}
        return server.request("POST", "/v1/chat/completions", body)

    file.write_text(json.dumps({"messages": messages(IMAGES[0])}), encoding="utf-8")
    options, environment = ("--threads", "1", "--prefix", str(file)), {"EDGERUN_CACHE": str(cache)}
    with edgerun.load(model, threads=1, prefix_disk=0, cache=False) as engine:
        asked = [*messages(IMAGES[0]), {"role": "user", "content": "the other"}]
        expected = engine.generate(asked, **PLAIN)
    with served([model], *options, **environment) as first:
        assert ask(first, IMAGES[0], "the sea").status == ask(first, IMAGES[1], "the sea").status == 200
    with served([model], *options, **environment) as second:
        (model / "vision.onnx").write_bytes(b"no graph")  # which is loaded when it is needed
        assert ask(second, IMAGES[1], "the other").status == 500
        answered = ask(second, IMAGES[0], "the other").json()
    assert answered["choices"][0]["message"]["content"] == expected.text
    usage = answered["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] * 3 // 4


def test_clients_learn_which_models_see(server: Served) -> None:
    for name, sees in (("seeing", True), ("bundle", False)):
        for said in (
            server.request("POST", "/api/show", {"model": name}),
            server.request("GET", f"/v1/models/{name}"),
        ):
            assert ("vision" in said.json().get("capabilities", ())) is sees


def test_a_session_keeps_its_images_in_a_file(bundle: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.session"
    with edgerun.load(bundle, threads=1) as engine, engine.session() as chat:
        first = chat.send(parts(IMAGES[0]), **PLAIN)
        assert first.text == answer(engine, IMAGES[0])
        chat.save(saved)
        expected = chat.send("other", **PLAIN)
    with edgerun.load(bundle, threads=1) as engine, engine.session(resume=saved) as chat:
        assert chat.messages[0]["content"] == parts(IMAGES[0])
        again = chat.send("other", **PLAIN)
        assert (again.text, again.stats.reused_tokens) == (expected.text, expected.stats.reused_tokens)
        # The slots of one image are not those of another.
        other = engine.generate([{"role": "user", "content": parts(IMAGES[1])}], **PLAIN)
        assert other.stats.reused_tokens < first.stats.prompt_tokens // 2


def test_rpc_takes_images_and_returns_them(bundle: Path, engine: Engine, tmp_path: Path) -> None:
    url = f"data:image/png;base64,{encoded(IMAGES[1])}"
    content = openai_body(url)["messages"][0]["content"]
    saved = str(tmp_path / "saved.session")
    with rpc(str(bundle)) as client:
        id_ = client.call("session/new")["session_id"]
        said = {"session_id": id_, "prompt": content, **PLAIN}
        assert client.call("session/prompt", said)["text"] == answer(engine, IMAGES[1])
        client.call("session/save", {"session_id": id_, "path": saved})
        message = client.call("session/restore", {"path": saved})["messages"][0]
        assert message["content"][0]["image_url"]["url"].partition(",")[2] == encoded(IMAGES[1])
        whole = client.call("generate", openai_body(url) | PLAIN)
        assert whole["choices"][0]["message"]["content"] == answer(engine, IMAGES[1])
        error = client.refused(
            "session/prompt", {**said, "prompt": openai_body("http://a/b")["messages"][0]["content"]}
        )
        assert "has the URL 'http://a/b'" in str(error)


def test_a_saved_conversation_goes_on_with_an_image(
    bundle: Path, engine: Engine, tmp_path: Path, capsys: Capture
) -> None:
    saved, picture = tmp_path / "saved.session", tmp_path / "a.png"
    picture.write_bytes(IMAGES[0])
    with engine.session() as chat:
        chat.send("other", **PLAIN)
        chat.save(saved)
        expected = chat.send(parts(IMAGES[0]), **PLAIN).text
    arguments = ["-p", TEXT, "-n", 8, "-t", 0, "--ignore-eos", "--json", "--resume", saved, "--image", picture]
    assert json_of(capsys, bundle, *arguments)["text"] == expected


def test_inspect_says_that_a_model_sees(bundle: Path, engine: Engine, tiny_bundle: Path, capsys: Capture) -> None:
    found = json_of(capsys, "inspect", bundle, "--json")["images"]
    assert (found["family"], found["tower"]) == ("smolvlm", "fp32")
    assert found["bytes"] == sum(path.stat().st_size for path in bundle.glob("vision.onnx*"))
    picture = BytesIO()
    Image.new("RGB", (448, 448)).save(picture, "png")
    assert engine.model.vision is not None
    assert found["tokens_of_448_x_448"] == engine.model.vision.see(picture.getvalue()).tokens
    shown = f"smolvlm, {found['tokens_of_448_x_448']} tokens for 448 x 448 pixels, fp32 tower of"
    assert shown in " ".join(output_of(capsys, "inspect", bundle).split())
    assert "images" not in json_of(capsys, "inspect", tiny_bundle, "--json")


def test_the_terminal_takes_images_by_command_and_by_dropping(
    bundle: Path, engine: Engine, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path))
    names = ["plain.png", "two words.png", "it's three.png"]
    seen = {"type": "image", "image": kept_image(IMAGES[0])}
    tokens = engine.count_tokens([{"role": "user", "content": [seen]}])
    for name, image in zip(names, IMAGES, strict=True):
        (tmp_path / name).write_bytes(image)
    (tmp_path / "page.png").write_text("<html></html>", encoding="utf-8")
    chat = [*EDGE_RUN, str(bundle), "-n", "8", "-t", "0", "--ignore-eos", "--spec", "off"]
    with terminal_screen(chat, columns=300, environment={"TERM": "dumb"}) as screen:

        def say(line: str, expected: str) -> None:
            before = len(screen.output)
            screen.type(line + "\n")
            screen.wait_for(lambda: expected in screen.output[before:])

        def answered() -> None:
            screen.wait_for(lambda: screen.output.rpartition(TEXT)[2].endswith("\n> "))

        screen.wait_for(lambda: "> " in screen.output)
        say(f"/image {tmp_path}/missing.png", "No such file")
        say(f"/image {tmp_path}/page.png", "an image cannot be read")
        say(f"/image {tmp_path}/plain.png", f"plain.png: {tokens} tokens")
        say(f"'{tmp_path}/two words.png' {TEXT}", "two words.png: ")
        answered()
        say("/new", "new conversation")
        escaped = str(tmp_path / "it's three.png").replace("'", "\\'").replace(" ", "\\ ")
        say(escaped, "goes with the next message")
        say(TEXT, "\n")
        answered()
        say("/image", "/image needs a file")
        say(f"/export {tmp_path}/last.json", "written to")
        screen.type("/quit\n")
        assert screen.end() == 0
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        stored = [store.shown(each.id)[1] for each in store.conversations()]
    asked = {tuple(each.name for each in messages[0].attachments): messages for messages in stored}
    assert set(asked) == {("plain.png", "two words.png"), ("it's three.png",)}
    (_, three) = asked[("it's three.png",)]
    assert three.content == answer(engine, base64.b64decode(kept_image(IMAGES[2]).partition(",")[2]))
    exported = json.loads((tmp_path / "last.json").read_text(encoding="utf-8"))
    assert exported["conversations"][0]["messages"][0]["attachments"][0]["image"] == kept_image(IMAGES[2])


def test_the_terminal_refuses_images_of_a_model_that_reads_text_alone(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("EDGERUN_HOME", str(tmp_path))
    (tmp_path / "a.png").write_bytes(IMAGES[0])
    with terminal_screen([*EDGE_RUN, str(tiny_bundle), "-n", "4"], columns=300, environment={"TERM": "dumb"}) as screen:
        screen.wait_for(lambda: "> " in screen.output)
        for count, line in enumerate((f"/image {tmp_path}/a.png", f"{tmp_path}/a.png {TEXT}"), 1):
            screen.type(line + "\n")
            screen.wait_for(lambda count=count: screen.output.count("reads text alone") == count)
            screen.wait_for(lambda: screen.output.endswith("\n> "))
        said = [each for each in screen.output.splitlines() if "reads text alone" in each]
        assert len(said) == 2
        assert all("a vision tower" in each for each in said)
        screen.type("/quit\n")
        assert screen.end() == 0
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        assert not store.conversations()


def test_the_app_keeps_images_with_their_conversation(bundle: Path, engine: Engine, tmp_path: Path) -> None:
    kept = kept_image(IMAGES[0])
    with running_app(tmp_path, bundle, "--draft", "none") as app, app.entered() as client:
        image = post(client, "/api/image", name="a.png", url=f"data:image/png;base64,{encoded(IMAGES[0])}")["image"]
        assert image == kept
        what = post(client, "/api/image", 400, name="a.png", url="data:image/png;base64,aGk=")
        assert "an image cannot be read" in what["error"]["message"]
        sampling = {"temperature": 0, "max_tokens": 8}
        conversation, path = new_conversation(client, sampling=sampling), "/api/conversations/{}/messages"
        attachments = [{"name": "a.png", "text": "", "image": image}]
        for wrong in ("https://example.org/a.png", "data:image/svg+xml;base64,aGk=", 'data:image/png;base64,a"b'):
            body = {"content": TEXT, "attachments": [{**attachments[0], "image": wrong}]}
            assert "not an image" in post(client, path.format(conversation), 400, **body)["error"]["message"]
        with window(app, client.cookies) as page:
            sent = post(client, path.format(conversation), content=TEXT, attachments=attachments)
            first = page.wait_for_end(sent["answer"]["id"])
        exported = [
            client.get(f"/api/conversations/{conversation}/export?format={kind}") for kind in ("json", "markdown")
        ]
    with running_app(tmp_path, bundle, "--draft", "none") as app, app.entered() as client:
        question = read(client, conversation)["messages"][0]
        assert question["attachments"] == attachments
        with window(app, client.cookies) as page:
            sent = post(client, path.format(conversation), content="other", parent=first["id"])
            assert page.wait_for_end(sent["answer"]["id"])["error"] is None
            for name, file in zip(("a.json", "a.md"), exported, strict=True):
                (copy,) = post(client, "/api/import", name=name, content=file.text)["conversations"]
                (asked, *_) = read(client, copy["id"])["messages"]
                assert (asked["content"], asked["attachments"]) == (TEXT, attachments)
                post(client, path.format(copy["id"]), content="", attachments=attachments)
        assert ask(client, "/api/state")["models"][0]["capabilities"][-1] == "vision"
    decoded = base64.b64decode(kept.partition(",")[2])
    assert engine.generate([{"role": "user", "content": parts(decoded)}], **sampling).text == first["content"]


def test_kept_images_are_small_and_tell_nothing_of_the_camera() -> None:
    from io import BytesIO

    from PIL import Image

    photo, file = Image.open(BytesIO(random_image(1, (3000, 1000)))), BytesIO()
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "a camera", 6  # turned by a quarter
    photo.save(file, "JPEG", exif=exif)
    url = kept_image(file.getvalue())
    kept = Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))
    assert (kept.size, dict(kept.getexif())) == ((683, 2048), {})
    assert re.fullmatch(r"data:image/(png|jpeg);base64,[\w+/=]+", url)
    assert kept_image(base64.b64decode(url.partition(",")[2])) != ""


def test_stored_attachments_of_earlier_versions_are_read(tmp_path: Path) -> None:
    with ConversationStore(tmp_path / "conversations.sqlite3") as store:
        conversation = store.create().id
        message = store.add_message(conversation, None, "user", "hello", attachments=[Attachment("a.txt", "text")])
        store.database.write(
            lambda connection: connection.execute("UPDATE message SET attachments = ?", ('[["a.txt", "text"]]',))
        )
        assert store.message(message.id).attachments == (Attachment("a.txt", "text"),)
