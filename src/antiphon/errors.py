"""The exception tree. Nothing else in the package defines an exception that crosses a module.

AntiphonError
├── SettingsError          a setting is unknown or out of range; names the key; the process does not start
├── StoreError             a file is missing, damaged or cannot be had; names the file and the fix
│   ├── SupersededError    another host owns the stored session by now: it was claimed, or is deleted
│   └── RowError           one stored session is damaged, or of another version; the others can be had
├── Unauthorized           a request carries no API key, or one that is unknown; answered with 401
├── RemoteProtocolError    the client's fault; answered on the wire, the session lives
├── LocalProtocolError     our fault: an event that the wire dialect has no frame for, or a state no transition for
├── MediaError             a file or container that cannot be decoded
├── ModelError             one model step failed; fails the response or session, never the server
│   ├── RemoteError        another server, which runs a model, cannot be reached or gives no proper answer
│   └── ModelLost          the model's threads have ended or hang: every call of it fails until the server restarts
├── EngineError            the engine was asked for what it cannot do (a row that left the context, a closed session)
│   ├── CapabilityError    this kind of engine can never do it; names the capability
│   └── GrammarError       a grammar that the engine does not accept
└── Refused                no room: carries a reason and when to try again
"""

from __future__ import annotations


class AntiphonError(Exception):
    """Base of everything that antiphon raises on purpose. The command line prints it as one line,
    without a traceback.
    """


class SettingsError(AntiphonError):
    """A setting is unknown, of the wrong type or out of range. The message names the flag, variable or key; the process
    does not start.
    """


class StoreError(AntiphonError):
    """A file of a model, a recording or the store is missing, damaged or cannot be written. The message names the file
    and, where there is one, the fix.
    """


class SupersededError(StoreError):
    """A write to a stored session was refused, because its fence is not the newest: another host has claimed the
    session, it was released, or it is deleted. The message names the session.
    """


class RowError(StoreError):
    """One stored session cannot be read or written, while the store can: it is damaged, or of another version. The
    message names the session, and no part of what it holds.
    """


class RemoteProtocolError(AntiphonError):
    """The client broke the protocol; it is answered on the wire and the session goes on. `code` is the dialect's error
    code, `message` the text for the client, `param` the field at fault.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class Unauthorized(AntiphonError):
    """A request carries no API key where one is asked for, or one that is unknown or has expired."""


class LocalProtocolError(AntiphonError):
    """The core sent an event that the dialect has no frame for, or that cannot happen in a session's present state. It
    is a fault of the server, so it is raised and not answered.
    """


class MediaError(AntiphonError):
    """Bytes that no decoder reads, or a file without audio. The message is fit for the client that sent them."""


class ModelError(AntiphonError):
    """A model's step failed, or a model does not load. It fails the response or the session, never the server."""


class RemoteError(ModelError):
    """Another server, which runs a model, failed: it cannot be reached, does not answer in time, or answers what is no
    answer.
    """


class ModelLost(ModelError):
    """A model computes nothing any more: one of its threads ended, or hangs in a step. Every call of it fails with this
    error until the server is restarted. The message names the model's lane or thread, and why it is lost.
    """


class EngineError(AntiphonError):
    """An engine session was asked for what it cannot do, such as a row that has left the context. The session can still
    be used.
    """


class CapabilityError(EngineError):
    """An engine was asked for what engines of its kind cannot do. The message names the engine and the capability that
    it lacks.
    """


class GrammarError(EngineError):
    """A grammar, or a JSON schema, that the engine does not accept. The message is that of its grammar library, and fit
    for the client that sent the schema. `index`: which of the grammars that were checked together.
    """

    def __init__(self, reason: str, index: int = 0) -> None:
        super().__init__(reason)
        self.index = index


class Refused(AntiphonError):
    """There is no room for what was asked. `reason` is a sentence for the client, `retry_after_s` an estimate in
    seconds. `by_own_limit`: the caller's key has all that it may have, while the server has room for others.
    """

    def __init__(self, reason: str, retry_after_s: float, *, by_own_limit: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_own_limit = by_own_limit
        self.retry_after_s = retry_after_s
