"""Encodes the audio of responses for a full-duplex client, and adds its duration and the times of its words.

docs/wire/duplex.md describes the deltas and the formats.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import from_alaw, from_ulaw, to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.words import Word
from antiphon.protocols.realtime.audio_buffer import DecodeAudio
from antiphon.protocols.realtime.input_fields import AudioFormat


def _from_f32(data: bytes) -> Pcm:
    return np.asarray(np.clip(np.frombuffer(data, "<f4"), -1.0, 1.0), np.float32)


# For each input format: its decoder to float32 samples in [-1, 1], and its number of bytes per sample.
_DECODERS: dict[str, tuple[Callable[[bytes], Pcm], int]] = {
    "pcm16": (from_pcm16, 2),
    "pcm_f32le": (_from_f32, 4),
    "g711_ulaw": (from_ulaw, 1),
    "g711_alaw": (from_alaw, 1),
}


def duplex_audio(max_bytes: int) -> DecodeAudio:
    """Return a decoder for this dialect's formats. `max_bytes`: maximum size of one append, in decoded bytes.

    The decoder raises RemoteProtocolError (`bad_audio`) for invalid data, including NaN and infinite samples.
    """

    def decode(text: str, audio_format: AudioFormat, param: str) -> Pcm:
        from_bytes, sample_bytes = _DECODERS[audio_format.type]
        try:
            data = decode_base64(text)
        except ValueError:
            raise RemoteProtocolError("bad_audio", "Sound comes in base64.", param) from None
        if len(data) > max_bytes or len(data) % sample_bytes:
            raise RemoteProtocolError(
                "bad_audio", f"{len(data)} bytes are not a whole number of samples, or more than {max_bytes}.", param
            )
        pcm = from_bytes(data)
        if not np.isfinite(pcm).all():
            raise RemoteProtocolError("bad_audio", "A sample is not a finite number.", param)
        return pcm

    return decode


class TextMark(TypedDict):
    """The end of a word: as an offset in characters into the item's text, and in milliseconds into its audio."""

    text_chars: int
    audio_end_ms: int


class DeltaFacts(TypedDict):
    """The `metadata` of an audio delta. `playback`: how many milliseconds of the item were generated and sent."""

    end_of_turn: bool
    audio_duration_ms: int
    audio_text_marks: list[TextMark]
    playback: dict[str, int]


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """An audio delta of an item, as a client receives it: base64 and metadata."""

    audio: str
    format: str
    rate_hz: int
    facts: DeltaFacts


@dataclass(slots=True)
class _SentItem:
    """The text and audio of one item, as far as they were sent."""

    text: str = ""
    # Length of the text up to the last word that was spoken so far, in characters.
    spoken_chars: int = 0
    audio_s: float = 0.0
    # Ends of words, to be sent with the next delta.
    marks: list[TextMark] = field(default_factory=list)
    resampler: Resampler | None = None


class ResponseAudioTexts:
    """Aligns the text and audio of each item, so that audio deltas state where their words end.

    The last delta of an item, or `forget`, drops the item's state.
    """

    def __init__(self) -> None:
        self._items: dict[str, _SentItem] = {}

    def add_text(self, item_id: str, text: str) -> None:
        """Append text to an item. Call it before `add_audio` adds the audio of these words; otherwise their marks do
        not advance.
        """
        self._items.setdefault(item_id, _SentItem()).text += text

    def add_audio(
        self, item_id: str, pcm: Pcm, rate_hz: int, words: Sequence[Word], audio_format: AudioFormat
    ) -> AudioDelta | None:
        """Return the item's next audio delta; None if the audio is too short for a sample at the output rate.

        `pcm` is float32 [num_samples] at `rate_hz`. `words` are the words that end within `pcm`; their times are
        measured from the beginning of the item's audio.
        """
        sent = self._items.setdefault(item_id, _SentItem())
        sent.audio_s += len(pcm) / rate_hz
        for word in words:
            found = sent.text.find(word.text, sent.spoken_chars)
            if found >= 0:
                sent.spoken_chars = found + len(word.text)
            sent.marks.append({"text_chars": sent.spoken_chars, "audio_end_ms": round(word.end_s * 1000)})
        sent.resampler = sent.resampler or Resampler(rate_hz, audio_format.rate_hz)
        out = sent.resampler.feed(pcm)
        return _delta(sent, out, audio_format, last=False) if len(out) else None

    def end(self, item_id: str, audio_format: AudioFormat) -> AudioDelta:
        """Return an item's last delta, and forget the item. The delta's audio may be empty."""
        sent = self._items.pop(item_id, _SentItem())
        rest = sent.resampler.flush() if sent.resampler else np.zeros(0, np.float32)
        return _delta(sent, rest, audio_format, last=True)

    def forget(self, item_id: str) -> None:
        """Forget an item that was cut off. No-op for an unknown item."""
        self._items.pop(item_id, None)


def encoded(pcm: Pcm, audio_format: AudioFormat) -> bytes:
    """Encode float32 samples, already at the format's rate, in an output format. `wav` is a file with a header."""
    match audio_format.type:
        case "pcm_f32le":
            return pcm.astype("<f4").tobytes()
        case "g711_ulaw":
            return to_ulaw(pcm)
        case "g711_alaw":
            return to_alaw(pcm)
        case "wav":
            data = to_pcm16(pcm)
            return wav_header(audio_format.rate_hz, len(data)) + data
        case _:
            return to_pcm16(pcm)


def _delta(sent: _SentItem, pcm: Pcm, audio_format: AudioFormat, *, last: bool) -> AudioDelta:
    marks, sent.marks = sent.marks, []
    audio_ms = round(sent.audio_s * 1000)
    facts: DeltaFacts = {
        "end_of_turn": last,
        "audio_duration_ms": audio_ms,
        "audio_text_marks": marks,
        "playback": {"generated_ms": audio_ms, "sent_ms": audio_ms},
    }
    audio = b64encode(encoded(pcm, audio_format) if len(pcm) else b"").decode()
    return AudioDelta(audio, audio_format.type, audio_format.rate_hz, facts)
