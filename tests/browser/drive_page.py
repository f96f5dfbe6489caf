"""A user of the page, simulated by headless Chromium with a recording as its microphone.

    drive_page.py URL RECORDING.wav CAMERA.y4m FOLDER [websocket|webrtc|returns|calls]

It talks, hears the answer and interrupts a long one by the button, over WebSocket and WebRTC; then it tries captions,
speech, video, and the keyboard alone. Screenshots go to FOLDER. With a transport, it only talks over that, at a door
whose host dies during the first answer. With `returns`, it starts captions, prints that, and continues after the server
was killed and restarted. With `calls`, it does the same in a WebRTC call, at a door in front of a model that repeats
what is written.
"""

from __future__ import annotations

import io
import re
import sys
import wave
from pathlib import Path

from accessible import everybody_can_use
from chromium import launched
from playwright.sync_api import Page, expect, sync_playwright

SLOW_MS = 30_000
# Measures the pixels in each side's waveform colour: what is really drawn.
LOUDEST = """() => {
    const canvas = document.getElementById("timeline"), pen = canvas.getContext("2d");
    const ratio = canvas.width / canvas.clientWidth, found = {};
    for (const [side, top] of [["microphone", 8], ["answer", 90]]) {
        const { data, width, height } = pen.getImageData(
            70 * ratio, top * ratio, canvas.width - 70 * ratio, 56 * ratio);
        let tallest = 0;
        for (let x = 0; x < width; x++) {
            let solid = 0;
            for (let y = 0; y < height; y++) solid += data[4 * (y * width + x) + 3] > 200;
            tallest = Math.max(tallest, solid / height);
        }
        found[side] = tallest;
    }
    return found;
}"""


def heard_something(page: Page) -> None:
    """Check that the newest row of the table of stages has all its times, in a possible order."""
    row = page.locator("#stages tbody tr").first
    expect(row.locator("td").nth(5)).to_have_text(re.compile(r"^\d+$"), timeout=SLOW_MS)
    sound, heard = (int(row.locator("td").nth(k).inner_text()) for k in (4, 5))
    assert 0 < sound <= heard < 15_000, (sound, heard)


def options(page: Page, *, shown: bool) -> None:
    page.locator("#options").evaluate("(node, shown) => { node.open = shown; }", shown)


def talk(page: Page, transport: str, folder: Path) -> None:
    options(page, shown=True)
    page.locator("#transport").select_option(transport)
    options(page, shown=False)
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    # The recording is heard and transcribed …
    expect(page.locator("#talk-log .me").first).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
    # … and answered, aloud.
    expect(page.locator("#talk-log .them").first).to_contain_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    heard_something(page)
    page.screenshot(path=folder / f"talk-{transport}.png", full_page=True)
    everybody_can_use(page, f"talk, {transport}")
    for side, loudest in page.evaluate(LOUDEST).items():
        assert loudest > 0.02, f"the waveform of {side} is flat"
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    # The button cuts off a long answer to a written question: the unheard part is struck out.
    page.locator("#typed").fill("Count from one to sixty in words, please: one, two, three and so on.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#talk-state")).to_have_text("Speaking", timeout=SLOW_MS)
    page.wait_for_timeout(2500)
    page.get_by_role("button", name="Interrupt").click()
    cut = page.locator("#talk-log .them").last.locator(".cut")
    expect(cut).to_have_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    kept = page.locator("#talk-log .them").last.locator("span").first.inner_text()
    assert kept, "nothing of 2.5 seconds was heard"
    # It stays like that: later audio of the answer neither plays nor counts as heard.
    page.wait_for_timeout(1500)
    expect(cut).to_have_text(re.compile(r"\w{3,}"))
    assert page.locator("#talk-log .them").last.locator("span").first.inner_text() == kept
    expect(page.locator("#talk-state")).to_have_text("Listening")
    page.screenshot(path=folder / f"interrupted-{transport}.png", full_page=True)
    page.get_by_role("button", name="Stop").first.click()
    expect(page.locator("#talk-state")).to_have_text("Not connected")
    page.locator("#talk-log").evaluate("node => node.replaceChildren()")
    page.locator("#stages tbody").evaluate("node => node.replaceChildren()")


