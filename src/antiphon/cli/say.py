"""`antiphon say`: speaks a text, or standard input as it arrives, to a file, a player or standard output.

`antiphon voices`: lists the voices, shows which of them are downloaded, and plays a sample of one.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast, get_args

import anyio.to_thread

from antiphon.audio import SpeechFormat
from antiphon.audio.encode import Encoder
from antiphon.audio.pcm import from_pcm16
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.audio.wav import wav_header
from antiphon.cli.preparation import store_for
from antiphon.contracts import Synthesizer
from antiphon.errors import ModelError, RemoteProtocolError, SettingsError, StoreError
from antiphon.events.speech import SpeechConfig
from antiphon.loading.loader import fallback_profile, load, store_of
from antiphon.loading.selection import ALL_VOICES, SPEECH_ROLES
from antiphon.sessions.speech.render import speak
from antiphon.settings import Settings
from antiphon.store import MODELS, Model
from antiphon.text.markup import MarkupReader, plain, without_pauses
from antiphon.text.sentences import SentenceSplitter

# Programs that play raw mono PCM16 from standard input, with their arguments for a sample rate.
PLAYERS: dict[str, Callable[[int], list[str]]] = {
    "pw-play": lambda hz: ["--raw", f"--rate={hz}", "--channels=1", "--format=s16", "-"],
    "paplay": lambda hz: ["--raw", f"--rate={hz}", "--channels=1", "--format=s16le"],
    "aplay": lambda hz: ["-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", str(hz)],
    "ffplay": lambda hz: ["-loglevel", "error", "-autoexit", "-nodisp", "-f", "s16le", "-ar", str(hz), "-"],
    "play": lambda hz: ["-q", "-t", "raw", "-e", "signed", "-b", "16", "-c", "1", "-r", str(hz), "-"],
}


# The text of a voice's sample.
SAMPLE = "Hello, I am {name}. The weather will be mild tomorrow, with some rain late in the evening."
# ffplay's message on a machine without a sound device.
NO_DEVICE = "audio open failed"
# Limit on the text that an error quotes, in characters.
SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class SayRequest:
    """The options of `antiphon say`, from the command line."""

    # The text; "-": standard input, spoken as it arrives.
    text: str
    # The file to write; its suffix is the format. "-": WAV on standard output. None: play.
    file: str | None = None
    # Whether to play the audio. Without a `file`, it is always played.
    play: bool = False
    # The voice's name; None: the first one loaded.
    voice: str | None = None
    # The speed of speech, from 0.25 to 4.
    speed: float = 1.0
    # The random seed: the same seed gives the same samples. None: a random seed.
    seed: int | None = None
    # Whether to print the times of each word on standard error.
    words: bool = False


def check_request(request: SayRequest) -> None:
    """Check a request before models are loaded.

    Raises SettingsError for an invalid format or speed, or if no player is installed; ModelError if there is no text;
    StoreError if the file cannot be written.
    """
    if not request.text.strip():
        raise ModelError("there is no text to speak")
    if not 0.25 <= request.speed <= 4.0:
        raise SettingsError("--speed must be from 0.25 to 4")
    if request.file == "-":
        return
    if not request.file:
        _player_name()
        return
    _format_of(request.file)
    path = Path(request.file)
    if path.is_dir():
        raise StoreError(f"-o {request.file}: this is a folder")
    if not path.parent.is_dir():
        raise StoreError(f"-o {request.file}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise StoreError(f"-o {request.file}: it cannot be written")


async def say(settings: Settings, request: SayRequest) -> None:
    """Speak the whole text, and return when all audio was written or played.

    Raises SettingsError if the voice or format is unknown or no player is installed; ModelError if a model fails, the
    player fails, or no part of the text can be spoken, in which case no file is left; StoreError.
    """
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models), None, SPEECH_ROLES)
    try:
        if models.synthesizer is None:
            raise SettingsError("--synthesizer none: there is no voice to speak with")
        profile = models.synthesizer.profile
        if request.voice and request.voice not in profile.voices:
            raise SettingsError(f"--speak-as {request.voice}: there are {', '.join(profile.voices)}")
        sink = _Sink(request, profile.sample_rate_hz)
        try:
            await _say(models.synthesizer, request, sink)
        except BaseException:
            sink.abandon()
            raise
        await anyio.to_thread.run_sync(sink.close)
    finally:
        models.close()


async def _say(synthesizer: Synthesizer, request: SayRequest, sink: _Sink) -> None:
    config = SpeechConfig(
        request.voice, "none", "pcm", request.speed, request.seed, stream=True, word_times=request.words
    )
    buffer, at_s = PlaybackClock(time.monotonic), 0.0
    # Sentences that could not be spoken. They are printed after a sentence was spoken; if no sentence is spoken, one
    # error covers them all.
    unspoken: list[str] = []
    async for sentence in _sentences(request.text):
        sentence_s = at_s
        try:
            async with aclosing(speak(synthesizer, sentence, config, buffer)) as chunks:
                async for chunk in chunks:
                    if chunk.data and unspoken:
                        _tell_unspoken(unspoken)
                    at_s += chunk.end_s - chunk.start_s
                    await anyio.to_thread.run_sync(sink.write, chunk.data)
                    if chunk.skipped:
                        print(f"left out because the voice cannot speak it: {chunk.skipped}", file=sys.stderr)
                    for word in chunk.words if request.words else ():
                        start_s, end_s = sentence_s + word.start_s, sentence_s + word.end_s
                        print(f"{start_s:8.3f} {end_s:8.3f} {word.text}", file=sys.stderr)
        except RemoteProtocolError:
            unspoken.append(sentence)
            if at_s:
                _tell_unspoken(unspoken)
    if not at_s:
        said = " ".join(" ".join(unspoken).split())[:SHOWN_CHARS]
        raise ModelError(f"the voice cannot speak any of this text{f': {said}' if said else ''}")


def _tell_unspoken(sentences: list[str]) -> None:
    """Print the sentences that were left out, and clear the list."""
    for sentence in sentences:
        shown = " ".join(without_pauses(sentence).split())[:SHOWN_CHARS]
        print(f"antiphon: left out because the voice cannot speak it: {shown}", file=sys.stderr)
    sentences.clear()


async def _sentences(text: str) -> AsyncIterator[str]:
    """Yield the sentences of a text, or, for "-", of standard input as it arrives."""
    splitter = SentenceSplitter()
    if text != "-":
        for sentence in splitter.feed(plain(text)) + splitter.flush():
            yield sentence
        return
    markup = MarkupReader()
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while data := await anyio.to_thread.run_sync(os.read, sys.stdin.fileno(), 4096):
        for sentence in splitter.feed(markup.feed(decoder.decode(data))):
            yield sentence
    for sentence in splitter.feed(markup.flush()) + splitter.flush():
        yield sentence


class _Sink:
    """The destination of PCM16: a file, which is encoded and opened with the first data, or a player."""

    def __init__(self, request: SayRequest, rate_hz: int) -> None:
        self._rate_hz, self._path = rate_hz, request.file
        self._format: SpeechFormat = "wav" if request.file == "-" else _format_of(request.file or "a.pcm")
        self._encoder = Encoder(self._format, rate_hz)
        self._num_bytes = 0
        self._out: BinaryIO | None = None
        self._player: _Player | None = None

    def write(self, data: bytes) -> None:
        """Write PCM16. Raises StoreError if the file cannot be written, ModelError if the player fails."""
        if data:
            self._num_bytes += len(data)
            self._write(self._encoder.feed(from_pcm16(data)))

    def close(self) -> None:
        """Write the rest, and wait until the player has played it. Raises as `write` does."""
        self._write(self._encoder.finish())
        if self._player:
            self._player.finish()
        elif self._out and self._format == "wav" and self._out.seekable():
            self._out.seek(0)
            self._out.write(wav_header(self._rate_hz, self._num_bytes))
        self._end()

    def abandon(self) -> None:
        """Stop without writing the rest. What was written stays."""
        if self._player:
            self._player.stop()
        with contextlib.suppress(OSError):
            self._end()

    def _end(self) -> None:
        if self._out and self._out is not sys.stdout.buffer:
            self._out.close()

    def _write(self, data: bytes) -> None:
        if self._path is None:
            self._player = self._player or _Player(self._rate_hz)
            self._player.write(data)
            return
        if self._path == "-":
            self._out = sys.stdout.buffer
            self._out.write(data)
            self._out.flush()
            return
        try:
            self._out = self._out or Path(self._path).open("wb")  # noqa: SIM115
            self._out.write(data)
            self._out.flush()
        except OSError as error:
            raise StoreError(f"-o {self._path}: {error.strerror}") from None


class _Player:
    """A program that plays PCM16 from its standard input. Its standard error is kept for the message of a failure."""

    def __init__(self, rate_hz: int) -> None:
        self._name = _player_name()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        command = [self._name, *PLAYERS[self._name](rate_hz)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=self._said)

    def write(self, data: bytes) -> None:
        """Write PCM16 to the program. Raises ModelError if the program has ended."""
        assert self._process.stdin
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failed(self._ended()[1]) from None

    def finish(self) -> None:
        """Wait until everything is played. Raises ModelError if the program reports a failure."""
        code, lines = self._ended()
        # ffplay exits with 0 if it finds no sound device.
        if code or any(NO_DEVICE in line for line in lines):
            raise self._failed(lines)

    def stop(self) -> None:
        """Kill the program, so that it stops playing at once."""
        self._process.kill()
        self._ended()

    def _ended(self) -> tuple[int, list[str]]:
        """Wait for the program's end. Returns its exit code and the lines that it printed on standard error."""
        if self._said.closed:
            return self._process.wait(), []
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        code = self._process.wait()
        with self._said as said:
            said.seek(0)
            lines = said.read().decode(errors="replace").splitlines()
        return code, [line.strip() for line in lines if line.strip()]

    def _failed(self, lines: list[str]) -> ModelError:
        why = next((line for line in lines if NO_DEVICE in line), lines[-1] if lines else "no message")
        return ModelError(f"{self._name} cannot play it ({why}): give a file with -o FILE")


