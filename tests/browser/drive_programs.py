"""The programs of docs/browser.md, exactly as printed, in headless Chromium with a real server at port 8000.

    drive_programs.py FOLDER MICROPHONE.wav CAMERA.y4m

FOLDER has the pages, each by its name; they are served at http://localhost:3000.
"""

from __future__ import annotations

import re
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

from chromium import launched
from playwright.sync_api import Browser, Page, expect, sync_playwright

SLOW_MS = 60_000
ORIGIN_PORT = 3000


class Quiet(SimpleHTTPRequestHandler):
    """Serves the folder without logging requests."""

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def opened(browser: Browser, name: str, errors: list[str]) -> Page:
    page = browser.new_page()
    page.on("pageerror", lambda e: errors.append(f"{name}: {e}"))
    page.goto(f"http://localhost:{ORIGIN_PORT}/{name}.html")
    return page


def captions(page: Page) -> None:
    page.locator("#start").click()
    expect(page.locator("#lines")).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)


def agent(page: Page) -> None:
    page.locator("#ask").click()
    expect(page.locator("#start")).to_contain_text("start it first")
    # The small model's answers are sampled, so not every one is a call. It repeats an answer that it has given, so
    # each attempt is another conversation.
    called = re.compile(r"tool: get_weather\(.*Paris.*17 degrees")
    for _ in range(4):
        page.locator("#start").click()
        # The recording is transcribed first. Then the model has to call a tool and answer with its output.
        expect(page.locator("#lines")).to_contain_text("assistant: ", timeout=SLOW_MS)
        page.locator("#ask").click()
        try:
            expect(page.locator("#lines")).to_contain_text(called, timeout=15_000)
            break
        except AssertionError:
            page.reload()
    expect(page.locator("#lines")).to_contain_text(called)
    expect(page.locator("#lines p").last).to_contain_text(re.compile("assistant: .*(rain|17)", re.I), timeout=SLOW_MS)


def narrator(page: Page) -> None:
    page.locator("#read").click()
    expect(page.locator("#first")).to_have_text(re.compile(r"first sound after \d+ ms"), timeout=SLOW_MS)


def camera(page: Page) -> None:
    page.locator("#start").click()
    expect(page.locator("#start")).to_have_text(re.compile(r"([4-9]|\d\d) frames, \d+ of them new"), timeout=SLOW_MS)
    page.wait_for_timeout(3000)
    page.locator("#ask").click()
    expect(page.locator("#said")).to_contain_text(re.compile("EXIT.*42"), timeout=SLOW_MS)


def main() -> None:
    folder, microphone, sign = sys.argv[1:]
    listener = ThreadingHTTPServer(("127.0.0.1", ORIGIN_PORT), partial(Quiet, directory=folder))
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    errors: list[str] = []
    with sync_playwright() as playwright:
        browser = launched(playwright, microphone, sign)
        for drive in (captions, agent, narrator, camera):
            page = opened(browser, drive.__name__, errors)
            drive(page)
            page.close()
            print(f"docs/browser.md, {drive.__name__}.html: works", flush=True)
        browser.close()
    assert not errors, errors


if __name__ == "__main__":
    main()
