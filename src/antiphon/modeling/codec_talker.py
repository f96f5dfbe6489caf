"""From text to frames of codes: a decoder says the first code of each frame on the engine, a small one the other fifteen, for all sessions at once.

A frame's row is the sum of its codes' embeddings and of one token's of the text: so text is read while it is spoken, a token a frame.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu
from transformers import DynamicCache

from antiphon.engine.api import Sampling
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.sampling import generator, sample
from antiphon.errors import ModelError

# The last codes of the talker's vocabulary are no sound but its own marks.
MARKS = 1024
# A sound has so many frames at most (generation_config.json, max_new_tokens).
MOST_FRAMES = 2048
# Frames of 80 ms in a sound's chunks: the first sound soon, then fewer steps of the vocoder.
CHUNKS = (1, 2, 4, 8, 12)
# Frames that the vocoder is given at once, at most: others wait for it.
MAX_VOCODED = 25


@dataclass(frozen=True, slots=True)
class CodecSampling:
    """How codes are chosen: the first of a frame, and the others (`inner`). Temperature 0: the likeliest. A sound has from `least` to `most` frames."""

    first: Sampling
    inner: Sampling
    least: int = 2
    most: int = MOST_FRAMES


MANNER = CodecSampling(
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, repetition_window=MOST_FRAMES),
    Sampling(temperature=0.9, top_k=50),
)


class TextProjection(nn.Module):
    """A text token's embedding to the talker's width. Names of the checkpoint, `talker.text_projection.`"""

    def __init__(self, inside: int, out: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(inside, inside), nn.Linear(inside, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inside] to [n, out]."""
        out: torch.Tensor = self.linear_fc2(silu(self.linear_fc1(x)))
        return out


