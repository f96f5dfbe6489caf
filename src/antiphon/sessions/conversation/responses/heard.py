"""Tracks the playback of a conversation's responses, and cuts the history to the part that was heard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Resampler
from antiphon.audio.playback_clock import PlaybackClock
from antiphon.contracts.playback import PlaybackTracker
from antiphon.events.conversation import ContentPosition, ItemTruncated, ResponseAudioDelta
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.kept import UnheardAudio
from antiphon.turns.overlap import RESPONSE_TAIL_S


class HearsEcho(Protocol):
    """A listener that does not take the expected echo of the responses for speech. `audio_s`: the seconds of audio that
    it has processed.
    """

    audio_s: float

    def expect_echo(self, pcm: Pcm) -> None:
        """Expect the echo of audio that is about to be sent: float32 [num_samples], 16 kHz. It plays after all audio
        that was passed to this method before.
        """
        ...

    def expect_silence(self) -> None:
        """Expect no more echo, because audio that was not played by now never will be."""
        ...


class HeardResponses:
    """Tracks the audio of one conversation's responses after it is sent, and cuts the history to the part that was
    heard.

    - `playback`: plays the responses, or tracks their playback. If None, it is unknown how much was heard, and the
      client truncates items itself.
    - `left_s`: returns the seconds of sent audio that are still to be played. Pass it if a better source than the clock
      exists.
    """

    def __init__(
        self,
        history: ConversationHistory,
        listener: HearsEcho,
        context: ConversationContext,
        emit: EmitConversation,
        *,
        playback: PlaybackTracker | None = None,
        left_s: Callable[[], float] | None = None,
    ) -> None:
        self._history = history
        self._listener = listener
        self._emit = emit
        self._count = context.count
        self._playback = playback
        self._known_left_s = left_s
        self._clock = PlaybackClock(context.clock)
        # Whether playback is paused because of speech over the response.
        self._is_held = False
        # The id of the item whose audio is being sent, and the resampler that converts it to the listener's rate.
        self._said: tuple[str, Resampler] | None = None
        # The response whose audio was sent last, and the second of the user's audio at which it began to be sent.
        self._began = ("", 0.0)
        # The newest audio that was sent, for a client that cannot pause.
        self._sent = UnheardAudio()
        # The ids of the responses under way, and the truncations of their items to the milliseconds heard. A truncation
        # is applied when the response is closed.
        self._under_way: set[str] = set()
        self._truncations: list[tuple[ContentPosition, int]] = []

    @property
    def clock_left_s(self) -> float:
        """Seconds of sent audio that are still to be played, by the clock. 0 if everything was played."""
        return self._clock.left_s

    @property
    def left_s(self) -> float:
        """Seconds of audio that are still to be played, from the best source available."""
        return self._known_left_s() if self._known_left_s else self._clock.left_s

    @property
    def goes_on(self) -> bool:
        """Whether more than RESPONSE_TAIL_S of audio is still to be played."""
        return self.left_s > RESPONSE_TAIL_S

    def began_s(self, response_id: str) -> float | None:
        """The second of the user's audio at which the newest response with audio began to be sent. None for any other
        response.
        """
        return self._began[1] if response_id == self._began[0] else None

    def add(self, audio: ResponseAudioDelta, *, keeps: bool = False) -> None:
        """Count audio that is about to be sent, and have the listener expect its echo. The audio plays after all audio
        that was sent before it. A new item begins with a fresh resampler. `keeps`: keep it for `unheard`.
        """
        self._clock.add(len(audio.pcm) / audio.rate_hz)
        if audio.at.response_id != self._began[0]:
            self._began = (audio.at.response_id, self._listener.audio_s)
        if keeps:
            self._sent.add(audio.at.item_id, audio.pcm, audio.rate_hz, self._clock.left_s)
        if self._said is None or self._said[0] != audio.at.item_id:
            self._said = (audio.at.item_id, Resampler(audio.rate_hz, SAMPLE_RATE_HZ))
        self._listener.expect_echo(self._said[1].feed(audio.pcm))

    def can_pause(self, *, reports: bool) -> bool:
        """Whether playback can pause and continue. `reports`: whether the client gets a PlaybackHoldChanged."""
        return self._playback is not None or reports

    def heard_s(self, item_id: str) -> float | None:
        """Return the seconds of an item's audio that were played, by the clock. None unless it is the newest and its
        audio was kept.
        """
        return self._sent.heard_s(item_id, self._clock.left_s)

    def unheard(self, item_id: str, from_s: float) -> Pcm | None:
        """Return the audio of the newest item from this second on, as far as it was sent: float32 [num_samples], at
        the rate of the responses. None if it is not known.
        """
        return self._sent.rest(item_id, from_s)

    async def hold(self, held: bool, *, reports: bool) -> None:
        """Pause (`held`) or resume the playback of responses, because of speech over them. With `reports`, a client
        that plays the audio itself gets a PlaybackHoldChanged. A no-op if the state does not change. `silence` ends a
        hold.
        """
        if held == self._is_held:
            return
        self._is_held = held
        self._clock.hold(held)
        self._count("ducks" if held else "ducks_without_interruption", 1)
        if self._playback:
            self._playback.hold(held)
        if reports:
            await self._emit(PlaybackHoldChanged(held))

    async def silence(self) -> None:
        """Stop playback of all responses, and report a `PlaybackCleared` for each response that was cut off.

        The history is cut to the part that was heard, see `truncate`. Without a `playback`, nothing is cut.
        """
        self._clock.stop()
        self._listener.expect_silence()
        self._is_held = False
        stopped = self._playback.silence() if self._playback else []
        for response_id in dict.fromkeys(place.response_id for place, _ in stopped):
            await self._emit(PlaybackCleared(response_id))
            await self.truncate([c for c in stopped if c[0].response_id == response_id])

    async def truncate_as_asked(self, item_id: str, content_index: int, audio_end_ms: int) -> None:
        """Truncate an item to the part that the client has played, after the client has stopped playback. Raises the
        RemoteProtocolError of `ConversationHistory.truncate`.
        """
        kept_ms = self._history.truncate(item_id, content_index, audio_end_ms)
        self._clock.stop()
        self._listener.expect_silence()
        await self._report_truncated(item_id, content_index, kept_ms)

    async def truncate(self, heard: list[tuple[ContentPosition, int]]) -> None:
        """Truncate each item to the milliseconds that were heard, and report an `ItemTruncated` for each. The items of
        a response under way are truncated when it is closed. Items that were deleted meanwhile are skipped.
        """
        self._truncations += heard
        for response_id in dict.fromkeys(place.response_id for place, _ in heard):
            if response_id not in self._under_way:
                await self._truncate_pending(response_id)

    def response_began(self, response_id: str) -> None:
        """Record that a response is under way, so that its items are not complete."""
        self._under_way.add(response_id)

    async def response_closed(self, response_id: str) -> None:
        """Record that a response's items are complete, and apply the truncations that waited for that."""
        self._under_way.discard(response_id)
        await self._truncate_pending(response_id)

    async def _truncate_pending(self, response_id: str) -> None:
        due = [c for c in self._truncations if c[0].response_id == response_id]
        self._truncations = [c for c in self._truncations if c[0].response_id != response_id]
        for place, heard_ms in due:
            if any(i.id == place.item_id for i in self._history.items):
                kept_ms = self._history.truncate(place.item_id, place.content_index, heard_ms, from_whole=True)
                await self._report_truncated(place.item_id, place.content_index, kept_ms)

    async def _report_truncated(self, item_id: str, content_index: int, kept_ms: int) -> None:
        text = self._history.get(item_id).parts[content_index].text
        await self._emit(ItemTruncated(item_id, content_index, kept_ms, text))
