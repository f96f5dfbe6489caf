"""Sessions with a vision-language model: each frame is encoded and computed once, and a question costs what is new.

A session is one sequence of rows: the system turn, then for each question the new frames with their times, the question
and its answer. None of it is rendered again. An answer that is cut off is rolled back to before its question, and the
frames stay.

With `prefill` "eager", the frames that a question asked now would be answered from are put into the KV as they come,
and taken back where the question turns out to be about others; with "query", nothing is computed before a question.
What is in the KV when a question is answered is the same either way.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Hashable, Iterable, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

import anyio
import torch

from antiphon.adapters.parts import load_parts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.vlm.family import FamilyPart, VisionFamily
from antiphon.adapters.vlm.qwen_vl import MODELS, QwenVl
from antiphon.adapters.vlm.smolvlm import SmolVlm
from antiphon.audio import Pcm
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
from antiphon.engine.api import Finish, Sampling, Session
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.errors import EngineError, Refused
from antiphon.events.tools import Tool
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.tokens import Detokenizer
from antiphon.pipelines.cascade import spoken
from antiphon.pipelines.observer import words_of
from antiphon.shares.places import Places
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.vision.images import EncodedImage

SYSTEM = "You answer questions about what a camera or a screen shows, in one or two sentences."
MAX_TOKENS = 256
# The rate that the profile names where there is no synthesizer, and so no audio.
DEFAULT_RATE_HZ = 24_000
# At most so many frames are prefilled at once before a question.
MAX_FRAMES_AHEAD = 2
# Pictures that may wait for the model's thread at a time, whoever sent them: each delays the next step of all sessions.
MAX_WAITING_ENCODES = 2
# Pixels. Larger pictures are scaled down to this before anything else: no encoder here sees more of them.
MAX_SIDE = 2048


class VisionLanguageModel:
    """A VideoModel that sees pictures: one checkpoint of SmolVLM, Qwen2.5-VL or Qwen3-VL on an engine.

    `folder` holds the checkpoint as `transformers` writes it; its config.json says which family it is.
    `synthesizer` speaks the answers, and `transcriber` hears spoken questions; they belong to the caller. None: answers
    are text, and speech in questions is not heard.
    `family` and `engine` are the loaded model and what steps it. `prefill`: whether frames are computed before they are
    asked about ("eager") or with a question ("query").
    """

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        synthesizer: Synthesizer | None = None,
        transcriber: Transcriber | None = None,
    ) -> None:
        """Load the checkpoint and start the engine. Waits for seconds.

        int8 weights are those of the decoder only. Raises ModelError for a checkpoint that does not load or is of no
        known family.
        """
        device = options.device
        family, compute_dtype, dtype = load_parts(
            model_id,
            folder,
            options,
            lambda folder, dtype: _read(folder, device, dtype),
            lambda family: (family.decoder,),
            mixture=_model_type(folder).endswith("_moe"),
        )
        self.family = family
        self.synthesizer, self.transcriber = synthesizer, transcriber
        self.prefill = options.prefill
        self._id = model_id
        # Pictures that wait for the model's thread, which encodes all of them before its next step.
        self.encode_places = Places(MAX_WAITING_ENCODES)
        runner = Runner(
            family.decoder,
            torch.device(device),
            compute_dtype,
            dtype,
            position_axes=family.position_axes,
            input_width=family.input_width,
        )
        self.engine = LocalEngine(runner, options.settings, observe=options.observe)

    @property
    def profile(self) -> VideoProfile:
        """The facts of the model. The voices and the rate are the synthesizer's, and are not cached."""
        voice = self.synthesizer.profile if self.synthesizer else None
        return VideoProfile(
            self._id, "pictures", voice.sample_rate_hz if voice else DEFAULT_RATE_HZ, voice.voices if voice else ()
        )

    async def encode_image(self, image: EncodedImage) -> PictureRows:
        """Return an image's rows, as the decoder sees them.

        Decoding and scaling run in a thread; the encoder runs in the model's, between two steps, so this waits for the
        step under way. Raises MediaError for what is no image, ModelError where the encoder fails.
        """
        prepared = await in_thread(lambda: self.family.prepare(image.pixels(MAX_SIDE)), places=IMAGE_THREADS)
        async with self.encode_places.held():
            return await self.engine.thread.call_model(lambda: self.family.encode(prepared))

    async def open(self, instructions: str, owner: Hashable | None = None) -> VisionLanguageStream:
        """Open a session, and append the system turn: this module's instructions and then the caller's.

        Only the session's rows are reserved; the system turn is computed with the first frames or question. Raises
        Refused where the engine has no room.
        """
        opening = await in_thread(self.family.opening, f"{SYSTEM} {instructions}".strip())
        return VisionLanguageStream(self, await self.engine.open(owner=owner), opening)

    @property
    def engines(self) -> tuple[LocalEngine, ...]:
        """The engine of the decoder, for whoever watches its thread."""
        return (self.engine,)

    def close(self) -> None:
        """Stop the model's thread. Sessions that are still open fail; the synthesizer and transcriber stay open."""
        self.engine.close()


