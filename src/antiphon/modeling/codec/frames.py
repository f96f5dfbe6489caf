"""Generates utterances as frames of audio codes. Each utterance is one generation of an engine; each row is a frame.

A frame's input row is the sum of the embeddings of its codes and of one text token. So the talker reads the text while
it speaks, one token for each frame. Frames and their rows are computed within the engine's step (`FrameProgram`), for
all utterances at once. The event loop only supplies text ahead of the frames (`TextFeed`) and reads the codes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import torch

from antiphon.engine.api import Sampling, Session, Token
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, is_plain
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.codec.talker import CapturedFrames, CodecSampling, CodePredictor, FirstCodeChooser
from antiphon.modeling.gathered import GatheredCalls

# The numbers of frames (of 80 ms) in the successive chunks of audio. With small chunks at the start, the first audio is
# early. With larger chunks later, the vocoder runs less often.
CHUNK_FRAMES = (1, 2, 4, 8, 12)
# Limit of frames in one call of the vocoder. All sessions that share the vocoder's thread wait for the call.
MAX_VOCODER_FRAMES = 25
# If a text is still being written, its next word is read when fewer than TEXT_TOKENS_AHEAD tokens are left for frames.
# So a step that computes a frame may have to wait for the writer, but not for the event loop.
TEXT_TOKENS_AHEAD = 4


class FrameMaker:
    """Computes one frame for each utterance of a step.

    `first_codes`: the embedding table of the first codes. `usual`: the default sampling of the codes after the first.
    On a GPU, the constructor captures frames with this sampling as CUDA graphs; None: no frames are captured.
    """

    def __init__(self, predictor: CodePredictor, first_codes: torch.nn.Module, usual: Sampling | None) -> None:
        self._predictor, self._first_codes = predictor, first_codes
        table: Any = first_codes.weight
        self._no_text = torch.zeros_like(table[:1])
        self._captured: CapturedFrames | None = None
        if table.device.type == "cuda":
            fuse_norms(predictor)
            if usual:
                self._captured = CapturedFrames(predictor, first_codes, usual)
                self._captured.warm()

    def frames(self, programs: Sequence[FrameProgram], logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return a frame's codes for each program, int64 [n, codes], and set their rows. See `StepProgram.run`."""
        like: Any = self._first_codes.weight
        first = FirstCodeChooser.choose([p.first_codes for p in programs], logits)
        uniforms = torch.tensor([p.random.take(self._predictor.num_codes) for p in programs], dtype=torch.float64)
        thoughts, given, params = hidden.to(like.dtype), first.clamp(min=0), [p.params for p in programs]
        made = self._captured.call(thoughts, given, params, uniforms) if self._captured else None
        if made is None:
            choices = RowChoices.of(params, like.device)
            # A blocking copy would also wait for all work queued on the device.
            uniforms = uniforms.to(like.device, non_blocking=True)
            made = self._predictor(thoughts, self._first_codes(given), choices, uniforms)
        codes, summed = made
        texts = [p.text for p in programs]
        rows = summed + torch.cat([self._no_text if text is None else text for text in texts])
        for program, row, text in zip(programs, torch.split(rows, 1), texts, strict=True):
            program.row, program.row_has_text = row, text is not None
        return torch.cat((first[:, None], codes), 1)