def talk_on(page: Page, transport: str, folder: Path) -> None:
    """The host dies while the first answer plays: the answer begins again, and the next question is answered too."""
    page.locator("#transport").select_option(transport)
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#talk-log .me").first).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
    for number, question in enumerate(("", "Name a colour.", "Name an animal.")):
        if question:
            page.locator("#typed").fill(question)
            page.get_by_role("button", name="Send").click()
        expect(page.locator("#talk-state")).to_have_text("Speaking", timeout=SLOW_MS)
        expect(page.locator("#talk-state")).to_have_text("Listening", timeout=2 * SLOW_MS)
        expect(page.locator("#talk-log .them").last).to_contain_text(re.compile(r"\w{2,}"), timeout=SLOW_MS)
        page.screenshot(path=folder / f"door-{transport}-{number}.png", full_page=True)
    page.get_by_role("button", name="Stop").first.click()
    expect(page.locator("#talk-state")).to_have_text("Not connected")


def takes_up_a_call(page: Page) -> None:
    """The reader of this program's output kills the door and restarts it: another call begins."""
    page.locator("#transport").select_option("webrtc")
    # The scripted detector takes any sound of a real microphone for speech, which would cut the answers off.
    page.locator("#turns").select_option("manual")
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    for number, words in enumerate(("blue green", "seven eight", "done")):
        if number == 1:
            print("kill it", flush=True)
            # The browser notices it after a few seconds. What is written before that is not lost.
            page.wait_for_timeout(500)
        page.locator("#typed").fill(words)
        page.get_by_role("button", name="Send").click()
        if number == 1:
            print("bring it back", flush=True)
        expect(page.locator("#talk-log .them").nth(number)).to_contain_text(words, timeout=2 * SLOW_MS)
        # An answer that is not complete when the door dies is asked for again.
        expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    expect(page.locator("#talk-log .me")).to_have_count(3)
    page.get_by_role("button", name="Stop").first.click()
    expect(page.locator("#talk-state")).to_have_text("Not connected")


def goes_on(page: Page) -> None:
    """The reader of this program's output kills the server and restarts it: captions resume by themselves."""
    page.get_by_role("tab", name="Captions").click()
    page.get_by_role("button", name="Start captions").click()
    expect(page.locator("#captions-log")).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
    print("kill it", flush=True)
    expect(page.locator("#captions-state")).to_contain_text("Continues when the server is ready", timeout=SLOW_MS)
    expect(page.locator("#status")).to_contain_text("does not answer")
    before = page.locator("#captions-log p").count()
    print("bring it back", flush=True)
    expect(page.locator("#captions-state")).to_have_text("Listening", timeout=2 * SLOW_MS)
    expect(page.locator("#captions-error")).to_be_empty()
    expect(page.locator("#captions-log p").nth(before)).to_contain_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    page.get_by_role("button", name="Stop captions").click()
    expect(page.locator("#captions-state")).to_have_text("Stopped", timeout=SLOW_MS)
    # Times increase from line to line.
    begins = re.findall(r"^(\d\d:\d\d:\d\d,\d{3}) -->", downloaded(page, "Download subtitles").decode(), re.MULTILINE)
    assert len(begins) > before
    assert begins == sorted(begins), begins


def stops_in_mid_line(page: Page) -> None:
    """A line under way at a stop is completed, and is in the subtitles. A second start says that it adds lines, and
    *Clear* starts over.
    """
    page.get_by_role("tab", name="Captions").click()
    page.locator("#language").select_option("English")
    page.get_by_role("button", name="Start captions").click()
    expect(page.locator("#captions-log p.open")).to_contain_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    page.get_by_role("button", name="Stop captions").click()
    expect(page.locator("#captions-state")).to_have_text("Stopped", timeout=SLOW_MS)
    expect(page.locator("#captions-log p.open")).to_have_count(0)
    assert re.search(r"-->.*\n\w", downloaded(page, "Download subtitles").decode())
    lines = page.locator("#captions-log p").count()
    page.get_by_role("button", name="Start captions").click()
    expect(page.locator("#captions-state")).to_contain_text("are added below", timeout=SLOW_MS)
    expect(page.locator("#captions-log p")).to_have_count(lines)
    page.get_by_role("button", name="Clear").click()
    expect(page.locator("#captions-log p")).to_have_count(0)
    page.get_by_role("button", name="Stop captions").click()
    expect(page.locator("#captions-state")).to_have_text("Stopped", timeout=SLOW_MS)


def talk_by_keyboard(page: Page) -> None:
    """Ask a written question with Tab, Enter and arrows alone, from the top of the page, and hear the answer."""
    page.locator("body").evaluate("() => document.activeElement?.blur()")
    page.get_by_role("tab", name="Talk").focus()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "talk-start"
    page.keyboard.press("Enter")
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    answers = page.locator("#talk-log .them").count()
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "typed":
            break
    page.keyboard.type("Name a colour.")
    page.keyboard.press("Enter")
    expect(page.locator("#talk-log .them").nth(answers)).to_contain_text(re.compile(r"\w{2,}"), timeout=SLOW_MS)
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.id") == "talk-start":
            break
    page.keyboard.press("Enter")
    expect(page.locator("#talk-state")).to_have_text("Not connected")


