"""Audio of telephone lines: the order of packets, and the tones of keys."""

from __future__ import annotations

import numpy as np
import pytest

from antiphon.audio import Pcm
from antiphon.audio.line.telephone import KEYS, PAUSE_S, TONE_S, JitterBuffer, tones

RATE_HZ = 8000
ROWS_HZ, COLUMNS_HZ = (697, 770, 852, 941), (1209, 1336, 1477, 1633)


def strength(pcm: Pcm, hz: int) -> float:
    """Return the amplitude of one frequency."""
    return float(abs(np.exp(-2j * np.pi * hz * np.arange(len(pcm)) / RATE_HZ) @ pcm) * 2 / len(pcm))


def key_of(pcm: Pcm) -> str:
    """Return the key of a tone, as a receiver finds it: the loudest row and the loudest column."""
    row = int(np.argmax([strength(pcm, hz) for hz in ROWS_HZ]))
    column = int(np.argmax([strength(pcm, hz) for hz in COLUMNS_HZ]))
    return ("123A", "456B", "789C", "*0#D")[row][column]


def test_a_receiver_reads_the_keys_from_their_tones() -> None:
    pcm, length = tones(KEYS, RATE_HZ), round((TONE_S + PAUSE_S) * RATE_HZ)
    stretches = [pcm[at : at + length] for at in range(0, len(pcm), length)]
    assert "".join(key_of(s[: round(TONE_S * RATE_HZ)]) for s in stretches) == KEYS
    assert not any(s[round(TONE_S * RATE_HZ) :].any() for s in stretches)
    assert np.abs(pcm).max() <= 0.5
    assert len(tones("", RATE_HZ)) == 0
    with pytest.raises(ValueError, match="not a key"):
        tones("12x", RATE_HZ)


def packet(number: int) -> Pcm:
    return np.full(160, number / 100, np.float32)


def received(numbers: list[int]) -> list[int]:
    """Return the numbers of the packets that come out, -1 for one that is lost."""
    buffer = JitterBuffer[Pcm]()
    out = [pcm for number in numbers for pcm in buffer.put(number, packet(number))]
    return [-1 if pcm is None else round(float(pcm[0]) * 100) for pcm in out]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        # Reordered and doubled.
        ([1, 3, 2, 2, 4, 3], [1, 2, 3, 4]),
        # The second is lost. Silence takes its place as soon as it can be known.
        ([1, 3, 4, 5, 6, 7], [1, -1, 3, 4, 5, 6, 7]),
        # It arrives after all, but too late.
        ([1, 3, 4, 5, 6, 7, 2, 8], [1, -1, 3, 4, 5, 6, 7, 8]),
        # The sender begins again.
        ([90, 91, 1, 2], [90, 91, 1, 2]),
    ],
)
def test_packets_come_out_in_order_and_what_is_lost_is_silence(sent: list[int], expected: list[int]) -> None:
    assert received(sent) == expected


def test_while_a_packet_is_missing_the_later_ones_wait() -> None:
    assert received([1, 3, 4, 5, 6]) == [1]
