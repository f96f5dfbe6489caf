"""What is being said, message by message, as the tail of a stored conversation has it (`--store-speech`). Pure.

A snapshot has no audio: what was not yet words when a host died is sent again by the client. A tail spares it that, and
is there where the client has not kept what it has sent. It is as good as its beginning: where a message is missing, the
client is asked for all that come from there on.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.events.transcription import AppendAudio
from antiphon.store.sessions import TailChunk

log = logging.getLogger(__name__)
# What is kept for chunks at most. A longer turn is in those that were stored before.
MAX_KEPT_S = 20.0
# Of a chunk: numbers of the client's messages, and their audio as PCM16 of 16 kHz.
_Messages = list[tuple[int, bytes]]


@dataclass(frozen=True, slots=True)
class _Message:
    """A message that is audio alone: its number, its audio as PCM16, and at which of this host's samples it begins."""

    number: int
    pcm16: bytes
    begin: int


class SpeechTail:
    """Collects the audio of a client's messages that are in no snapshot, for the next chunk of the tail."""

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._num_samples = 0
        # How many of them a chunk has.
        self._num_stored = 0

    def took(self, number: int, audio: Collection[AppendAudio]) -> None:
        """Note a message that was taken, and has nothing but audio."""
        pcm = np.concatenate([command.pcm for command in audio])
        self._messages.append(_Message(number, to_pcm16(pcm), self._num_samples))
        self._num_samples += len(pcm)
        while self._messages and self._num_samples - self._messages[0].begin > MAX_KEPT_S * SAMPLE_RATE_HZ:
            self._drop_first()

    def settled(self, last: int, *, empties: bool) -> None:
        """A snapshot has all messages up to this number in it. `empties`: with it, the tail is emptied."""
        while self._messages and self._messages[0].number <= last:
            self._drop_first()
        if empties:
            self._num_stored = 0

    def chunk(self, from_ms: int) -> TailChunk | None:
        """Return what no chunk has yet; None for nothing. `from_ms`: where in the session's audio this host began."""
        new = [message for n, message in enumerate(self._messages) if n >= self._num_stored]
        self._num_stored = len(self._messages)
        if not new:
            return None
        messages: _Messages = [(message.number, message.pcm16) for message in new]
        return TailChunk(from_ms + new[0].begin * 1000 // SAMPLE_RATE_HZ, msgspec.msgpack.encode(messages))

    def _drop_first(self) -> None:
        self._messages.popleft()
        self._num_stored = max(0, self._num_stored - 1)


def messages_of(
    chunks: Iterable[TailChunk], received: int, applied: Collection[int], max_s: float = math.inf
) -> list[tuple[int, Pcm]]:
    """Return the client's messages that a tail has, by number, from the first on that a snapshot lacks.

    `received`, `applied`: as in `ResumePoint`, of the snapshot. Those that are applied have no audio here. The list
    ends where a message is missing, and before it has more audio than `max_s`. Chunks that are damaged count as
    missing.
    """
    audio = dict[int, bytes]()
    for chunk in chunks:
        try:
            audio |= dict(msgspec.msgpack.decode(chunk.data, type=_Messages))
        except msgspec.MsgspecError as error:
            log.error("a piece of a stored turn cannot be read: %s", error)
    found: list[tuple[int, Pcm]] = []
    end = number = received + 1
    left = max_s * SAMPLE_RATE_HZ
    while number in audio or number in applied:
        left -= len(audio.get(number, b"")) // 2
        if left < 0:
            break
        pcm16 = audio.get(number, b"")
        found.append((number, from_pcm16(pcm16[: len(pcm16) // 2 * 2])))
        number += 1
        end = number if pcm16 else end
    return found[: end - received - 1]
