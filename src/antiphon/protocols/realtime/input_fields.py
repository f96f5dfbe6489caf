"""The fields of `session.audio.input`: formats, noise reduction and turn detection, with their defaults and checks.

Transcriptions and conversations share most of them: docs/wire/openai-transcription.md, docs/wire/openai-realtime.md. A
check takes the client's value and returns the value that the session has from then on. It modifies no argument. Checks
raise RemoteProtocolError with the path of the field at fault. That path begins with `param`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.transcription import (
    EnrolledVoice,
    KnownVoice,
    PrimarySpeakerMode,
    TranscriptionConfig,
)
from antiphon.protocols.connection import Context
from antiphon.protocols.fields import Text, merged, unknown_parameter, unsupported
from antiphon.protocols.realtime.transcript_events import LANGUAGE, LOGPROBS, WORDS
from antiphon.protocols.realtime.turn_fields import TurnDetection, TurnDetectionFields, check_turn_detection
from antiphon.protocols.wire import decode_json

F = TypeVar("F")
G = TypeVar("G", bound=msgspec.Struct)
# Sample rates allowed for PCM, in Hz. G.711 is always at 8,000 Hz.
PCM_RATES_HZ = (8000, 16000, 24000, 44100, 48000)
# Path of the primary speaker's fields, the same in all dialects. Name of the field for an enrolled voice.
SPEAKER_PATH, _FIELD = "session.audio.input.", "enrolled_voice"
# Name of the field for known speakers, the same in all dialects.
_KNOWN_FIELD = "known_speaker_names"
NO_SPEAKER_MODEL = "This server has no --speaker-model to tell voices apart."
# Maximum number of voices that are looked up for one message. A valid message names only one.
MAX_NAMED = 4
# Maximum number of known speakers of a session.
MAX_KNOWN_SPEAKERS = 20


class AudioFormat(msgspec.Struct, frozen=True):
    """An audio format as the client sees it. `rate`: sample rate in Hz; missing for G.711, which is at 8,000 Hz."""

    type: str = "audio/pcm"
    rate: int | UnsetType = UNSET

    @property
    def rate_hz(self) -> int:
        """The sample rate in Hz; 8,000 for G.711."""
        return 8000 if self.rate is UNSET else self.rate


PCM_24K = AudioFormat("audio/pcm", 24000)
# Formats by their beta names.
BETA_FORMATS = {"pcm16": PCM_24K, "g711_ulaw": AudioFormat("audio/pcmu"), "g711_alaw": AudioFormat("audio/pcma")}


class FormatFields(msgspec.Struct, forbid_unknown_fields=True):
    """A format as a client sends it."""

    type: object = UNSET
    rate: object = UNSET


class NoiseReduction(msgspec.Struct, forbid_unknown_fields=True):
    """Noise reduction, as clients send it and see it. It has no effect. `strength` is not checked."""

    type: str | UnsetType = UNSET
    strength: object = UNSET


# Limits of a session's keyterms: their number, and the length of each. A final's words are compared with all keyterms.
MAX_KEYTERMS = 200
MAX_KEYTERM_CHARS = 64


class TranscriptionFields(msgspec.Struct, forbid_unknown_fields=True):
    """`transcription` as a client sends it."""

    model: Text | UnsetType | None = UNSET  # Name of the transcriber.
    language: Text | UnsetType | None = UNSET  # Language of the speech. If missing, it is detected.
    prompt: Text | UnsetType | None = UNSET  # Names and words that the audio is likely to contain.
    keywords: list[Text] | UnsetType | None = UNSET  # Terms to recognize, at most MAX_KEYTERMS.
    keyterms: list[Text] | UnsetType | None = UNSET  # Alias of `keywords`.
    languages: list[Text] | UnsetType | None = UNSET  # Candidates for language detection.
    speaker_labels: bool | UnsetType | None = UNSET  # Whether transcripts have the label of the turn's voice.
    known_speaker_names: list[Text] | UnsetType | None = UNSET  # The remembered speakers to recognize.

    def terms(self, param: str) -> list[str] | UnsetType:
        """Return `keywords` or its alias `keyterms`. Null counts as an empty list, and blank terms are dropped.

        Raises RemoteProtocolError if both fields are present, if there are more than MAX_KEYTERMS terms, or if a term
        is longer than MAX_KEYTERM_CHARS characters.
        """
        name = "keywords" if self.keyterms is UNSET else "keyterms"
        if self.keywords is not UNSET and self.keyterms is not UNSET:
            raise RemoteProtocolError(
                "invalid_value", "'keyterms' is another name for 'keywords': give one of them.", f"{param}.{name}"
            )
        given = self.keywords if self.keyterms is UNSET else self.keyterms
        if given is UNSET:
            return UNSET
        terms = [" ".join(t.split()) for t in given or () if t.strip()]
        if len(terms) > MAX_KEYTERMS:
            message = f"Invalid '{param}.{name}': {len(terms)} items. Expected at most {MAX_KEYTERMS}."
            raise RemoteProtocolError("invalid_value", message, f"{param}.{name}")
        if any(len(t) > MAX_KEYTERM_CHARS for t in terms):
            message = f"Invalid '{param}.{name}': string too long. Expected at most {MAX_KEYTERM_CHARS} characters."
            raise RemoteProtocolError("string_above_max_length", message, f"{param}.{name}")
        return terms


class Transcription(msgspec.Struct):
    """`transcription` as the client sees it. Only fields that were set are shown."""

    model: str | UnsetType = UNSET  # Name of the transcriber.
    language: str | UnsetType = UNSET  # Language of the speech; missing if it is detected.
    prompt: str | UnsetType = UNSET  # Names and words that the audio is likely to contain.
    keywords: list[str] | UnsetType = UNSET  # Terms to recognize.
    languages: list[str] | UnsetType = UNSET  # Candidates for language detection.
    speaker_labels: bool | UnsetType = UNSET  # Whether transcripts have the label of the turn's voice.
    known_speaker_names: list[str] | UnsetType = UNSET  # The remembered speakers to recognize.


class InputFields(msgspec.Struct, forbid_unknown_fields=True):
    """Changes to `session.audio.input`, as a client sends them."""

    format: FormatFields | Text | UnsetType = UNSET  # Format of the client's audio.
    # Transcripts of the user's turns; null turns them off.
    transcription: TranscriptionFields | UnsetType | None = UNSET
    noise_reduction: NoiseReduction | UnsetType | None = UNSET  # Shown to the client; has no effect.
    # Turn detection; if null, the client ends turns by committing its audio.
    turn_detection: TurnDetectionFields | UnsetType | None = UNSET
    primary_speaker: Text | UnsetType | None = UNSET  # The voices whose turns count: `off`, `auto` or `enrolled`.
    enrolled_voice: Text | UnsetType | None = UNSET  # Name of the uploaded voice, for `enrolled`.


class AudioInput(msgspec.Struct):
    """`session.audio.input` as the client sees it. It is stored with a conversation under these names."""

    format: AudioFormat = PCM_24K  # Format of the client's audio.
    transcription: Transcription | None = None  # Transcripts of the user's turns; None if they are off.
    noise_reduction: NoiseReduction | None = None  # Has no effect.
    turn_detection: TurnDetection | None = None  # Turn detection; None if the client ends its turns.
    # The voices whose turns count. This extension is only shown to clients that have set it.
    primary_speaker: PrimarySpeakerMode | UnsetType = UNSET
    # Name of the enrolled voice. This extension is only shown in the mode `enrolled`.
    enrolled_voice: str | UnsetType = UNSET

    def config(self, included: Collection[str], known: tuple[KnownVoice, ...] = ()) -> TranscriptionConfig:
        """Return the configuration for transcription.

        `included`: additional facts that the client has requested. `known`: the voices of `known_speaker_names`.
        """
        asked = self.transcription or Transcription()
        return TranscriptionConfig(
            language=asked.language or None,
            prompt=asked.prompt or "",
            keyterms=tuple(asked.keywords or ()),
            vad=self.turn_detection.config() if self.turn_detection else None,
            languages=tuple(asked.languages or ()),
            word_times=WORDS in included,
            logprobs=LOGPROBS in included,
            reports_language=LANGUAGE in included,
            speaker_labels=asked.speaker_labels is True,
            known_voices=known,
        )


@dataclass(frozen=True, slots=True)
class SessionVoices:
    """The voices that the fields of a session name, with their vectors.

    - `enrolled`: the voices that count as the user's.
    - `known`: the speakers whose turns have their names as labels.
    """

    enrolled: tuple[EnrolledVoice, ...] = ()
    known: tuple[KnownVoice, ...] = ()


def format_of_beta(given: F) -> F | FormatFields:
    """Convert a format's beta name into its fields. Returns any other value unchanged, for `check_format`."""
    found = BETA_FORMATS.get(given) if isinstance(given, str) else None
    return FormatFields(found.type, 24000) if found else given


