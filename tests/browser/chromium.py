"""Debian's Chromium, headless, with files for a microphone and a camera."""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import Browser, Playwright


def path() -> str | None:
    """Return the path of Chromium; None: playwright uses its own."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def launched(
    playwright: Playwright, microphone: str | Path, camera: str | Path, *, loops: bool = False, trusted: str = ""
) -> Browser:
    """Start Chromium, with permission to use both.

    `loops`: the microphone's file repeats. `trusted`: the digest of the key of a self-signed certificate that it
    accepts.
    """
    flags = [
        "--no-sandbox",
        "--use-fake-ui-for-media-stream",
        "--use-fake-device-for-media-stream",
        f"--use-file-for-fake-audio-capture={microphone}{'' if loops else '%noloop'}",
        f"--use-file-for-fake-video-capture={camera}",
        "--autoplay-policy=no-user-gesture-required",
    ]
    if trusted:
        flags.append(f"--ignore-certificate-errors-spki-list={trusted}")
    return playwright.chromium.launch(executable_path=path(), args=flags)
