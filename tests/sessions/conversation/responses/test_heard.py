"""How much of the responses is still to be played, pauses and silence, and how much the history keeps."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import anyio
import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPart, ContentPosition, Item, ItemTruncated, ResponseAudioDelta
from antiphon.events.playback import PlaybackCleared, PlaybackHoldChanged
from antiphon.events.words import Word
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.responses.heard import HeardResponses
from antiphon.turns.overlap import RESPONSE_TAIL_S

A, B = ContentPosition("resp_a", "item_a", 0), ContentPosition("resp_b", "item_b", 0)


class Loudspeaker:
    """Plays instead of the client. `stopped`: what `silence` cuts off."""

    def __init__(self, *stopped: tuple[ContentPosition, int]) -> None:
        self.stopped, self.held = [*stopped], list[bool]()

    def silence(self) -> list[tuple[ContentPosition, int]]:
        return self.stopped

    def hold(self, held: bool) -> None:
        self.held.append(held)


class Room:
    """One `HeardResponses`, with two spoken items of one second in its history, and its reports.

    `expected`: the samples of each expected echo, None for each call that expects silence.
    """

    audio_s = 0.0

    def __init__(self, playback: Loudspeaker | None = None, **options: Any) -> None:
        self.now_s = 0.0
        self.out: list[Any] = []
        self.expected: list[int | None] = []
        self.counted: Counter[str] = Counter()
        self.history = ConversationHistory()
        for at in (A, B):
            words = [Word("One", 0.0, 0.4, 1.0), Word("two.", 0.5, 1.0, 1.0)]
            part = ContentPart("output_audio", "One two.", words=words, audio_s=1.0)
            self.history.add(Item(at.item_id, "message", "assistant", parts=[part]))
        context = SimpleNamespace(
            count=lambda name, number: self.counted.update({name: number}), clock=lambda: self.now_s
        )
        self.heard = HeardResponses(
            self.history, self, cast(ConversationContext, context), self.emit, playback=playback, **options
        )

    async def emit(self, event: Any) -> None:
        self.out.append(event)

    def expect_echo(self, pcm: Pcm) -> None:
        self.expected.append(len(pcm))

    def expect_silence(self) -> None:
        self.expected.append(None)

    def send(self, at: ContentPosition, seconds: float, rate_hz: int = 16_000) -> None:
        self.heard.add(ResponseAudioDelta(at, np.zeros(int(seconds * rate_hz), np.float32), rate_hz))

    def text(self, at: ContentPosition) -> str:
        return self.history.get(at.item_id).text


def test_audio_is_played_one_after_the_other_and_pauses_while_it_is_held() -> None:
    async def main() -> None:
        room = Room()
        room.send(A, 1.0)
        room.now_s = 0.4
        for _ in range(2):
            await room.heard.hold(True, reports=True)
        room.now_s = 5.0
        assert room.heard.left_s == pytest.approx(0.6)
        await room.heard.hold(False, reports=False)
        room.send(B, 0.5)
        room.now_s = 5.5
        assert room.heard.left_s == room.heard.clock_left_s == pytest.approx(0.6)
        room.now_s = 7.0
        # A pause while nothing is played has no effect.
        await room.heard.hold(True, reports=True)
        room.now_s = 8.0
        await room.heard.hold(False, reports=True)
        assert room.heard.left_s == 0
        assert room.out == [PlaybackHoldChanged(True), PlaybackHoldChanged(True), PlaybackHoldChanged(False)]
        assert room.counted == {"ducks": 2, "ducks_without_interruption": 2}

    anyio.run(main)


def test_the_listener_expects_the_echo_of_what_is_sent_at_its_own_rate_and_none_once_it_is_silenced() -> None:
    async def main() -> None:
        room = Room()
        whole, pcm = Resampler(24_000, 16_000), np.zeros(8_000, np.float32)
        sizes = [len(whole.feed(pcm)) for _ in range(3)]
        assert sizes[0] != sizes[2]
        for at in (A, A, A, B):
            room.send(at, 1 / 3, 24_000)
        # All audio of an item shares one resampler.
        assert room.expected == [*sizes, sizes[0]]
        await room.heard.silence()
        assert room.expected[4:] == [None]
        assert room.heard.left_s == 0

    anyio.run(main)


@pytest.mark.parametrize(("left_s", "goes_on"), [(RESPONSE_TAIL_S, False), (RESPONSE_TAIL_S + 0.01, True)])
def test_what_is_known_of_the_playback_goes_before_the_clock(left_s: float, goes_on: bool) -> None:
    room = Room(left_s=lambda: left_s)
    room.send(A, 9.0)
    assert (room.heard.left_s, room.heard.clock_left_s, room.heard.goes_on) == (left_s, 9.0, goes_on)


def test_what_plays_in_place_of_the_client_pauses_and_is_silenced_and_its_items_are_cut() -> None:
    async def main() -> None:
        loudspeaker = Loudspeaker((A, 450), (B, 0))
        room = Room(loudspeaker)
        await room.heard.hold(True, reports=False)
        await room.heard.silence()
        # Silence has ended the hold, so that another can begin.
        await room.heard.hold(True, reports=False)
        assert loudspeaker.held == [True, True]
        assert room.out == [
            PlaybackCleared("resp_a"),
            ItemTruncated("item_a", 0, 450, "One"),
            PlaybackCleared("resp_b"),
            ItemTruncated("item_b", 0, 0),
        ]
        assert (room.text(A), room.text(B)) == ("One", "")

    anyio.run(main)


def test_items_of_a_response_under_way_are_cut_once_it_is_closed() -> None:
    async def main() -> None:
        room = Room()
        room.heard.response_began("resp_a")
        await room.heard.truncate([(A, 450), (B, 450)])
        assert room.out == [ItemTruncated("item_b", 0, 450, "One")]
        await room.heard.response_closed("resp_b")
        assert room.text(A) == "One two."
        await room.heard.response_closed("resp_a")
        assert room.out[1:] == [ItemTruncated("item_a", 0, 450, "One")]
        # It is closed for good, and a later report that more was heard cuts the original item again.
        await room.heard.response_closed("resp_a")
        await room.heard.truncate([(A, 1000)])
        assert room.out[2:] == [ItemTruncated("item_a", 0, 1000, "One two.")]
        assert room.text(A) == "One two."

    anyio.run(main)


def test_items_that_were_deleted_are_passed_over() -> None:
    async def main() -> None:
        room = Room()
        room.history.delete("item_a")
        await room.heard.truncate([(A, 450)])
        assert room.out == []

    anyio.run(main)


def test_when_the_client_truncates_an_item_then_nothing_more_is_played() -> None:
    async def main() -> None:
        room = Room()
        room.send(A, 1.0)
        room.expected.clear()
        with pytest.raises(RemoteProtocolError):
            await room.heard.truncate_as_asked("item_c", 0, 450)
        assert (room.heard.left_s, room.expected, room.out) == (1.0, [], [])
        await room.heard.truncate_as_asked("item_a", 0, 450)
        assert (room.heard.left_s, room.expected, room.out) == (0.0, [None], [ItemTruncated("item_a", 0, 450, "One")])
        # It stays cut, as the client's request counts.
        await room.heard.truncate_as_asked("item_a", 0, 1000)
        assert room.text(A) == "One"

    anyio.run(main)
