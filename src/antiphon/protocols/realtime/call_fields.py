"""The field `tool_calls` of a session, an extension: what happens until the results of function calls are known.

docs/tools.md describes it. Without the field, a session behaves as OpenAI's does.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from antiphon.errors import RemoteProtocolError
from antiphon.events.tools import CallOptions
from antiphon.protocols.fields import Text, number

PARAM = "session.tool_calls"
# The value of `filler` with which the model words the fillers.
GENERATED = "generated"
# The most fillers, and the longest one in characters.
MAX_FILLERS, MAX_FILLER_CHARS = 32, 500
# The default and the greatest value of `filler_after_ms`, and the least and the greatest deadline, in milliseconds.
FILLER_AFTER_MS, MAX_AFTER_MS = 500, 60_000
MIN_DEADLINE_MS, MAX_DEADLINE_MS = 100, 600_000


class CallFields(msgspec.Struct, forbid_unknown_fields=True):
    """`session.tool_calls` as a client sends it. A missing field, and null, select the default."""

    # `generated`, a filler, or a list of fillers, which are said in turn; null for none.
    filler: Text | list[Text] | None = None
    # The time without a result after which a filler is said, in milliseconds.
    filler_after_ms: float | None = None
    # Whether results of the client's functions are answered without a `response.create`.
    auto_response: bool | None = None
    # The time after which a call without a result has failed, in milliseconds.
    deadline_ms: float | None = None


class CallSettings(msgspec.Struct):
    """`session.tool_calls` as the client sees it. It is stored with a conversation under these names."""

    filler: str | list[str] | None
    filler_after_ms: float
    auto_response: bool
    deadline_ms: float | None

    def options(self) -> CallOptions:
        """Return the settings for the conversation."""
        given = [self.filler] if isinstance(self.filler, str) else self.filler or []
        is_generated = self.filler == GENERATED
        return CallOptions(
            fillers=() if is_generated else tuple(given),
            generates_fillers=is_generated,
            filler_after_ms=self.filler_after_ms,
            answers_results=self.auto_response,
            deadline_ms=self.deadline_ms,
        )


def call_settings(given: CallFields | None) -> CallSettings | UnsetType:
    """Check the field, and return it as the client sees it. Null removes it. Raises RemoteProtocolError."""
    if given is None:
        return UNSET
    texts = [given.filler] if isinstance(given.filler, str) else given.filler or []
    if len(texts) > MAX_FILLERS or not all(0 < len(text.strip()) <= MAX_FILLER_CHARS for text in texts):
        expected = f"expected up to {MAX_FILLERS} texts of 1 to {MAX_FILLER_CHARS} characters"
        raise RemoteProtocolError(
            "invalid_value", f"Invalid value for '{PARAM}.filler': {expected}.", f"{PARAM}.filler"
        )
    after = FILLER_AFTER_MS if given.filler_after_ms is None else given.filler_after_ms
    deadline = given.deadline_ms
    if deadline is not None:
        deadline = number(deadline, f"{PARAM}.deadline_ms", MIN_DEADLINE_MS, MAX_DEADLINE_MS)
    return CallSettings(
        given.filler,
        number(after, f"{PARAM}.filler_after_ms", 0, MAX_AFTER_MS),
        given.auto_response is True,
        deadline,
    )
