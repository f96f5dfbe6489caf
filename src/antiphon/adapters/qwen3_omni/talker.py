"""The talker: it has heard what the user's turns are made of, and speaks the thinker's answer while that is written.

Its rows are the users' turns, of text as the text is embedded and of sound and pictures as the thinker's tapped layer has them, then the answer's. So
between turns its KV is kept too: what it said is taken back, the next user's turn is appended.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import torch

from antiphon.adapters.qwen3_omni.checkpoint import TalkerParts
from antiphon.audio import Pcm
from antiphon.contracts import MediaPart
from antiphon.engine.api import Sampling
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.errors import EngineError, ModelError
from antiphon.modeling.chat import ChatRow, common_prefix, runs_by_part
from antiphon.modeling.codec_talker import CodecSampling, CodePredictorBatch, TextRows, chunk_sizes, generate_frames
from antiphon.modeling.codec_vocoder import VocoderState
from antiphon.modeling.media_rows import MediaRows

# As its makers have it choose (generate()'s own settings).
MANNER = CodecSampling(
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, repetition_window=4096),
    Sampling(temperature=1.0, top_k=50, top_p=0.8),
    min_frames=0,
    max_frames=4096,
)
# A session is promised room for a turn and its answer.
RESERVE_ROWS = 1024
# The tokens that open an answer: whose turn it is.
OPENING_ROWS = 3


class OmniTalker:
    """The loaded talker on its engine. `embed`: the thinker's table of tokens."""

    def __init__(
        self, talker: TalkerParts, embed: torch.nn.Embedding, engine: Engine, manner: CodecSampling = MANNER
    ) -> None:
        self.talker, self.engine, self.manner = talker, engine, manner
        self.inners = CodePredictorBatch(engine, talker.inner, talker.decoder.get_input_embeddings())
        self._embed = embed

    @property
    def speakers(self) -> tuple[str, ...]:
        """Names of its voices."""
        return tuple(self.talker.speakers)

    async def open(self) -> OmniTalkerStream:
        """For a new conversation. Raises Refused where there is no room."""
        return OmniTalkerStream(self, await self.engine.open(RESERVE_ROWS))

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Text tokens as the talker reads them: [n, width]. In the engine's thread."""
        given = self._embed(torch.tensor(list(ids), device=self._embed.weight.device))
        return self._projected(self.talker.model.text_projection, given)

    @torch.inference_mode()
    def sensed_rows(self, sensed: MediaRows) -> torch.Tensor:
        """Sound or a picture as the talker has it: [n, width]. In the engine's thread."""
        hidden = sensed.hidden
        if hidden is None:
            # It left the context before it was computed: the thinker knows nothing of it either.
            hidden = torch.zeros(len(sensed.rows), self._embed.weight.shape[1])
        return self._projected(self.talker.model.hidden_projection, hidden)

    @torch.inference_mode()
    def opening_rows(self, ids: Sequence[int], speaker: str) -> torch.Tensor:
        """How an answer begins [n, width]: `ids`, the tokens that open it and its first. In the engine's thread."""
        marks = self.talker.marks
        told = (marks.no_think, marks.think_bos, marks.think_eos, self.talker.speakers[speaker], marks.pad, marks.bos)
        table = self.talker.decoder.get_input_embeddings()
        codes = table(torch.tensor(told, device=table.weight.device))
        *opening, first = ids
        written = self.text_rows([*[marks.text_pad] * (len(told) - 2), marks.text_bos, first])
        return torch.cat((self.text_rows(opening), written + codes.to(written)))

    def _projected(self, projection: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        like = next(projection.parameters())
        out: torch.Tensor = projection(given.to(like.device, like.dtype))
        return out

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


class OmniTalkerStream:
    """One conversation's session with the talker."""

    def __init__(self, voice: OmniTalker, session: EngineSession) -> None:
        self._voice, self._session = voice, session
        # Users' rows that it has.
        self._rows: list[ChatRow] = []

    async def say(
        self,
        prompt: Sequence[ChatRow],
        sensed: Mapping[MediaPart, MediaRows],
        text: AsyncIterator[int],
        speaker: str,
        seed: int | None = None,
    ) -> AsyncGenerator[Pcm, None]:
        """The sound of an answer whose tokens are `text`, while they come. `prompt`: the conversation's rows up to it.

        Raises ModelError, Refused.
        """
        voice, session = self._voice, self._session
        first = await anext(text, None)
        if first is None:
            return
        try:
            await self._hear(prompt, sensed)
            opening = [row for row in prompt[_last_turn(prompt, voice.talker.roles[0]) :] if isinstance(row, int)]
            ids = [*opening[:OPENING_ROWS], first]
            session.append_embeddings(await voice.engine.call_model(lambda: voice.opening_rows(ids, speaker)))
            async with aclosing(self.frames(text, seed)) as made, aclosing(self._sounds(made)) as sounds:
                async for pcm in sounds:
                    yield pcm
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error

    async def frames(self, text: AsyncIterator[int], seed: int | None = None) -> AsyncGenerator[list[int], None]:
        """Frames of codes behind the rows there are, while the rest of the text comes. Raises ModelError, EngineError, Refused."""
        voice, talker = self._voice, self._voice.talker
        marks, manner = talker.marks, voice.manner
        if seed is not None:
            manner = replace(manner, first=replace(manner.first, seed=seed), rest=replace(manner.rest, seed=seed + 1))
        rows = TextRows(voice.engine, voice.text_rows, marks.text_eos, marks.text_pad, [], _one_by_one(text))
        size = int(talker.decoder.config.vocab_size)
        async with aclosing(generate_frames(self._session, voice.inners, rows.next, manner, marks.end, size)) as made:
            async for frame in made:
                yield frame

    async def _sounds(self, made: AsyncIterator[list[int]]) -> AsyncGenerator[Pcm, None]:
        past, sizes = VocoderState(), chunk_sizes()
        held, size = list[list[int]](), next(sizes)
        async for frame in made:
            held.append(frame)
            if len(held) == size:
                yield await self._sound(held, past)
                held, size = [], next(sizes)
        if held:
            yield await self._sound(held, past)

    async def _sound(self, held: list[list[int]], past: VocoderState) -> Pcm:
        voice = self._voice
        pcm: Pcm = (await voice.engine.call_model(lambda: voice.talker.vocoder(held, past))).numpy()
        return pcm

    async def _hear(self, prompt: Sequence[ChatRow], sensed: Mapping[MediaPart, MediaRows]) -> None:
        """Make the session hold just the users' turns."""
        voice, session = self._voice, self._session
        wanted = list(_users(prompt, voice.talker.roles))
        held = common_prefix(self._rows, wanted)
        try:
            session.rollback(held)
        except EngineError:
            # Those rows left the context: begin anew.
            session.rollback(0)
            held = 0
        self._rows = wanted[:held]
        for part, ids in runs_by_part(wanted[held:]):
            if part is None:
                held += len(ids)
                session.append_embeddings(await voice.engine.call_model(partial(voice.text_rows, ids)))
            else:
                of = sensed[part]
                held += len(of.rows)
                made = await voice.engine.call_model(partial(voice.sensed_rows, of))
                session.append_embeddings(made, of.positions)
            self._rows = wanted[:held]

    def close(self) -> None:
        """End it."""
        self._session.close()


async def _one_by_one(tokens: AsyncIterator[int]) -> AsyncIterator[list[int]]:
    async for token in tokens:
        yield [token]


def _last_turn(rows: Sequence[ChatRow], begins: int) -> int:
    return max(i for i, row in enumerate(rows) if row == begins)


def _users(rows: Sequence[ChatRow], roles: tuple[int, int]) -> list[ChatRow]:
    """The users' turns, each with the token that begins it and those that end it."""
    begins, user = roles
    out: list[ChatRow] = []
    mine = False
    for row, following in itertools.zip_longest(rows, rows[1:]):
        if row == begins:
            mine = following == user
        if mine:
            out.append(row)
    return out