def server_board(page: Page) -> None:
    page.get_by_role("tab", name="Server").click()
    expect(page.locator("#kinds tbody tr")).to_have_count(5, timeout=SLOW_MS)
    expect(page.locator("#delays tbody tr").last.locator("td").nth(1)).to_have_text(re.compile(r"^\d+$"))
    everybody_can_use(page, "server")


def downloaded(page: Page, button: str) -> bytes:
    """Return the file that the page downloads when this button is pressed."""
    with page.expect_download() as download:
        page.get_by_role("button", name=button).press("Enter")
    return Path(download.value.path()).read_bytes()


def watch(page: Page, folder: Path) -> None:
    page.get_by_role("tab", name="Camera").click()
    expect(page.locator("#sight")).to_contain_text("no model that sees pictures")
    page.get_by_role("button", name="Start camera").click()
    expect(page.locator("#watch-state")).to_contain_text(
        re.compile(r"[4-9] frames shown, 1 of them new"), timeout=SLOW_MS
    )
    page.wait_for_timeout(3000)
    page.locator("#question").fill("What does the sign say?")
    page.get_by_role("button", name="Ask").click()
    expect(page.locator("#watch-log .them").first).to_contain_text(re.compile("EXIT.*42"), timeout=SLOW_MS)
    page.screenshot(path=folder / "camera.png", full_page=True)
    page.get_by_role("button", name="Stop watching").click()
    expect(page.locator("#watch-state")).to_have_text("Not watching")


def main() -> None:
    url, recording, sign, folder, transport = *sys.argv[1:4], Path(sys.argv[4]), (sys.argv[5:] or [""])[0]
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launched(playwright, recording, sign, loops=transport == "returns")
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(url)
        expect(page.locator("#status")).to_contain_text("Ready:", timeout=SLOW_MS)
        page.locator("#options summary").click()
        if transport == "returns":
            goes_on(page)
            page.get_by_role("button", name="Clear").click()
            expect(page.locator("#captions-log p")).to_have_count(0)
            stops_in_mid_line(page)
            print("captions go on where the server was killed and came back, and finish what is being said")
            return
        if transport == "calls":
            takes_up_a_call(page)
            print("a call is taken up where its door was killed")
            return
        if transport:
            talk_on(page, transport, folder)
            assert not errors, errors
            print(f"the page goes on by {transport} where its host dies")
            return
        for transport in ("websocket", "webrtc", "duplex"):
            talk(page, transport, folder)
        # By keyboard alone.
        page.get_by_role("tab", name="Talk").focus()
        page.keyboard.press("ArrowRight")
        expect(page.locator("#captions")).to_be_visible()
        page.get_by_role("button", name="Start captions").press("Enter")
        expect(page.locator("#captions-log")).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
        expect(page.locator("#captions-state")).to_have_text("Listening")
        expect(page.locator("#captions-srt")).to_be_enabled(timeout=SLOW_MS)
        page.screenshot(path=folder / "captions.png", full_page=True)
        page.get_by_role("button", name="Stop captions").press("Enter")
        expect(page.locator("#captions-state")).to_have_text("Stopped", timeout=SLOW_MS)
        text, subtitles = downloaded(page, "Download text"), downloaded(page, "Download subtitles")
        assert re.search("printed|book|block", text.decode(), re.I), text
        assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\n\w", subtitles.decode()), subtitles
        page.get_by_role("tab", name="Captions").press("ArrowRight")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        page.get_by_role("button", name="Speak").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        expect(page.locator("#speech-state")).to_contain_text("generated in", timeout=SLOW_MS)
        expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=SLOW_MS)
        with wave.open(io.BytesIO(downloaded(page, "Download sound"))) as sound:
            assert 1 < sound.getnframes() / sound.getframerate() < 10
        watch(page, folder)
        server_board(page)
        page.get_by_role("tab", name="Server").press("Home")
        talk_by_keyboard(page)
        page.set_viewport_size({"width": 390, "height": 844})
        page.get_by_role("tab", name="Talk").click()
        assert page.evaluate("document.documentElement.scrollWidth <= 390"), "it is wider than a phone"
        page.screenshot(path=folder / "phone.png", full_page=True)
        assert not errors, errors
        browser.close()
    print("the page talks over WebSocket, WebRTC and in full duplex, is interrupted, captions, speaks and watches")


if __name__ == "__main__":
    main()
