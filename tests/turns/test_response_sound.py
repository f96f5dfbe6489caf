"""When a response could be heard, as features of a backchannel detector."""

from __future__ import annotations

import numpy as np

from antiphon.audio import Pcm
from antiphon.turns.response_sound import KEPT_STRETCHES, ResponseSound

S = 16000


def tone(seconds: float) -> Pcm:
    return np.full(int(seconds * S), 0.1, np.float32)


def quiet(seconds: float) -> Pcm:
    return np.zeros(int(seconds * S), np.float32)


def state(sound: ResponseSound, at_s: float) -> list[float]:
    """Return the features at a time, in seconds instead of shares of five."""
    (row,) = sound.features(int(at_s * S), 1, 320).tolist()
    assert row[4:] == [0.0] * 4
    return [row[0], *(round(5 * share, 2) for share in row[1:4])]


def test_the_state_of_a_response_with_a_pause_before_during_and_after_it() -> None:
    sound = ResponseSound()
    assert state(sound, 1) == [0, 5, 5, 5]
    # It arrives at once, in two pieces, and plays from second 1 on: 1 s, a pause of 0.4 s, 0.6 s.
    sound.add(np.concatenate((tone(1), quiet(0.4))), S)
    sound.add(tone(0.6), S)
    assert state(sound, 0.9) == [0, 5, 5, 5]
    assert state(sound, 1.5) == [1, 0.5, 5, 5]
    assert state(sound, 2.2) == [0, 1.2, 5, 0.2]
    assert state(sound, 2.5) == [1, 1.5, 0.1, 5]
    assert state(sound, 3.5) == [0, 2.5, 1.1, 0.5]
    # The next response begins a second later.
    sound.add(tone(1), 5 * S)
    assert state(sound, 5.5) == [1, 0.5, 5, 2.5]


def test_a_short_gap_is_no_pause_and_a_cut_ends_the_sound() -> None:
    sound = ResponseSound()
    sound.add(np.concatenate((tone(1), quiet(0.1), tone(1))), 0)
    assert state(sound, 1.05) == [1, 1.05, 5, 5]
    sound.cut(int(1.5 * S))
    assert state(sound, 1.75) == [0, 1.75, 5, 0.25]
    # What is sent after the cut plays at once.
    sound.add(tone(1), int(1.6 * S))
    assert state(sound, 2.0)[0] == 1


def test_a_long_session_keeps_only_the_last_stretches() -> None:
    sound = ResponseSound()
    for k in range(3 * KEPT_STRETCHES):
        sound.add(tone(0.02), k * S)
    last = 3 * KEPT_STRETCHES - 1
    assert state(sound, last + 0.01)[0] == 1
    assert state(sound, last - KEPT_STRETCHES + 0.01) == [0, 5, 5, 5]
