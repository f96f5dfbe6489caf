"""The playback ledger, which records how much of each response was heard. The client's acknowledgements decide, or the
clock if the client sends none. The ledger has no tasks or sockets, and the clock is a parameter.

The audio of a response is open until the user's next turn is committed. While it is open, an acknowledgement may still
correct how much of it was heard, even after the response was cut off. Later acknowledgements are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from antiphon.audio.playback_clock import PlaybackClock
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPartDone, ContentPosition, ConversationEvent, ResponseAudioDelta
from antiphon.events.duplex import AcknowledgePlayback, PlaybackAcknowledged, PlaybackCursors

NO_CURSORS = PlaybackCursors()
# An item counts as heard to its end if at most SLACK_MS are unacknowledged, because clients round to whole chunks and
# whole milliseconds.
SLACK_MS = 50
# Maximum number of items kept. An acknowledgement of an older one raises playback_item_not_found.
MAX_ITEMS = 64


@dataclass(slots=True)
class _ItemAudio:
    """The audio of one item. Its times are readings of the ledger's clock, which stops during a hold."""

    # The position of the audio in its response.
    at: ContentPosition
    # The time at which its first chunk was sent.
    begun_s: float
    # Seconds of audio generated so far.
    generated_s: float = 0.0
    # The cursors that the client acknowledged.
    cursors: PlaybackCursors = NO_CURSORS
    # Whether all of its audio was generated.
    complete: bool = False
    # Milliseconds that had been heard when it was cut off. None if it was not cut off.
    cut_ms: int | None = None
    # The time at which the last acknowledgement arrived, or None if none has arrived.
    acked_s: float | None = None
    # Whether acknowledgements still count, because no later turn of the user has been committed.
    open: bool = True

    @property
    def generated_ms(self) -> int:
        return round(self.generated_s * 1000)


