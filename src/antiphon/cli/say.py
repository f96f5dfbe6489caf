"""`antiphon say`: speaks a text, or what arrives on standard input, to a file, a player or standard output."""

from __future__ import annotations

import codecs
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast, get_args

import anyio.to_thread

from antiphon.audio import SpeechFormat
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import from_pcm16
from antiphon.audio.wav import wav_header
from antiphon.contracts import Synthesizer
from antiphon.errors import RemoteProtocolError, SettingsError
from antiphon.events.speech import SpeechConfig
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import SPEECH_ROLES
from antiphon.sessions.speech.render import ListenerBuffer, speak
from antiphon.settings import Settings
from antiphon.text.sentences import SentenceSplitter

# Programs that play raw PCM16 mono from standard input, with the arguments that take the rate.
PLAYERS: dict[str, Callable[[int], list[str]]] = {
    "pw-play": lambda hz: ["--raw", f"--rate={hz}", "--channels=1", "--format=s16", "-"],
    "paplay": lambda hz: ["--raw", f"--rate={hz}", "--channels=1", "--format=s16le"],
    "aplay": lambda hz: ["-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(hz)],
    "ffplay": lambda hz: ["-loglevel", "error", "-autoexit", "-nodisp", "-f", "s16le", "-ar", str(hz), "-"],
    "play": lambda hz: ["-q", "-t", "raw", "-e", "signed", "-b", "16", "-c", "1", "-r", str(hz), "-"],
}


@dataclass(frozen=True, slots=True)
class SayRequest:
    """What is to be spoken, and where to.

    - `text`: the text; "-" is standard input, spoken as it arrives.
    - `file`: its name's ending is the format; "-" is WAV on standard output.
    - `play`: play the audio; also without it where no `file` is given.
    - `voice`, `speed`, `seed`: as in SpeechConfig.
    - `words`: print where each word lies, on standard error.
    """

    text: str
    file: str | None = None
    play: bool = False
    voice: str | None = None
    speed: float = 1.0
    seed: int | None = None
    words: bool = False


async def say(settings: Settings, request: SayRequest) -> None:
    """Speak all of the text, and return when it was written or played. Raises SettingsError for a voice or format that
    there is not, or where there is no player, StoreError, ModelError.
    """
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models), None, SPEECH_ROLES)
    try:
        if models.synthesizer is None:
            raise SettingsError("--synthesizer none: there is no voice to speak with")
        profile = models.synthesizer.profile
        if request.voice and request.voice not in profile.voices:
            raise SettingsError(f"--speak-as {request.voice}: there are {', '.join(profile.voices)}")
        if not 0.25 <= request.speed <= 4.0:
            raise SettingsError("--speed: from 0.25 to 4")
        sink = _sink(request, profile.sample_rate_hz)
        try:
            await _say(models.synthesizer, request, sink)
        finally:
            await anyio.to_thread.run_sync(sink.close)
    finally:
        models.close()


async def _say(synthesizer: Synthesizer, request: SayRequest, sink: _Sink) -> None:
    config = SpeechConfig(
        request.voice, "none", "pcm", request.speed, request.seed, stream=True, word_times=request.words
    )
    buffer, at_s = ListenerBuffer(), 0.0
    async for sentence in _sentences(request.text):
        sentence_s = at_s
        try:
            async with aclosing(speak(synthesizer, sentence, config, buffer)) as chunks:
                async for chunk in chunks:
                    at_s += chunk.end_s - chunk.start_s
                    await anyio.to_thread.run_sync(sink.write, chunk.data)
                    if chunk.skipped:
                        print(f"left out, for the voice cannot speak it: {chunk.skipped}", file=sys.stderr)
                    for word in chunk.words if request.words else ():
                        start_s, end_s = sentence_s + word.start_s, sentence_s + word.end_s
                        print(f"{start_s:8.3f} {end_s:8.3f} {word.text}", file=sys.stderr)
        except RemoteProtocolError as error:
            print(f"antiphon: {error}", file=sys.stderr)


async def _sentences(text: str) -> AsyncIterator[str]:
    """The sentences of a text, or for "-" of standard input as it arrives."""
    splitter = SentenceSplitter()
    if text != "-":
        for sentence in splitter.feed(text) + splitter.flush():
            yield sentence
        return
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := await anyio.to_thread.run_sync(os.read, sys.stdin.fileno(), 4096):
        for sentence in splitter.feed(decoder.decode(data)):
            yield sentence
    for sentence in splitter.flush():
        yield sentence


class _Sink:
    """Where PCM16 goes: encoded into a file, or as it is into a player."""

    def __init__(
        self, out: BinaryIO, rate_hz: int, format: SpeechFormat, player: subprocess.Popen[bytes] | None = None
    ) -> None:
        self._out, self._rate_hz, self._format, self._player = out, rate_hz, format, player
        self._encoder = Encoder(format, rate_hz)
        self._num_bytes = 0

    def write(self, data: bytes) -> None:
        self._num_bytes += len(data)
        self._out.write(self._encoder.feed(from_pcm16(data)))
        self._out.flush()

    def close(self) -> None:
        try:
            self._out.write(self._encoder.finish())
            if self._format == "wav" and self._out.seekable():
                self._out.seek(0)
                self._out.write(wav_header(self._rate_hz, self._num_bytes))
            if self._out is not sys.stdout.buffer:
                self._out.close()
        finally:
            if self._player:
                self._player.wait()


def _sink(request: SayRequest, rate_hz: int) -> _Sink:
    if request.file == "-":
        return _Sink(sys.stdout.buffer, rate_hz, "wav")
    if request.file and not request.play:
        format = Path(request.file).suffix.lstrip(".").lower()
        format = {"ogg": "opus", "raw": "pcm"}.get(format, format)
        if format not in get_args(SpeechFormat):
            raise SettingsError(f"-o {request.file}: the name must end in one of {', '.join(get_args(SpeechFormat))}")
        return _Sink(Path(request.file).open("wb"), rate_hz, cast(SpeechFormat, format))
    name = next((n for n in PLAYERS if shutil.which(n)), None)
    if name is None:
        raise SettingsError(f"there is no player ({', '.join(PLAYERS)}): give a file with -o FILE")
    player = subprocess.Popen([name, *PLAYERS[name](rate_hz)], stdin=subprocess.PIPE)
    assert player.stdin
    return _Sink(cast(BinaryIO, player.stdin), rate_hz, "pcm", player)
