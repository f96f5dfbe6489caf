"""Which names of models, voices and languages a client may use, and what each of them stands for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from antiphon.errors import RemoteProtocolError

_LANGUAGES = """
    af:afrikaans am:amharic ar:arabic as:assamese az:azerbaijani ba:bashkir be:belarusian bg:bulgarian bn:bengali
    bo:tibetan br:breton bs:bosnian ca:catalan cs:czech cy:welsh da:danish de:german el:greek en:english es:spanish
    es:castilian et:estonian eu:basque fa:persian fa:farsi fi:finnish fo:faroese fr:french gl:galician gu:gujarati
    ha:hausa haw:hawaiian he:hebrew hi:hindi hr:croatian ht:haitian hu:hungarian hy:armenian id:indonesian
    is:icelandic it:italian ja:japanese jw:javanese ka:georgian kk:kazakh km:khmer kn:kannada ko:korean la:latin
    lb:luxembourgish ln:lingala lo:lao lt:lithuanian lv:latvian mg:malagasy mi:maori mk:macedonian ml:malayalam
    mn:mongolian mr:marathi ms:malay mt:maltese my:burmese my:myanmar ne:nepali nl:dutch nl:flemish nn:nynorsk
    no:norwegian oc:occitan pa:punjabi pl:polish ps:pashto pt:portuguese ro:romanian ru:russian sa:sanskrit
    sd:sindhi si:sinhala sk:slovak sl:slovenian sn:shona so:somali sq:albanian sr:serbian su:sundanese sv:swedish
    sw:swahili ta:tamil te:telugu tg:tajik th:thai tk:turkmen tl:tagalog tl:filipino tr:turkish tt:tatar
    uk:ukrainian ur:urdu uz:uzbek vi:vietnamese yi:yiddish yo:yoruba yue:cantonese zh:chinese zh:mandarin
"""
# The languages that models know, by their English names.
LANGUAGE_NAMES = {name: code for code, name in (pair.split(":") for pair in _LANGUAGES.split())}
# Codes of the same language, which clients send and models do not know.
_OTHER_CODES = {"cmn": "zh", "fil": "tl", "in": "id", "iw": "he", "ji": "yi", "jv": "jw", "nb": "no"}


def language_code(language: str) -> str:
    """The code of a language that is given by its name, code or locale: `en` for `English`, `EN` and `en-US`."""
    named = language.strip().lower()
    code = LANGUAGE_NAMES.get(named) or named.replace("_", "-").partition("-")[0]
    return _OTHER_CODES.get(code, code)


# How the hosted service's model names begin: gpt-realtime, gpt-4o-mini-transcribe, whisper-1 ... Clients that were
# written for it send one of them when their user chose no model.
HOSTED_PREFIXES = ("gpt-", "whisper-1", "tts-1")
# What Hugging Face's speech-to-speech calls the models of a server.
LOCAL = "local"
# The hosted service's voices. Clients send one of them when their user chose none, and the first loaded voice speaks.
HOSTED_VOICES = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
# What a client can do whose language no loaded voice speaks.
OTHER_VOICES = "for another language the server needs eSpeak NG (apt install espeak-ng) or another --synthesizer"
# Of a name in an error.
MAX_SHOWN_CHARS = 100


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names that clients may use for the loaded models of one kind.

    `loaded`: the ids as /v1/models lists them; the first is also called `default`. There is at least one.
    `strict`: the hosted service's names, and LOCAL, are unknown, instead of standing for the first model.
    `unit_ms`: the milliseconds of audio in a unit of a native model; 0 for a model whose turns the server finds.
    `hears`: a conversation model is given the audio of turns, and not their transcript.
    """

    loaded: tuple[str, ...]
    strict: bool = False
    unit_ms: int = 0
    hears: bool = False

    def exact(self, name: str) -> str | None:
        """The id of the loaded model of this name; `default` is the first one. None for any other name; case counts."""
        if name == "default":
            return self.loaded[0]
        return name if name in self.loaded else None

    def lenient(self, name: str) -> str | None:
        """As `exact`, and the first model for a name of the hosted service or LOCAL unless names are `strict`; else
        None.
        """
        found = self.exact(name)
        if found or self.strict:
            return found
        return self.loaded[0] if is_hosted_model(name) else None


def is_hosted_model(name: str) -> bool:
    """Whether a loaded model stands for this name, where names are not strict."""
    return name == LOCAL or name.startswith(HOSTED_PREFIXES)


def hosted_task(name: str) -> tuple[str, ...]:
    """What the hosted model of a name does, in Hugging Face's names of tasks, the likeliest first."""
    if name.startswith("whisper") or "transcribe" in name:
        return ("automatic-speech-recognition",)
    if name.startswith("tts") or "-tts" in name:
        return ("text-to-speech",)
    # Requests for conversations come to what answers in them, or else only listens.
    return ("any-to-any", "text-generation", "automatic-speech-recognition", "text-to-speech")


def unknown_language(language: str, knows: Callable[[str], bool], param: str) -> RemoteProtocolError:
    """What a client is told of a language that the transcriber does not know, with what to write if that is clear."""
    code = language_code(language)
    hint = f" Write '{code}'." if code != language and knows(code) else ""
    message = f"Invalid value: '{language[:MAX_SHOWN_CHARS]}' is no language of this model.{hint}"
    return RemoteProtocolError("invalid_value", message, param)


def loaded_voice(name: str | None, voices: Sequence[str]) -> str | None:
    """The voice of this name, whatever its case; None for the default, and for a name that there is not."""
    return next((v for v in voices if name and v.lower() == name.lower()), None)


def check_voice(name: str | None, voices: Sequence[str], param: str, *, strict: bool) -> None:
    """Raise `voice_not_found` for a name that no voice has, and that is none of the hosted service's. Where nothing is
    spoken, any name will do.
    """
    if name and voices and not loaded_voice(name, voices) and not is_hosted_voice(name, strict=strict):
        raise voice_not_found(name, voices, param)


def is_hosted_voice(name: str, *, strict: bool) -> bool:
    """Whether a name that no loaded voice has stands for the first one; `strict`: none does."""
    return not strict and name.lower() in HOSTED_VOICES


def voice_not_found(name: str, voices: Sequence[str], param: str) -> RemoteProtocolError:
    """What a client is told of a voice that there is not."""
    there_are = ", ".join(voices)
    return RemoteProtocolError(
        "voice_not_found", f"The voice `{name[:MAX_SHOWN_CHARS]}` does not exist; there are: {there_are}.", param
    )
