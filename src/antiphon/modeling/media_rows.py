"""Audio and images as rows of a decoder's input.

These types connect encoders, which belong to adapters, with conversations, which insert the rows at the template's
placeholders. This module encodes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from antiphon.contracts import AudioPart, ImagePart, MediaPart, Message, VideoPart
from antiphon.engine.api import Position
from antiphon.errors import EngineError, MediaError, Refused, RemoteProtocolError
from antiphon.modeling.omni.hidden_rows import RowStates
from antiphon.shares.places import current_owner

# Seconds after which a refused client may retry. Other conversations may then hold fewer rows.
RETRY_AFTER_S = 10.0


@dataclass(frozen=True, slots=True)
class AudioWindow:
    """A window of an audio clip, which is encoded separately.

    `source`: the clip, or the turn to which the clip belongs. `number`: the window's number, from the start of
    `source`. `digest`: a hash of the encoder's input. So equal windows have equal rows. If later audio changes a
    window's features, the window is no longer equal.
    """

    source: object
    number: int
    digest: bytes


# An object that has rows: an image, an audio clip, or a window of an audio clip.
MediaPiece = MediaPart | AudioWindow
# The pieces of each audio clip or image, each with its number of rows.
MediaSizes = dict[MediaPart, list[tuple[MediaPiece, int]]]
# A row of a conversation: a token, or a row of an audio clip or image by its number. A row of a video's frame or sound
# also has the time position of its frame or window, counted from the beginning of the video.
ChatRow = int | tuple[MediaPiece, int] | tuple[MediaPiece, int, int]
EncodedPieces = Sequence[tuple[MediaPiece, "MediaRows"]]


class MediaRows:
    """An audio clip or an image as the decoder's input: `rows`, float [n, width].

    `positions`: one for each row, relative to the first free position; None if they are consecutive. `hidden`: the
    output of the decoder's tapped layer for the rows, float [n, width of the layer]; None until the first rows are
    computed. If the rows are computed again, it is another tensor.
    """

    def __init__(self, rows: Any, positions: Sequence[Position] | None = None) -> None:
        self.rows, self.positions = rows, positions
        self._states = RowStates(len(rows))

    @property
    def hidden(self) -> torch.Tensor | None:
        """See above."""
        return self._states.states

    def sink(self, start: int) -> Callable[[int, Any], None]:
        """Return the Sink of the rows from `start` on, which are about to be computed. With 0, `hidden` is replaced."""
        if not start:
            self._states = RowStates(len(self.rows))
        states = self._states
        return lambda offset, hidden: states.sink(start + offset, hidden)

    @property
    def num_bytes(self) -> int:
        """The size of `rows` in bytes. `hidden` has about the same size."""
        return int(self.rows.numel() * self.rows.element_size())


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent rows of one kind: tokens, or the rows `start` .. `stop` of an audio clip, an image or a window of sound.

    `part`: the clip, image or window; None for tokens. `ids`: the tokens. `positions`: one for each row, relative to
    the first free position; None if they are consecutive.
    """

    part: MediaPiece | None
    ids: list[int]
    start: int = 0
    stop: int = 0
    positions: Sequence[Position] | None = None


def runs(
    rows: Sequence[ChatRow],
    begin: int,
    media: Mapping[MediaPiece, MediaRows],
    joined: Collection[tuple[int, int]] = (),
) -> Iterator[Run]:
    """Yield the runs of rows from `begin` on.

    If row `begin` is within a video, the row before it determines the positions. `media`: the rows of all parts.
    `joined`: pairs of tokens in which the second has the position of the first.
    """
    before: ChatRow | None = rows[begin - 1] if begin else None
    for part, group in itertools.groupby(rows[begin:], lambda row: None if isinstance(row, int) else row[0]):
        run = list(group)
        if part is None:
            ids = [row for row in run if isinstance(row, int)]
            yield Run(None, ids, positions=_token_positions(before, ids, joined))
        else:
            start, stop = run[0][1], run[-1][1] + 1  # type: ignore[index]
            yield Run(part, [], start, stop, _media_positions(before, run, media))
        before = run[-1]


def _token_positions(
    before: ChatRow | None, ids: Sequence[int], joined: Collection[tuple[int, int]]
) -> list[Position] | None:
    out, free = list[int](), 0
    for last, token in itertools.pairwise((before, *ids)):
        free -= (last, token) in joined
        out.append(free)
        free += 1
    return [(p,) * 3 for p in out] if out != list(range(len(out))) else None


def _media_positions(
    before: ChatRow | None, run: Sequence[ChatRow], media: Mapping[MediaPiece, MediaRows]
) -> Sequence[Position] | None:
    first = run[0]
    assert not isinstance(first, int)
    if len(first) == 2:
        return media[first[0]].positions
    # The first free position, relative to the start of the video: the one after the video's earlier rows, if any.
    free = 0 if before is None or isinstance(before, int) else max(_in_video(before, media)) + 1
    return [tuple(p - free for p in _in_video(row, media)) for row in run]


