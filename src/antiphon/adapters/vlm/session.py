"""Sessions with a vision-language model: frames are encoded and prefilled once; a question computes only new rows.

A session is one sequence of rows: the system turn, then for each question the new frames with their times, the question
and its answer. Existing rows are never rendered again. If an answer is interrupted, its rows and the question are
rolled back, and the frames stay.

With `prefill` "eager", the currently selected frames are added to the KV as they arrive, and rolled back if a question
selects other frames. With "query", nothing is computed before a question. In both cases, the KV has the same rows when
a question is answered.
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
from antiphon.modeling.gathered import ImageBatch
from antiphon.modeling.media_rows import PictureRows
from antiphon.modeling.tokens import Detokenizer
from antiphon.pipelines.cascade import spoken
from antiphon.pipelines.observer import words_of
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.vision.images import EncodedImage

SYSTEM = "You answer questions about what a camera or a screen shows, in one or two sentences."
MAX_TOKENS = 256
# The sample rate in the profile if there is no synthesizer. Answers then have no audio.
DEFAULT_RATE_HZ = 24_000
# Limit of frames that are prefilled at once before a question.
MAX_FRAMES_AHEAD = 2
# Limit of a picture's longer side in pixels. Larger pictures are first scaled down; no encoder here uses a higher
# resolution.
MAX_SIDE = 2048


class VisionLanguageModel:
    """A VideoModel that sees pictures: one checkpoint of SmolVLM, Qwen2.5-VL or Qwen3-VL on an engine.

    `folder` contains a checkpoint in the layout of `transformers`; its config.json names the family. `synthesizer`
    speaks the answers; None: answers are text only. `transcriber` transcribes spoken questions; None: speech in
    questions is ignored. The caller owns both. `family` is the loaded model, and `engine` steps it. `prefill`: whether
    frames are computed before a question ("eager") or with it ("query").
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
        """Load the checkpoint and start the engine. Takes several seconds.

        Only the decoder may have int8 weights. Raises ModelError if the checkpoint does not load, or its family is
        unknown.
        """
        device = options.device
        family, compute_dtype, dtype = load_parts(
            model_id,
            folder,
            options,
            lambda folder, dtype: read(folder, device, dtype),
            lambda family: (family.decoder,),
            mixture=_model_type(folder).endswith("_moe"),
        )
        self.family = family
        self.synthesizer, self.transcriber = synthesizer, transcriber
        self.prefill = options.prefill
        self._id = model_id
        runner = Runner(
            family.decoder,
            torch.device(device),
            compute_dtype,
            dtype,
            position_axes=family.position_axes,
            input_width=family.input_width,
        )
        self.engine = LocalEngine(runner, options.settings, observe=options.observe)
        self.images = ImageBatch(self.engine.thread, family.encode, family.num_patches, torch.device(device).type)

    @property
    def profile(self) -> VideoProfile:
        """The properties of the model. The voices and the sample rate are the synthesizer's current ones."""
        voice = self.synthesizer.profile if self.synthesizer else None
        return VideoProfile(
            self._id, "pictures", voice.sample_rate_hz if voice else DEFAULT_RATE_HZ, voice.voices if voice else ()
        )

    async def encode_image(self, image: EncodedImage) -> PictureRows:
        """Return the decoder's input rows for an image.

        Decoding and scaling run in a thread pool. The encoder runs in the model's thread between two steps, so this
        waits for the current step. On a GPU, images that wait share a pass of it. Raises MediaError if `image` is not
        an image, and ModelError if the encoder fails.
        """
        prepared = await in_thread(lambda: self.family.prepare(image.pixels(MAX_SIDE)), places=IMAGE_THREADS)
        (rows,) = await self.images.rows([prepared])
        return rows

    async def open(self, instructions: str, owner: Hashable | None = None) -> VisionLanguageStream:
        """Open a session, and append the system turn: SYSTEM, then `instructions`.

        Only reserves rows; the system turn is computed with the first frames or question. Raises Refused if the engine
        is full.
        """
        opening = await in_thread(self.family.opening, f"{SYSTEM} {instructions}".strip())
        return VisionLanguageStream(self, await self.engine.open(owner=owner), opening)

    @property
    def engines(self) -> tuple[LocalEngine, ...]:
        """The engine of the decoder, whose thread the server monitors."""
        return (self.engine,)

    def close(self) -> None:
        """Stop the model's thread. Open sessions fail. The synthesizer and the transcriber stay open."""
        self.engine.close()


def _model_type(folder: Path) -> str:
    """Return the `model_type` of config.json, or "" if it is missing."""
    try:
        return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def read(folder: Path, device: str, dtype: torch.dtype) -> VisionFamily:
    """Read a checkpoint of any family that takes images. Raises ValueError for other checkpoints."""
    model_type = _model_type(folder)
    # The first version's checkpoints have the type of the architecture that it was derived from.
    if model_type in ("smolvlm", "idefics3"):
        return SmolVlm(folder, device, dtype)
    if model_type in MODELS:
        return QwenVl(folder, device, dtype, model_type)
    raise ValueError(f"{model_type} is not one of smolvlm, {', '.join(MODELS)}")


