"""The exception tree. Nothing else in the package defines an exception that crosses a module.

AntiphonError
├── SettingsError          a setting is unknown or out of range; names the key; the process does not start
├── StoreError             a model file is missing, damaged or cannot be had; names the file and the fix
├── Unauthorized           a request carries no API key, or one that is unknown; answered with 401
├── RemoteProtocolError    the client's fault; answered on the wire, the session lives
├── LocalProtocolError     our fault: an event that the wire dialect has no frame for
├── MediaError             a file or container that cannot be decoded
├── ModelError             one model step failed; fails the response or session, never the server
├── EngineError            the engine was asked for what it cannot do (a row that left the context, a closed session)
└── Refused                no room: carries a reason and when to try again
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of everything antiphon raises on purpose."""


class SettingsError(AntiphonError):
    """A setting is unknown, of the wrong type or out of range."""


class StoreError(AntiphonError):
    """A model file is missing, damaged or out of reach. The message names the file and the fix."""


class RemoteProtocolError(AntiphonError):
    """The client broke the protocol. `code` is the dialect's error code, `param` the field at fault."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Unauthorized(AntiphonError):
    """A request carries no API key where one is asked for, or one that is unknown or has expired."""


class LocalProtocolError(AntiphonError):
    """We tried to send what the dialect cannot say."""


class MediaError(AntiphonError):
    """Bytes that no decoder reads, or a file without sound."""


class ModelError(AntiphonError):
    """A model step failed."""


class EngineError(AntiphonError):
    """An engine session was asked for what it cannot do. The session lives."""


class Refused(AntiphonError):
    """There is no room. `reason` is a sentence, `retry_after_s` an estimate in seconds."""

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s