def _in_video(row: ChatRow, media: Mapping[MediaPiece, MediaRows]) -> Position:
    """The position of a video's row, counted from the video's beginning."""
    part, number, at = row  # type: ignore[misc]
    positions = media[part].positions
    if positions is None:
        return (at + number,) * 3
    time, *place = positions[number]
    return (at + time, *place)


def common_prefix(a: Sequence[ChatRow], b: Sequence[ChatRow]) -> int:
    """Return the length of the common prefix of two lists of rows. Rows of media are compared by their part."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class MediaBudget:
    """Counts the memory that encoded sound and images take, in all conversations of a model and for each API key.

    These rows are on the model's device, like the KV. The engine refers to the same rows if it must compute lost KV
    again, so they are counted only once. Used from one event loop.
    """

    def __init__(self) -> None:
        self._by_owner: dict[Hashable, int] = {}

    @property
    def num_bytes(self) -> int:
        """The total bytes of all conversations."""
        return sum(self._by_owner.values())

    def add(self, owner: Hashable, num_bytes: int) -> None:
        """Add to the bytes of a key; a negative `num_bytes` subtracts."""
        self._by_owner[owner] = self._by_owner.get(owner, 0) + num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def is_full(self, owner: Hashable, limit_bytes: int) -> bool:
        """Return whether all keys together hold `limit_bytes`, and this key at least its equal share. 0: no limit."""
        share = limit_bytes // len({*self._by_owner, owner})
        return 0 < limit_bytes <= self.num_bytes and self._by_owner.get(owner, 0) >= share

    def check(self, owner: Hashable, limit_bytes: int) -> None:
        """Raise Refused if `is_full` is True: all keys together hold the limit, and this key holds at least its share.

        Must be called before a part is encoded. The size of the part is still unknown, so all keys together may then
        exceed the limit by this part. If the other keys already hold the whole limit, a new key may still add parts
        until it holds its equal share.
        """
        if self.is_full(owner, limit_bytes):
            held, most = self.num_bytes >> 20, limit_bytes >> 20
            raise Refused(f"conversations hold {held} of {most} MB of encoded sound and images", RETRY_AFTER_S)


class HeldMedia:
    """The encoded audio clips and images of one conversation, counted in its model's budget for `current_owner`.

    Other code must not change `rows`.
    """

    def __init__(self, budget: MediaBudget) -> None:
        self.rows: dict[MediaPiece, MediaRows] = {}
        self._budget = budget
        self._owner = current_owner.get()
        self._closed = False

    def make_room(self, limit_bytes: int, used: Collection[MediaPiece]) -> None:
        """Raise Refused if the budget is full even without the parts that the conversation does not use."""
        if self._budget.is_full(self._owner, limit_bytes):
            self.keep(used)
        self._budget.check(self._owner, limit_bytes)

    def put(self, part: MediaPiece, rows: MediaRows) -> None:
        """Hold a part, unless it is held already. Raises EngineError if the conversation is closed."""
        if self._closed:
            raise EngineError("the conversation is closed")
        if part not in self.rows:
            self.rows[part] = rows
            self._budget.add(self._owner, rows.num_bytes)

    def keep(self, used: Collection[MediaPiece], spare: int = 0) -> None:
        """Drop the parts that are not in `used`, except the newest `spare` of these."""
        unused = [part for part in self.rows if part not in used]
        for part in unused[: len(unused) - spare] if len(unused) > spare else ():
            self._budget.add(self._owner, -self.rows.pop(part).num_bytes)

    def close(self) -> None:
        """Drop all parts, and accept no further parts."""
        self._closed = True
        self.keep(())


class MediaEncoder(Protocol):
    """The encoders of a model that hears or sees.

    `placeholder_ids`: the placeholder tokens. Each stands for one audio clip, image or video in a rendered
    conversation. `joined`: pairs of tokens in which the second has the position of the first. `has_tap`: whether the
    model's decoder has a tapped layer, whose output `MediaRows.hidden` keeps. `window_s`: the length of a window of a
    video's sound, in seconds.
    """

    placeholder_ids: frozenset[int]
    joined: frozenset[tuple[int, int]]
    window_s: float
    has_tap: bool

    def video_rows(self, video: VideoPart, sizes: Mapping[MediaPart, int]) -> list[ChatRow]:
        """Return the rows of a video in order. `sizes`: the number of rows of each frame and window of sound."""
        ...

    async def encode(self, part: MediaPart) -> MediaRows:
        """Return the rows of one audio clip, image or window of sound. Waits for the encoder.

        Raises MediaError if the data is not an image, ModelError if the encoder fails, and Refused if the engine is
        closed.
        """
        ...


@runtime_checkable
class WindowedMediaEncoder(MediaEncoder, Protocol):
    """A MediaEncoder that encodes audio in windows, each independent of the others."""

    async def encode_windows(
        self, part: AudioPart, held: Mapping[MediaPiece, MediaRows]
    ) -> Sequence[tuple[AudioWindow, MediaRows]]:
        """Return the windows of an audio clip with their rows, in order.

        The rows of windows in `held` are taken from there. If the part is still growing, returns only the finished
        windows. Later audio does not change these, unless it is louder than all audio before it. Waits and raises like
        `encode`.
        """
        ...


@dataclass(frozen=True, slots=True)
class PictureRows:
    """A picture as the decoder's input: `rows`, float [n, width], and the position of each; None: consecutive."""

    rows: torch.Tensor
    positions: tuple[Position, ...] | None = None


