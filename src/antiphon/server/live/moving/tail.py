"""The tail of a stored session. Pure.

The tail of a conversation is the audio of the turn under way, message by message (`--store-speech`). The tail of a
transcription session has what finished windows have added to open turns (`TurnPart`), which may last for an hour.

A snapshot has no audio. If a host dies and the session has no tail, the client has to send all audio again that was not
transcribed. With a tail, the client need not keep that audio or send it again. A tail is used up to the first missing
message: the client sends that message and all later ones again.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import from_pcm16, to_pcm16
from antiphon.events.transcription import AppendAudio
from antiphon.sessions.transcription.state import TurnPart
from antiphon.store.sessions import TailChunk

log = logging.getLogger(__name__)
# Maximum audio kept in memory for chunks. The beginning of a longer turn is in chunks that were already stored.
MAX_KEPT_S = 20.0
# Contents of a chunk: numbers of the client's messages, each with its audio as PCM16 at 16 kHz.
_Messages = list[tuple[int, bytes]]
# Made once: msgspec's description of a type must not be built by two threads at the same time.
_PARTS = msgspec.msgpack.Decoder(list[TurnPart])


@dataclass(frozen=True, slots=True)
class _Message:
    """A message with only audio: its number, its PCM16 audio, and its first sample, counted from this host's start."""

    number: int
    pcm16: bytes
    begin: int


class SpeechTail:
    """Collects the audio of messages that no snapshot covers, for the next chunk of the tail."""

    def __init__(self) -> None:
        self._messages: deque[_Message] = deque()
        self._num_samples = 0
        # Number of messages in `_messages`, from the first, that are already in a chunk.
        self._num_stored = 0

    def took(self, number: int, audio: Collection[AppendAudio]) -> None:
        """Record a message that contains only audio."""
        pcm = np.concatenate([command.pcm for command in audio])
        self._messages.append(_Message(number, to_pcm16(pcm), self._num_samples))
        self._num_samples += len(pcm)
        while self._messages and self._num_samples - self._messages[0].begin > MAX_KEPT_S * SAMPLE_RATE_HZ:
            self._drop_first()

    def settled(self, last: int, *, empties: bool) -> None:
        """Drop messages up to number `last`, as a snapshot covers them. `empties`: its write empties the tail."""
        while self._messages and self._messages[0].number <= last:
            self._drop_first()
        if empties:
            self._num_stored = 0

    def chunk(self, from_ms: int) -> TailChunk | None:
        """Return a chunk of the messages that are in no chunk yet; None if there are none.

        `from_ms` is the position in the session's audio at which this host began.
        """
        new = [message for n, message in enumerate(self._messages) if n >= self._num_stored]
        self._num_stored = len(self._messages)
        if not new:
            return None
        messages: _Messages = [(message.number, message.pcm16) for message in new]
        return TailChunk(from_ms + new[0].begin * 1000 // SAMPLE_RATE_HZ, msgspec.msgpack.encode(messages))

    def _drop_first(self) -> None:
        self._messages.popleft()
        self._num_stored = max(0, self._num_stored - 1)


def chunk_of(parts: Sequence[TurnPart]) -> TailChunk:
    """Return the chunk with the finished parts of a transcription's open turns, all of the same window."""
    return TailChunk(parts[0].window, msgspec.msgpack.encode(parts))


def parts_of(chunks: Iterable[TailChunk]) -> list[TurnPart]:
    """Return the finished parts of turns in a transcription's tail, in order. Damaged chunks count as missing."""
    found: list[TurnPart] = []
    for chunk in chunks:
        try:
            found += _PARTS.decode(chunk.data)
        except msgspec.MsgspecError as error:
            log.error("stored parts of a transcript cannot be read: %s", error)
    return found


def messages_of(
    chunks: Iterable[TailChunk], received: int, applied: Collection[int], max_s: float = math.inf
) -> list[tuple[int, Pcm]]:
    """Return the client's messages in a tail, by number, from the first one that the snapshot does not cover.

    `received` and `applied` are those of the snapshot's `ResumePoint`. Applied messages have no audio here. The list
    ends at the first missing message, and before its audio exceeds `max_s`. Damaged chunks count as missing.
    """
    audio = dict[int, bytes]()
    for chunk in chunks:
        try:
            audio |= dict(msgspec.msgpack.decode(chunk.data, type=_Messages))
        except msgspec.MsgspecError as error:
            log.error("a chunk of stored audio cannot be read: %s", error)
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
