"""Which messages of a client a snapshot covers: none is lost or carried out twice when the session is restored."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.server.live.moving.resume_point import ReceivedMessages, SettledMessages


def test_audio_counts_once_everything_in_it_was_read_and_other_messages_once_they_were_carried_out() -> None:
    received = ReceivedMessages()
    received.add(1, 0.0, 1, is_audio=False)  # a configuration
    received.add(2, 100.0, 2, is_audio=True)
    received.add(3, 100.0, 3, is_audio=False)  # an item, while somebody speaks
    received.add(4, 200.0, 4, is_audio=True)
    received.add(5, 200.0, 5, is_audio=False)  # another that still waits in the inbox
    assert received.snapshot(0.0, 0)[:3] == SettledMessages(0, [])[:3]
    assert received.snapshot(0.0, 4)[:3] == SettledMessages(1, [3])[:3]
    assert received.snapshot(100.0, 4)[:3] == SettledMessages(3, [])[:3]
    assert received.snapshot(200.0, 5)[:3] == SettledMessages(5, [])[:3]


def test_a_message_that_was_heard_in_part_is_sent_again_and_its_beginning_passed_over_whoever_hears_it() -> None:
    received = ReceivedMessages()
    received.add(1, 1000.0, 1, is_audio=True)
    received.add(2, 2000.0, 2, is_audio=True)
    heard = received.snapshot(1600.0, 2)
    assert heard == SettledMessages(1, [], 600.0, 1000.0)
    # A conversation counts from the audio that the client sends again.
    heard = heard._replace(from_ms=0.0)
    again = ReceivedMessages(heard)
    assert again.snapshot(0.0, 0) == heard
    again.add(2, 1000.0, 1, is_audio=True)
    # The next host has heard less of the audio so far, but the part that was transcribed before still counts.
    assert again.snapshot(200.0, 1) == heard
    assert again.snapshot(700.0, 1)[:3] == SettledMessages(1, [], 700.0)[:3]
    assert again.snapshot(1000.0, 1)[:3] == SettledMessages(2, [])[:3]


def test_messages_that_needed_no_command_are_carried_out_at_once() -> None:
    received = ReceivedMessages()
    received.add(1, 50.0, 1, is_audio=True)
    received.add(2, 50.0, 0, is_audio=False)
    assert received.snapshot(0.0, 1)[:3] == SettledMessages(0, [2])[:3]


def test_a_restored_session_passes_over_what_was_carried_out_and_goes_on_counting() -> None:
    received = ReceivedMessages(SettledMessages(7, [9, 10]))
    assert not received.is_applied(8)
    received.add(8, 20.0, 1, is_audio=True)
    assert received.is_applied(9)
    # The next host also dies, before it has transcribed the audio. Messages that the first host carried out still
    # count.
    assert received.snapshot(0.0, 1)[:3] == SettledMessages(7, [9, 10])[:3]
    assert received.is_applied(10)
    assert not received.is_applied(11)
    assert received.snapshot(20.0, 1)[:3] == SettledMessages(10, [])[:3]


MESSAGES = st.lists(st.sampled_from(["audio", "item", "urgent"]), max_size=30)


@given(MESSAGES, st.data())
def test_however_often_its_host_dies_then_each_message_takes_effect_once(kinds: list[str], data: st.DataObject) -> None:
    """Hosts carry out messages in order and die at any point. The next host gets uncovered messages again."""
    effects: list[int] = []
    before = SettledMessages(0, [])
    for life in range(4):
        received = ReceivedMessages(before)
        put: list[tuple[int, str]] = []
        heard_ms, audio_ms = 0.0, 0.0
        last = life == 3
        stop = len(kinds) if last else data.draw(st.integers(before.last, len(kinds)))
        for number in range(before.last + 1, stop + 1):
            if received.is_applied(number):
                continue
            kind = kinds[number - 1]
            if kind == "urgent":
                effects.append(number)
                received.add(number, audio_ms, 0, is_audio=False)
                continue
            put.append((number, kind))
            audio_ms += 100 if kind == "audio" else 0
            received.add(number, audio_ms, len(put), is_audio=kind == "audio")
        taken = len(put) if last else data.draw(st.integers(0, len(put)))
        read = taken if last else data.draw(st.integers(0, taken))
        for position, (number, kind) in enumerate(put[:taken]):
            if kind == "item":
                effects.append(number)
            elif position < read:
                heard_ms += 100
        # The audio that was transcribed is in the history. Later audio is lost with the host.
        settled = [n for n, kind in put[:read] if kind == "audio"]
        last_before = before.last
        before = received.snapshot(heard_ms, taken)
        assert before.last >= last_before
        effects += [n for n in settled if n <= before.last]
        missing = [n for n in settled if n > before.last]
        assert not missing
    assert sorted(effects) == list(range(1, len(kinds) + 1))
