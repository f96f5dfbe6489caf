"""Sessions with a model that sees pictures: a frame is encoded when it comes and is in the KV once; a question costs what is new since the last one.

A session is one sequence of rows: the system turn, then for each question the new frames, each with its time, the question and its answer. Nothing of
it is rendered again; an answer that is cut is rolled back to before its question, and the frames stay.

What a question asked now would be answered from is put into the KV as it comes (`eager`), and taken back where it turns out otherwise; or only when
one is asked (`query`). What is in the KV when a question is answered is the same.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Literal

import torch

from antiphon.adapters.vlm.family import FamilyPart, VisionFamily
from antiphon.adapters.vlm.qwen_vl import MODELS, QwenVl
from antiphon.adapters.vlm.smolvlm import SmolVlm
from antiphon.contracts import (
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    ResponseChunk,
    Synthesizer,
    TextDelta,
    Transcriber,
    VideoFrame,
    VideoProfile,
    VideoQuestion,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings, Finish, Sampling
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import placed, round_linear
from antiphon.engine.threads import load_errors, load_in_own_thread
from antiphon.errors import EngineError, Refused
from antiphon.events.tools import Tool
from antiphon.modeling.detokenizer import Detokenizer
from antiphon.modeling.media_rows import PictureRows
from antiphon.pipelines.cascade import spoken
from antiphon.pipelines.observer import words_of
from antiphon.vision.images import decode

SYSTEM = "You answer questions about what a camera or a screen shows, in one or two sentences."
MAX_TOKENS = 256
# Of a voice that is not there.
NO_RATE_HZ = 24_000
# So many frames are taken in ahead at once, at most.
MAX_AHEAD = 2
# Larger pictures are scaled down to this before anything else: no encoder here sees more of them.
MAX_SIDE = 2048


class VisionLanguageModel:
    """See Watcher. `folder` holds a checkpoint as `transformers` writes it, of a family that `_families` knows."""

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
        prefill: Literal["eager", "query"] = "eager",
    ) -> None:
        """Raises ModelError for a checkpoint that does not load."""
        kind, dtype = placed(device, weights, mixture=_kind(folder).endswith("_moe"))
        with load_errors(model_id, folder):
            self.family = load_in_own_thread(
                lambda: _load(folder, device, dtype, rounded=kind == "int8"), device=device, threads=threads
            )
        # Who speaks the answers and who hears the questions, where somebody does.
        self.synthesizer: Synthesizer | None = None
        self.transcriber: Transcriber | None = None
        self.prefill = prefill
        self._id = model_id
        family, where = self.family, torch.device(device)
        runner = Runner(
            family.decoder,
            where,
            torch.float32 if kind == "int8" else dtype,
            dtype,
            position_axes=family.position_axes,
            input_width=family.input_width,
        )
        self.engine = Engine(runner, settings, observe=observe)

    @property
    def profile(self) -> VideoProfile:
        """See Watcher."""
        voice = self.synthesizer.profile if self.synthesizer else None
        return VideoProfile(
            self._id, "pictures", voice.sample_rate_hz if voice else NO_RATE_HZ, voice.voices if voice else ()
        )

    async def look(self, image: bytes) -> PictureRows:
        """An encoded image as the decoder sees it. Raises MediaError."""
        prepared = await asyncio.to_thread(lambda: self.family.prepare(decode(image, MAX_SIDE)))
        return await self.engine.ask_model(lambda: self.family.look(prepared))

    async def open(self, instructions: str) -> VisionLanguageStream:
        """See Watcher."""
        return VisionLanguageStream(self, await self.engine.open(), instructions)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


def _kind(folder: Path) -> str:
    """What its config.json says it is; empty where it does not."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _load(folder: Path, device: str, dtype: torch.dtype, *, rounded: bool) -> VisionFamily:
    kind = _kind(folder)
    family: VisionFamily
    if kind == "smolvlm":
        family = SmolVlm(folder, device, dtype)
    elif kind in MODELS:
        family = QwenVl(folder, device, dtype, kind)
    else:
        raise ValueError(f"{kind} is none of smolvlm, {', '.join(MODELS)}")
    if rounded:
        round_linear(family.decoder)
    return family


