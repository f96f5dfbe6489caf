"""How much of each answer was heard, by what the client acknowledges, or by the clock where it never does. Pure: time comes in.

The latest answer is open until the user's next turn is committed: until then an acknowledgement may still say how much of it was heard, even
after it was cut. After that it is history, and an acknowledgement comes too late.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPartDone, ContentPosition, ConversationEvent, ResponseAudioDelta
from antiphon.events.duplex import AcknowledgePlayback, PlaybackAcknowledged, PlaybackCursors

NOTHING = PlaybackCursors()
# Who has acknowledged all but this has heard it all: clients count in whole chunks and milliseconds.
SLACK_MS = 50
# Answers whose cursors are remembered; an acknowledgement of an older one is of nothing.
MOST = 64


@dataclass(slots=True)
class _Sound:
    """The sound of one item."""

    at: ContentPosition
    begun_s: float
    generated_s: float = 0.0
    cursors: PlaybackCursors = NOTHING
    complete: bool = False
    # Where it was cut, in milliseconds; None: it was not.
    cut_ms: int | None = None
    # When its last acknowledgement came, by the ledger's clock.
    acked_s: float | None = None
    open: bool = True

    @property
    def generated_ms(self) -> int:
        return round(self.generated_s * 1000)


class PlaybackLedger:
    """`clock`: monotonic seconds. `acks_only`: see Duplex. As a Playback it says what was heard of what is cut."""

    def __init__(self, clock: Callable[[], float], *, acks_only: bool = False) -> None:
        self.acks_only = acks_only
        self._clock = clock
        # By item, oldest first. Bound: MOST.
        self._sounds: dict[str, _Sound] = {}
        # The client acknowledges: then its word is all that counts.
        self._acknowledges = False
        # How long nothing was played, and since when nothing is.
        self._held_s = 0.0
        self._held_since_s: float | None = None

    @property
    def sounding(self) -> bool:
        """Some of what was given to the client has not been heard yet, neither by its word nor by the clock."""
        return self.left_s > SLACK_MS / 1000

    @property
    def left_s(self) -> float:
        """Seconds of what was given to the client that have not sounded yet."""
        playing = (s for s in self._sounds.values() if s.open and s.cut_ms is None)
        return max((s.generated_ms - self._played_ms(s) for s in playing), default=0) / 1000

    def hold(self, held: bool) -> None:
        """The client plays nothing for a while, or goes on where it was."""
        if held and self._held_since_s is None:
            self._held_since_s = self._clock()
        elif not held and self._held_since_s is not None:
            self._held_s += self._clock() - self._held_since_s
            self._held_since_s = None

    def _now_s(self) -> float:
        return (self._clock() if self._held_since_s is None else self._held_since_s) - self._held_s

    def cursors(self, item_id: str) -> PlaybackCursors:
        """Of an item's sound so far."""
        sound = self._sounds.get(item_id)
        return (
            replace(sound.cursors, generated_ms=sound.generated_ms, sent_ms=sound.generated_ms)
            if sound
            else PlaybackCursors()
        )

    def take(self, output: ConversationEvent) -> None:
        """What is told to the client, in order."""
        match output:
            case ResponseAudioDelta(at, pcm, rate_hz):
                if at.item_id not in self._sounds:
                    self._sounds[at.item_id] = _Sound(at, self._now_s())
                    while len(self._sounds) > MOST:
                        del self._sounds[next(iter(self._sounds))]
                self._sounds[at.item_id].generated_s += len(pcm) / rate_hz
            case ContentPartDone(at) if at.item_id in self._sounds:
                self._sounds[at.item_id].complete = True
            case _:
                return

    def acknowledge(self, ack: AcknowledgePlayback) -> tuple[PlaybackAcknowledged, tuple[ContentPosition, int] | None]:
        """Move the cursors. With it, where the item has to be cut anew: its place, and the milliseconds heard.

        Raises RemoteProtocolError: playback_item_not_found, playback_item_mismatch, playback_ack_too_late.
        """
        sound = self._find(ack)
        if not sound.open:
            raise RemoteProtocolError("playback_ack_too_late", "A later turn of the user has been committed.")
        self._acknowledges = True
        sound.acked_s = self._now_s()
        most, had = sound.generated_ms, sound.cursors
        played = min(max(had.played_ms, ack.played_ms), most)
        committed = min(max(had.committed_ms, ack.committed_ms), most)
        sound.cursors = PlaybackCursors(most, most, played, committed)
        again = None
        if sound.cut_ms is not None and committed != sound.cut_ms:
            sound.cut_ms = committed
            again = (sound.at, committed)
        kept = sound.cut_ms is not None or (sound.complete and committed >= most - SLACK_MS)
        at = sound.at
        return PlaybackAcknowledged(at.response_id, at.item_id, played, committed, sound.cursors, kept), again

    def cut(self, item_id: str, heard_ms: int) -> None:
        """The client has said by other means how much of an item was heard."""
        if sound := self._sounds.get(item_id):
            sound.cut_ms = heard_ms
            sound.cursors = replace(sound.cursors, played_ms=heard_ms, committed_ms=heard_ms)

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """See Playback."""
        cut = []
        for sound in self._sounds.values():
            heard_ms = self._heard_ms(sound)
            if sound.open and sound.cut_ms is None and (not sound.complete or heard_ms < sound.generated_ms - SLACK_MS):
                sound.cut_ms = heard_ms
                cut.append((sound.at, heard_ms))
        self.hold(False)
        return cut

    def settle(self) -> list[tuple[ContentPosition, int]]:
        """A turn of the user is committed: what answers came before it is history. What is to be cut of them for that."""
        cut = []
        for sound in self._sounds.values():
            if sound.open and sound.complete:
                sound.open = False
                if (
                    self.acks_only
                    and sound.cut_ms is None
                    and sound.cursors.committed_ms < sound.generated_ms - SLACK_MS
                ):
                    sound.cut_ms = sound.cursors.committed_ms
                    cut.append((sound.at, sound.cut_ms))
        return cut

    def _heard_ms(self, sound: _Sound) -> int:
        if self._acknowledges or self.acks_only:
            return sound.cursors.committed_ms
        return self._by_clock_ms(sound)

    def _played_ms(self, sound: _Sound) -> int:
        """What has sounded by now, if it is played as it comes: since its last acknowledgement, or since it came."""
        if sound.acked_s is None:
            return self._by_clock_ms(sound)
        return sound.cursors.played_ms + round((self._now_s() - sound.acked_s) * 1000)

    def _by_clock_ms(self, sound: _Sound) -> int:
        return min(sound.generated_ms, round((self._now_s() - sound.begun_s) * 1000))

    def _find(self, ack: AcknowledgePlayback) -> _Sound:
        if ack.response_id is None and ack.item_id is None:
            for sound in reversed(self._sounds.values()):
                if sound.open:
                    return sound
            raise RemoteProtocolError("playback_item_not_found", "No answer has sounded that is not history.")
        for sound in reversed(self._sounds.values()):
            of_response = ack.response_id == sound.at.response_id
            # Clients make an item's id of its response's.
            of_item = ack.item_id in (sound.at.item_id, f"item_{sound.at.response_id}")
            if of_item and ack.response_id is not None and not of_response:
                raise RemoteProtocolError(
                    "playback_item_mismatch", f"The item {ack.item_id} is not of the response {ack.response_id}."
                )
            if of_item or (of_response and ack.item_id is None):
                return sound
            if of_response:
                raise RemoteProtocolError(
                    "playback_item_mismatch", f"The response {ack.response_id} has no sound in an item {ack.item_id}."
                )
        raise RemoteProtocolError("playback_item_not_found", f"There is no sound of {ack.response_id or ack.item_id}.")
