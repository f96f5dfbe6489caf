"""The tail of a stored conversation: the audio of the turn under way."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from antiphon.audio import Pcm
from antiphon.events.transcription import AppendAudio
from antiphon.server.live.moving.tail import MAX_KEPT_S, SpeechTail, messages_of
from antiphon.store.sessions import TailChunk


def pcm(value: int, ms: int = 100) -> Pcm:
    """Return audio whose samples all have one value, by which a test recognizes it."""
    return np.full(ms * 16, value / 1024, np.float32)


def took(tail: SpeechTail, *numbers: int) -> None:
    for number in numbers:
        tail.took(number, [AppendAudio(pcm(number))])


def numbers(chunks: list[TailChunk], received: int, *applied: int) -> list[int]:
    """Return the numbers of the messages found. Checks that each has its audio, or no audio if it was applied."""
    found = messages_of(chunks, received, applied)
    for number, audio in found:
        assert number in applied or np.array_equal(audio, pcm(number))
    return [number for number, _ in found]


def chunk(tail: SpeechTail, from_ms: int = 0) -> TailChunk:
    made = tail.chunk(from_ms)
    assert made
    return made


def test_what_no_snapshot_has_is_in_the_chunks_once() -> None:
    tail = SpeechTail()
    took(tail, 1, 2, 3)
    tail.settled(1, empties=False)
    first = chunk(tail, 5000)
    assert first.at_ms == 5100
    assert tail.chunk(5000) is None
    took(tail, 4)
    second = chunk(tail, 5000)
    assert second.at_ms == 5300
    assert numbers([first, second], 1) == [2, 3, 4]
    # A newer snapshot needs fewer of the messages.
    assert numbers([second, first], 3) == [4]
    assert numbers([first, second], 4) == []


def test_when_the_tail_is_emptied_then_what_is_still_unsettled_is_stored_again() -> None:
    tail = SpeechTail()
    took(tail, 1, 2, 3)
    chunk(tail)
    tail.settled(2, empties=True)
    assert numbers([chunk(tail)], 2) == [3]


def test_when_a_message_is_missing_then_the_client_is_asked_from_there_on() -> None:
    tail = SpeechTail()
    took(tail, 2, 3)
    first = chunk(tail)
    took(tail, 5)
    second = chunk(tail)
    assert numbers([first, second], 1) == [2, 3]
    # A message that was carried out needs no audio, and counts only if audio follows it.
    assert numbers([first, second], 1, 4) == [2, 3, 4, 5]
    assert numbers([first, second], 1, 4, 6) == [2, 3, 4, 5]
    assert numbers([second], 1, 4) == []
    damaged = TailChunk(0, b"\xc1 nothing")
    assert numbers([damaged, second], 3, 4) == [4, 5]
    assert numbers([first, damaged], 1) == [2, 3]


def test_a_long_turn_takes_bounded_memory() -> None:
    tail = SpeechTail()
    took(tail, *range(1, 400))
    found = messages_of([chunk(tail)], 399 - round(MAX_KEPT_S * 10), ())
    assert len(found) == MAX_KEPT_S * 10
    # The client has to send a longer message again.
    tail.took(400, [AppendAudio(pcm(400, 1000 * round(MAX_KEPT_S) + 100))])
    assert tail.chunk(0) is None


def test_no_more_is_heard_at_once_than_a_live_inbox_takes() -> None:
    tail = SpeechTail()
    took(tail, 1, 2, 3)
    assert len(messages_of([chunk(tail)], 0, (), 0.25)) == 2


@given(st.lists(st.sampled_from(["audio", "other", "chunk", "snapshot", "turn"]), max_size=40))
def test_whenever_its_host_dies_then_the_tail_goes_on_where_the_snapshot_ends(steps: list[str]) -> None:
    tail, chunks, number, received, kinds = SpeechTail(), list[TailChunk](), 0, 0, dict[int, str]()
    for step in steps:
        match step:
            case "audio":
                number += 1
                took(tail, number)
                kinds[number] = step
            case "other":
                number += 1
                kinds[number] = step
            case "chunk":
                if made := tail.chunk(0):
                    chunks.append(made)
            case "snapshot" | "turn":
                received = number - number // 3
                tail.settled(received, empties=step == "turn")
                chunks = [] if step == "turn" else chunks
    found = numbers(chunks, received)
    # The messages continue from the snapshot without a gap, and contain only audio.
    assert found == list(range(received + 1, received + 1 + len(found)))
    assert all(kinds[n] == "audio" for n in found)