class VisionLanguageStream:
    """A VideoStream: one session's rows in the engine, and the frames that wait for a question.

    `session` is the engine's session, which the stream owns; `close` closes it. Used from one event loop.
    """

    def __init__(self, model: VisionLanguageModel, session: Session, opening: Iterable[FamilyPart]) -> None:
        self.session = session
        self._model = model
        # Frames that no question has used yet: number -> time in seconds, and the rows of the picture.
        self._waiting: dict[int, tuple[float, PictureRows]] = {}
        # The numbers of the currently selected frames, which the next question would be answered from.
        self._selected: tuple[int, ...] = ()
        # The frames in the current turn: the number, and the frame's first row.
        self._in_turn: list[tuple[int, int]] = []
        self._turn_begun = self._answering = False
        self._append(opening)
        session.pin()

    @property
    def waiting_frames(self) -> tuple[int, ...]:
        """The numbers of the frames whose rows are held for the next question, in order of arrival.

        A prefilled frame is still included. A frame is removed when it is used in a question, dropped or forgotten.
        """
        return tuple(self._waiting)

    @property
    def prefilled_frames(self) -> tuple[int, ...]:
        """The numbers of the frames that are rows of the current turn. The next question need not compute them."""
        return tuple(number for number, _ in self._in_turn)

    def _append(self, parts: Iterable[FamilyPart]) -> None:
        for part in parts:
            if isinstance(part, PictureRows):
                self.session.append_embeddings(part.rows, part.positions)
            else:
                self.session.append(part)

    async def run(self) -> None:
        """Wait until cancelled. This stream has no background work: frames are encoded when they are appended."""
        await anyio.sleep_forever()

    async def settled(self) -> None:
        """Return at once: frames are already encoded when `append_frame` returns."""

    async def append_frame(self, frame: VideoFrame) -> None:
        """Encode a frame and hold its rows for the next question. Waits for the encoder.

        The frame is not prefilled before `select_frames` names it. Raises MediaError if it is not an image, and
        ModelError.
        """
        self._waiting[frame.number] = (frame.at_s, await self._model.encode_image(frame.image))

    def append_audio(self, pcm: Pcm, at_s: float) -> None:
        """Do nothing: a question includes its audio."""

    def select_frames(self, frames: tuple[int, ...]) -> None:
        """Select the frames that the next question would be answered from, and prefill them if that saves work.

        With `prefill` "eager" and no answer in progress, the current turn then contains exactly the selected frames
        that are waiting. If more than MAX_FRAMES_AHEAD of them are new, nothing is computed: if the selection shifts
        with each frame, most frames would be computed again each time. Errors are ignored here; the next question would
        raise them.
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

        Frames of earlier questions are rows of the context. When the context is full, they leave it together with their
        turn (engine/rows.py).
        """
        self._waiting = {n: (at_s, picture) for n, (at_s, picture) in self._waiting.items() if at_s >= before_s}

    def drop_frame(self, frame: int) -> None:
        """Drop one waiting frame by number. Ignores unknown numbers.

        If the frame was prefilled, its rows are rolled back when the next frames or question are appended.
        """
        self._waiting.pop(frame, None)

    def _num_kept(self, wanted: Sequence[int]) -> int:
        """Return the number of leading frames that the turn shares with `wanted`. The rest must be rolled back."""
        return next(
            (i for i, (n, _) in enumerate(self._in_turn) if wanted[i : i + 1] != [n]),
            len(self._in_turn),
        )

    def _show(self, frames: Sequence[int]) -> None:
        """Make the current turn contain exactly the waiting frames among `frames`."""
        session, family = self.session, self._model.family
        wanted = [n for n in sorted(frames) if n in self._waiting]
        if not self._turn_begun:
            session.start_turn()
            self._append(family.turn())
            self._turn_begun = True
        kept = self._num_kept(wanted)
        if kept < len(self._in_turn):
            # If these rows have already left the context, there is nothing to roll back.
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
        """Answer a question as text and, with a synthesizer and a `voice`, as audio while the text is generated.

        Closing the generator stops the answer within a step. The question and its answer are then rolled back, and the
        frames stay. Only one question is answered at a time. Raises Refused, ModelError and RemoteProtocolError.
        """
        return spoken(_QuestionStream(self, question), self._model.synthesizer, options, voice)

    async def answer_text(self, question: VideoQuestion, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer a question in text: yields TextDeltas, then one ReplyDone. For closing, see `answer`.

        With a transcriber, first waits for the transcript of the question's audio. The transcript precedes the
        question's text. Waiting frames that are not in `question.frames` are dropped. Raises EngineError and
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
            # Frames that this question did not use are too old for the next question.
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
        """End a turn that the model did not end. With `question_row`, first roll back the rows from that row on."""
        if question_row is not None:
            # If that row has already left the context, the rest of the turn stays.
            with suppress(EngineError):
                self.session.rollback(question_row)
        self._append(self._model.family.end())

    def close(self) -> None:
        """Close the engine's session and free its KV. An answer in progress fails. The model stays open."""
        self.session.close()


class _QuestionStream:
    """A LanguageStream that answers one question, so that a cascade can speak it."""

    def __init__(self, stream: VisionLanguageStream, question: VideoQuestion) -> None:
        self._stream, self._question = stream, question

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Do nothing: a question has no messages."""

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Answer the question. `messages` is ignored."""
        return self._stream.answer_text(self._question, options)

    def close(self, *, keep: bool = False) -> None:
        """Do nothing: the stream owns the session, which continues after the question."""
