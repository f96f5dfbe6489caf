"""A user of the page, played by headless Chromium with a recording for a microphone.

    drive_page.py URL RECORDING.wav CAMERA.y4m FOLDER [ws|rtc]

It talks, hears the answer and interrupts a long one by the button, over WebSocket and WebRTC; then captions, speech,
video, and the keyboard alone. Screenshots go to FOLDER. With a transport it only talks by that, at a door whose host
dies in the first answer.
"""

from __future__ import annotations

import io
import re
import shutil
import sys
import wave
from pathlib import Path

from playwright.sync_api import Page, expect, sync_playwright

SLOW_MS = 30_000


def heard_something(page: Page) -> None:
    """The newest row of the stages has all its times, in an order that can be."""
    row = page.locator("#stages tbody tr").first
    expect(row.locator("td").nth(5)).to_have_text(re.compile(r"^\d+$"), timeout=SLOW_MS)
    sound, heard = (int(row.locator("td").nth(k).inner_text()) for k in (4, 5))
    assert 0 < sound <= heard < 15_000, (sound, heard)


def talk(page: Page, transport: str, folder: Path) -> None:
    page.locator("#transport").select_option(transport)
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    # The recording is heard and understood …
    expect(page.locator("#talk-log .me").first).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
    # … and answered, aloud.
    expect(page.locator("#talk-log .them").first).to_contain_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    heard_something(page)
    page.screenshot(path=folder / f"talk-{transport}.png", full_page=True)
    expect(page.locator("#talk-state")).to_have_text("Listening", timeout=SLOW_MS)
    # A long answer to a written question is cut short by the button: what was not heard is struck out.
    page.locator("#typed").fill("Count from one to sixty in words, please: one, two, three and so on.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#talk-state")).to_have_text("Speaking", timeout=SLOW_MS)
    page.wait_for_timeout(2500)
    page.get_by_role("button", name="Interrupt").click()
    cut = page.locator("#talk-log .them").last.locator(".cut")
    expect(cut).to_have_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    kept = page.locator("#talk-log .them").last.locator("span").first.inner_text()
    assert kept, "nothing of 2.5 seconds was heard"
    page.screenshot(path=folder / f"interrupted-{transport}.png", full_page=True)
    page.get_by_role("button", name="Stop").first.click()
    expect(page.locator("#talk-state")).to_have_text("Not connected")
    page.locator("#talk-log").evaluate("node => node.replaceChildren()")
    page.locator("#stages tbody").evaluate("node => node.replaceChildren()")


def talk_on(page: Page, transport: str, folder: Path) -> None:
    """The host dies while the first answer sounds: it is begun anew, and the next question is answered, too."""
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


def downloaded(page: Page, button: str) -> bytes:
    """What the page gives to keep on a press of this button."""
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
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=[
                "--no-sandbox",
                "--use-fake-ui-for-media-stream",
                "--use-fake-device-for-media-stream",
                f"--use-file-for-fake-audio-capture={recording}%noloop",
                f"--use-file-for-fake-video-capture={sign}",
                "--autoplay-policy=no-user-gesture-required",
            ],
        )
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(url)
        expect(page.locator("#status")).to_contain_text("Ready:", timeout=SLOW_MS)
        page.locator("#options summary").click()
        if transport:
            talk_on(page, transport, folder)
            assert not errors, errors
            print(f"the page goes on by {transport} where its host dies")
            return
        for transport in ("ws", "rtc", "duplex"):
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
        expect(page.locator("#captions-state")).to_have_text("Stopped")
        text, subtitles = downloaded(page, "Download text"), downloaded(page, "Download subtitles")
        assert re.search("printed|book|block", text.decode(), re.I), text
        assert re.match(r"1\n00:00:0\d,\d{3} --> 00:00:\d\d,\d{3}\n\w", subtitles.decode()), subtitles
        page.get_by_role("tab", name="Captions").press("ArrowRight")
        expect(page.get_by_role("button", name="Stop")).to_be_disabled()
        page.get_by_role("button", name="Speak").press("Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        expect(page.locator("#speech-state")).to_contain_text("made in", timeout=SLOW_MS)
        expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=SLOW_MS)
        with wave.open(io.BytesIO(downloaded(page, "Download sound"))) as sound:
            assert 1 < sound.getnframes() / sound.getframerate() < 10
        watch(page, folder)
        page.set_viewport_size({"width": 390, "height": 844})
        page.get_by_role("tab", name="Talk").click()
        assert page.evaluate("document.documentElement.scrollWidth <= 390"), "it is wider than a phone"
        page.screenshot(path=folder / "phone.png", full_page=True)
        assert not errors, errors
        browser.close()
    print("the page talks over WebSocket, WebRTC and in full duplex, is interrupted, captions, speaks and watches")


if __name__ == "__main__":
    main()