class FrameProgram:
    """The state of one utterance in the steps that compute its frames. A StepProgram of the engine.

    `end`, `size`: as in FirstCodeChooser. `row`, float [1, width]: the newest frame's row, still without its text if
    `row_has_text` is False. `num_taken`: the number of text rows that frames have used so far, including padding.
    Raises ValueError if the sampling of the codes after the first is not plain (`is_plain`).
    """

    def __init__(self, maker: FrameMaker, sampling: CodecSampling, end: int, size: int) -> None:
        if not is_plain(sampling.rest):
            raise ValueError("the code predictor does not support penalties, biases or exclusions")
        self._maker = maker
        self.first_codes = FirstCodeChooser(sampling.first, end, size, sampling.min_frames)
        self.params, self.random = sampling.rest, RandomNumbers(sampling.rest)
        # Bound: the rows of a text, or TEXT_TOKENS_AHEAD rows and a word if the text is still being written.
        self._texts: deque[torch.Tensor] = deque()
        self._padding: torch.Tensor | None = None
        self.row: torch.Tensor | None = None
        self.row_has_text = False
        self.num_taken = 0

    def give(self, rows: Sequence[torch.Tensor], padding: torch.Tensor | None = None) -> None:
        """Add text rows [1, width] for the next frames. `padding`, given at the end: the row for all later frames."""
        self._texts.extend(rows)
        self._padding = padding

    @property
    def text(self) -> torch.Tensor | None:
        """The text row [1, width] of the next frame; None if it has not arrived."""
        return self._texts[0] if self._texts else self._padding

    @staticmethod
    def run(programs: Sequence[FrameProgram], logits: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Return the codes of a frame for each utterance. See `StepProgram.run`."""
        return programs[0]._maker.frames(programs, logits, hidden)

    def accept(self, numbers: Sequence[int]) -> int:
        """Return the first code of a frame. Raises ModelError if a code could not be chosen."""
        if NO_TOKEN in numbers:
            raise ModelError("the model's output is not a number")
        return self.first_codes.accept(numbers[0])

    def next_row(self) -> torch.Tensor | None:
        """Return the newest frame's row; None if its text has not arrived yet."""
        assert self.row is not None
        if not self.row_has_text:
            if self.text is None:
                return None
            self.row, self.row_has_text = self.row + self.text, True
        self.num_taken += 1
        if self._texts:
            self._texts.popleft()
        return self.row


class TextRows:
    """Maps text tokens to the talker's input rows, in one batch for all utterances that ask before the next step.

    `rows`: maps tokens to rows [n, width]; called in the thread. `eos`, `pad`: the tokens for the end of a text and for
    the padding after the end.
    """

    def __init__(self, thread: ModelThread, rows: Callable[[Sequence[int]], torch.Tensor], eos: int, pad: int) -> None:
        self.thread, self.eos = thread, eos
        self._rows, self._pad = rows, pad
        self._calls = GatheredCalls[Sequence[int], Sequence[torch.Tensor]](thread, self._made)
        # The row of `pad`; None until it is first needed.
        self.padding: torch.Tensor | None = None

    async def of(self, ids: Sequence[int]) -> Sequence[torch.Tensor]:
        """Return a row [1, width] for each token. Waits for the model's thread. Raises ModelError, Refused."""
        return await self._calls.call(ids) if ids else ()

    async def make_padding(self) -> torch.Tensor:
        """Return `padding`, after computing it if necessary. Raises ModelError and Refused."""
        if self.padding is None:
            (self.padding,) = await self.of([self._pad])
        return self.padding

    def _made(self, batch: Sequence[Sequence[int]]) -> list[Sequence[torch.Tensor]]:
        rows = iter(torch.split(self._rows([token for ids in batch for token in ids]), 1))
        return [[next(rows) for _ in ids] for ids in batch]


class TokenPieces:
    """The tokens of a text that is still being written, piece by piece, for one reader at a time.

    A piece is read from `source` on demand. If a reader is cancelled while it waits, the next reader gets the piece.
    The owner must call `aclose`.
    """

    def __init__(self, source: AsyncIterator[list[int]]) -> None:
        self._source = source
        self._wanted = asyncio.Semaphore(0)
        self._is_wanted = False
        # Bound: one piece, because a piece is read only after the previous one was taken.
        self._read: asyncio.Queue[list[int] | Exception | None] = asyncio.Queue()
        # Bound: TEXT_TOKENS_AHEAD and a word.
        self._given_back: deque[list[int]] = deque()
        # A single task reads all pieces, because a generator with a cancel scope must stay in one task.
        self._reader = asyncio.create_task(self._read_pieces())

    def __aiter__(self) -> TokenPieces:
        return self

    async def __anext__(self) -> list[int]:
        """Return the next piece. Raises StopAsyncIteration at the end of the text, and any exception of the source."""
        if self._given_back:
            return self._given_back.popleft()
        if not self._is_wanted:
            self._is_wanted = True
            self._wanted.release()
        piece = await self._read.get()
        if isinstance(piece, list):
            self._is_wanted = False
            return piece
        # Later calls get the same end or error.
        self._read.put_nowait(piece)
        raise StopAsyncIteration if piece is None else piece

    def give_back(self, pieces: Sequence[list[int]]) -> None:
        """Return these pieces to the front, in order."""
        self._given_back.extendleft(reversed(pieces))

    async def aclose(self) -> None:
        """Cancel the task that reads the source, and wait for it."""
        self._reader.cancel()
        with suppress(asyncio.CancelledError):
            await self._reader

    async def _read_pieces(self) -> None:
        try:
            while True:
                await self._wanted.acquire()
                piece = await anext(self._source, None)
                self._read.put_nowait(piece)
                if piece is None:
                    return
        except Exception as error:
            # The reader of the pieces raises this error again.
            self._read.put_nowait(error)


class TextFeed:
    """Feeds the text of one utterance to its program: the rows of its tokens, of the end token, and of the padding.

    `ids`: the first tokens; None: the session already has the text and its end token. `more`: the tokens that arrive
    later. A piece is read when fewer than TEXT_TOKENS_AHEAD tokens are left for frames.
    """

    def __init__(self, rows: TextRows, ids: Sequence[int] | None, more: TokenPieces | None = None) -> None:
        self._rows, self._ids, self._more = rows, ids, more
        self._pieces = list[list[int]]()
        # The number of tokens that were given, minus the number of frames that were read.
        self._left = 0
        self._few_left = asyncio.Event()

    def start(self, program: FrameProgram) -> asyncio.Task[None] | None:
        """Begin to give rows to a program, before its first step. Returns the task that gives the rest, if needed.

        The task ends with the text. It raises ModelError, Refused, and any exception of `more`.
        """
        if self._ids is None and (padding := self._rows.padding) is not None:
            program.give((), padding)
            return None
        return asyncio.create_task(self._feed(program))

    def read_frame(self) -> None:
        """Record that one more frame was read."""
        self._left -= 1
        if self._left < TEXT_TOKENS_AHEAD:
            self._few_left.set()

    def give_back(self, num_taken: int) -> None:
        """Give back the pieces of `more` of which no frame used a token. `num_taken`: the total number of used rows."""
        if self._more is None:
            return
        unspoken, tokens = list[list[int]](), len(self._ids or ())
        for piece in self._pieces:
            if tokens >= num_taken:
                unspoken.append(piece)
            tokens += len(piece)
        self._more.give_back(unspoken)

    async def _feed(self, program: FrameProgram) -> None:
        rows, ids = self._rows, list(self._ids or ())
        if self._more is not None:
            await self._give(program, ids)
            async for piece in self._more:
                self._pieces.append(piece)
                await self._give(program, piece)
                await self._few_left.wait()
            ids = []
        ends = [] if self._ids is None or rows.eos in ids else [rows.eos]
        padding = await rows.make_padding()
        last = await rows.of([*ids, *ends])
        rows.thread.post(partial(program.give, last, padding))

    async def _give(self, program: FrameProgram, ids: Sequence[int]) -> None:
        made = await self._rows.of(ids)
        self._rows.thread.post(partial(program.give, made))
        self._left += len(ids)
        if self._left >= TEXT_TOKENS_AHEAD:
            self._few_left.clear()
        else:
            self._few_left.set()


async def generate_frames(
    session: Session,
    maker: FrameMaker,
    text: TextFeed,
    sampling: CodecSampling,
    end: int,
    size: int,
    max_frames: int | None = None,
) -> AsyncGenerator[list[int], None]:
    """Yield the frames that follow the session's rows, with one code for each codebook, until the audio ends.

    Each frame uses one token of `text`, and waits for it. `end`, `size`: as in FirstCodeChooser. `max_frames`: a limit
    below that of `sampling`. The session gets a row for each frame. Raises ModelError, EngineError and Refused.
    """
    program = FrameProgram(maker, sampling, end, size)
    most = min(max_frames or sampling.max_frames, sampling.max_frames)
    params = Sampling(max_tokens=most, stop=frozenset((end,)), program=program)
    feeding = text.start(program)
    try:
        async with aclosing(session.generate(params)) as tokens:
            while token := await _unless_fails(anext(tokens, None), feeding):
                if token.id == end:
                    return
                text.read_frame()
                yield list(token.numbers)
    finally:
        if feeding:
            feeding.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await feeding
        text.give_back(program.num_taken)


async def _unless_fails(token: Awaitable[Token | None], feeding: asyncio.Task[None] | None) -> Token | None:
    """Return the token. If the task that feeds the text fails, raise its error: the token would never arrive."""
    if feeding is None or (feeding.done() and feeding.exception() is None):
        return await token
    waiting = asyncio.ensure_future(token)
    try:
        await asyncio.wait((waiting, feeding), return_when=asyncio.FIRST_COMPLETED)
        if feeding.done():
            feeding.result()
        return await waiting
    finally:
        if not waiting.done():
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting


def chunk_sizes(first: int | None = None) -> Iterator[int]:
    """Yield the numbers of frames in the successive chunks of an utterance's audio. Never ends.

    `first`: the size of the first chunk, at most MAX_VOCODER_FRAMES. The later chunks grow up to the last of
    CHUNK_FRAMES.
    """
    if first:
        first = min(first, MAX_VOCODER_FRAMES)
        yield first
    yield from (size for size in CHUNK_FRAMES if size > (first or 0))
    while True:
        yield CHUNK_FRAMES[-1]