def _player_name() -> str:
    name = next((n for n in PLAYERS if shutil.which(n)), None)
    if name is None:
        raise SettingsError(f"there is no player ({', '.join(PLAYERS)}): give a file with -o FILE")
    return name


def _format_of(file: str) -> SpeechFormat:
    """Return the format of a file by its suffix. Raises SettingsError for an unknown suffix."""
    format = Path(file).suffix.lstrip(".").lower()
    format = {"ogg": "opus", "raw": "pcm"}.get(format, format)
    if format not in get_args(SpeechFormat):
        raise SettingsError(f"-o {file}: the name must end in one of {', '.join(get_args(SpeechFormat))}")
    return cast(SpeechFormat, format)


# --- voices -----------------------------------------------------------------------------------------------------------


def voice_lines(settings: Settings) -> list[str]:
    """Return a line for each voice: its name, its description, and whether it is downloaded."""
    store = store_for(settings)
    out = []
    for name, model in _voices().items():
        state = f"missing: antiphon voices --add {name}" if store.missing(model) else "here"
        out.append(f"{name:16} {model.summary:36} {state}")
    try:
        profile = fallback_profile(settings)
    except ModelError as error:
        return [*out, f"no fallback voice: {error}"]
    languages = ", ".join(code for code in profile.languages if code != "en")
    return [*out, f"{profile.id:16} {'by rules, a fallback for':36} here", f"{'':16} {languages}"]


def with_voices(settings: Settings, names: Sequence[str]) -> Settings:
    """Return the settings with these voices, or `all` known ones. Raises SettingsError for an unknown name."""
    known = _voices()
    for name in names:
        if name not in known and name != ALL_VOICES:
            raise SettingsError(f"there is no voice {name}; there are {', '.join(known)}, and {ALL_VOICES}")
    default = next(iter(known))
    further = (ALL_VOICES,) if ALL_VOICES in names else tuple(name for name in names if name != default)
    return replace(settings, speech=replace(settings.speech, voices=further))


def _voices() -> dict[str, Model]:
    """Return the registry's voices, by their names without the adapter's prefix."""
    return {m.id.removeprefix(f"{m.adapter}-"): m for m in MODELS.values() if m.role == "synthesizer"}
