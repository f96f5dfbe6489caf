"""Damaged files: audio around the damage keeps its place, and missing audio is counted."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.containers import SkippedAudio, decode, decode_all, measure_s
from antiphon.errors import MediaError
from tests.audio.sound_files import KINDS, heard, of_kind, pcm16, played_s, wav, written
from tests.conftest import DATA, Recording

SECONDS = 4
RANDOM = random.Random(0)
DAMAGE: dict[str, Callable[[bytes, int], bytes]] = {
    "zeros inside": lambda data, at: data[:at] + bytes(300) + data[at + 300 :],
    "random bytes inside": lambda data, at: data[:at] + RANDOM.randbytes(300) + data[at + 300 :],
    "bytes missing inside": lambda data, at: data[:at] + data[at + 500 :],
    "bytes inserted": lambda data, at: data[:at] + RANDOM.randbytes(500) + data[at:],
    "cut short by 100 bytes": lambda data, at: data[:-100],
    "zeros behind": lambda data, at: data + bytes(3000),
    "text behind": lambda data, at: data + b"<p>The end.</p>\n" * 200,
    "a form's line before": lambda data, at: b'\r\nContent-Disposition: form-data; name="file"\r\n\r\n' + data,
}
# These files have an index of all frames. After missing or inserted bytes, its offsets are wrong.
INDEXED = ("m4a", "faststart")
MOVES = ("bytes missing inside", "bytes inserted")


@pytest.fixture(scope="module")
def said(recordings: dict[str, Recording]) -> Pcm:
    return recordings["jfk"].pcm[: SECONDS * SAMPLE_RATE_HZ]


@cache
def whole(kind: str) -> bytes:
    return of_kind(decode_all(str(DATA / "audio" / "jfk.flac"))[: SECONDS * SAMPLE_RATE_HZ], kind)


def read(data: bytes) -> tuple[Pcm, float]:
    """Return the audio of a file, and the seconds that were skipped."""
    skipped = SkippedAudio()
    chunks = list(decode(io.BytesIO(data), skipped=skipped))
    assert measure_s(io.BytesIO(data), 3600) < 60
    return np.concatenate(chunks), skipped.seconds


@pytest.mark.parametrize("damage", DAMAGE)
# Vorbis has pages of several seconds here, and a damaged page is lost.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "vorbis"])
def test_what_is_around_damage_is_heard_in_its_place(kind: str, damage: str, said: Pcm) -> None:
    data = whole(kind)
    found, skipped_s = read(DAMAGE[damage](data, len(data) // 2))
    windows = heard(said, found)
    middle = len(windows) // 2
    assert all(windows[: middle - 1])
    if kind in INDEXED and damage in MOVES:
        # As in a player.
        assert 1 < skipped_s < 3
        return
    assert sum(windows) >= len(windows) - 2
    assert windows[-1] or "short" in damage
    assert skipped_s < 0.7


@pytest.mark.parametrize("kind", ["mp3", "adts", "faststart", "fragmented", "flac", "opus", "webm"])
def test_a_stretch_of_zeros_is_counted_as_skipped(kind: str, said: Pcm) -> None:
    data = whole(kind)
    length = len(data) // 4
    at = len(data) // 2
    found, skipped_s = read(data[:at] + bytes(length) + data[at + length :])
    # A quarter of the file, and the damaged pages, clusters and fragments at both of its ends.
    assert 0.7 < skipped_s < 2.2
    windows = heard(said, found)
    assert all(windows[: len(windows) * 3 // 10])
    # In ADTS, the number of missing frames is unknown.
    assert kind == "adts" or windows[-1]


@pytest.mark.parametrize("kind", ["mp3", "adts", "faststart", "fragmented", "flac", "opus", "webm", "wav"])
def test_the_beginning_of_a_file_is_heard(kind: str, said: Pcm) -> None:
    data = whole(kind)
    windows = heard(said, read(data[: len(data) * 6 // 10])[0])
    assert all(windows[: len(windows) // 2])


@settings(max_examples=60)
@given(
    st.sampled_from(list(KINDS)),
    st.sampled_from(["cut", "drop", "zeros", "noise"]),
    st.floats(0, 1),
    st.sampled_from([1, 40, 300, 3000, 20_000]),
    st.integers(0, 1000),
)
def test_whatever_is_damaged_no_less_is_found_than_by_a_player(
    kind: str, damage: str, place: float, length: int, seed: int
) -> None:
    data = whole(kind)
    at = int(place * len(data))
    new = {"cut": b"", "drop": b"", "zeros": bytes(length), "noise": random.Random(seed).randbytes(length)}[damage]
    damaged = data[:at] + new + (b"" if damage == "cut" else data[at + length :])
    try:
        found, skipped_s = read(damaged)
    except MediaError:
        assert played_s(damaged) == 0
        return
    assert len(found) / SAMPLE_RATE_HZ > played_s(damaged) - 0.1
    assert np.isfinite(found).all()
    assert 0 <= skipped_s < 60


# --- several recordings in one file


def with_tag(data: bytes) -> bytes:
    """Return an MP3 with an ID3v2 tag of 40 kB, such as a cover, that has bytes like the beginnings of frames."""
    length = 40_000
    size = bytes(length >> shift & 0x7F for shift in (21, 14, 7, 0))
    return b"ID3\x04\0\0" + size + (b"\xff\xfb\x90\x64" + bytes(96)) * (length // 100) + data


@pytest.mark.parametrize("kind", [*KINDS, "tagged mp3", "mp3 at another rate", "endless wav", "rifx"])
def test_recordings_that_follow_each_other_are_all_heard(kind: str, said: Pcm) -> None:
    match kind:
        case "tagged mp3":
            first, second = whole("mp3"), with_tag(whole("mp3"))
        case "mp3 at another rate":
            first, second = whole("mp3"), with_tag(written(said, "mp3", "libmp3lame", 22_050))
        case "endless wav":
            first = second = wav(pcm16(said), sizes=0xFFFFFFFF)
        case "rifx":
            first = second = wav(pcm16(said, ">"), order=">")
        case _:
            first = second = whole(kind)
    found, skipped_s = read(first + second)
    assert all(heard(said, found))
    assert all(heard(said, found[-len(said) - 800 :]))
    assert skipped_s < 0.1


# --- files without audio


def test_what_is_no_sound_is_told_by_its_cause(said: Pcm) -> None:
    raw = pcm16(said)
    causes = {
        "the file is empty": [b""],
        "begins with zeros": [bytes(5000)],
        "raw PCM": [raw, raw[1:], bytes(5000) + raw],
        "its head is missing": [whole(kind)[9001:] for kind in ("m4a", "fragmented", "opus", "webm")],
        "no index (moov)": [whole("m4a")[:20_000], whole("m4a")[:200]],
        "HTML": [b"<!DOCTYPE html><html><body>404</body></html>", b"\xef\xbb\xbf <html lang=en>" + b"\xc3\xa9" * 5000],
        "JSON": [b'{"error": {"message": "not found"}}'],
        "XML": [b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"],
        "text, not sound": [b"UklGRiQ" * 900],
        "0 samples a second": [wav(raw, rate_hz=0)],
        "cannot be decoded": [wav(raw, bits=0)],
        "holds no sound": [wav(b"")],
        "no sound file": [RANDOM.randbytes(5000), b"PK\x03\x04" + RANDOM.randbytes(5000), wav(raw)[:30]],
    }
    for cause, files in causes.items():
        for data in files:
            with pytest.raises(MediaError) as error:
                decode_all(io.BytesIO(data))
            assert cause in str(error.value)
