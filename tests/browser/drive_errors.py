"""The page's messages when something is missing or refused, in headless Chromium, without a real server.

    drive_errors.py FOLDER

The page's files and a server's answers come from this program. Screenshots go to FOLDER.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import chromium
from accessible import everybody_can_use
from playwright.sync_api import Browser, Page, expect, sync_playwright

WEB = Path(__file__).resolve().parents[2] / "src" / "antiphon" / "web"
# A browser trusts http://localhost like https, but no other http address.
TRUSTED, UNTRUSTED = "localhost", "antiphon.example"
FULL = {"error": {"message": "No room for another session.", "code": "rate_limit_exceeded"}}
METRICS = """# HELP antiphon_load What of the machine is promised.
antiphon_load 0.62
antiphon_red{light="loop"} 0.0
antiphon_red{light="lane"} 1.0
antiphon_held_sessions{kind="captions"} 3.0
antiphon_headroom_sessions{kind="captions"} 5.0
antiphon_capacity_sessions{kind="captions"} 12.0
antiphon_voice_to_voice_seconds_bucket{le="0.5"} 4.0
antiphon_voice_to_voice_seconds_bucket{le="1.0"} 8.0
antiphon_voice_to_voice_seconds_bucket{le="+Inf"} 8.0
antiphon_voice_to_voice_seconds_count 8.0
"""
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
TABS = ("talk", "captions", "speech", "camera")
KINDS = ("captions", "conversation", "speech", "video", "duplex")


@dataclass
class Server:
    """The state of the fake server. It accepts no WebSockets."""

    key: str = ""
    status: str = "ready"
    video: str = ""
    serves: tuple[str, ...] = KINDS
    languages: tuple[str, ...] = ("en", "de", "fr")
    metrics_key: str = ""
    is_gone: bool = False


class Answers(BaseHTTPRequestHandler):
    """Serves the page's files, and the answers of `plays`."""

    plays = Server()

    def do_GET(self) -> None:
        plays, path = type(self).plays, self.path[1:].partition("?")[0]
        file = WEB / path.removeprefix("web/") if path.startswith("web/") else WEB / (path or "index.html")
        if plays.is_gone:
            self.close_connection = True
        elif file.is_file():
            self._send(200, TYPES[file.suffix], file.read_bytes())
        elif path == "ready":
            body = {"status": plays.status, "models": ["one"], "serves": plays.serves}
            self._json(200 if plays.status == "ready" else 503, body)
        elif path == "metrics":
            if self.headers.get("Authorization") == f"Bearer {plays.metrics_key}":
                self._send(200, "text/plain", METRICS.encode())
            else:
                self._json(401, {"error": {"message": "No."}})
        elif plays.key and self.headers.get("Authorization") != f"Bearer {plays.key}":
            self._json(401, {"error": {"message": "No.", "code": "invalid_api_key"}})
        elif path == "v1/models":
            video = {"video": plays.video} if plays.video else {}
            self._json(
                200,
                {
                    "data": [
                        {"id": "one", "task": "automatic-speech-recognition", "languages": plays.languages, **video}
                    ]
                },
            )
        elif path == "v1/audio/voices":
            self._json(200, {"voices": ["heart"]})
        else:
            self._json(503, FULL)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.do_GET()

    def _json(self, status: int, value: object) -> None:
        self._send(status, "application/json", json.dumps(value).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


listener = ThreadingHTTPServer(("127.0.0.1", 0), Answers)


def opened(browser: Browser, server: Server, host: str = TRUSTED, *, allowed: bool = True, width: int = 1280) -> Page:
    context = browser.new_context(viewport={"width": width, "height": 800}, permissions=[])
    if allowed:
        context.grant_permissions(["microphone", "camera"])
    page = context.new_page()
    Answers.plays = server
    page.goto(f"http://{host}:{listener.server_port}/")
    return page


def start(page: Page, tab: str) -> None:
    """Press the main button of a tab."""
    page.locator(f"#tab-{tab}").click()
    page.locator(f"#{tab} button.main").click()


def says(page: Page, tab: str, what: str) -> None:
    """Check that the tab shows this error right below its button, also to screen readers."""
    error = page.locator(f"#{tab}-error")
    expect(error).to_contain_text(re.compile(what), timeout=10_000)
    assert error.get_attribute("role") == "alert"
    button, text = page.locator(f"#{tab} button.main").bounding_box(), error.bounding_box()
    assert button
    assert text
    assert 0 <= text["y"] - button["y"] - button["height"] < 60, (tab, button, text)


def at_rest(browser: Browser, folder: Path) -> None:
    for width in (1600, 1280, 390):
        page = opened(browser, Server(video="pictures"), width=width)
        expect(page.locator("#status")).to_have_text("Ready: one")
        expect(page.locator("#key-field")).to_be_hidden()
        expect(page.locator("#sight")).to_contain_text("sees the pictures")
        page.locator("#options summary").click()
        page.locator("#times").evaluate("node => { node.hidden = false; }")
        top = page.locator("[role=tablist]").bounding_box()
        assert top
        assert top["y"] < 64, "the header takes too much of the page"
        for tab in TABS:
            page.locator(f"#tab-{tab}").click()
            for label in page.locator(f"#{tab} .bar label:has(select, input[type=range])").all():
                # A label is next to its control.
                text, field = label.bounding_box(), label.locator("select, input").bounding_box()
                assert text
                assert field
                assert abs(text["y"] + text["height"] / 2 - field["y"] - field["height"] / 2) < 4, tab
            for log in page.locator(f"#{tab} .log").all():
                shown = log.evaluate("node => getComputedStyle(node, '::before').content")
                assert re.search("(Press|Start) ", shown), (tab, shown)
            paint = "node => [getComputedStyle(node).backgroundColor, getComputedStyle(document.body).backgroundColor]"
            filled, paper = page.locator(f"#{tab} button.main").evaluate(paint)
            assert filled not in (paper, "rgba(0, 0, 0, 0)"), "the main button looks like the others"
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (tab, width)
            page.screenshot(path=folder / f"rest-{tab}-{width}.png", full_page=True)
            for colours in ("light", "dark"):
                page.locator("#theme").select_option(colours)
                everybody_can_use(page, f"{tab}, {width}, {colours}")
        page.reload()
        paper = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(paper) == "rgb(23, 24, 27)", "the choice of dark colours is forgotten"
        expect(page.locator("#speech-stop")).to_be_disabled()
        if width == 1280:
            cut = """node => {
                const pen = document.createElement("canvas").getContext("2d"), style = getComputedStyle(node);
                pen.font = style.font;
                const room = node.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 20;
                return [...node.options].filter((o) => pen.measureText(o.text).width > room).map((o) => o.text);
            }"""
            page.locator("#tab-talk").click()
            for select in page.locator("#options select").all():
                assert not (found := select.evaluate(cut)), found
        page.context.close()


def lacks(browser: Browser) -> None:
    page = opened(browser, Server(serves=("captions",)))
    for tab, package in (("talk", "talk"), ("speech", "speech"), ("camera", "video")):
        page.locator(f"#tab-{tab}").click()
        expect(page.locator(f"#{tab}-lacks")).to_contain_text(f"pip install '.[{package}]'")
        expect(page.locator(f"#{tab} button.main")).to_be_disabled()
    page.locator("#tab-captions").click()
    expect(page.locator("#captions-lacks")).to_be_hidden()
    expect(page.locator("#captions-start")).to_be_enabled()
    page.context.close()


def metrics(browser: Browser, folder: Path) -> None:
    """The server tab: with a key, without it, and while the server does not answer."""
    page = opened(browser, server := Server(metrics_key="scrape"))
    page.locator("#tab-server").click()
    expect(page.locator("#server-error")).to_contain_text("The metrics need a key")
    page.locator("#metrics-key").fill("wrong")
    page.locator("#metrics-key").press("Tab")
    expect(page.locator("#server-error")).to_contain_text("key of the metrics is wrong")
    page.locator("#metrics-key").fill("scrape")
    page.locator("#metrics-key").press("Tab")
    expect(page.locator("#load-text")).to_have_text("62 %")
    expect(page.locator("#kinds tbody tr").first).to_have_text("Captions3512")
    # Half of 8 lie below 0.5 s; of the other half, which lies between 0.5 and 1 s, nine tenths below 0.95 s.
    expect(page.locator("#delays tbody tr").last).to_have_text("Voice to voice8500950")
    expect(page.locator("#lights")).to_have_text("No new sessions are admitted now: lane")
    everybody_can_use(page, "server")
    page.screenshot(path=folder / "server.png", full_page=True)
    server.is_gone = True
    expect(page.locator("#server-error")).to_contain_text("does not answer", timeout=10_000)
    expect(page.locator("#server-board")).to_be_hidden()
    server.is_gone = False
    expect(page.locator("#server-board")).to_be_visible(timeout=10_000)
    expect(page.locator("#server-error")).to_be_empty()
    page.context.close()


def keys(browser: Browser, folder: Path) -> None:
    page = opened(browser, Server(key="right"))
    expect(page.locator("#status")).to_contain_text("needs an API key")
    expect(page.locator("#key-field")).to_be_visible()
    start(page, "talk")
    says(page, "talk", "needs an API key")
    page.locator("#key").fill("wrong")
    page.locator("#key").press("Tab")
    expect(page.locator("#status")).to_contain_text("key is wrong")
    for tab in TABS:
        start(page, tab)
        says(page, tab, "key is wrong")
    page.screenshot(path=folder / "wrong-key.png", full_page=True)
    page.locator("#key").fill("right")
    page.locator("#key").press("Tab")
    expect(page.locator("#status")).to_have_text("Ready: one")
    expect(page.locator("#key-field")).to_be_visible()
    for tab in TABS:
        expect(page.locator(f"#{tab}-error")).to_be_empty()
    page.context.close()


def languages(browser: Browser) -> None:
    """Offers the model's languages by name; if there is only one, it is the only choice."""
    for codes, names in ((("en", "de", "fr"), ["Any", "English", "French", "German"]), (("en",), ["English"])):
        page = opened(browser, Server(languages=codes))
        expect(page.locator("#status")).to_have_text("Ready: one")
        page.locator("#tab-captions").click()
        expect(page.locator("#language option")).to_have_text(names)
        page.context.close()


def refusals(browser: Browser) -> None:
    page = opened(browser, Server())
    for tab in TABS:
        start(page, tab)
        says(page, tab, "is full")
    page.locator("#tab-talk").click()
    page.locator("#options summary").click()
    page.locator("#transport").select_option("webrtc")
    start(page, "talk")
    says(page, "talk", "No room for another session")
    page.context.close()
    page = opened(browser, server := Server())
    expect(page.locator("#status")).to_have_text("Ready: one")
    server.status = "draining"
    start(page, "talk")
    says(page, "talk", "not ready: draining")
    page.context.close()
    page = opened(browser, Server(), allowed=False)
    for tab in ("talk", "captions", "camera"):
        start(page, tab)
        says(page, tab, "is not allowed. Allow it in the address bar")
    page.context.close()
    page = opened(browser, Server(), UNTRUSTED)
    for tab in ("talk", "captions", "camera"):
        page.locator(f"#tab-{tab}").click()
        says(page, tab, "with https")
        start(page, tab)
        says(page, tab, "with https")
    page.context.close()


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        flags = [
            "--no-sandbox",
            "--use-fake-device-for-media-stream",
            f"--host-resolver-rules=MAP {UNTRUSTED} 127.0.0.1",
        ]
        browser = playwright.chromium.launch(executable_path=chromium.path(), args=flags)
        at_rest(browser, folder)
        lacks(browser)
        metrics(browser, folder)
        keys(browser, folder)
        languages(browser)
        refusals(browser)
        browser.close()
    print("the page says what is missing, and what to do about it")


if __name__ == "__main__":
    main()
