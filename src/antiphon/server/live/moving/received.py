"""Which of the client's messages a stored conversation has in it. Pure.

A host that dies takes with it the audio that it had heard and not yet made words of. So a snapshot says up to which
message everything is in it; the client sends again what came after that. Of those later messages, some were carried
out nevertheless, an item that was created while somebody spoke for instance: these are listed, and whoever restores
the conversation passes them over. And where the first one to be sent again was heard in part, the snapshot says how
much of its audio is in it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class _Message:
    """One message: up to which millisecond the audio reached with it, whether it was audio alone, and the number of
    commands that had been put into the inbox with its last one.
    """

    number: int
    audio_end_ms: float
    is_audio: bool
    num_put: int


class SettledMessages(NamedTuple):
    """What of the client's messages is in a snapshot: all up to the number `last`, those of the later ones that are in
    `applied`, and the first `heard_ms` of the audio that the client sends again.
    """

    last: int
    applied: list[int]
    heard_ms: float = 0.0


NOTHING = SettledMessages(0, [])


class ReceivedMessages:
    """The client's messages that are not in the conversation yet, or come after one that is not.

    `before`: what the snapshot has in it that the session was restored from. Audio is counted from there on.
    """

    def __init__(self, before: SettledMessages = NOTHING) -> None:
        self._applied = set(before.applied)
        self._waiting: deque[_Message] = deque()
        self._num_settled = before.last
        self._heard_before_ms = before.heard_ms
        # The millisecond at which the audio begins of the messages that wait.
        self._waiting_from_ms = 0.0

    def is_applied(self, number: int) -> bool:
        """Whether this message was carried out before the session was restored, and is to be passed over now."""
        if number not in self._applied:
            return False
        audio_end_ms = self._waiting[-1].audio_end_ms if self._waiting else self._waiting_from_ms
        self._waiting.append(_Message(number, audio_end_ms, False, 0))
        return True

    def add(self, number: int, audio_end_ms: float, num_put: int, *, is_audio: bool) -> None:
        """Note a message that was taken. `audio_end_ms`: all audio so far. `num_put`: how many commands had been put
        into the inbox with it, 0 where it needed none. `is_audio`: it has nothing but audio.
        """
        self._waiting.append(_Message(number, audio_end_ms, is_audio, num_put))

    def snapshot(self, settled_ms: float, num_taken: int) -> SettledMessages:
        """Return what is in the conversation now.

        `settled_ms`: all audio before it is in the conversation, or holds no speech. `num_taken`: how many commands the
        session has taken out of the inbox.
        """
        while self._waiting and self._is_in(self._waiting[0], settled_ms, num_taken):
            message = self._waiting.popleft()
            self._num_settled, self._waiting_from_ms = message.number, message.audio_end_ms
            self._applied.discard(message.number)
        later = {m.number for m in self._waiting if not m.is_audio and m.num_put <= num_taken}
        heard_ms = max(settled_ms, self._heard_before_ms) - self._waiting_from_ms
        # Those that the client has yet to send again are still in the conversation.
        return SettledMessages(self._num_settled, sorted(later | self._applied), max(0.0, heard_ms))

    @staticmethod
    def _is_in(message: _Message, settled_ms: float, num_taken: int) -> bool:
        return message.num_put <= num_taken and not (message.is_audio and message.audio_end_ms > settled_ms)
