"""The exception tree. Nothing else in the package defines an exception that crosses a module.

AntiphonError
├── SettingsError          a setting is unknown or out of range; names the key; the process does not start
├── StoreError             a file is missing, damaged or unavailable; names the file and the fix
│   ├── SupersededError    this host no longer owns the stored session: another one claimed it, or it was deleted
│   └── RowError           one stored session is damaged or of another version; the other sessions are readable
├── Unauthorized           a request's API key is missing or unknown; answered with 401
├── RemoteProtocolError    the client's fault; answered on the wire, and the session continues
├── LocalProtocolError     our fault: the dialect has no frame, or a state has no transition, for an event
├── MediaError             a file or container cannot be decoded
├── ModelError             a step of a model failed; fails the response or session, never the server
│   ├── RemoteError        another server that runs a model cannot be reached, or its answer is invalid
│   └── ModelLost          the model's threads have ended or hang: every call fails until the server restarts
├── EngineError            an invalid request to an engine, such as for a row that left the context
│   ├── CapabilityError    this kind of engine does not support the request; names the capability
│   └── GrammarError       the engine does not accept a grammar
└── Refused                no capacity; has a reason and the time to wait before another attempt
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of all exceptions that antiphon raises on purpose. The command line prints them as one line, without a
    traceback.
    """


class SettingsError(AntiphonError):
    """A setting is unknown, of the wrong type or out of range. The message names the flag, variable or key. The process
    does not start.
    """


class StoreError(AntiphonError):
    """A file of a model, a recording or the store is missing, damaged or cannot be written. The message names the file,
    and the fix if one is known.
    """


class SupersededError(StoreError):
    """A write to a stored session was refused because its fence is not the newest: another host has claimed the
    session, or the session was released or deleted. The message names the session.
    """


class RowError(StoreError):
    """One stored session cannot be read or written, although the store works: the session is damaged, or of another
    version. The message names the session and quotes nothing of its content.
    """


class RemoteProtocolError(AntiphonError):
    """The client broke the protocol. It gets an error on the wire, and the session continues.

    `code` is the dialect's error code, `message` the text for the client, `param` the field at fault.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Unauthorized(AntiphonError):
    """A request lacks a required API key, or its key is unknown or expired."""


class LocalProtocolError(AntiphonError):
    """The dialect has no frame for an event, or the current state has no transition for it. This is a bug in the
    server, so it is raised instead of being sent to the client.
    """


class MediaError(AntiphonError):
    """Bytes that no decoder can read, or a file without audio. The message may be shown to the client."""


class ModelError(AntiphonError):
    """A model's step failed, or a model cannot be loaded. It fails the response or the session, never the server."""


class RemoteError(ModelError):
    """Another server that runs a model failed: it cannot be reached, does not answer in time, or sends an invalid
    answer.
    """


class ModelLost(ModelError):
    """A model no longer computes: one of its threads ended, or hangs in a step. Every call fails with this error until
    the server restarts. The message names the model's lane or thread and the cause.
    """


class EngineError(AntiphonError):
    """An engine session got a request that it cannot fulfil, such as for a row that has left the context. The session
    stays usable.
    """


class CapabilityError(EngineError):
    """An engine got a request that its kind of engine does not support. The message names the engine and the missing
    capability.
    """


class GrammarError(EngineError):
    """The engine does not accept a grammar or a JSON schema. The message is from its grammar library and may be shown
    to the client.

    `index`: the position of the grammar among those that were checked together.
    """

    def __init__(self, reason: str, index: int = 0) -> None:
        super().__init__(reason)
        self.index = index


class Refused(AntiphonError):
    """There is no capacity for the request.

    `reason`: a sentence for the client. `retry_after_s`: an estimate of when to try again, in seconds. `by_own_limit`:
    the caller's own key is at its limit, while the server has capacity for other keys.
    """

    def __init__(self, reason: str, retry_after_s: float, *, by_own_limit: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_own_limit = by_own_limit
        self.retry_after_s = retry_after_s
