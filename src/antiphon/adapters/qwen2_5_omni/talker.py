"""The talker: it reads the whole conversation as rows of the thinker, and speaks a reply while the thinker writes it.

An input row of the prompt is the thinker's hidden state of that row, plus the token's embedding if the row is a token.
The KV is kept between turns: the codes of a reply are rolled back, and the new rows of the conversation are appended.
While the talker speaks, 50 codes a second, each row is the embedding of a code plus the thinker's row of one token of
the reply.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from antiphon.adapters.qwen2_5_omni.checkpoint import VoiceParts
from antiphon.adapters.qwen2_5_omni.token2wav import Speaker, WavStream
from antiphon.audio import Pcm
from antiphon.engine.api import Engine, Sampling, Session
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local.device_sampling import random_generator
from antiphon.engine.local.sampling import RowSampler, sample_rows
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError, ModelError
from antiphon.modeling.media_rows import ChatRow, MediaPiece, MediaRows, Run
from antiphon.modeling.omni.conversation import SpokenTokens, TalkerRows
from antiphon.modeling.omni.hidden_rows import HiddenRow, states
from antiphon.pipelines.merge import Put, side_by_side

# Limit of codes in one reply.
MAX_CODES = 4096
# The sampling of the released code (the defaults of its generate()).
TALKER_SAMPLING = Sampling(
    max_tokens=MAX_CODES,
    temperature=0.9,
    top_k=40,
    top_p=0.8,
    repetition_penalty=1.05,
    repetition_window=MAX_CODES + 3,
)
# Rows that are reserved for a session: a turn and its reply.
RESERVE_ROWS = 1024


class BarredCodeChooser:
    """Chooses the codes of one reply; a Chooser of the engine.

    `seen`: codes that penalties apply to in addition to the chosen ones. `barred`: bool [vocabulary], the codes that
    are never chosen.
    """

    def __init__(self, params: Sampling, seen: Sequence[int], barred: torch.Tensor) -> None:
        self._sampler, self._barred, self._codes = RowSampler(params, len(barred)), barred, list(seen)

    @staticmethod
    def choose(choosers: Sequence[BarredCodeChooser], logits: torch.Tensor) -> torch.Tensor:
        """Return the next code of each reply, or NO_TOKEN. All choosers must have the same barred codes."""
        left = logits.masked_fill(choosers[0]._barred.to(logits.device, non_blocking=True), -torch.inf)
        edits = [c._sampler.edits(c._codes, len(c._codes)) for c in choosers]
        return sample_rows(left, [c._sampler for c in choosers], edits)

    def accept(self, chosen: int) -> int:
        """Record a chosen code. Raises ModelError for NO_TOKEN."""
        if chosen == NO_TOKEN:
            raise ModelError("the model's output is not a number")
        self._codes.append(chosen)
        return chosen


class Talker:
    """A TalkerModel. `token2wav` runs in the talker's thread.

    `parts`: its modules. `embed`: the thinker's token embedding, which may be on another device. `joined`: see
    MediaEncoder. `sampling`: how codes are chosen.
    """

    def __init__(
        self,
        parts: VoiceParts,
        embed: nn.Embedding,
        engine: Engine,
        thread: ModelThread,
        joined: Collection[tuple[int, int]] = (),
        sampling: Sampling = TALKER_SAMPLING,
    ) -> None:
        self.parts, self.engine, self.thread, self.sampling = parts, engine, thread, sampling
        self.embed, self.joined = embed, joined
        codes = torch.arange(engine.vocabulary_size)
        # Codes without an embedding in the vocoder have no audio; the published model would fail on them.
        self.barred = (codes >= parts.token2wav.num_codes) & ~torch.isin(codes, torch.tensor(sorted(parts.ends)))
        self.barred[parts.bos] = True

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices in lower case, in the checkpoint's order. The first is the default."""
        return tuple(self.parts.speakers)

    async def open(self) -> TalkerStream:
        """Return the talker's stream of a new conversation. The caller must close it. Raises Refused if it is full."""
        return TalkerStream(self, await self.engine.open(RESERVE_ROWS))

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int], hidden: torch.Tensor | float = 0.0) -> torch.Tensor:
        """Return the talker's rows of text tokens before its projection: [n, width]. Called in the model's thread.

        `hidden`: the thinker's hidden states of the tokens, [n, width].
        """
        made: torch.Tensor = self.embed(torch.tensor(list(ids), device=self.embed.weight.device)) + hidden
        return made

    @torch.inference_mode()
    def projected(self, rows: torch.Tensor, codes: Sequence[int] = ()) -> torch.Tensor:
        """Return the talker's input rows for rows [n, width], with the embeddings of `codes` added to the last ones."""
        table, project = self.parts.decoder.codes, self.parts.decoder.projection
        given = rows.to(table.weight.device, table.weight.dtype)
        if codes:
            added = table(torch.tensor(list(codes), device=given.device))
            given = torch.cat((given[: -len(codes)], given[-len(codes) :] + added))
        out: torch.Tensor = project(given)
        return out

    def opening_rows(self, first: tuple[int, torch.Tensor], speaker: Speaker) -> torch.Tensor:
        """Return the rows between the prompt and the first code: [2, talker's width]. Called in the model's thread."""
        token, hidden = first
        rows = torch.cat((self.text_rows([speaker.bos]), self.text_rows([token], hidden)))
        return self.projected(rows, (self.parts.pad, self.parts.bos))