class VisionLanguageStream:
    """See Watching."""

    def __init__(self, model: VisionLanguageModel, session: EngineSession, instructions: str) -> None:
        self._model, self._session = model, session
        # Frames that came and are in no question yet, as the decoder sees them.
        self._new: dict[int, tuple[float, PictureRows]] = {}
        # Of these, those that a question asked now would be answered from; and those that are in the KV, each with the row it begins at.
        self._expected: tuple[int, ...] = ()
        self._shown: list[tuple[int, int]] = []
        self._in_turn = self._answering = False
        self._give(model.family.opening(f"{SYSTEM} {instructions}".strip()))
        session.pin()

    def _give(self, parts: Iterable[FamilyPart]) -> None:
        for part in parts:
            if isinstance(part, PictureRows):
                self._session.append_embeddings(part.rows, part.positions)
            else:
                self._session.append(part)

    async def run(self) -> None:
        """Nothing is left for later."""
        await asyncio.Event().wait()

    async def settled(self) -> None:
        """Frames are known when they are seen."""

    async def append_frame(self, frame: VideoFrame) -> None:
        """See Watching."""
        self._new[frame.number] = (frame.at_s, await self._model.look(frame.image))

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """See Watching."""
        self._expected = frames
        wanted = [n for n in sorted(frames) if n in self._new]
        # Where the sampling shifts with every frame, taking them in ahead would be taking most of them in again.
        ahead = len(wanted) - self._same(wanted) <= MAX_AHEAD and (wanted or self._shown)
        if self._model.prefill == "eager" and ahead and not self._answering:
            # The question to come says what went wrong.
            with suppress(EngineError, Refused):
                self._show(frames)

    def forget(self, before_s: float) -> None:
        """See Watching. What a question was answered from leaves with the context (engine/sequence.py)."""
        self._new = {n: (at_s, picture) for n, (at_s, picture) in self._new.items() if at_s >= before_s}

    def drop_frame(self, frame: int) -> None:
        """See Watching."""
        self._new.pop(frame, None)

    def _same(self, wanted: Sequence[int]) -> int:
        """How many of the frames in the turn under way are the first of these."""
        return next((i for i, (n, _) in enumerate(self._shown) if wanted[i : i + 1] != [n]), len(self._shown))

    def _show(self, frames: Sequence[int]) -> None:
        """Make the turn under way hold just the new ones of these."""
        session, family = self._session, self._model.family
        wanted = [n for n in sorted(frames) if n in self._new]
        if not self._in_turn:
            session.start_turn()
            self._give(family.turn())
            self._in_turn = True
        same = self._same(wanted)
        if same < len(self._shown):
            # Where they have left the context already, there is nothing to take back.
            with suppress(EngineError):
                session.rollback(self._shown[same][1])
                del self._shown[same:]
        for number in wanted:
            if number in {n for n, _ in self._shown}:
                continue
            at_s, picture = self._new[number]
            self._shown.append((number, session.length))
            self._give(family.frame(picture, at_s))

    def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """See Watching."""
        return spoken(_QuestionStream(self, question), self._model.synthesizer, options, voice)

    async def written(self, question: VideoQuestion, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """The answer's text."""
        model, session, known = self._model, self._session, tuple(self._new)
        self._answering = True
        try:
            heard = await words_of(question, model.transcriber)
            told = f'Somebody said: "{heard}".' if heard and question.text.strip() else heard
            self._show(question.frames)
            # Those that were passed over when a question was asked are old at the next.
            for number in known:
                self._new.pop(number, None)
            asked = session.length
            self._give(model.family.question(" ".join(filter(None, (told, question.text)))))
            self._shown, self._in_turn, complete = [], False, False
            try:
                async with aclosing(self._said(options)) as replies:
                    async for reply in replies:
                        yield reply
                complete = session.finish is Finish.STOP
            finally:
                if not complete:
                    self._end(asked if session.finish is not Finish.LENGTH else None)
        finally:
            self._answering = False
            self.select_frames(self._expected)

    async def _said(self, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        session, words = self._session, self._model.family.vocabulary
        stream, count, prompt = Detokenizer(words.tokenizer), 0, session.length
        sampling = Sampling(
            max_tokens=options.max_tokens or MAX_TOKENS, temperature=options.temperature or 0.0, stop=words.stop
        )
        async with aclosing(session.generate(sampling)) as tokens:
            async for token in tokens:
                count += 1
                if token.id not in words.stop and (text := stream.feed(token.id)):
                    yield TextDelta(text)
        if text := stream.flush():
            yield TextDelta(text)
        yield ReplyDone("stop" if session.finish is Finish.STOP else "length", prompt, 0, count)

    def _end(self, asked: int | None) -> None:
        """End a turn that did not end by itself. `asked`: what was asked from this row on is forgotten with the answer; what was seen is not."""
        if asked is not None:
            # Where it has left the context already, the rest of it stays.
            with suppress(EngineError):
                self._session.rollback(asked)
        self._give(self._model.family.end())

    def close(self) -> None:
        """See Watching."""
        self._session.close()


class _QuestionStream:
    """One question as a dialogue: see Dialogue."""

    def __init__(self, watching: VisionLanguageStream, question: VideoQuestion) -> None:
        self._watching, self._question = watching, question

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """It is in the KV already."""

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """The question's answer."""
        return self._watching.written(self._question, options)

    def close(self, *, keep: bool = False) -> None:
        """The session lives on."""
