"""The audio of responses as a full-duplex client gets it: in its format, with its length and the times of its words.

docs/wire/duplex.md describes the deltas and the formats.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.g711 import from_alaw, from_ulaw, to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.data_uri import decode_base64
from antiphon.events.words import Word
from antiphon.protocols.realtime.audio_buffer import DecodeAudio
from antiphon.protocols.realtime.input_fields import AudioFormat


def _from_f32(data: bytes) -> Pcm:
    return np.asarray(np.clip(np.frombuffer(data, "<f4"), -1.0, 1.0), np.float32)


# By the name of an input format: from bytes to float32 samples in [-1, 1], and how many bytes a sample has.
_DECODERS: dict[str, tuple[Callable[[bytes], Pcm], int]] = {
    "pcm16": (from_pcm16, 2),
    "pcm_f32le": (_from_f32, 4),
    "g711_ulaw": (from_ulaw, 1),
    "g711_alaw": (from_alaw, 1),
}


def duplex_audio(max_bytes: int) -> DecodeAudio:
    """What reads the formats of this dialect. `max_bytes`: the most of one append, after base64 is decoded.

    It raises RemoteProtocolError (`bad_audio`), also for a sample that is not a finite number.
    """

    def decode(text: str, audio_format: AudioFormat, param: str) -> Pcm:
        from_bytes, sample_bytes = _DECODERS[audio_format.type]
        try:
            data = decode_base64(text)
        except ValueError:
            raise RemoteProtocolError("bad_audio", "Sound comes in base64.", param) from None
        if len(data) > max_bytes or len(data) % sample_bytes:
            raise RemoteProtocolError(
                "bad_audio", f"{len(data)} bytes are no whole number of samples, or over {max_bytes}.", param
            )
        pcm = from_bytes(data)
        if not np.isfinite(pcm).all():
            raise RemoteProtocolError("bad_audio", "A sample is not a finite number.", param)
        return pcm

    return decode


class TextMark(TypedDict):
    """The end of a word: so many characters of the item's text, at so many milliseconds of its audio."""

    text_chars: int
    audio_end_ms: int


class DeltaFacts(TypedDict):
    """The `metadata` of a delta of audio. `playback`: how much of the item's audio was generated, and sent."""

    end_of_turn: bool
    audio_duration_ms: int
    audio_text_marks: list[TextMark]
    playback: dict[str, int]


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """More of an item's audio, as a client gets it: in base64, and what is told with it."""

    audio: str
    format: str
    rate_hz: int
    facts: DeltaFacts


@dataclass(slots=True)
class _SentItem:
    """What was sent of one item."""

    text: str = ""
    # Where in the text the words of its audio so far end, in characters.
    spoken_chars: int = 0
    audio_s: float = 0.0
    # The ends of words that the next delta will have: characters of the text, and milliseconds of the audio.
    marks: list[TextMark] = field(default_factory=list)
    resampler: Resampler | None = None


class ResponseAudioTexts:
    """Joins the text and the audio of each item, so that deltas of audio say how far in the text they have come.

    What it keeps of an item goes with the item's last delta, or with `forget`.
    """

    def __init__(self) -> None:
        self._items: dict[str, _SentItem] = {}

    def add_text(self, item_id: str, text: str) -> None:
        """Add to an item's text. It has to come before the audio of its words, or they have no mark of their own."""
        self._items.setdefault(item_id, _SentItem()).text += text

    def add_audio(
        self, item_id: str, pcm: Pcm, rate_hz: int, words: Sequence[Word], audio_format: AudioFormat
    ) -> AudioDelta | None:
        """The fields of a delta with more of an item's audio; None where it is too short to give a sample yet.

        `pcm` is float32 [num_samples] at `rate_hz`. `words` are those that end in it, with times from the beginning of
        the item's audio.
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
        """The fields of an item's last delta, whose audio may be empty. The item is forgotten."""
        sent = self._items.pop(item_id, _SentItem())
        rest = sent.resampler.flush() if sent.resampler else np.zeros(0, np.float32)
        return _delta(sent, rest, audio_format, last=True)

    def forget(self, item_id: str) -> None:
        """Drop what is kept of an item that was cut off; nothing if there is nothing."""
        self._items.pop(item_id, None)


def encoded(pcm: Pcm, audio_format: AudioFormat) -> bytes:
    """The bytes of an output format for float32 samples at its rate; a `wav` is a whole file, header included."""
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
