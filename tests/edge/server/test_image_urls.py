"""`--allow-image-urls`: what is fetched for a request, and from where; a local server stands for the internet."""

from __future__ import annotations

import base64
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from shutil import which
from typing import Any

import pytest

pytest.importorskip("PIL", reason="needs the images extra")
pytest.importorskip("onnx", reason="needs the export extra")
pytest.importorskip("starlette", reason="needs the serve extra")

from edgerun.edge.server import image_urls
from edgerun.edge.server.server_settings import ServerSettings
from support.commands import Patch
from support.serving import Served, served, served_here
from support.vision_models import random_image, seeing_bundle

IMAGE = random_image(1)
PLAIN: dict[str, Any] = {"max_tokens": 8, "temperature": 0}
MEGABYTE = 1 << 20


class Pages(BaseHTTPRequestHandler):
    """Answers by path, and notes the paths."""

    def do_GET(self) -> None:
        found: list[str] = self.server.found  # type: ignore[attr-defined]
        found.append(self.path)
        name = self.path[1:]
        status, headers, body = 200, {}, IMAGE
        if name in ("moved", "loop", "away", "file"):
            target = {"moved": "a.png", "loop": "loop", "file": "file:///etc/passwd"}.get(name)
            status, headers = 302, {"Location": target or f"http://127.0.0.2:{self.server.server_port}/a.png"}
        elif name == "missing":
            status = 404
        elif name == "page":
            body = b"<html></html>"
        elif name.isdecimal():
            body = bytes(int(name) * MEGABYTE)
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        if name != "endless":
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            if name in ("slow", "endless"):
                while True:
                    self.wfile.write(b"a" * (1 if name == "slow" else MEGABYTE))
                    self.server.ending.wait(0.05 if name == "slow" else 0)  # type: ignore[attr-defined]
            self.wfile.write(body)
        except OSError:
            pass

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def web() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        server.found, server.ending = [], threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        server.ending.set()  # type: ignore[attr-defined]
        thread.join()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_bundle(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[Served]:
    with served_here(bundle, ServerSettings(allow_image_urls=True), threads=1) as server:
        yield server


@pytest.fixture
def reachable(monkeypatch: Patch) -> None:
    """Take 127.0.0.1 for an address of the internet."""
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")


def chat(server: Served, *urls: str) -> Any:
    images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    said = [*images, {"type": "text", "text": "the sea http://example.org"}]
    return server.request("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": said}], **PLAIN})


def refused(server: Served, *urls: str) -> str:
    answered = chat(server, *urls)
    assert answered.status == 400
    message: str = answered.json()["error"]["message"]
    assert "\n" not in message
    return message


@pytest.mark.usefixtures("reachable")
def test_each_api_fetches_images(server: Served, web: Any) -> None:
    data, url = base64.b64encode(IMAGE).decode(), f"http://127.0.0.1:{web.server_port}/a.png"
    text = {"type": "text", "text": "the sea"}

    def responses(url: str) -> Any:
        content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "the sea"}]
        body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, "temperature": 0}
        return server.request("POST", "/v1/responses", body).json()["output"]

    def messages(source: dict[str, str]) -> Any:
        content = [{"type": "image", "source": source}, text]
        body = {"messages": [{"role": "user", "content": content}], **PLAIN}
        return server.request("POST", "/v1/messages", body).json()["content"]

    web.found.clear()
    expected = chat(server, f"data:;base64,{data}").json()["choices"]
    assert chat(server, url).json()["choices"] == expected
    assert chat(server, url.replace("a.png", "moved")).json()["choices"] == expected
    inline = {"type": "base64", "media_type": "image/png", "data": data}
    assert messages({"type": "url", "url": url}) == messages(inline)
    texts = [each[0]["content"][0]["text"] for each in (responses(url), responses(f"data:;base64,{data}"))]
    assert texts[0] == texts[1]
    assert web.found == ["/a.png", "/moved", "/a.png", "/a.png", "/a.png"]