def beta_format_name(audio_format: AudioFormat) -> str:
    """Return the beta name of a format. For PCM of any rate it is `pcm16`."""
    return next((name for name, f in BETA_FORMATS.items() if f.type == audio_format.type), "pcm16")


def check_format(given: FormatFields | str, before: AudioFormat, param: str) -> AudioFormat:
    """Check a format, after merging it into `before`: an object with `type` and, for PCM, a `rate` in PCM_RATES_HZ.

    A string is refused. It is either an unknown beta name (`format_of_beta` has replaced the known names), or a beta
    name in an update that uses GA names.
    """
    if isinstance(given, str) and (meant := BETA_FORMATS.get(given)):
        expected = f'expected an object, {{"type": "{meant.type}"}}'
        raise RemoteProtocolError("invalid_type", f"Invalid type for '{param}': {expected}.", param)
    if isinstance(given, str):
        raise unsupported(given, tuple(BETA_FORMATS), param)
    kinds = ("audio/pcm", "audio/pcmu", "audio/pcma")
    found = merged(given, before)
    if not isinstance(found.type, str) or found.type not in kinds:
        raise unsupported(found.type, kinds, param)
    if found.type != "audio/pcm":
        return AudioFormat(found.type)
    rate = 24000 if found.rate in (UNSET, None) else found.rate
    if not isinstance(rate, int) or rate not in PCM_RATES_HZ:
        rates = ", ".join(map(str, PCM_RATES_HZ))
        raise RemoteProtocolError(
            "invalid_value", f"Invalid rate: {rate}. Supported values are: {rates}.", f"{param}.rate"
        )
    return AudioFormat("audio/pcm", rate)


