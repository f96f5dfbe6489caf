"""The page and the programs of docs/browser.md in a real browser against real servers: `make browser`.

It needs Chromium (Debian: `apt install chromium`) and npm. It uses ports 3000 and 8000, as docs/browser.md does.

`make browser DOOR=1` tests only the page at a door, and `python tests/browser/run.py --tls` only the page over https.
With `--call`, it tests only a call whose door is killed.
The first run creates the driver's environment next to this file. Screenshots are written to out/.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import threading
import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
from run import environment, hosts_behind_a_door, server, started
from tests.cluster.processes import cluster

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16
from antiphon.server.wyoming.listening import address_of

HERE = Path(__file__).resolve().parent
RECORDING = HERE.parent / "data" / "audio" / "lj-LJ001-0004.flac"
MICROPHONE_HZ, LEAD_S = 48_000, 1.5
SIGN = "EXIT 42"
LIMIT_S = 300


def microphone(path: Path) -> None:
    """Write the file that Chromium uses as a microphone: a moment of silence, then the recording."""
    pcm = np.concatenate((np.zeros(int(LEAD_S * 16_000), np.float32), decode_all(str(RECORDING))))
    resampler = Resampler(16_000, MICROPHONE_HZ)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_HZ)
        file.writeframes(to_pcm16(np.concatenate((resampler.feed(pcm), resampler.flush()))))


def camera(path: Path) -> None:
    """Write the file that Chromium uses as a camera: a door's sign, as YUV4MPEG2."""
    image = Image.new("RGB", (640, 360), "white")
    ImageDraw.Draw(image).text((60, 140), SIGN, "black", ImageFont.load_default(72))
    luma, *chroma = (np.asarray(plane) for plane in image.convert("YCbCr").split())
    frame = luma.tobytes() + b"".join(plane[::2, ::2].tobytes() for plane in chroma)
    path.write_bytes(b"YUV4MPEG2 W640 H360 F5:1 Ip C420\n" + (b"FRAME\n" + frame) * 10)


def returning(command: Callable[[str], Sequence[str | Path]]) -> int:
    """Drive the page; when the driver says so, kill its server, and restart it on the same port."""
    process, url = started("--profile", "light")

    def kill() -> None:
        process.kill()
        process.wait()

    def bring_back() -> None:
        nonlocal process
        process, _ = started("--profile", "light", "--port", str(urlsplit(url).port))

    try:
        return _driven(command(url), kill, bring_back)
    finally:
        process.kill()


def losing_its_door(command: Callable[[str], Sequence[str | Path]]) -> int:
    """Drive the page at a door; when the driver says so, kill the door, and restart it on the same port."""
    with cluster("", num_hosts=1) as hosts:
        door = hosts.add_door()
        door.wait()

        def bring_back() -> None:
            door.start()
            door.wait()

        return _driven(command(door.url), door.kill, bring_back)


def _driven(command: Sequence[str | Path], kill: Callable[[], None], bring_back: Callable[[], None]) -> int:
    """Run a driver to its end. Its output says when to kill the server, and when to bring it back."""
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    timer = threading.Timer(LIMIT_S, driver.kill)
    timer.start()
    try:
        assert driver.stdout
        for line in driver.stdout:
            if line == "kill it\n":
                kill()
            elif line == "bring it back\n":
                bring_back()
            else:
                print(line, end="", flush=True)
        return driver.wait()
    finally:
        timer.cancel()
        driver.kill()


def programs(command: Callable[[Path], Sequence[str | Path]]) -> int:
    """Drive the pages of docs/browser.md, run as the page describes."""
    text = (HERE.parents[1] / "docs" / "browser.md").read_text()
    flags = re.search(r"^antiphon serve (.+)$", text, re.MULTILINE)
    assert flags
    with tempfile.TemporaryDirectory() as folder, server("--port", "8000", *flags[1].split()):
        found = re.findall(r"Save this as `(\S+)`:\n\n```html\n(.*?)```", text, re.DOTALL)
        assert len(found) == text.count("```html")
        for name, page in found:
            (Path(folder) / name).write_text(page)
        return subprocess.run(command(Path(folder)), timeout=2 * LIMIT_S, check=False).returncode


def over_tls(command: Callable[[str, str], Sequence[str | Path]]) -> int:
    """Drive the page at this machine's address, over https with a self-signed certificate."""
    flags = ("--host", "0.0.0.0", "--allow-anonymous", "--tls", "self-signed")
    with server(*flags) as url:
        address, port = address_of("0.0.0.0"), urlsplit(url).port
        shown = ssl.get_server_certificate(("127.0.0.1", port or 0))
        key = x509.load_pem_x509_certificate(shown.encode()).public_key()
        spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        digest = base64.b64encode(hashlib.sha256(spki).digest()).decode()
        given = command(f"https://{address}:{port}", digest)
        return subprocess.run(given, timeout=LIMIT_S, check=False).returncode


def module() -> int:
    """Check the module's types, and pack it: the npm package has its types and every file."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "client"
        shutil.copytree(HERE.parents[1] / "src" / "antiphon" / "web" / "client", folder)
        npm = partial(subprocess.run, cwd=folder, timeout=LIMIT_S, check=True, stdout=subprocess.PIPE, text=True)
        npm(["npm", "install", "--silent", "--no-audit", "--no-fund"])
        # `prepack` generates the types, and fails on a type error.
        said = npm(["npm", "pack", "--json", "--silent"]).stdout
        names = {file["path"] for file in json.loads(said[said.index("[\n") :])[0]["files"]}
        scripts = {path.name for path in folder.glob("*.js")}
        types = {f"types/{Path(name).stem}.d.ts" for name in scripts - {"worklets.js"}}
        assert scripts | types | {"package.json", "README.md"} <= names, names
    print(f"the module's types hold, and its package has {len(names)} files")
    return 0


def main() -> int:
    python = environment("browser", HERE)
    with tempfile.TemporaryDirectory() as folder:
        path, sign = Path(folder) / "microphone.wav", Path(folder) / "camera.y4m"
        microphone(path)
        camera(sign)

        def drive(url: str, *transport: str) -> int:
            command = [python, HERE / "drive_page.py", url, path, sign, HERE / "out", *transport]
            return subprocess.run(command, timeout=LIMIT_S, check=False).returncode

        def drive_tls() -> int:
            return over_tls(lambda *given: [python, HERE / "drive_tls.py", *given, path, sign, HERE / "out"])

        if "--tls" in sys.argv:
            return drive_tls()
        failed = 0
        if not {"--door", "--call"} & {*sys.argv}:
            command = [python, HERE / "drive_errors.py", HERE / "out"]
            failed = module() | subprocess.run(command, timeout=LIMIT_S, check=False).returncode
            failed |= programs(lambda folder: [python, HERE / "drive_programs.py", folder, path, sign])
            failed |= drive_tls()
            with server() as url:
                failed |= drive(url)
            failed |= returning(lambda url: [python, HERE / "drive_page.py", url, path, sign, HERE / "out", "returns"])
        failed |= losing_its_door(lambda url: [python, HERE / "drive_page.py", url, path, sign, HERE / "out", "calls"])
        for transport in ("websocket", "webrtc") if "--call" not in sys.argv else ():
            with hosts_behind_a_door() as url:
                failed |= drive(url, transport)
        return failed


if __name__ == "__main__":
    sys.exit(main())
