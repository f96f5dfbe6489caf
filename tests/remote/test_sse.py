"""Streams of server-sent events: split anywhere, bounded, and without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import pytest

from antiphon.errors import RemoteError
from antiphon.remote import sse
from antiphon.remote.sse import LINES_A_TURN, MAX_EVENT_BYTES, events
from tests.remote.turns import turns_of_others


async def stream(parts: Iterable[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def read(parts: Iterable[bytes]) -> list[bytes]:
    async def main() -> list[bytes]:
        return [data async for data in events(stream(parts))]

    return asyncio.run(main())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_cut_at_any_place(size: int) -> None:
    whole = b": hello\r\n\r\ndata: a\ndata:b\nid: 3\n\n\r\ndata: c \r\n\r\nevent: x\ndata: d\n\ndata: e"
    assert read(whole[at : at + size] for at in range(0, len(whole), size)) == [b"a\nb", b"c ", b"d", b"e"]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([b"data: ", *[b"x" * (1 << 16)] * 20], "too long"),
        ([b"data: " + b"x" * MAX_EVENT_BYTES + b"\n\n"], "too long"),
        # Data lines without content, and a line that is not a data line.
        ([b"data:\n" * (MAX_EVENT_BYTES // 5 + 1)], "too long"),
        ([b"x" * (MAX_EVENT_BYTES + 1)], "too long"),
        ([b"\n" * (1 << 16)] * 5, "more than 262144 lines"),
        ([b": hello\n" * (1 << 16)] * 5, "more than 262144 lines"),
        ([b"data: {}\n\n" * (1 << 16)] * 3, "more than 262144 lines"),
    ],
)
def test_an_event_and_a_stream_are_bounded_whatever_they_are_made_of(
    parts: list[bytes], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "MAX_LINES", 1 << 18)
    with pytest.raises(RemoteError, match=message):
        read(parts)


def test_lines_that_come_at_once_let_others_take_their_turns() -> None:
    async def main() -> None:
        with turns_of_others() as turns:
            found = [data async for data in events(stream([b"data: {}\n\n" * (10 * LINES_A_TURN)]))]
        assert len(found) == 10 * LINES_A_TURN
        assert turns.count >= 19

    asyncio.run(main())


def test_a_long_line_that_grows_by_single_bytes_is_read_in_no_time() -> None:
    """The line is searched once. Searching or copying the whole line for each byte would take minutes."""
    assert read([b"data: " + b"x" * 900_000, *[b"y"] * 100_000, b"\n\n"]) == [b"x" * 900_000 + b"y" * 100_000]