def check_primary_speaker(given: str | None, context: Context, param: str) -> PrimarySpeakerMode | UnsetType:
    """Check the mode that says which voices count: all voices, or only the user's, which is learned or enrolled."""
    if given is None:
        return UNSET
    if given not in get_args(PrimarySpeakerMode):
        raise unsupported(given, get_args(PrimarySpeakerMode), param)
    if given != "off" and context.unit_ms:
        raise RemoteProtocolError("invalid_value", "A native model hears all voices, and answers any.", param)
    if given != "off" and not context.tells_voices:
        raise RemoteProtocolError("invalid_value", NO_SPEAKER_MODEL, param)
    return cast(PrimarySpeakerMode, given)


def check_enrolled_voice(given: InputFields, audio: AudioInput, param: str) -> str | UnsetType:
    """Return the name of the enrolled voice, after applying the changes in `given`.

    The changes were already applied to `audio.primary_speaker`.
    """
    named = audio.enrolled_voice if given.enrolled_voice is UNSET else given.enrolled_voice or UNSET
    if audio.primary_speaker == "enrolled":
        if named is UNSET:
            raise RemoteProtocolError(
                "missing_required_parameter",
                f"Missing required parameter: '{param}', the name of a voice of /v1/audio/voices.",
                param,
            )
        return named
    if isinstance(given.enrolled_voice, str):
        raise RemoteProtocolError("invalid_value", "A voice is enrolled with 'primary_speaker' 'enrolled'.", param)
    return UNSET


def refuse_primary_speaker(given: InputFields) -> None:
    """Raise RemoteProtocolError for fields of a primary speaker. For sessions that do not support them."""
    for name in ("primary_speaker", _FIELD):
        if getattr(given, name) not in (UNSET, None, "off"):
            raise unknown_parameter(f"{SPEAKER_PATH}{name}")


def session_voices(before: SessionVoices, given: InputFields, audio: AudioInput, context: Context) -> SessionVoices:
    """Return the voices that a session names. The changes in `given` were already applied to `audio`.

    A voice is looked up when an update names it. Later changes to the stored voice have no effect. Raises
    RemoteProtocolError if a voice is not available. For a restored session, speakers who are not remembered any more
    are left out.
    """
    enrolled = before.enrolled
    if audio.enrolled_voice is UNSET:
        enrolled = ()
    elif given.enrolled_voice is not UNSET or not before.enrolled:
        enrolled = context.enrolled_voices(audio.enrolled_voice, f"{SPEAKER_PATH}enrolled_voice")
    names = (audio.transcription.known_speaker_names if audio.transcription else UNSET) or []
    asked = given.transcription.known_speaker_names if given.transcription else UNSET
    if asked is UNSET and [voice.name for voice in before.known] == names:
        return SessionVoices(enrolled, before.known)
    param = f"{SPEAKER_PATH}transcription.{_KNOWN_FIELD}"
    return SessionVoices(enrolled, known_voices(names, context, param, leaves_out=asked is UNSET))


def known_voices(
    names: Collection[str], context: Context, param: str, *, leaves_out: bool = False
) -> tuple[KnownVoice, ...]:
    """Return the voices of known speakers. Leaves out those who are not remembered if `leaves_out`.

    Raises RemoteProtocolError for more than MAX_KNOWN_SPEAKERS, and for one that cannot be used.
    """
    if len(names) > MAX_KNOWN_SPEAKERS:
        message = f"Invalid '{param}': {len(names)} items. Expected at most {MAX_KNOWN_SPEAKERS}."
        raise RemoteProtocolError("invalid_value", message, param)
    found = list[KnownVoice]()
    for name in names:
        try:
            found.append(context.known_voice(name, param))
        except RemoteProtocolError:
            if not leaves_out:
                raise
    return tuple(found)


