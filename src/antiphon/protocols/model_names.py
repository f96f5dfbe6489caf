"""The names of models, voices and languages that clients may use, and the meaning of each name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code

# Tasks of hosted models, under their Hugging Face names.
HEARS, SPEAKS = "automatic-speech-recognition", "text-to-speech"
# Prefixes of the model names of hosted services, with the models' task; "" if the rest of the name shows it. Clients of
# a service send one of these names if their user has not chosen a model.
HOSTED_PREFIXES = {
    # OpenAI.
    "gpt-": "",
    "whisper-1": HEARS,
    "tts-1": SPEAKS,
    # Deepgram.
    "nova": HEARS,
    "flux": HEARS,
    "aura": SPEAKS,
    # ElevenLabs.
    "eleven_": SPEAKS,
    "scribe_": HEARS,
    # AssemblyAI.
    "universal": HEARS,
    "u3-": HEARS,
    # Cartesia.
    "sonic": SPEAKS,
    "ink-": HEARS,
    # Google.
    "gemini-": "",
    "models/gemini-": "",
}
# The model name that Hugging Face's speech-to-speech sends to any server.
LOCAL = "local"
# Voices of OpenAI's hosted service. Clients send one of these names if their user has not chosen a voice. The first
# loaded voice then speaks.
HOSTED_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
# Advice that is added to errors about a language that no loaded voice speaks.
OTHER_VOICES = "for another language the server needs eSpeak NG (apt install espeak-ng) or another --synthesizer"
# Maximum number of characters of a name that an error quotes.
MAX_SHOWN_CHARS = 100
# Maximum number of voices that an error lists. A voice of many speakers has hundreds.
MAX_SHOWN_VOICES = 40


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that clients may use for the loaded models of one kind.

    `loaded`: the ids that /v1/models lists, at least one. Clients may also call the first one `default`. `strict`: do
    not accept LOCAL and the names of hosted services. Otherwise these names stand for the first model.
    `unit_ms`: length of a native model's unit of audio, in milliseconds; 0 if the server detects turns. `hears`: the
    conversation model receives the audio of turns instead of their transcripts.
    """

    loaded: tuple[str, ...]
    strict: bool = False
    unit_ms: int = 0
    hears: bool = False

    def exact(self, name: str) -> str | None:
        """Return the id of the loaded model with exactly this name; for `default`, the first id. None if unknown."""
        if name == "default":
            return self.loaded[0]
        return name if name in self.loaded else None

    def lenient(self, name: str) -> str | None:
        """Return `exact(name)`. Unless `strict`, return the first id for LOCAL and hosted names. Otherwise None."""
        found = self.exact(name)
        if found or self.strict:
            return found
        return self.loaded[0] if is_hosted_model(name) else None


def is_hosted_model(name: str) -> bool:
    """Return whether this name stands for the first loaded model, unless names are strict."""
    return name == LOCAL or name.startswith(tuple(HOSTED_PREFIXES))


def hosted_task(name: str) -> tuple[str, ...]:
    """Return the likely tasks of a hosted model, under their Hugging Face names, most likely first."""
    task = next((task for prefix, task in HOSTED_PREFIXES.items() if name.startswith(prefix)), "")
    if task == HEARS or "transcribe" in name:
        return (HEARS,)
    if task == SPEAKS or "-tts" in name:
        return (SPEAKS,)
    # Prefer a model that answers for a conversation. Fall back to one that only transcribes or speaks.
    return ("any-to-any", "text-generation", HEARS, SPEAKS)


def unknown_language(language: str, knows: Callable[[str], bool], param: str) -> RemoteProtocolError:
    """Return the error for a language that the transcriber does not know. It suggests the right code if possible."""
    code = language_code(language)
    hint = f" Write '{code}'." if code != language and knows(code) else ""
    message = f"Invalid value: '{language[:MAX_SHOWN_CHARS]}' is no language of this model.{hint}"
    return RemoteProtocolError("invalid_value", message, param)


def loaded_voice(name: str | None, voices: Sequence[str]) -> str | None:
    """Return the voice with this name, ignoring case. None if the name is None or unknown."""
    return next((v for v in voices if name and v.lower() == name.lower()), None)


def check_voice(name: str | None, voices: Sequence[str], param: str, *, strict: bool) -> None:
    """Raise `voice_not_found` for a name that is neither a loaded voice nor a voice of OpenAI's hosted service.

    If no voice is loaded, any name is accepted. If `strict`, the hosted voices are not accepted.
    """
    if name and voices and not loaded_voice(name, voices) and not is_hosted_voice(name, strict=strict):
        raise voice_not_found(name, voices, param)


def is_hosted_voice(name: str, *, strict: bool) -> bool:
    """Return whether the first loaded voice stands for this hosted voice. Always False if `strict`."""
    return not strict and name.lower() in HOSTED_VOICES


def voice_not_found(name: str, voices: Sequence[str], param: str) -> RemoteProtocolError:
    """Return the error for an unknown voice. It lists the loaded voices, if there are many only the first."""
    more = f" and {len(voices) - MAX_SHOWN_VOICES} more" if len(voices) > MAX_SHOWN_VOICES else ""
    there_are = ", ".join(voices[:MAX_SHOWN_VOICES]) + more
    return RemoteProtocolError(
        "voice_not_found", f"The voice `{name[:MAX_SHOWN_CHARS]}` does not exist; there are: {there_are}.", param
    )
