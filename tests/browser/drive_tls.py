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
from drive_page import SLOW_MS, talk
from playwright.sync_api import Error, expect, sync_playwright


def main() -> None:
    url, digest, recording, sign, folder = *sys.argv[1:5], Path(sys.argv[5])
    assert not re.search(r"//(localhost|127\.)", url), url
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = launched(playwright, recording, sign)
        # The certificate names the address; only nobody vouches for it.
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
            talk(page, transport, folder)
        assert sockets
        assert all(one.startswith("wss://") for one in sockets), sockets
        assert not errors, errors
        browser.close()
    print("the page hears and talks over https with a self-signed certificate, at another address than localhost")


if __name__ == "__main__":
    main()