def named_voices(data: str | bytes | msgspec.Raw) -> list[str]:
    """Return the names of enrolled voices in a message, at most MAX_NAMED, so that they can be looked up before the
    message is read. These are the strings in fields called `enrolled_voice`.
    """
    return _named(data, _FIELD, MAX_NAMED)


def named_speakers(data: str | bytes | msgspec.Raw) -> list[str]:
    """Return the names of known speakers in a message, like `named_voices`: those in `known_speaker_names`."""
    return _named(data, _KNOWN_FIELD, MAX_KNOWN_SPEAKERS)


def _named(data: str | bytes | msgspec.Raw, field: str, most: int) -> list[str]:
    """Return the strings in fields of this name, and in lists in them. Messages without this word are not decoded."""
    text: str | bytes = bytes(data) if isinstance(data, msgspec.Raw) else data
    if field not in text if isinstance(text, str) else field.encode() not in text:
        return []
    try:
        waiting = [decode_json(text)]
    except ValueError:
        return []
    found = list[str]()
    while waiting and len(found) < most:
        match waiting.pop():
            case dict() as fields:
                named = fields.get(field)
                found += [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
                waiting += fields.values()
            case list() as items:
                waiting += items
    return found[:most]


def check_noise_reduction(
    given: NoiseReduction | None, before: NoiseReduction | None, param: str
) -> NoiseReduction | None:
    """Check noise reduction. It is accepted and shown, but has no effect. None turns it off."""
    if given is None:
        return None
    if given.type is not UNSET and given.type not in ("near_field", "far_field"):
        raise unsupported(given.type, ("near_field", "far_field"), f"{param}.type")
    return merged(given, before)


def apply_input(
    audio: AudioInput, given: InputFields, context: Context, where: str, *, responds: bool = True
) -> AudioInput:
    """Return a session's input after applying the changes in `given`. `where`: the prefix of their paths.

    `responds`: the session is a conversation. A transcription has no primary speaker, and cannot turn transcripts off.
    Raises RemoteProtocolError for an invalid field.
    """
    if not responds:
        refuse_primary_speaker(given)
    changed = msgspec.structs.replace(audio)
    if given.format is not UNSET:
        changed.format = check_format(given.format, audio.format, f"{where}format")
    if given.transcription is not UNSET:
        asked, before, param = given.transcription, audio.transcription, f"{where}transcription"
        if responds:
            # Null turns off the user's transcripts.
            changed.transcription = _merged_transcription(asked, before, context, param) if asked else None
        else:
            changed.transcription = _loaded_transcription(asked, before or Transcription(), context, param)
    if given.noise_reduction is not UNSET:
        param = f"{where}noise_reduction"
        changed.noise_reduction = check_noise_reduction(given.noise_reduction, audio.noise_reduction, param)
    if responds:
        if given.primary_speaker is not UNSET:
            param = f"{SPEAKER_PATH}primary_speaker"
            changed.primary_speaker = check_primary_speaker(given.primary_speaker, context, param)
        changed.enrolled_voice = check_enrolled_voice(given, changed, f"{SPEAKER_PATH}enrolled_voice")
    if given.turn_detection is not UNSET:
        changed.turn_detection = check_turn_detection(
            given.turn_detection, audio.turn_detection, f"{where}turn_detection", responds=responds
        )
    return changed


def _loaded_transcription(
    given: TranscriptionFields | None, before: Transcription, context: Context, param: str
) -> Transcription:
    """Check the `transcription` of a transcription session. Null changes nothing. Logs the name of a hosted model."""
    changed = _merged_transcription(given or TranscriptionFields(), before, context, param)
    changed.model = model = changed.model or context.models.loaded[0]
    if context.models.lenient(model) is None:
        raise RemoteProtocolError("model_not_found", f"The model '{model}' does not exist.", f"{param}.model")
    if context.models.exact(model) is None and model != before.model:
        context.log_alias(model)
    return changed


def _merged_transcription(
    given: TranscriptionFields, before: Transcription | None, context: Context, param: str
) -> Transcription:
    """Merge `transcription` into `before`, without checking the model's name. Raises RemoteProtocolError."""
    kept, found, terms = before or Transcription(), merged(given, before), given.terms(param)
    context.check_language(found.language or None, f"{param}.language")
    languages = kept.languages
    if given.languages is not UNSET:
        languages = context.check_languages(given.languages, f"{param}.languages")
    keywords = kept.keywords if terms is UNSET else terms
    if found.speaker_labels and not context.tells_voices:
        raise RemoteProtocolError("invalid_value", NO_SPEAKER_MODEL, f"{param}.speaker_labels")
    return Transcription(
        *(found.model or UNSET, found.language or UNSET, found.prompt or UNSET, keywords, languages),
        *(found.speaker_labels or UNSET, found.known_speaker_names or UNSET),
    )
