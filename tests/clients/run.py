"""Third-party clients, each in an environment of its own, against a real server: `make clients`.

    python tests/clients/run.py [NAME…]

An environment is made beside this file from NAME.txt on the first run. A driver prints one line and exits with 0 if its
client was served.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import venv
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from antiphon.audio.containers import decode_all
from antiphon.audio.pcm import Resampler, to_pcm16

HERE = Path(__file__).resolve().parent
NAMES = ("agents", "livekit", "pipecat", "node", "duplex", "openbmb")
LIMIT_S = 180
RECORDING = HERE.parent / "data" / "audio"


def environment(name: str, here: Path = HERE) -> Path:
    """The interpreter of a client's environment in `here`, which is made anew when its list has changed."""
    listed = here / f"{name}.txt"
    folder = here / f".venv-{name}"
    digest = hashlib.sha256(listed.read_bytes()).hexdigest()
    stamp = folder / ".done"
    if not stamp.is_file() or stamp.read_text() != digest:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", "-r", listed], check=True)
        stamp.write_text(digest)
    return folder / "bin" / "python"


def command(name: str) -> list[str | Path]:
    """The command that drives a client, without its arguments. Node's packages are installed when their list is new."""
    if name != "node":
        return [environment(name), HERE / f"drive_{name}.py"]
    folder = HERE / "node"
    stamp, listed = folder / "node_modules" / ".done", (folder / "package-lock.json").read_text()
    if not stamp.is_file() or stamp.read_text() != listed:
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)
        stamp.write_text(listed)
    return ["node", folder / "drive.mjs"]


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a server with the default models, and stop it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-m", "antiphon", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        assert process.stdout
        yield next(found[1] for line in process.stdout if (found := re.search(r"ready at (\S+)", line)))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wav(recording: Path, folder: Path) -> Path:
    """The recording as PCM16 at 24 kHz: Node reads no FLAC."""
    path = folder / "recording.wav"
    resampler = Resampler(16_000, 24_000)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes(to_pcm16(np.concatenate((resampler.feed(decode_all(str(recording))), resampler.flush()))))
    return path


def main() -> int:
    names = sys.argv[1:] or NAMES
    commands = {name: command(name) for name in names}
    recording = next(p for p in sorted(RECORDING.iterdir()) if p.name.startswith("lj-LJ001-0008"))
    failed = 0
    with tempfile.TemporaryDirectory() as folder, server() as url:
        for name, start in commands.items():
            sound = _wav(recording, Path(folder)) if name == "node" else recording
            try:
                done = subprocess.run([*start, url, sound], timeout=LIMIT_S, check=False)
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = 124
            print(f"{name}: {'served' if code == 0 else f'FAILED ({code})'}", flush=True)
            failed += code != 0
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
