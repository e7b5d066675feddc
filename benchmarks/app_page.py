"""The app's page in a conversation of 500 messages: time of a keystroke and of a token, in a real browser.

Starts `edge-run app` with a data folder of its own and opens the conversation in chromium. A keystroke takes from the
key's own timestamp to the first task after the frame that shows it, a token from its event's arrival to the same
point; up to a frame (16.7 ms) of either is waiting for the screen. The processor's time that the page's thread took is
given beside it, since other programs, and the model itself, make everything wait; a token's has its share of what a
question and the end of its answer take. Then the component that shows Markdown is measured alone, in answers that grow
by one token at a time: the time of a change with its layout.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page, sync_playwright

from edgerun.edge.conversations.store import ConversationStore

TIMES: Final = 200
"""Number of keystrokes, and least number of tokens."""
LENGTHS: Final = (10_000, 50_000, 200_000)
"""Lengths of the growing answers, in characters."""
ANSWER: Final = (
    "An answer of some **length** with `code`, a [link](https://example.org) and a formula $x^2$.\n\n- one\n- two\n\n"
    "```python\ndef double(x):\n    return 2 * x\n```\n\n|a|b|\n|-|-|\n|1|2|\n\n"
)
_RECORD: Final = """
window.keys = [];
window.tokens = [];
window.finished = 0;
const shown = (times, begin) => requestAnimationFrame(() => setTimeout(() => times.push(performance.now() - begin)));
addEventListener("keydown", (event) => shown(window.keys, event.timeStamp), true);
window.EventSource = class extends EventSource {
  constructor(...options) {
    super(...options);
    // Called before the page's own handler, which is set later.
    this.addEventListener("message", ({ data }) => {
      const { type, message } = JSON.parse(data);
      if (type === "delta") shown(window.tokens, performance.now());
      if (type === "message" && message.role === "assistant" && message.state !== "writing") window.finished += 1;
    });
  }
};
"""
_GROW: Final = """async ([answer, length, times]) => {
  const { h, render } = await import("edgerun/preact");
  const { Markdown } = await import("/page/markdown.js");
  const box = document.createElement("div");
  document.querySelector("main").append(box);
  let text = answer.repeat(Math.ceil(length / answer.length)).slice(0, length);
  const show = () => {
    const begin = performance.now();
    render(h(Markdown, { text, writing: true }), box);
    box.offsetHeight;
    return performance.now() - begin;
  };
  const first = show();
  await new Promise((resolve) => setTimeout(resolve, 2000));
  const taken = [];
  for (let at = 0; at < times; at += 1) {
    text += answer.slice((at * 4) % answer.length).slice(0, 4);
    taken.push(show());
    await new Promise(requestAnimationFrame);
  }
  render(null, box);
  box.remove();
  return [first, taken];
}"""


def filled(home: Path, messages: int) -> str:
    """Write a conversation of so many messages into a data folder, and return its id."""
    store = ConversationStore(home / "conversations.sqlite3")
    conversation = store.create(title="Long").id
    parent = None
    for number in range(messages // 2):
        question = store.add_message(conversation, parent, "user", f"find files larger than {number} MB")
        parent = store.add_message(conversation, question.id, "assistant", ANSWER).id
    store.close()
    return conversation


def summary(times: Sequence[float]) -> dict[str, float]:
    """Median and worst of times, in milliseconds."""
    return {"number": len(times), "median_ms": statistics.median(times), "worst_ms": max(times)}


def thread_time(page: Page) -> Callable[[int], float]:
    """Begin to measure the processor's time of the page's thread.

    Returns:
        A function that gives the time since then, in milliseconds for each of so many events.
    """
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def seconds() -> float:
        metrics = {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}
        return float(metrics["TaskDuration"])

    begin = seconds()
    return lambda events: (seconds() - begin) * 1000 / events


def measure(page: Page, conversation: str) -> dict[str, Any]:
    """Measure keystrokes, tokens and growing answers in a page of the app."""
    page.evaluate("id => { location.hash = '#/c/' + id }", conversation)
    page.locator(".message.assistant .md").last.wait_for()
    found: dict[str, Any] = {"messages": page.locator("[data-message]").count()}
    composer = page.get_by_role("textbox", name="Message", exact=True)
    composer.click()
    used = thread_time(page)
    for number in range(TIMES):
        page.keyboard.press("abcde "[number % 6])
        page.wait_for_function("number => window.keys.length > number", arg=number)
    found["keystroke"] = {**summary(page.evaluate("window.keys")), "thread_ms": used(TIMES)}
    used = thread_time(page)
    page.keyboard.press("Control+a")
    while page.evaluate("window.tokens.length") < TIMES:
        # Playwright's selectors would take more of the page's time than the page.
        before = page.evaluate("window.finished")
        page.keyboard.insert_text("find files larger than 100 MB and sort them by size")
        page.keyboard.press("Enter")
        page.wait_for_function("before => window.finished > before", arg=before, polling=100)
    found["token"] = summary(page.evaluate("window.tokens"))
    found["token"]["thread_ms"] = used(int(found["token"]["number"]))
    for length in LENGTHS:
        first, times = page.evaluate(_GROW, [ANSWER, length, TIMES])
        found[f"answer of {length:,} characters"] = {**summary(times), "first_ms": first}
    return found


def opened_address(app: subprocess.Popen[str]) -> str:
    """Wait until the app says its address."""
    for line in app.stderr or ():
        if found := re.search(r"edge-run: open (http://\S+)", line):
            return found[1]
    raise SystemExit("the app did not start")


def main() -> int:
    """Start an app and a browser, measure, and end both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the model; the bundled one when left out")
    parser.add_argument("--messages", type=int, default=500)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is needed")
    command = [sys.executable, "-c", "from edgerun.edge.cli.main import main; raise SystemExit(main())", "app"]
    command += [*([options.model] if options.model else []), "--no-browser", "--port", "0"]
    with tempfile.TemporaryDirectory() as home:
        conversation = filled(Path(home), options.messages)
        environment = {**os.environ, "EDGERUN_HOME": home}
        with (
            subprocess.Popen(command, stderr=subprocess.PIPE, encoding="utf-8", env=environment) as app,
            sync_playwright() as playwright,
        ):
            try:
                browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
                page = browser.new_page()
                page.add_init_script(_RECORD)
                page.goto(opened_address(app))
                found = measure(page, conversation)
                version = browser.version
                browser.close()
            finally:
                app.terminate()
    for name, row in found.items():
        if isinstance(row, dict):
            first = f", at once {row['first_ms']:.0f} ms" if "first_ms" in row else ""
            first = f", thread {row['thread_ms']:.1f} ms" if "thread_ms" in row else first
            times = f"median {row['median_ms']:6.1f} ms, worst of {row['number']} {row['worst_ms']:6.1f} ms"
            print(f"{name:30} {times}{first}")
    print(json.dumps({"benchmark": "app_page", "chromium": version, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
