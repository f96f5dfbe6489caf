"""The page over https with a self-signed certificate, at an address other than localhost, in headless Chromium.

    drive_tls.py URL DIGEST RECORDING.wav CAMERA.y4m FOLDER

DIGEST is that of the certificate's key, in base64. Chromium refuses the page without it. With it, as after a user has
accepted the certificate, the microphone is permitted, and the page talks over WebSocket (wss) and WebRTC.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from chromium import launched
from drive_page import SLOW_MS
from playwright.sync_api import Error, Page, expect, sync_playwright


def answered(page: Page, transport: str, folder: Path) -> None:
    """The microphone's recording is transcribed, and answered aloud."""
    page.locator("#transport").select_option(transport)
    page.get_by_role("button", name="Start talking").click()
    expect(page.locator("#talk-log .me").first).to_contain_text(re.compile("printed|book|block", re.I), timeout=SLOW_MS)
    expect(page.locator("#talk-log .them").first).to_contain_text(re.compile(r"\w{3,}"), timeout=SLOW_MS)
    heard_ms = page.locator("#stages tbody tr").first.locator("td").nth(5)
    expect(heard_ms).to_have_text(re.compile(r"^\d+$"), timeout=SLOW_MS)
    page.screenshot(path=folder / f"tls-{transport}.png", full_page=True)
    page.get_by_role("button", name="Stop").first.click()
    expect(page.locator("#talk-state")).to_have_text("Not connected")
    page.locator("#talk-log").evaluate("node => node.replaceChildren()")
    page.locator("#stages tbody").evaluate("node => node.replaceChildren()")


def main() -> None:
    url, digest, recording, sign, folder = *sys.argv[1:5], Path(sys.argv[5])
    assert not re.search(r"//(localhost|127\.)", url), url
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launched(playwright, recording, sign)
        # The certificate names the address, but no authority has signed it.
        refused = ""
        try:
            browser.new_page().goto(url)
        except Error as error:
            refused = error.message
        assert "ERR_CERT_AUTHORITY_INVALID" in refused, refused
        browser.close()
        browser = launched(playwright, recording, sign, trusted=digest)
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        sockets: list[str] = []
        page.on("websocket", lambda socket: sockets.append(socket.url))
        page.goto(url)
        assert page.evaluate("window.isSecureContext")
        expect(page.locator("#status")).to_contain_text("Ready:", timeout=SLOW_MS)
        page.locator("#options summary").click()
        for transport in ("websocket", "webrtc"):
            answered(page, transport, folder)
        assert sockets
        assert all(one.startswith("wss://") for one in sockets), sockets
        assert not errors, errors
        browser.close()
    print("the page hears and talks over https with a self-signed certificate, at another address than localhost")


if __name__ == "__main__":
    main()