class PlaybackLedger:
    """Records how much was generated, sent, played and heard of the last 64 items with audio. A PlaybackTracker for
    clients that play responses themselves. For one event loop. No method waits.

    - `clock`: returns monotonic seconds.
    - `acks_only`: only acknowledged audio counts as heard. Otherwise a client that has never acknowledged anything is
      assumed to play each item from its first chunk on, in real time. The attribute may be changed at any time.
    """

    def __init__(self, clock: Callable[[], float], *, acks_only: bool = False) -> None:
        self.acks_only = acks_only
        self._clock = PlaybackClock(clock)
        # The audio of each item, by item id, oldest first. Bound: MAX_ITEMS.
        self._items: dict[str, _ItemAudio] = {}
        # Whether the client has ever sent an acknowledgement. From then on the clock no longer decides what was heard.
        self._acknowledges = False

    @property
    def is_playing(self) -> bool:
        """Whether more than SLACK_MS of the sent audio is still to be played, by the client's acknowledgements or by
        the clock. Audio that was cut off does not count.
        """
        return self.left_s > SLACK_MS / 1000

    @property
    def left_s(self) -> float:
        """The playout: the estimated seconds of sent audio that are still to be played. The estimate assumes that
        playback has continued in real time since the last acknowledgement. It stays the same during a hold.
        """
        playing = (s for s in self._items.values() if s.open and s.cut_ms is None)
        return max((s.generated_ms - self._played_ms(s) for s in playing), default=0) / 1000

    def hold(self, held: bool) -> None:
        """Stop the playback clock (`held`) because the client ducks the response, or let the clock continue from the
        time at which it stopped. A no-op if the state does not change.
        """
        self._clock.hold(held)

    def cursors(self, item_id: str) -> PlaybackCursors:
        """Return an item's cursors, in milliseconds. Audio counts as sent when it was generated. All cursors are 0 for
        an item that had no audio or is no longer kept.
        """
        audio = self._items.get(item_id)
        return (
            replace(audio.cursors, generated_ms=audio.generated_ms, sent_ms=audio.generated_ms)
            if audio
            else PlaybackCursors()
        )

    def follow(self, event: ConversationEvent) -> None:
        """Record an event for the client. Call it for every event of a response, in the order of sending. Only audio
        deltas and ends of content parts matter.
        """
        match event:
            case ResponseAudioDelta(at, pcm, rate_hz):
                if at.item_id not in self._items:
                    self._items[at.item_id] = _ItemAudio(at, self._clock.now_s)
                    while len(self._items) > MAX_ITEMS:
                        del self._items[next(iter(self._items))]
                self._items[at.item_id].generated_s += len(pcm) / rate_hz
            case ContentPartDone(at) if at.item_id in self._items:
                self._items[at.item_id].complete = True
            case _:
                return

    def acknowledge(self, ack: AcknowledgePlayback) -> tuple[PlaybackAcknowledged, tuple[ContentPosition, int] | None]:
        """Move an item's cursors, which never go back and never exceed the generated audio.

        Returns the event for the client. If the item had been cut off at another place, also returns its position and
        the milliseconds of it that now count as heard. The caller then has to truncate the history to them again.

        Raises RemoteProtocolError with the code playback_item_not_found, playback_item_mismatch (the two ids do not
        belong together) or playback_ack_too_late (a later turn of the user has been committed).
        """
        audio = self._find(ack)
        if not audio.open:
            raise RemoteProtocolError("playback_ack_too_late", "A later turn of the user has been committed.")
        self._acknowledges = True
        audio.acked_s = self._clock.now_s
        generated_ms, before = audio.generated_ms, audio.cursors
        played = min(max(before.played_ms, ack.played_ms), generated_ms)
        committed = min(max(before.committed_ms, ack.committed_ms), generated_ms)
        audio.cursors = PlaybackCursors(generated_ms, generated_ms, played, committed)
        truncation = None
        if audio.cut_ms is not None and committed != audio.cut_ms:
            audio.cut_ms = committed
            truncation = (audio.at, committed)
        history_exact = audio.cut_ms is not None or (audio.complete and committed >= generated_ms - SLACK_MS)
        at = audio.at
        acknowledged = PlaybackAcknowledged(at.response_id, at.item_id, played, committed, audio.cursors, history_exact)
        return acknowledged, truncation

    def cut(self, item_id: str, heard_ms: int) -> None:
        """Record that the client itself truncated an item to `heard_ms`. Both playback cursors of the item move to that
        position, forwards or back. Ignores an item without audio.
        """
        if audio := self._items.get(item_id):
            audio.cut_ms = heard_ms
            audio.cursors = replace(audio.cursors, played_ms=heard_ms, committed_ms=heard_ms)

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Cut off every open item that was not heard to its end, and end a hold. Returns the position of each, oldest
        first, and the milliseconds heard. Leaves out items that were cut off before.
        """
        cut = []
        for audio in self._items.values():
            heard_ms = self._heard_ms(audio)
            if audio.open and audio.cut_ms is None and (not audio.complete or heard_ms < audio.generated_ms - SLACK_MS):
                audio.cut_ms = heard_ms
                cut.append((audio.at, heard_ms))
        self.hold(False)
        return cut

    def settle(self) -> list[tuple[ContentPosition, int]]:
        """Close the complete items, because a turn of the user was committed.

        With `acks_only`, returns each item that was not acknowledged to its end, with its acknowledged milliseconds, so
        that the history can be truncated to them. Otherwise returns an empty list.
        """
        cut = []
        for audio in self._items.values():
            if audio.open and audio.complete:
                audio.open = False
                if (
                    self.acks_only
                    and audio.cut_ms is None
                    and audio.cursors.committed_ms < audio.generated_ms - SLACK_MS
                ):
                    audio.cut_ms = audio.cursors.committed_ms
                    cut.append((audio.at, audio.cut_ms))
        return cut

    def _heard_ms(self, audio: _ItemAudio) -> int:
        if self._acknowledges or self.acks_only:
            return audio.cursors.committed_ms
        return self._by_clock_ms(audio)

    def _played_ms(self, audio: _ItemAudio) -> int:
        """Milliseconds played by now if playback has continued in real time since the last acknowledgement. Without an
        acknowledgement, since the first chunk.
        """
        if audio.acked_s is None:
            return self._by_clock_ms(audio)
        return audio.cursors.played_ms + round((self._clock.now_s - audio.acked_s) * 1000)

    def _by_clock_ms(self, audio: _ItemAudio) -> int:
        return min(audio.generated_ms, round((self._clock.now_s - audio.begun_s) * 1000))

    def _find(self, ack: AcknowledgePlayback) -> _ItemAudio:
        if ack.response_id is None and ack.item_id is None:
            for audio in reversed(self._items.values()):
                if audio.open:
                    return audio
            raise RemoteProtocolError("playback_item_not_found", "No answer has sounded that is not history.")
        for audio in reversed(self._items.values()):
            of_response = ack.response_id == audio.at.response_id
            # Some clients do not keep the item's id and derive one from the response's id.
            of_item = ack.item_id in (audio.at.item_id, f"item_{audio.at.response_id}")
            if of_item and ack.response_id is not None and not of_response:
                raise RemoteProtocolError(
                    "playback_item_mismatch", f"The item {ack.item_id} is not part of the response {ack.response_id}."
                )
            if of_item or (of_response and ack.item_id is None):
                return audio
            if of_response:
                raise RemoteProtocolError(
                    "playback_item_mismatch", f"The response {ack.response_id} has no audio in an item {ack.item_id}."
                )
        raise RemoteProtocolError("playback_item_not_found", f"There is no sound of {ack.response_id or ack.item_id}.")
