"""The `info` event: the programs of this server, which Home Assistant reads once and keeps."""

from __future__ import annotations

import msgspec

from antiphon.contracts import LanguageProfile, SynthesizerProfile, TranscriberProfile

# The name of the service in Home Assistant.
NAME = "antiphon"


class Attribution(msgspec.Struct):
    """Who made a program or model. Both fields are required."""

    name: str = NAME
    url: str = ""


class Artifact(msgspec.Struct, kw_only=True):
    """The fields of every program, model and voice. Clients fail if one of them is missing; null is allowed."""

    name: str
    attribution: Attribution = msgspec.field(default_factory=Attribution)
    installed: bool = True
    description: str | None = None
    version: str | None = None


class Spoken(Artifact, kw_only=True):
    """A model or voice with its languages, as ISO-639-1 codes."""

    languages: list[str]


class AsrProgram(Artifact, kw_only=True):
    """The transcriber as a program for speech-to-text, with one model."""

    models: list[Spoken]
    supports_transcript_streaming: bool = True
    # Whether the client has to find the end of the speech.
    requires_external_vad: bool = False
    prefers_auto_gain_enabled: bool = False
    prefers_noise_reduction_enabled: bool = False


class TtsProgram(Artifact, kw_only=True):
    """The synthesizer as a program for text-to-speech, with its voices."""

    voices: list[Spoken]
    supports_synthesize_streaming: bool = True


class HandleProgram(Artifact, kw_only=True):
    """The language model as a conversation agent. It does not control the devices of the house."""

    models: list[Spoken]
    supports_handled_streaming: bool = True
    supports_home_control: bool = False


class Info(msgspec.Struct):
    """All programs. Clients require every list. Satellites, wake words and intents are not served here."""

    asr: list[AsrProgram] = []  # The transcriber, if one is loaded.
    tts: list[TtsProgram] = []  # The synthesizer, if one is loaded.
    handle: list[HandleProgram] = []  # The language model, if one is loaded.
    intent: list[Artifact] = []  # Always empty: Home Assistant recognizes intents.
    wake: list[Artifact] = []  # Always empty: there are no wake words.
    mic: list[Artifact] = []  # Always empty: there are no microphones.
    snd: list[Artifact] = []  # Always empty: there are no loudspeakers.


def info(
    transcriber: TranscriberProfile | None,
    synthesizer: SynthesizerProfile | None,
    language_model: LanguageProfile | None,
    version: str,
    *,
    finds_end: bool,
) -> Info:
    """Return the `info` of a server with these models. `finds_end`: this server finds the end of the speech."""
    found = Info()
    if transcriber:
        model = Spoken(name=transcriber.id, version=version, languages=sorted(transcriber.languages))
        program = AsrProgram(name=NAME, version=version, models=[model], requires_external_vad=not finds_end)
        found.asr = [program]
    if synthesizer:
        voices = [
            Spoken(name=name, version=version, languages=sorted(synthesizer.languages_of(name)))
            for name in synthesizer.voices
        ]
        found.tts = [TtsProgram(name=NAME, version=version, voices=voices)]
    if language_model:
        # A language model has no list of its languages. Its questions come from the transcriber.
        spoken = transcriber.languages if transcriber else ("en",)
        model = Spoken(name=language_model.id, version=version, languages=sorted(spoken))
        found.handle = [HandleProgram(name=NAME, version=version, models=[model])]
    return found
