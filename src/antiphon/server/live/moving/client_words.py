"""The words that a transcription's client keeps for the next host, so that not each of them has to be stored.

A row has the words that were sent of the window that is being decoded, as they were at the row's last write. The event
that reports further words of this window also has the words themselves, signed with a key in the row (`resume_words`).
A client that asked for it sends the newest of them back when it resumes at another host. They say which words it has,
so that host neither repeats nor leaves out any.
"""

from __future__ import annotations

import base64
import hmac
import logging
import secrets
from dataclasses import replace

import msgspec

from antiphon.protocols.resume import MAX_RESUME_WORDS
from antiphon.server.live.moving.resume_point import ResumePoint
from antiphon.sessions.transcription.continuing import Continuing
from antiphon.sessions.transcription.state import SentWord, TranscriptionState

log = logging.getLogger(__name__)
# Bytes of the signature, and of the key.
SIGNATURE_BYTES, KEY_BYTES = 16, 16


class _Sent(msgspec.Struct, array_like=True):
    """The fields `window`, `sent` and `sent_until` of a TranscriptionState."""

    window: int
    words: list[SentWord]
    until: int


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SENT = msgspec.msgpack.Decoder(_Sent)


class ClientWords:
    """Decides which words of one transcription session its client keeps. `key` signs them, in hexadecimal digits."""

    def __init__(self, key: str) -> None:
        self.key = key
        # The words in the row that was written last, and their window.
        self._window, self._stored = 0, tuple[SentWord, ...]()

    def wrote(self, state: TranscriptionState) -> None:
        """Record a row that is being written."""
        self._window, self._stored = state.window, state.sent

    def for_client(self, turn: int, continuing: Continuing) -> str | None:
        """Return the value of `resume_words` for an event that reports words of a turn. None if they have to be stored.

        The row needs to have some words of the turn in this window: its item has an id then, and the window is open.
        """
        window, words, until = continuing.sent
        is_more = bool(self._stored) and self._stored[-1].turn == turn and len(words) > len(self._stored)
        if not is_more or window != self._window or words[-1].turn != turn:
            return None
        data = msgspec.msgpack.encode(_Sent(window, list(words), until))
        found = base64.b64encode(_signature(self.key, data) + data).decode()
        return found if len(found) <= MAX_RESUME_WORDS else None


def new_key() -> str:
    """Return a random key for `ClientWords`."""
    return secrets.token_hex(KEY_BYTES)


def with_client_words(continued: ResumePoint, given: str) -> ResumePoint:
    """Return the resume point with the words that the client has kept, if it has more of them than the row.

    Ignores words of another window, and words that no host has signed.
    """
    state = continued.transcription
    if not (given and state and state.sent and continued.words_key):
        return continued
    try:
        raw = base64.b64decode(given, validate=True)
        signature, data = raw[:SIGNATURE_BYTES], raw[SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, _signature(continued.words_key, data)):
            raise ValueError("no host of the session has signed them")
        sent = _SENT.decode(data)
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("the words that a client has kept are ignored: %s", error)
        return continued
    if sent.window != state.window or len(sent.words) <= len(state.sent):
        return continued
    state = replace(state, sent=tuple(sent.words), sent_until=sent.until)
    return msgspec.structs.replace(continued, transcription=state)


def _signature(key: str, data: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(key), data, "sha256")[:SIGNATURE_BYTES]
