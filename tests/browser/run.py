"""The page in a real browser against real servers: `make browser`. Needs Chromium (Debian: `apt install chromium`).

`make browser DOOR=1` tries the page at a door alone.
The driver's environment is made beside this file on the first run; screenshots are left in out/.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import wave
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
from run import environment, hosts_behind_a_door, server

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16

HERE = Path(__file__).resolve().parent
RECORDING = HERE.parent / "data" / "audio" / "lj-LJ001-0004.flac"
MICROPHONE_HZ, LEAD_S = 48_000, 1.5
SIGN = "EXIT 42"
LIMIT_S = 300


def microphone(path: Path) -> None:
    """Write what Chromium takes for a microphone: a moment of silence, then the recording."""
    pcm = np.concatenate((np.zeros(int(LEAD_S * 16_000), np.float32), decode_all(str(RECORDING))))
    resampler = Resampler(16_000, MICROPHONE_HZ)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(MICROPHONE_HZ)
        file.writeframes(to_pcm16(np.concatenate((resampler.feed(pcm), resampler.flush()))))


def camera(path: Path) -> None:
    """Write what Chromium takes for a camera: a door's sign, as YUV4MPEG2."""
    image = Image.new("RGB", (640, 360), "white")
    ImageDraw.Draw(image).text((60, 140), SIGN, "black", ImageFont.load_default(72))
    luma, *chroma = (np.asarray(plane) for plane in image.convert("YCbCr").split())
    frame = luma.tobytes() + b"".join(plane[::2, ::2].tobytes() for plane in chroma)
    path.write_bytes(b"YUV4MPEG2 W640 H360 F5:1 Ip C420\n" + (b"FRAME\n" + frame) * 10)


def main() -> int:
    python = environment("browser", HERE)
    with tempfile.TemporaryDirectory() as folder:
        path, sign = Path(folder) / "microphone.wav", Path(folder) / "camera.y4m"
        microphone(path)
        camera(sign)

        def drive(url: str, *transport: str) -> int:
            command = [python, HERE / "drive_page.py", url, path, sign, HERE / "out", *transport]
            return subprocess.run(command, timeout=LIMIT_S, check=False).returncode

        failed = 0
        if "--door" not in sys.argv:
            command = [python, HERE / "drive_errors.py", HERE / "out"]
            failed = subprocess.run(command, timeout=LIMIT_S, check=False).returncode
            with server() as url:
                failed |= drive(url)
        for transport in ("ws", "rtc"):
            with hosts_behind_a_door() as url:
                failed |= drive(url, transport)
        return failed


if __name__ == "__main__":
    sys.exit(main())
