"""Keeps what is left of a response that speech has ended, in case the speech turns out to be no reason to end it.

Speech over a response may be decided by its sound, before it has words. A client that plays the response itself has
then stopped, and cannot continue. If the words are a backchannel, or if there are none, another response says the rest,
from the sample at which the first one was stopped.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from antiphon.audio import Pcm
from antiphon.contracts import ResponseAudio
from antiphon.events.conversation import Item
from antiphon.sessions.conversation.history import cut_to
from antiphon.sessions.conversation.responses.generation import RestOfResponse, earlier
from antiphon.sessions.conversation.responses.response import ResponseTask

# Seconds of audio that are kept after they were played by the server's clock, because a client may lag behind it.
LAG_S = 5.0


class UnheardAudio:
    """The audio of the item that was sent last, as far as it may still be unheard.

    Memory: 2 bytes for each sample that is still to be played, and for LAG_S.
    """

    def __init__(self) -> None:
        self._item_id = ""
        self._rate_hz = 1
        # The position of the first kept sample in the item's audio, and of the sample after the last one.
        self._start = self._end = 0
        self._chunks: deque[npt.NDArray[np.int16]] = deque()

    def add(self, item_id: str, pcm: Pcm, rate_hz: int, left_s: float) -> None:
        """Add audio, float32 [num_samples], of an item. `left_s`: the seconds of all audio that are to be played."""
        if item_id != self._item_id:
            self._item_id, self._rate_hz, self._start, self._end = item_id, rate_hz, 0, 0
            self._chunks.clear()
        self._chunks.append(np.rint(np.clip(pcm, -1, 1) * 32767).astype(np.int16))
        self._end += len(pcm)
        oldest = self._end - int((left_s + LAG_S) * rate_hz)
        while self._chunks and self._start + len(self._chunks[0]) <= oldest:
            self._start += len(self._chunks.popleft())

    def heard_s(self, item_id: str, left_s: float) -> float | None:
        """Return how many seconds of the item were played if `left_s` are left. None for another item."""
        return max(0.0, self._end / self._rate_hz - left_s) if item_id == self._item_id else None

    def rest(self, item_id: str, from_s: float) -> Pcm | None:
        """Return the audio of the item from this second on, float32 [num_samples]. None if it is not kept."""
        at = round(from_s * self._rate_hz) - self._start
        if item_id != self._item_id or at < 0:
            return None
        kept = np.concatenate([np.zeros(0, np.int16), *self._chunks])[at:]
        return kept.astype(np.float32) / np.float32(32767)


@dataclass(slots=True)
class KeptResponse:
    """A response that the speech of `turn` has ended, and whose generation waits if it was not complete.

    - `item`: its message.
    - `heard_s`: the seconds of its audio that were played by the server's clock.
    - `is_cancelled`: whether the rest is not to be said, whatever the words of the turn are.
    """

    turn: int
    task: ResponseTask
    item: Item
    heard_s: float
    is_cancelled: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether its generation waits, so that the model's stream is not free."""
        return self.task.keeps

    @property
    def cut_ms(self) -> int | None:
        """The millisecond at which the message has to be truncated; None if the client has truncated it."""
        part = self.item.parts[0]
        return None if part.whole else round(1000 * min(self.heard_s, part.audio_s))

    def cancel(self) -> None:
        """Give up the rest. The generation ends within one step of the model. Returns at once."""
        self.is_cancelled = True
        if self.task.kept_source:
            self.task.kept_source.cancel()
        else:
            self.task.keeps = False

    async def drop(self) -> None:
        """Give up the rest, and wait for the end of the generation. After that, the model's stream is free."""
        self.cancel()
        await self.task.drop_kept()

    def rest(self, pcm: Pcm) -> RestOfResponse:
        """Return the source of the response that says the rest. `pcm`: the audio that was sent and not heard. The item
        has to be truncated to what was heard.
        """
        part, made = self.item.parts[0], self.item.parts[0].produced()
        later = [w for w in made.words if w.end_s > part.audio_s + 1e-6]
        heard = cut_to(made.text, [w.text for w in made.words], len(made.words) - len(later))
        left = made.text[len(heard) :] if made.text.startswith(heard) else " ".join(w.text for w in later)
        sent = ResponseAudio(pcm, tuple(earlier(word, part.audio_s) for word in later))
        return RestOfResponse((left + self.task.unsaid).lstrip(), sent, part.audio_s, self.task.kept_source)