def _model_type(folder: Path) -> str:
    """Return the `model_type` of config.json, or "" where there is none."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _read(folder: Path, device: str, dtype: torch.dtype) -> VisionFamily:
    model_type = _model_type(folder)
    if model_type == "smolvlm":
        return SmolVlm(folder, device, dtype)
    if model_type in MODELS:
        return QwenVl(folder, device, dtype, model_type)
    raise ValueError(f"{model_type} is none of smolvlm, {', '.join(MODELS)}")


class VisionLanguageStream:
    """A VideoStream: one session's rows in the engine, and the frames that wait for a question.

    `session` is the engine's session. The stream owns it, and `close` closes it. Used from one event loop.
    """

    def __init__(self, model: VisionLanguageModel, session: Session, opening: Iterable[FamilyPart]) -> None:
        self.session = session
        self._model = model
        # Frames that came and were in no question yet: number -> time in seconds, and the rows of the picture.
        self._waiting: dict[int, tuple[float, PictureRows]] = {}
        # The numbers of the frames that a question asked now would be answered from.
        self._selected: tuple[int, ...] = ()
        # The frames in the turn under way: the number, and the row that the frame begins at.
        self._in_turn: list[tuple[int, int]] = []
        self._turn_begun = self._answering = False
        self._append(opening)
        session.pin()

    @property
    def waiting_frames(self) -> tuple[int, ...]:
        """The numbers of the frames whose rows are held for the next question, in the order in which they came.

        The others were asked about, dropped or forgotten. A frame stays here when it is in the turn under way.
        """
        return tuple(self._waiting)

    @property
    def prefilled_frames(self) -> tuple[int, ...]:
        """The numbers of the frames that are rows of the turn under way; the next question computes none of them."""
        return tuple(number for number, _ in self._in_turn)

    def _append(self, parts: Iterable[FamilyPart]) -> None:
        for part in parts:
            if isinstance(part, PictureRows):
                self.session.append_embeddings(part.rows, part.positions)
            else:
                self.session.append(part)

    async def run(self) -> None:
        """Wait until cancelled. This stream has no work of its own: frames are encoded when they are appended."""
        await anyio.sleep_forever()

    async def settled(self) -> None:
        """Return at once: a frame is known when `append_frame` returns."""

    async def append_frame(self, frame: VideoFrame) -> None:
        """Encode a frame and hold its rows for the next question. Waits for the encoder.

        Nothing is prefilled before `select_frames` names the frame. Raises MediaError for what is no image, ModelError.
        """
        self._waiting[frame.number] = (frame.at_s, await self._model.encode_image(frame.image))

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Do nothing: a question comes with what was heard."""

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Name the frames that a question asked now would be answered from, and prefill them where that pays.

        With `prefill` "eager" and no answer under way, the turn's rows become just the waiting frames among these.
        Where more than MAX_FRAMES_AHEAD are new at once, nothing is done: a sampling that shifts with every frame would
        have most of them computed again each time. Errors are left to the question that follows.
        """
        self._selected = frames
        wanted = [n for n in sorted(frames) if n in self._waiting]
        num_new = len(wanted) - self._num_kept(wanted)
        pays = num_new <= MAX_FRAMES_AHEAD and (wanted or self._in_turn)
        if self._model.prefill == "eager" and pays and not self._answering:
            with suppress(EngineError, Refused):
                self._show(frames)

    def forget(self, before_s: float) -> None:
        """Drop the waiting frames that are older than `before_s`, in seconds since the session began.

        Frames that were asked about are rows of the context, and leave it with their turn when it is full
        (engine/rows.py).
        """
        self._waiting = {n: (at_s, picture) for n, (at_s, picture) in self._waiting.items() if at_s >= before_s}

    def drop_frame(self, frame: int) -> None:
        """Drop one waiting frame, by number. A number that is not waiting is ignored.

        Where the frame was prefilled, its rows are taken back when the next frames or question are appended.
        """
        self._waiting.pop(frame, None)

    def _num_kept(self, wanted: Sequence[int]) -> int:
        """Return how many frames of the turn under way are also the first of these; the rest would be taken back."""
        return next(
            (i for i, (n, _) in enumerate(self._in_turn) if wanted[i : i + 1] != [n]),
            len(self._in_turn),
        )

    def _show(self, frames: Sequence[int]) -> None:
        """Make the turn under way hold just the waiting frames among these."""
        session, family = self.session, self._model.family
        wanted = [n for n in sorted(frames) if n in self._waiting]
        if not self._turn_begun:
            session.start_turn()
            self._append(family.turn())
            self._turn_begun = True
        kept = self._num_kept(wanted)
        if kept < len(self._in_turn):
            # Where these rows have left the context already, there is nothing to take back.
            with suppress(EngineError):
                session.rollback(self._in_turn[kept][1])
                del self._in_turn[kept:]
        for number in wanted:
            if number in self.prefilled_frames:
                continue
            at_s, picture = self._waiting[number]
            self._in_turn.append((number, session.length))
            self._append(family.frame(picture, at_s))

    def answer(
        self, question: VideoQuestion, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Answer a question as text, and with a synthesizer and a `voice` also as audio, while the text is made.

        Closing the generator ends the answer within a step: the question and what was said leave the KV, the frames
        stay. One question is answered at a time. Raises Refused, ModelError, RemoteProtocolError.
        """
        return spoken(_QuestionStream(self, question), self._model.synthesizer, options, voice)

    async def answer_text(self, question: VideoQuestion, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer a question in text: TextDelta as it comes, then one ReplyDone. Closing it is as for `answer`.

        Where a transcriber is set, the question's audio is transcribed first, which is waited for, and its words are
        put before the text. Frames that waited and are not in `question.frames` are dropped. Raises EngineError,
        ModelError.
        """
        model, session, known = self._model, self.session, tuple(self._waiting)
        self._answering = True
        try:
            heard = await words_of(question, model.transcriber)
            speech = f'Somebody said: "{heard}".' if heard and question.text.strip() else heard
            text = " ".join(filter(None, (speech, question.text)))
            asked = await in_thread(model.family.question, text)
            self._show(question.frames)
            # Frames that were passed over when a question was asked would be old news to the next.
            for number in known:
                self._waiting.pop(number, None)
            question_row = session.length
            self._append(asked)
            self._in_turn, self._turn_begun, complete = [], False, False
            try:
                async with aclosing(self._generate(options)) as replies:
                    async for reply in replies:
                        yield reply
                complete = session.finish is Finish.STOP
            finally:
                if not complete:
                    self._end_turn(question_row if session.finish is not Finish.LENGTH else None)
        finally:
            self._answering = False
            self.select_frames(self._selected)

    async def _generate(self, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        session, words = self.session, self._model.family.vocabulary
        detokenizer, num_tokens, num_prompt = Detokenizer(words.tokenizer), 0, session.length
        sampling = Sampling(
            max_tokens=options.max_tokens or MAX_TOKENS, temperature=options.temperature or 0.0, stop=words.stop
        )
        async with aclosing(session.generate(sampling)) as tokens:
            async for token in tokens:
                num_tokens += 1
                if token.id not in words.stop and (text := detokenizer.feed(token.id)):
                    yield TextDelta(text)
        if text := detokenizer.flush():
            yield TextDelta(text)
        yield ReplyDone("stop" if session.finish is Finish.STOP else "length", num_prompt, 0, num_tokens)

    def _end_turn(self, question_row: int | None) -> None:
        """End a turn that the model did not end. With `question_row`, the rows from there on are taken back first."""
        if question_row is not None:
            # Where that row has left the context already, what is left of the turn stays.
            with suppress(EngineError):
                self.session.rollback(question_row)
        self._append(self._model.family.end())

    def close(self) -> None:
        """Close the engine's session and free its KV; an answer under way fails. The model stays open."""
        self.session.close()


class _QuestionStream:
    """A LanguageStream that answers one question, so that a cascade can speak it."""

    def __init__(self, stream: VisionLanguageStream, question: VideoQuestion) -> None:
        self._stream, self._question = stream, question

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Do nothing: the frames are in the KV already, and a question has no messages."""

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer the question. `messages` is ignored."""
        return self._stream.answer_text(self._question, options)

    def close(self, *, keep: bool = False) -> None:
        """Do nothing: the session belongs to the stream, and lives on after the question."""
