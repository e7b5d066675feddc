"""The page in a real browser: images that are picked, pasted, dropped and taken with the camera."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

pytest.importorskip("playwright", reason="needs playwright")
pytest.importorskip("PIL", reason="needs the images extra")

from playwright.sync_api import Browser, Locator, expect

from support.browser import look
from support.chat_page import ChatPage, opened
from support.vision_models import random_image, seeing_bundle

TRANSFER = """([png, name, kind]) => {
  const bytes = Uint8Array.from(atob(png), (character) => character.charCodeAt(0));
  const data = new DataTransfer();
  data.items.add(new File([bytes], name, { type: "image/png" }));
  const event = kind === "paste" ? new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true })
    : new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector("#composer-text").dispatchEvent(event);
}"""


def shown(images: Locator) -> list[bool]:
    """Whether each image has pixels."""
    found: list[bool] = images.evaluate_all("(all) => all.map((each) => each.complete && each.naturalWidth > 0)")
    return found


def attach(chat: ChatPage, number: int, kind: str) -> None:
    """Paste or drop an image on the composer."""
    chat.page.evaluate(TRANSFER, [base64.b64encode(random_image(number)).decode(), f"{kind}.png", kind])


def test_images_are_attached_in_four_ways_and_stay_with_their_conversation(tmp_path: Path, chromium: Browser) -> None:
    bundle, home = seeing_bundle(tmp_path), tmp_path / "home"
    with opened(chromium, home, bundle, "--draft", "none") as app, app.window() as chat:
        attached = chat.page.locator(".attached li")
        chat.attached_files.set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": random_image(1)})
        expect(attached).to_have_count(1)
        for count, kind in enumerate(("paste", "drop"), 2):
            attach(chat, count, kind)
            expect(attached).to_have_count(count)
        chat.page.context.grant_permissions(["camera"])
        chat.page.get_by_role("button", name="Take a picture").click()
        chat.page.get_by_role("button", name="Take it").click()
        expect(attached).to_have_count(4)
        assert shown(attached.locator("img")) == [True] * 4
        chat.page.get_by_role("button", name="Remove drop.png").click()
        expect(attached).to_have_count(3)
        chat.send("the sea and the sand")
        chat.in_state("length")
        look(chat.page, "images")
        conversation = chat.id()
    with opened(chromium, home, bundle, "--draft", "none") as app, app.window(path=f"/#/c/{conversation}") as chat:
        images = chat.messages.first.get_by_role("img")
        expect(images).to_have_count(3)
        assert [each.get_attribute("alt") for each in images.all()] == ["a.png", "paste.png", "camera.png"]
        assert shown(images) == [True] * 3
        chat.send("other")
        expect(chat.answers).to_have_count(2)
        chat.in_state("length")
