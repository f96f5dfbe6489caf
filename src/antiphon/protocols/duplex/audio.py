"""An answer's sound as a duplex client gets it: in its format, with how long it is and which words have sounded by when. Pure."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.encode import wav_header
from antiphon.audio.g711 import from_alaw, from_ulaw, to_alaw, to_ulaw
from antiphon.audio.pcm import Resampler, from_pcm16, to_pcm16
from antiphon.events.words import Word
from antiphon.protocols.duplex.session_fields import AudioFormat


@dataclass(slots=True)
class _Said:
    """Of one item: its text so far, where in it its sounding words end, and how long its sound is."""

    text: str = ""
    at: int = 0
    sound_s: float = 0.0
    marks: list[dict[str, int]] = field(default_factory=list)
    resampler: Resampler | None = None


class ResponseAudioTexts:
    """By item."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}

    def text(self, item_id: str, text: str) -> None:
        """More of its text."""
        self._said.setdefault(item_id, _Said()).text += text

    def sound(
        self, item_id: str, pcm: Pcm, rate_hz: int, words: Sequence[Word], form: AudioFormat
    ) -> dict[str, Any] | None:
        """More of its sound, as the fields of a delta; None where it fills no frame yet."""
        said = self._said.setdefault(item_id, _Said())
        said.sound_s += len(pcm) / rate_hz
        for word in words:
            found = said.text.find(word.text, said.at)
            said.at = found + len(word.text) if found >= 0 else said.at
            said.marks.append({"text_chars": said.at, "audio_end_ms": round(word.end_s * 1000)})
        said.resampler = said.resampler or Resampler(rate_hz, form["rate"])
        out = said.resampler.feed(pcm)
        return _delta(said, out, form, last=False) if len(out) else None

    def end(self, item_id: str, form: AudioFormat) -> dict[str, Any]:
        """The last of its sound, which may be empty, as the fields of a delta."""
        said = self._said.pop(item_id, _Said())
        rest = said.resampler.flush() if said.resampler else np.zeros(0, np.float32)
        return _delta(said, rest, form, last=True)

    def forget(self, item_id: str) -> None:
        """Nothing more of it comes."""
        self._said.pop(item_id, None)


def decoder(form: AudioFormat) -> tuple[Any, int]:
    """What makes float32 of bytes of this format, and how many bytes a sample has."""
    kinds: dict[str, tuple[Any, int]] = {
        "pcm16": (from_pcm16, 2),
        "pcm_f32le": (_from_f32, 4),
        "g711_ulaw": (from_ulaw, 1),
        "g711_alaw": (from_alaw, 1),
    }
    return kinds[form["type"]]


def encoded(pcm: Pcm, form: AudioFormat) -> bytes:
    """float32 at the format's rate to its bytes; a WAV is whole."""
    match form["type"]:
        case "pcm_f32le":
            return pcm.astype("<f4").tobytes()
        case "g711_ulaw":
            return to_ulaw(pcm)
        case "g711_alaw":
            return to_alaw(pcm)
        case "wav":
            data = to_pcm16(pcm)
            return wav_header(form["rate"], len(data)) + data
        case _:
            return to_pcm16(pcm)


def _delta(said: _Said, pcm: Pcm, form: AudioFormat, *, last: bool) -> dict[str, Any]:
    marks, said.marks = said.marks, []
    sound_ms = round(said.sound_s * 1000)
    return {
        "delta": b64encode(encoded(pcm, form) if len(pcm) else b"").decode(),
        "format": form["type"],
        "sample_rate_hz": form["rate"],
        "metadata": {
            "end_of_turn": last,
            "audio_duration_ms": sound_ms,
            "audio_text_marks": marks,
            "playback": {"generated_ms": sound_ms, "sent_ms": sound_ms},
        },
    }


def _from_f32(data: bytes) -> Pcm:
    return np.asarray(np.clip(np.frombuffer(data, "<f4"), -1.0, 1.0), np.float32)