class ConversationMedia(HeldMedia):
    """The encoded media of one conversation, and its encodings in progress. Used from one event loop."""

    def __init__(self, budget: MediaBudget) -> None:
        super().__init__(budget)
        # The pieces of each encoded part, except parts that are still growing.
        self._pieces: dict[MediaPart, list[MediaPiece]] = {}
        self._encoding: dict[MediaPart, asyncio.Future[EncodedPieces]] = {}
        # The parts that the newest request needs.
        self._wanted: set[MediaPart] = set()

    async def encode(
        self,
        encoder: MediaEncoder,
        parts: Sequence[MediaPart],
        limit_bytes: int,
        in_use: Callable[[], set[MediaPiece]],
    ) -> MediaSizes:
        """Encode those of the parts that are not held yet, and return the pieces of all parts.

        `limit_bytes`: the limit of the budget. `in_use`: returns the pieces that must not be dropped to make room.
        Raises RemoteProtocolError if the data is not an image, ModelError if the encoder fails, Refused if the budget
        is full, and EngineError if this conversation is closed meanwhile.
        """
        self._wanted = wanted = set(parts)
        sizes = MediaSizes()
        for part in parts:
            pieces = self._pieces.get(part)
            if pieces is None:
                pieces = await self._encode(encoder, part, limit_bytes, lambda: in_use() | self._pieces_of(wanted))
                if not grows(part):
                    self._pieces[part] = pieces
            sizes[part] = [(piece, len(self.rows[piece].rows)) for piece in pieces]
        return sizes

    def keep(self, used: Collection[MediaPiece], spare: int = 0) -> None:
        """See HeldMedia.keep. Also keeps the video frames of the newest request, which may wait for earlier sound."""
        wanted = () if self._closed else self._wanted
        ahead = {part for part in wanted if isinstance(part, ImagePart) and part.in_video}
        super().keep({*used, *ahead}, spare)
        self._pieces = {p: pieces for p, pieces in self._pieces.items() if all(x in self.rows for x in pieces)}

    async def _encode(
        self, encoder: MediaEncoder, part: MediaPart, limit_bytes: int, in_use: Callable[[], set[MediaPiece]]
    ) -> list[MediaPiece]:
        for other in [p for p in self._encoding if p is not part and _turn(p) is not None and _turn(p) == _turn(part)]:
            # The other encoding produces the first windows of this part. If it fails, they are encoded with this part.
            before = self._encoding[other]
            await asyncio.wait([before])
            if not before.cancelled() and before.exception() is None:
                self._put_all(before.result())
        # Requests for the same part share one encoding, which continues if one of them is cancelled.
        encoding = self._encoding.get(part)
        if encoding is None:
            self.make_room(limit_bytes, in_use())
            encoding = self._encoding[part] = asyncio.ensure_future(_encoded(encoder, part, self.rows))
            # Retrieves the error if no request waits for it any longer. Otherwise asyncio would report it.
            encoding.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            made = await asyncio.shield(encoding)
        except MediaError as error:
            raise RemoteProtocolError("invalid_image", str(error), "item.content") from error
        finally:
            if encoding.done():
                self._encoding.pop(part, None)
        self._put_all(made)
        return [piece for piece, _ in made]

    def _put_all(self, made: EncodedPieces) -> None:
        for piece, rows in made:
            self.put(piece, rows)

    def _pieces_of(self, parts: Collection[MediaPart]) -> set[MediaPiece]:
        """The pieces of these parts and of the parts of the newest request. Of a turn: all its held windows."""
        wanted = {*parts, *self._wanted}
        turns = {_turn(part) for part in wanted} - {None}
        windows = {piece for piece in self.rows if isinstance(piece, AudioWindow) and piece.source in turns}
        return windows | {piece for part in wanted for piece in self._pieces.get(part, ())}


async def _encoded(encoder: MediaEncoder, part: MediaPart, held: Mapping[MediaPiece, MediaRows]) -> EncodedPieces:
    if isinstance(part, AudioPart) and isinstance(encoder, WindowedMediaEncoder):
        return await encoder.encode_windows(part, held)
    return [(part, await encoder.encode(part))]


def media_of(messages: Sequence[Message]) -> list[MediaPart]:
    """Return all media in these messages, in order, including the frames and the sound of videos."""
    out: list[MediaPart] = []
    for part in (p for m in messages for p in m.parts if not isinstance(p, str)):
        out += [*(image for _, image in part.frames), *part.sound] if isinstance(part, VideoPart) else [part]
    return out


def grows(part: MediaPart) -> bool:
    """Return whether a part is an audio clip that is still growing."""
    return isinstance(part, AudioPart) and part.grows


def _turn(part: MediaPart) -> object | None:
    return part.turn if isinstance(part, AudioPart) else None