@pytest.mark.usefixtures("reachable")
def test_what_cannot_be_fetched_is_said_in_one_line(server: Served, web: Any, monkeypatch: Patch) -> None:
    base = f"http://127.0.0.1:{web.server_port}"
    assert "the server answers 404" in refused(server, f"{base}/missing")
    assert "more than 3 redirections" in refused(server, f"{base}/loop")
    assert "its address is not public" in refused(server, f"{base}/away")
    assert "not an http or https URL" in refused(server, f"{base}/file")
    assert "not an http or https URL" in refused(server, base.replace("//", "//user:secret@"))
    assert "cannot be read" in refused(server, f"{base}/page")
    assert "more than 10485760 bytes" in refused(server, f"{base}/11")
    assert "more than 10485760 bytes" in refused(server, f"{base}/6", f"{base}/5")
    assert "more than 10485760 bytes" in refused(server, f"{base}/endless")
    assert "cannot be fetched" in refused(server, f"https://127.0.0.1:{web.server_port}/a.png")
    for wrong in ("http://", "http://127.0.0.1:port/", "http://a b/", "http://" + "a" * 70 + ".example/"):
        assert "cannot be fetched" in refused(server, wrong)
    monkeypatch.setattr(image_urls, "_SECONDS", 0.5)
    assert "take more than 0.5 seconds" in refused(server, f"{base}/slow")
    ending, look_up = threading.Event(), socket.getaddrinfo

    def resolve(host: str, *others: Any, **named: Any) -> Any:
        return [] if host == "slow.example" and ending.wait() else look_up(host, *others, **named)

    monkeypatch.setattr(image_urls.socket, "getaddrinfo", resolve)
    assert "take more than 0.5 seconds" in refused(server, "http://slow.example/a.png")
    ending.set()


def test_addresses_of_this_machine_and_its_networks_are_refused(server: Served, web: Any, monkeypatch: Patch) -> None:
    """Also behind a name, which is asked for once: the address that was checked is the one that is connected to."""
    web.found.clear()
    asked: list[str] = []
    look_up = socket.getaddrinfo

    def resolve(host: str, *others: Any, **named: Any) -> Any:
        asked.append(host)
        return look_up("127.0.0.1" if host == "images.example" else host, *others, **named)

    for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "0.0.0.0"):  # noqa: S104
        assert "cannot be fetched: its address is not public" in refused(
            server, f"http://{host}:{web.server_port}/a.png"
        )
    with monkeypatch.context() as patched:
        patched.setattr(image_urls.socket, "getaddrinfo", resolve)
        assert "its address is not public" in refused(server, f"http://images.example:{web.server_port}/a.png")
        patched.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
        assert chat(server, f"http://images.example:{web.server_port}/a.png").status == 200
    assert asked.count("images.example") == 2
    assert web.found == ["/a.png"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        *((each, True) for each in ("8.8.8.8", "2001:4860:4860::8888")),
        *((each, False) for each in ("127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254")),
        *((each, False) for each in ("100.64.0.1", "0.0.0.0", "224.0.0.1", "240.0.0.1", "255.255.255.255")),  # noqa: S104
        *((each, False) for each in ("::1", "::", "fd00::1", "fe80::1%eth0", "ff02::1", "::ffff:8.8.8.8")),
        *((each, False) for each in ("::7f00:1", "2002:7f00:1::", "64:ff9b::7f00:1", "2001::1")),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert image_urls.is_public(address) is public


@pytest.mark.usefixtures("reachable")
@pytest.mark.skipif(which("openssl") is None, reason="makes a key with openssl")
def test_keys_of_hosts_are_checked(server: Served, web: Any, tmp_path: Path, monkeypatch: Patch) -> None:
    key, signed = tmp_path / "key.pem", tmp_path / "signed.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=local", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out"]
    subprocess.run([*made, *names, str(signed)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed, key)
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as secure:
        secure.found, secure.ending = [], web.ending  # type: ignore[attr-defined]
        secure.socket = context.wrap_socket(secure.socket, server_side=True)
        thread = threading.Thread(target=secure.serve_forever)
        thread.start()
        url = f"https://127.0.0.1:{secure.server_port}/a.png"
        assert "verify failed" in refused(server, url)
        trusting = ssl.create_default_context(cafile=str(signed))
        monkeypatch.setattr(image_urls.ssl, "create_default_context", lambda: trusting)
        assert chat(server, url).status == 200
        monkeypatch.setattr(image_urls, "_SECONDS", 0.5)
        assert "take more than 0.5 seconds" in refused(server, url.replace("a.png", "slow"))
        secure.shutdown()
        thread.join()


def test_the_option_of_the_command(bundle: Path, web: Any) -> None:
    url = f"http://127.0.0.1:{web.server_port}/a.png"
    with served([bundle], "--threads", "1", "--allow-image-urls") as server:
        assert "its address is not public" in refused(server, url)
