"""The data of Wyoming's events that this server reads and sends. `antiphon/wyoming.py` has the framing."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.languages import language_code
from antiphon.events.transcription import Eagerness

# Limits of the words that a transcription should expect: their number, and the length of each.
MAX_TERMS, MAX_TERM_CHARS = 200, 64
# Maximum length of a conversation's id, in characters.
MAX_ID_CHARS = 200
# The eagerness of endpointing for each `vad_sensitivity`.
EAGERNESS: dict[str, Eagerness] = {"default": "auto", "relaxed": "low", "aggressive": "high"}


class Transcribe(msgspec.Struct):
    """`transcribe`: a transcription begins. Every field is optional."""

    name: str | None = None  # The model.
    language: str | None = None  # Code or locale of the language; None to detect it.
    vad_sensitivity: str | None = None  # How readily a pause ends the turn: a key of EAGERNESS.
    transcript_terms: list[str] | None = None  # Words that are likely to be said.
    transcript_names: list[str] | None = None  # Names that are likely to be said.

    @property
    def keyterms(self) -> tuple[str, ...]:
        """The words and names that are likely to be said. Those beyond the limits are dropped, since they are hints."""
        terms = [*(self.transcript_terms or ()), *(self.transcript_names or ())]
        return tuple(term for term in map(str.strip, terms) if 0 < len(term) <= MAX_TERM_CHARS)[:MAX_TERMS]

    @property
    def eagerness(self) -> Eagerness:
        """The eagerness of endpointing. Raises RemoteProtocolError for an unknown `vad_sensitivity`."""
        found = EAGERNESS.get(self.vad_sensitivity or "default")
        if found is None:
            expected = ", ".join(EAGERNESS)
            raise RemoteProtocolError("invalid_value", f"vad_sensitivity is one of {expected}.", "vad_sensitivity")
        return found


class AskedContext(msgspec.Struct):
    """The `context` of a request to a conversation agent."""

    conversation_id: str | None = None  # The conversation that the text continues; None for a new one.

    def __post_init__(self) -> None:
        if len(self.conversation_id or "") > MAX_ID_CHARS:
            raise ValueError(f"a conversation_id has at most {MAX_ID_CHARS} characters")


class Transcript(msgspec.Struct, omit_defaults=True):
    """`transcript`: from this server, a result. To this server, a text that a conversation agent answers."""

    text: str
    language: str | None = None


class Asked(msgspec.Struct):
    """`transcript` to this server, with its context. The context is returned with the answer."""

    text: str
    language: str | None = None
    context: msgspec.Raw | UnsetType = UNSET

    @property
    def conversation_id(self) -> str:
        """The id of the conversation, or "". Raises ValueError for a context of another shape."""
        if self.context is UNSET:
            return ""
        try:
            found = msgspec.json.decode(self.context, type=AskedContext | None)
        except msgspec.ValidationError as error:
            raise ValueError(str(error)) from None
        return (found and found.conversation_id) or ""


class Text(msgspec.Struct):
    """The data of a chunk of text: `transcript-chunk`, `synthesize-chunk`, `handled-chunk`."""

    text: str


class Timestamp(msgspec.Struct):
    """`voice-started` and `voice-stopped`: milliseconds of audio since the start of the transcription."""

    timestamp: int


class VoiceName(msgspec.Struct):
    """The voice that a client chooses for a synthesis, by its name or only by its language."""

    name: str | None = None  # One of the voices in `info`; None for the default.
    language: str | None = None  # Code or locale of the language, for a client that names no voice.
    speaker: str | None = None  # Speaker of a voice with several speakers.


class Synthesize(msgspec.Struct):
    """`synthesize` with its text, and `synthesize-start` without."""

    text: str = ""
    voice: VoiceName | None = None
    text_format: str | None = None  # `text` or `ssml`.


class HandledStart(msgspec.Struct, omit_defaults=True):
    """`handled-start`, with the context of the request."""

    context: msgspec.Raw | UnsetType = UNSET


class Handled(msgspec.Struct, omit_defaults=True):
    """`handled` and `not-handled`: the answer of a conversation agent, with the context of the request."""

    text: str
    context: msgspec.Raw | UnsetType = UNSET


class Ping(msgspec.Struct, omit_defaults=True):
    """`ping` and `pong`: the answer has the text of the question."""

    text: str | None = None


class Failure(msgspec.Struct):
    """`error`: sent in place of a result, before the connection is closed."""

    text: str
    code: str


def code_of(language: str | None) -> str | None:
    """Return the code of a language that a client names; None if it leaves the choice to this server."""
    code = language_code(language) if language else "auto"
    return None if code == "auto" else code