class CodePredictor(nn.Module):
    """What says the codes of a frame behind the first. `model`: a Qwen3Model, or what is called as one; tables and heads one a code.
    `width`: of the talker's rows."""

    def __init__(self, model: Any, tables: nn.ModuleList, heads: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.model, self.codec_embedding, self.lm_head = model, tables, heads
        inner = int(model.config.hidden_size)
        # The larger talkers are wider than it.
        self.small_to_mtp_projection = nn.Linear(width, inner) if inner != width else nn.Identity()

    @torch.inference_mode()
    def forward(
        self, thoughts: torch.Tensor, first: torch.Tensor, choose: Sequence[Callable[[torch.Tensor], int]]
    ) -> tuple[list[list[int]], torch.Tensor]:
        """Codes of one frame each for several sessions: `thoughts` [n, width] that the first codes were chosen from, `first` [n, width] their
        embeddings. Returns the other codes, and all embeddings summed [n, width]."""
        dtype = self.model.norm.weight.dtype
        rows, codes, summed = torch.stack((thoughts, first), 1).to(dtype), list[list[int]](), first.clone()
        past = DynamicCache(config=self.model.config)
        for number, head in enumerate(self.lm_head):
            hidden = self.model(
                inputs_embeds=self.small_to_mtp_projection(rows), past_key_values=past, use_cache=True
            ).last_hidden_state
            logits = head(hidden[:, -1]).float().cpu()
            codes.append([pick(row) for pick, row in zip(choose, logits, strict=True)])
            table = self.codec_embedding[number]
            embedded = table(torch.tensor(codes[-1], device=first.device))
            summed += embedded
            rows = embedded[:, None].to(dtype)
        return [list(column) for column in zip(*codes, strict=True)], summed


@dataclass(slots=True)
class _Asked:
    thought: torch.Tensor
    code: int
    choose: Callable[[torch.Tensor], int]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[tuple[list[int], torch.Tensor]]


class CodePredictorBatch:
    """`CodePredictor` in the engine's thread, for all that ask at once."""

    def __init__(self, engine: Engine, inner: CodePredictor, first: nn.Module) -> None:
        self._engine, self._inner, self._first = engine, inner, first
        # Bound: one a session.
        self._asked: deque[_Asked] = deque()

    async def codes(
        self, thought: torch.Tensor, code: int, choose: Callable[[torch.Tensor], int]
    ) -> tuple[list[int], torch.Tensor]:
        """The other codes of a frame, and all its embeddings' sum [width]. Raises ModelError."""
        loop = asyncio.get_running_loop()
        asked = _Asked(thought, code, choose, loop, loop.create_future())
        self._asked.append(asked)
        self._engine.post(self._answer)
        return await asked.done

    def _answer(self) -> None:
        """In the engine's thread: whoever has asked by now."""
        batch = [self._asked.popleft() for _ in range(len(self._asked))]
        if not batch:
            return
        try:
            like: Any = self._first.weight
            thoughts = torch.stack([a.thought for a in batch]).to(like.device, like.dtype)
            with torch.inference_mode():
                first = self._first(torch.tensor([a.code for a in batch], device=like.device))
            choose = [_Guarded(a.choose) for a in batch]
            codes, summed = self._inner(thoughts, first, choose)
        except Exception as error:
            # The edge of the model: whatever it raises fails those who asked, never the engine.
            failure = error if isinstance(error, ModelError) else ModelError(f"{type(error).__name__}: {error}")
            for asked in batch:
                self._engine.deliver(asked.loop, partial(_tell, asked.done, failure))
            return
        for asked, chose, mine, row in zip(batch, choose, codes, summed, strict=True):
            self._engine.deliver(asked.loop, partial(_tell, asked.done, chose.failure or (mine, row)))


class _Guarded:
    """A chooser whose failure is its own session's."""

    def __init__(self, choose: Callable[[torch.Tensor], int]) -> None:
        self._choose = choose
        self.failure: ModelError | None = None

    def __call__(self, logits: torch.Tensor) -> int:
        try:
            return self._choose(logits)
        except ModelError as error:
            self.failure = error
            return 0


def _tell(
    done: asyncio.Future[tuple[list[int], torch.Tensor]], answer: tuple[list[int], torch.Tensor] | ModelError
) -> None:
    if done.done():
        return
    if isinstance(answer, ModelError):
        done.set_exception(answer)
    else:
        done.set_result(answer)


class FirstCodeChooser:
    """Chooses the first codes of one sound's frames: see Chooser. `end`: the code that ends the sound, after `least` frames; `size`: of its vocabulary."""

    def __init__(self, params: Sampling, end: int, size: int, least: int) -> None:
        self._least = least
        self._params = replace(params, forbid=tuple(i for i in range(size - MARKS, size) if i != end))
        self._end = end
        self._said: list[int] = []
        self._random = generator(params)

    def __call__(self, logits: torch.Tensor) -> int:
        """See Chooser."""
        params = self._params
        if len(self._said) < self._least:
            params = replace(params, forbid=(*params.forbid, self._end))
        token, _ = sample(logits, params, self._said, len(self._said), self._random)
        self._said.append(token)
        return token


def inner_chooser(params: Sampling) -> Callable[[torch.Tensor], int]:
    """Chooses the other codes of one sound."""
    random = generator(params)
    return lambda logits: sample(logits, params, (), 0, random)[0]


async def frames(
    session: EngineSession,
    inners: CodePredictorBatch,
    text: Callable[[], Awaitable[torch.Tensor]],
    manner: CodecSampling,
    end: int,
    size: int,
    most: int | None = None,
) -> AsyncGenerator[list[int], None]:
    """Frames of codes after the rows that the session holds, until the sound ends. `text`: the row of the text's next token [width].

    Raises ModelError, EngineError, Refused.
    """
    first, inner = FirstCodeChooser(manner.first, end, size, manner.least), inner_chooser(manner.inner)
    sampling = Sampling(max_tokens=1, hidden=True, chooser=first)
    for _ in range(min(most or manner.most, manner.most)):
        async with aclosing(session.generate(sampling)) as tokens:
            (token,) = [t async for t in tokens]
        if token.id == end:
            return
        # What is heard of a code next is the whole frame.
        session.rollback(session.length - 1)
        codes, summed = await inners.codes(token.hidden, token.id, inner)
        yield [token.id, *codes]
        session.append_embeddings((summed + await text())[None])


class TextRows:
    """The text's rows, one a frame: its tokens, the mark of its end, then nothing. Waits for tokens that have not come.

    `rows`: tokens as the talker reads them [n, width], in the engine's thread. `ids` None: it has ended; `more` tokens follow them.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Callable[[Sequence[int]], torch.Tensor],
        eos: int,
        pad: int,
        ids: list[int] | None,
        more: AsyncIterator[list[int]] | None,
    ) -> None:
        self._engine, self._rows, self._eos, self._pad = engine, rows, eos, pad
        self._ids, self._more = ids or [], more
        self._ended = ids is None
        self._nothing: torch.Tensor | None = None

    async def next(self) -> torch.Tensor:
        """[width]."""
        while not self._ids and self._more is not None:
            tokens = await anext(self._more, None)
            if tokens is None:
                self._more = None
            else:
                self._ids += tokens
        if self._ids or not self._ended:
            token = self._ids.pop(0) if self._ids else self._eos
            self._ended = self._ended or token == self._eos
            return (await self._engine.ask_model(lambda: self._rows([token])))[0]
        if self._nothing is None:
            self._nothing = (await self._engine.ask_model(lambda: self._rows([self._pad])))[0]
        return self._nothing


def chunk_sizes(first: int | None = None) -> Iterator[int]:
    """Frames in a sound's chunks."""
    if first:
        first = min(first, MAX_VOCODED)
        yield first
    yield from (size for size in CHUNKS if size > (first or 0))
    while True:
        yield CHUNKS[-1]
