"""What ElevenLabs' requests say about a voice: its id, its settings, and the format of its audio."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from antiphon.audio import SpeechFormat
from antiphon.audio.encode import RawCodec, StreamEncoding
from antiphon.errors import RemoteProtocolError
from antiphon.events.speech import SpeechConfig
from antiphon.protocols.fields import number
from antiphon.protocols.model_names import loaded_voice
from antiphon.protocols.speech.fields import SpeechCatalog, SpeechFields, read_config

# An id of a voice of the hosted service. Such an id stands for the first loaded voice, unless names are strict.
_HOSTED_ID = re.compile(r"[A-Za-z0-9]{20}")
# What an SDK writes in the place of a model that its user has not chosen.
_NO_MODEL = ("", "Ellipsis", "None", "undefined")
DEFAULT_FORMAT = "mp3_44100_128"
# The sample rates of each codec, in Hz, and the codecs whose names have the bit rate too, in kbit/s.
_RATES: Mapping[str, tuple[RawCodec | SpeechFormat, Sequence[int]]] = {
    "mp3": ("mp3", (22050, 24000, 44100)),
    "opus": ("opus", (48000,)),
    "pcm": ("pcm_s16le", (8000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "wav": ("wav", (8000, 16000, 22050, 24000, 32000, 44100, 48000)),
    "ulaw": ("ulaw", (8000,)),
    "alaw": ("alaw", (8000,)),
}
_KBITS = (32, 48, 64, 96, 128, 192)
_WITH_KBITS = ("mp3", "opus")
# Media types of the codecs without a container. audio/encode.py has those of the others.
MEDIA_TYPES_OF_RAW = {"pcm_s16le": "audio/pcm", "ulaw": "audio/basic", "alaw": "audio/x-alaw-basic"}


class VoiceSettings(msgspec.Struct):
    """How a voice speaks. Only `speed` has an effect; the others belong to the hosted models."""

    # Tempo, in [0.25, 4]; 1 is the voice's own.
    speed: float | None = None
    # No effect.
    stability: object = None
    # No effect.
    similarity_boost: object = None
    # No effect.
    style: object = None
    # No effect.
    use_speaker_boost: object = None


def read_format(name: str) -> StreamEncoding:
    """Read the name of an output format, such as `mp3_44100_128`. Raises RemoteProtocolError for any other name."""
    codec, _, rest = name.partition("_")
    rate, _, kbits = rest.partition("_")
    found = _RATES.get(codec)
    known_bits = not kbits if codec not in _WITH_KBITS else kbits in map(str, _KBITS)
    if found is None or not known_bits or rate not in map(str, found[1]):
        message = f"The output format '{name[:40]}' is not supported."
        raise RemoteProtocolError("output_format_not_allowed", message, "output_format")
    return StreamEncoding(found[0], int(rate), 1000 * int(kbits) if kbits else None)


def read_voice(
    voice_id: str,
    catalog: SpeechCatalog,
    encoding: StreamEncoding,
    *,
    model_id: str | None = None,
    language_code: str | None = None,
    seed: int | None = None,
) -> SpeechConfig:
    """Return the configuration for a voice: PCM at the rate of `encoding`, as it is made, with word times.

    An id of the hosted service's stands for the first loaded voice. Blocks while it reads an uploaded voice. Raises the
    errors of `protocols/speech/fields.py` (`read_config`).
    """
    if _is_hosted(voice_id, catalog):
        catalog.log_alias(f"voice {voice_id}", catalog.voices[0])
        voice_id = ""
    model = None if model_id in _NO_MODEL else model_id
    fields = SpeechFields(model=model, voice=voice_id or None, language=language_code or None, seed=seed)
    config = read_config(fields, catalog, "pcm")
    return replace(config, stream=True, word_times=True, rate_hz=encoding.rate_hz)


def speed_of(settings: VoiceSettings | None, before: float = 1.0) -> float:
    """Return the tempo of the settings, or `before`. Raises RemoteProtocolError if it is out of range."""
    if settings is None or settings.speed is None:
        return before
    return number(settings.speed, "voice_settings.speed", 0.25, 4.0)


def _is_hosted(voice_id: str, catalog: SpeechCatalog) -> bool:
    known = loaded_voice(voice_id, catalog.voices) or (catalog.clones and catalog.uploaded(voice_id))
    return not known and not catalog.models.strict and _HOSTED_ID.fullmatch(voice_id) is not None
