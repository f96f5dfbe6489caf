"""The opening of a connection: everything the server knows before the first frame."""

from __future__ import annotations

from typing import Protocol

import msgspec

# The value that stands for a missing optional JSON field.
NULL = msgspec.Raw(b"null")
# Values of a query parameter that switch an option on.
TRUE_VALUES = ("1", "true", "yes")
# QueryParameters parameters with a key: of Google's, AssemblyAI's and Cartesia's clients where they can set no header.
URL_KEYS = ("key", "token", "api_key", "access_token")


class QueryParameters(Protocol):
    """The query of a URL, such as Starlette's QueryParams."""

    def get(self, key: str, default: str, /) -> str:
        """Return the last value of a parameter, or `default`."""
        ...

    def multi_items(self) -> list[tuple[str, str]]:
        """Return the names and values of all parameters, in order."""
        ...


class Headers(Protocol):
    """Headers of a request with lower-case names."""

    def get(self, key: str, default: str, /) -> str:
        """Return the value of a header, or `default`."""
        ...


class Opening(msgspec.Struct, frozen=True):
    """The facts from the request that opens a session: an upgrade, a client secret or a call (docs/wire/index.md).

    Recordings and stored sessions contain these field names, so never rename a field.
    """

    # QueryParameters parameter `model`, unchecked; empty if missing.
    model: str = ""
    # QueryParameters parameter `dialect`, unchecked; empty if missing.
    dialect: str = ""
    # QueryParameters parameter `intent`, unchecked; empty if missing.
    intent: str = ""
    # Whether to use OpenAI's beta event names: header `OpenAI-Beta: realtime=v1` or `?events=beta`.
    beta: bool = False
    # The session of a client secret or a call, as JSON with the fields of a `session.update`; null if neither was
    # used.
    session: msgspec.Raw = NULL
    # Whether the server plays the audio of responses on a WebRTC track. Events then carry no audio.
    plays: bool = False
    # Whether the client speaks the full-duplex dialect (protocols/duplex).
    duplex: bool = False
    # Path of the URL. Some dialects are chosen by it.
    path: str = ""
    # QueryParameters parameter `mode`, unchecked. Some dialects are chosen by it.
    mode: str = ""
    # QueryParameters parameter `record`: whether the speaker has agreed to be recorded.
    consents: bool = False
    # The whole query without keys, for dialects that are configured by it.
    query: tuple[tuple[str, str], ...] = ()

    @property
    def is_transcription(self) -> bool:
        """Whether the client secret or the call has a transcription session. Otherwise it has a conversation."""
        return self.has_session and _session_type(self.session) == "transcription"

    @property
    def has_session(self) -> bool:
        """Whether a client secret or a call defines the session."""
        return bytes(self.session) != b"null"


def opening_of(path: str, query: QueryParameters, headers: Headers, session: msgspec.Raw = NULL) -> Opening:
    """Return the opening of an upgrade request. `session` is that of its client secret."""
    return Opening(
        model=query.get("model", ""),
        dialect=query.get("dialect", ""),
        intent=query.get("intent", ""),
        beta="realtime=v1" in headers.get("openai-beta", "") or query.get("events", "") == "beta",
        session=session,
        duplex=query.get("duplex", "") in TRUE_VALUES,
        path=path,
        mode=query.get("mode", ""),
        consents=query.get("record", "") in TRUE_VALUES,
        query=tuple((name, value) for name, value in query.multi_items() if name not in URL_KEYS),
    )


class _Typed(msgspec.Struct):
    type: object = None


def _session_type(session: msgspec.Raw) -> object:
    try:
        return msgspec.json.decode(session, type=_Typed).type
    except msgspec.DecodeError:
        return None
