"""The files of Piper's voices: NAME.onnx and NAME.onnx.json, any number of them in one folder.

The fields of the JSON are those that piper-tts 1.8 reads. This module imports nothing that computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from antiphon.events.languages import language_code

# What makes the phonemes that a voice was trained with: eSpeak NG, or none, because its symbols are letters.
PHONEME_TYPES = ("espeak", "text")
# The symbols that begin and end a text, and the one between two others.
BEGIN, END, PAD = "^", "$", "_"


class SoundFields(msgspec.Struct, frozen=True):
    """The section `audio`: the sample rate of the voice, in Hz."""

    sample_rate: int


class EspeakFields(msgspec.Struct, frozen=True):
    """The section `espeak`: the name of eSpeak NG's voice, whose phonemes the voice reads, such as `en-us`."""

    voice: str = ""


class LanguageFields(msgspec.Struct, frozen=True):
    """The section `language`: its code, such as `en_US`. Files of 2023 do not have it."""

    code: str = ""


class ScaleFields(msgspec.Struct, frozen=True):
    """The section `inference`: the variation of sounds and of their durations, and the voice's normal slowness."""

    noise_scale: float = 0.667
    length_scale: float = 1.0
    noise_w: float = 0.8


class VoiceFields(msgspec.Struct, frozen=True):
    """The JSON of a voice. Other fields are not read."""

    # The form of its audio.
    audio: SoundFields
    # The ids of each phoneme or punctuation mark.
    phoneme_id_map: dict[str, list[int]]
    # What eSpeak NG has to know.
    espeak: EspeakFields = EspeakFields()
    # The language that it speaks.
    language: LanguageFields = LanguageFields()
    # Its usual way to speak.
    inference: ScaleFields = ScaleFields()
    # What its phonemes are made by: one of PHONEME_TYPES. None: the first of them.
    phoneme_type: str | None = "espeak"
    # The number of its speakers.
    num_speakers: int = 1
    # The numbers of its speakers, by name.
    speaker_id_map: dict[str, int] = {}
    # Vowels that are one phoneme of the map together.
    vowel_clusters: list[list[str]] | None = None


@dataclass(frozen=True, slots=True)
class VoiceFile:
    """One voice of a folder. `name`: the file's name without `.onnx`."""

    name: str
    graph: Path
    fields: VoiceFields

    @property
    def language(self) -> str:
        """The language that it speaks, as an ISO-639-1 code."""
        return language_code(self.fields.language.code or self.fields.espeak.voice or self.name)

    @property
    def speakers(self) -> dict[str, int | None]:
        """The number of each speaker by the name of its voice; None if there is only one.

        A voice of several speakers has a voice NAME:SPEAKER for each. NAME alone is the first of them.
        """
        if self.fields.num_speakers <= 1:
            return {self.name: None}
        by_number = sorted(self.fields.speaker_id_map.items(), key=lambda one: one[1])
        return {self.name: 0, **{f"{self.name}:{speaker}": number for speaker, number in by_number}}


def voice_files(folder: Path) -> Iterator[VoiceFile]:
    """Yield the voices of a folder, by name. Raises ValueError, which names the file, if one cannot be used."""
    for graph in sorted(folder.glob("*.onnx")):
        path = graph.with_name(f"{graph.name}.json")
        try:
            fields = msgspec.json.decode(path.read_bytes(), type=VoiceFields)
        except FileNotFoundError:
            raise ValueError(f"{graph.name} has no {path.name}: copy it from where the voice is from") from None
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ValueError(f"{path.name} cannot be read: {error}") from None
        kind = fields.phoneme_type or "espeak"
        if kind not in PHONEME_TYPES:
            made = " and ".join(PHONEME_TYPES)
            raise ValueError(f"{path.name}: its phonemes are of the kind {kind}, and only {made} are made here")
        if kind == "espeak" and not fields.espeak.voice:
            raise ValueError(f"{path.name} names no voice of eSpeak NG (espeak.voice)")
        if missing := [one for one in (BEGIN, END, PAD) if not fields.phoneme_id_map.get(one)]:
            raise ValueError(f"{path.name}: phoneme_id_map has no {' '.join(missing)}")
        yield VoiceFile(graph.name.removesuffix(".onnx"), graph, fields)


def describe(folder: Path) -> tuple[str, str]:
    """Return what the voices of a folder are, in words, and why they do not load; "" if they do."""
    try:
        voices = list(voice_files(folder))
    except ValueError as error:
        return "voices in Piper's format", str(error)
    names = ", ".join(f"{voice.name} ({voice.language})" for voice in voices)
    return f"voices in Piper's format: {names}", "" if voices else "it has no .onnx file"
