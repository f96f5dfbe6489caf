"""The talker: it reads the users' turns, and speaks the thinker's reply while the thinker writes it.

The talker's input is the rows of the users' turns, then the rows of the reply. Text rows are embeddings of the text.
Rows of audio and images are outputs of the thinker's tapped layer. The KV is kept between turns: the reply is rolled
back, and the next user's turn is appended.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import torch

from antiphon.adapters.qwen3_omni.checkpoint import TalkerParts
from antiphon.audio import Pcm
from antiphon.engine.api import GRAPHS, Engine, Sampling, Session
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError, ModelError
from antiphon.modeling.codec.frames import (
    FrameMaker,
    TextFeed,
    TextRows,
    TokenPieces,
    chunk_sizes,
    generate_frames,
)
from antiphon.modeling.codec.talker import CodecSampling
from antiphon.modeling.codec.vocoder import VocoderState
from antiphon.modeling.codec.vocoder_batch import VocoderBatch
from antiphon.modeling.media_rows import ChatRow, MediaPiece, MediaRows, Run
from antiphon.modeling.omni.conversation import SpokenTokens, TalkerRows
from antiphon.modeling.omni.hidden_rows import HiddenRow

# The sampling of the released code (the defaults of its generate()).
TALKER_SAMPLING = CodecSampling(
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, repetition_window=4096),
    Sampling(temperature=1.0, top_k=50, top_p=0.8),
    min_frames=0,
    max_frames=4096,
)
# Rows that are reserved for a session: a turn and its reply.
RESERVE_ROWS = 1024
# The number of tokens that begin a reply: "<|im_start|>assistant\n".
REPLY_OPENING_TOKENS = 3


class OmniTalker:
    """A TalkerModel. The code predictor and the vocoder run in `thread`, the talker's thread.

    `parts`: its modules. `embed`: the thinker's token embedding, which may be on another device. `sampling`: how codes
    are chosen. `graphs`: the parts that a GPU replays as graphs; see EngineSettings.
    """

    def __init__(
        self,
        parts: TalkerParts,
        embed: torch.nn.Embedding,
        engine: Engine,
        thread: ModelThread,
        sampling: CodecSampling = TALKER_SAMPLING,
        graphs: frozenset[str] = frozenset(GRAPHS),
    ) -> None:
        self.parts, self.engine, self.thread, self.sampling = parts, engine, thread, sampling
        usual = sampling.rest if "codes" in graphs else None
        self.frame_maker = FrameMaker(parts.code_predictor, parts.decoder.get_input_embeddings(), usual)
        self.text = TextRows(thread, self.text_rows, parts.special_ids.text_eos, parts.special_ids.text_pad)
        self.vocoders = VocoderBatch(thread, parts.vocoder, graphs="vocoder" in graphs)
        self._embed = embed

    @property
    def voices(self) -> tuple[str, ...]:
        """The names of the voices in lower case, in the checkpoint's order. The first is the default."""
        return tuple(self.parts.speakers)

    async def open(self) -> OmniTalkerStream:
        """Return the talker's stream of a new conversation. The caller must close it. Raises Refused if it is full."""
        return OmniTalkerStream(self, await self.engine.open(RESERVE_ROWS))

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the talker's input rows of text tokens: [n, width]. Called in the model's thread."""
        embedded = self._embed(torch.tensor(list(ids), device=self._embed.weight.device))
        return self._projected(self.parts.model.text_projection, embedded)

    @torch.inference_mode()
    def prompt_rows(self, run: Run, media: Mapping[MediaPiece, MediaRows]) -> torch.Tensor:
        """Return the talker's input rows of a run of a prompt: [n, width]. Called in the model's thread.

        For an audio clip or an image, these are projected outputs of the thinker's tapped layer. Rows that left the
        thinker's context before they were computed have no output; zeros are projected instead.
        """
        if run.part is None:
            return self.text_rows(run.ids)
        hidden = media[run.part].hidden
        if hidden is None:
            hidden = torch.zeros(len(media[run.part].rows), self._embed.weight.shape[1])
        return self._projected(self.parts.model.hidden_projection, hidden[run.start : run.stop])

    @torch.inference_mode()
    def opening_rows(self, ids: Sequence[int], speaker: str) -> torch.Tensor:
        """Return the rows of a reply before its first frame, [n, width]. Called in the model's thread.

        `ids`: the tokens that begin the reply, and the first token of its text. `speaker`: one of `voices`. Raises
        KeyError for an unknown speaker.
        """
        special = self.parts.special_ids
        control = (special.no_think, special.think_bos, special.think_eos)
        codes = (*control, self.parts.speakers[speaker], special.pad, special.bos)
        table = self.parts.decoder.get_input_embeddings()
        code_rows = table(torch.tensor(codes, device=table.weight.device))
        *opening, first = ids
        text = self.text_rows([*[special.text_pad] * (len(codes) - 2), special.text_bos, first])
        return torch.cat((self.text_rows(opening), text + code_rows.to(text)))

    def _projected(self, projection: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        like = next(projection.parameters())
        out: torch.Tensor = projection(given.to(like.device, like.dtype))
        return out


class OmniTalkerStream:
    """A TalkerSide: a session of the talker's engine, which keeps the KV of the users' turns between replies."""

    def __init__(self, talker: OmniTalker, session: Session) -> None:
        self._talker, self._session = talker, session
        self._rows = TalkerRows(session, talker.thread)

    async def prefill(
        self, prompt: Sequence[ChatRow], hidden: Sequence[HiddenRow], media: Mapping[MediaPiece, MediaRows]
    ) -> None:
        """Take in the rows of a turn that is still being spoken, see TalkerSide."""
        try:
            await self._hold(prompt, media)
            await self._session.settle(include_newest=True)
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error

    async def _hold(self, prompt: Sequence[ChatRow], media: Mapping[MediaPiece, MediaRows]) -> None:
        talker = self._talker
        wanted = _user_rows(prompt, talker.parts.turn_start, talker.parts.user)
        await self._rows.hold(wanted, media, lambda run, _: talker.prompt_rows(run, media))

    async def speak(
        self, spoken: SpokenTokens, media: Mapping[MediaPiece, MediaRows], voice: str, seed: int | None
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a reply. The first audio is one frame (80 ms). See TalkerSide.

        The thinker must have computed the rows of `media`.
        """
        talker, session = self._talker, self._session
        prompt, text = await spoken.prompt(), spoken.tokens()
        first = await anext(text, None)
        if first is None:
            return
        try:
            await self._hold(prompt, media)
            last_turn = prompt[_last_turn(prompt, talker.parts.turn_start) :]
            opening = [row for row in last_turn if isinstance(row, int)]
            ids = [*opening[:REPLY_OPENING_TOKENS], first]
            session.append_embeddings(await talker.thread.call_model(lambda: talker.opening_rows(ids, voice)))
            async with aclosing(self.frames(text, seed)) as frames, aclosing(self._vocoded(frames)) as audio:
                async for pcm in audio:
                    yield pcm
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error

    async def frames(self, text: AsyncIterator[int], seed: int | None = None) -> AsyncGenerator[list[int], None]:
        """Yield frames of codes that follow the session's rows, with one code for each codebook.

        Each frame waits for one token of `text`. After the last token, frames continue until the talker ends them.
        `seed`: seeds the sampling of all codes; None: random. Raises ModelError, EngineError and Refused.
        """
        talker, parts = self._talker, self._talker.parts
        special, sampling = parts.special_ids, talker.sampling
        if seed is not None:
            first, rest = replace(sampling.first, seed=seed), replace(sampling.rest, seed=seed + 1)
            sampling = replace(sampling, first=first, rest=rest)
        size = int(parts.decoder.config.vocab_size)
        async with aclosing(TokenPieces(_one_by_one(text))) as pieces:
            feed = TextFeed(talker.text, [], pieces)
            made = generate_frames(self._session, talker.frame_maker, feed, sampling, special.end, size)
            async with aclosing(made) as frames:
                async for frame in frames:
                    yield frame

    async def _vocoded(self, frames: AsyncIterator[list[int]]) -> AsyncGenerator[Pcm, None]:
        state, sizes = VocoderState(), chunk_sizes()
        held, size = list[list[int]](), next(sizes)
        async for frame in frames:
            held.append(frame)
            if len(held) == size:
                yield await self._talker.vocoders.audio(held, state)
                held, size = [], next(sizes)
        if held:
            yield await self._talker.vocoders.audio(held, state)

    def close(self) -> None:
        """Close the session and free its KV. A reply that is being spoken fails. The talker stays open."""
        self._session.close()


async def _one_by_one(tokens: AsyncIterator[int]) -> AsyncIterator[list[int]]:
    async for token in tokens:
        yield [token]


def _last_turn(rows: Sequence[ChatRow], turn_start: int) -> int:
    return max(i for i, row in enumerate(rows) if row == turn_start)


def _user_rows(rows: Sequence[ChatRow], turn_start: int, user: int) -> list[ChatRow]:
    """Return the rows of the users' turns, including the tokens that begin and end each turn."""
    out: list[ChatRow] = []
    in_user_turn = False
    for row, following in itertools.zip_longest(rows, rows[1:]):
        if row == turn_start:
            in_user_turn = following == user
        if in_user_turn:
            out.append(row)
    return out