class TalkerStream:
    """A TalkerSide: a session of the talker's engine, which keeps the conversation's KV between replies."""

    def __init__(self, talker: Talker, session: Session) -> None:
        self._talker, self._session = talker, session
        self._rows = TalkerRows(session, talker.thread, talker.joined)

    async def prefill(
        self, prompt: Sequence[ChatRow], hidden: Sequence[HiddenRow], media: Mapping[MediaPiece, MediaRows]
    ) -> None:
        """Take in the rows of a turn that is still being spoken, see TalkerSide."""
        try:
            await self._hold(prompt, hidden, media)
            await self._session.settle(include_newest=True)
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error

    async def _hold(
        self, prompt: Sequence[ChatRow], hidden: Sequence[HiddenRow], media: Mapping[MediaPiece, MediaRows]
    ) -> None:
        await self._rows.hold(prompt, media, partial(self._prompt_rows, hidden))

    async def speak(
        self, spoken: SpokenTokens, media: Mapping[MediaPiece, MediaRows], voice: str, seed: int | None
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a reply. The first audio follows after 24 codes (480 ms). See TalkerSide."""
        speaker = self._talker.parts.speakers[voice]
        # Queue of generated codes that are not audio yet. After the last code, it gets None. Bound: MAX_CODES.
        waiting: asyncio.Queue[int | None] = asyncio.Queue()

        async def choose(_: Put[Pcm]) -> None:
            try:
                async with aclosing(self.codes(spoken, media, speaker, seed)) as codes:
                    async for code in codes:
                        waiting.put_nowait(code)
            finally:
                waiting.put_nowait(None)

        async def sound(put: Put[Pcm]) -> None:
            wav = self.wav(speaker, seed)
            while (code := await waiting.get()) is not None:
                await put(await wav.feed([code]))
            await put(await wav.feed([], last=True))

        async with aclosing(side_by_side(choose, sound)) as audio:
            async for pcm in audio:
                if len(pcm):
                    yield pcm

    async def codes(
        self, spoken: SpokenTokens, media: Mapping[MediaPiece, MediaRows], speaker: Speaker, seed: int | None = None
    ) -> AsyncGenerator[int, None]:
        """Yield the codes of a reply while the thinker writes it, until the talker ends them.

        `media`: the rows of the audio and images in the prompt. A reply without tokens to speak has no codes. `seed`:
        seeds the sampling of codes; None: random. Closing the generator stops it within a step. Raises ModelError and
        Refused.
        """
        talker, session, parts = self._talker, self._session, self._talker.parts
        prompt = await spoken.prompt()
        rows = spoken.rows(talker.embed.weight)
        first = await anext(rows, None)
        if first is None:
            return
        params = talker.sampling if seed is None else replace(talker.sampling, seed=seed)
        # As published, penalties also apply to the codes that stand for the prompt.
        chooser = BarredCodeChooser(params, (parts.mask, parts.pad, parts.bos), talker.barred)
        one_code = Sampling(max_tokens=1, chooser=chooser)
        tail = iter((parts.text_eos,))
        try:
            await self._hold(prompt, spoken.prompt_states, media)
            opening = await talker.thread.call_model(lambda: talker.opening_rows(first, speaker))
            session.append_embeddings(opening)
            for _ in range(params.max_tokens):
                (token,) = await session.collect(one_code)
                if token.id in parts.ends:
                    return
                yield token.id
                # The engine's row has only the code. Replace it by one that also has the next token.
                session.rollback(session.length - 1)
                given = await anext(rows, None) or (next(tail, parts.text_pad), 0.0)
                session.append_embeddings(await talker.thread.call_model(partial(self._next_row, given, token.id)))
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error

    def _next_row(self, given: tuple[int, torch.Tensor | float], code: int) -> torch.Tensor:
        token, hidden = given
        return self._talker.projected(self._talker.text_rows([token], hidden), (code,))

    def wav(self, speaker: Speaker, seed: int | None = None) -> WavStream:
        """Return a stream that turns the codes of one reply into audio. `seed`: seeds its noise; None: random."""
        return WavStream(self._talker.parts.token2wav, self._talker.thread, speaker, random_generator(seed))

    def _prompt_rows(self, hidden: Sequence[HiddenRow], run: Run, start: int) -> Any:
        count = len(run.ids) or run.stop - run.start
        made = states(hidden[start : start + count], self._talker.embed.weight)
        # For audio and images, the rows are the thinker's hidden states only.
        return self._talker.projected(self._talker.text_rows(run.ids, made) if run.ids else made)

    def close(self) -> None:
        """Close the session and free its KV. A reply that is being spoken fails. The talker stays open."""
        self._session.close()
