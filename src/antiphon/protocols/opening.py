"""What is known of a connection before its first frame."""

from __future__ import annotations

import msgspec

# What a field of JSON that may be missing holds then.
NULL = msgspec.Raw(b"null")
# Values of a query parameter that switch something on.
TRUE_VALUES = ("1", "true", "yes")


class Opening(msgspec.Struct, frozen=True):
    """What the upgrade request, the client secret or the call asked for, as docs/wire/index.md describes it.

    Recordings and the state of sessions that outlive a restart store the fields by these names.
    """

    # The query parameters `model`, `dialect` and `intent`, unchecked; empty where they are missing.
    model: str = ""
    dialect: str = ""
    intent: str = ""
    # OpenAI's beta event names, which the header `OpenAI-Beta: realtime=v1` or `?events=beta` asks for.
    beta: bool = False
    # The session that a client secret or a call was made with: JSON, shaped like the `session` of a `session.update`;
    # null where there is none.
    session: msgspec.Raw = NULL
    # The server plays the audio of responses itself, on a WebRTC track: it is in no event.
    plays: bool = False
    # The client speaks the full-duplex dialect (protocols/duplex).
    duplex: bool = False
    # The path of the URL, and its query parameter `mode`, unchecked: some dialects are chosen by them.
    path: str = ""
    mode: str = ""
    # The query parameter `record`: whoever speaks has agreed to being recorded.
    consents: bool = False

    @property
    def is_transcription(self) -> bool:
        """Whether the session of a client secret or a call is a transcription; else it is a conversation."""
        return self.has_session and _session_type(self.session) == "transcription"

    @property
    def has_session(self) -> bool:
        """Whether a client secret or a call says what the session is."""
        return bytes(self.session) != b"null"


class _Typed(msgspec.Struct):
    type: object = None


def _session_type(session: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(session, type=_Typed).type
    except msgspec.DecodeError:
        return None
