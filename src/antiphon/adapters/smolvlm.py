"""SmolVLM (Idefics3's decoder and SigLIP) on the engine: frames are encoded when they come, and a question costs what is new since the last one.

A session is one sequence of rows: the system turn, then for each question the new frames, each with its time and one square of embeddings, the question and
its answer. Nothing of it is rendered again; an answer that is cut is rolled back to before its question, and the frames stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from transformers import AutoTokenizer, SmolVLMForConditionalGeneration

from antiphon.adapters.base import (
    Answer,
    Message,
    Question,
    Reply,
    ReplyDone,
    ReplyOptions,
    Seen,
    Synthesizer,
    TextDelta,
    Tool,
    Transcriber,
    VoiceOptions,
    WatcherProfile,
)
from antiphon.adapters.cascade import spoken
from antiphon.adapters.chat_template import plain_tokenizer
from antiphon.adapters.observer import words_of
from antiphon.adapters.text_stream import TextStream
from antiphon.engine.engine import Engine, EngineSettings, Session
from antiphon.engine.runner import Runner
from antiphon.engine.sequence import Finish, Sampling
from antiphon.engine.weights import best_kind
from antiphon.errors import ModelError
from antiphon.images import decode

SYSTEM = "You answer questions about what a camera or a screen shows, in one or two sentences."
MAX_TOKENS = 256
# Of a voice that is not there.
NO_RATE_HZ = 24_000
IMAGE, AROUND, WHOLE, END = "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"


class Decoder(nn.Module):
    """The text model and its head, as the runner steps them."""

    def __init__(self, text: Any, head: Any) -> None:
        super().__init__()
        self.text, self.head = text, head
        self.config = text.config

    def get_input_embeddings(self) -> Any:
        """The table of embeddings."""
        return self.text.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self.head

    def set_attn_implementation(self, name: str) -> None:
        """Of the text model alone: the vision tower keeps its own."""
        self.text.set_attn_implementation(name)

    def forward(self, inputs_embeds: Any, logits_to_keep: Any, **more: Any) -> Any:
        """As a causal language model of `transformers`."""
        hidden = self.text(inputs_embeds=inputs_embeds, **more).last_hidden_state
        return SimpleNamespace(logits=self.head(hidden[:, logits_to_keep]))


class SmolVlm:
    """See Watcher. `folder` holds a checkpoint as `transformers` writes it."""

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
    ) -> None:
        """Raises ModelError for a checkpoint that does not load."""
        kind = best_kind(device) if weights == "auto" else weights
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        if threads and device == "cpu":
            torch.set_num_threads(threads)
        try:
            whole: Any = SmolVLMForConditionalGeneration.from_pretrained(folder, dtype=dtype, local_files_only=True)
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"{model_id} does not load from {folder}: {error}") from error
        whole = whole.to(device).eval()
        self.model = whole.model
        self.tokenizer = tokenizer.backend_tokenizer
        self._plain = plain_tokenizer(self.tokenizer)
        self.side = int(whole.config.vision_config.image_size)
        # Who speaks the answers and who hears the questions, where somebody does.
        self.synthesizer: Synthesizer | None = None
        self.transcriber: Transcriber | None = None
        self._id = model_id
        where = torch.device(device)
        self.engine = Engine(
            Runner(Decoder(whole.model.text_model, whole.lm_head), where, dtype, dtype), settings, observe=observe
        )
        ends = {self.tokenizer.token_to_id(END), whole.config.text_config.eos_token_id, tokenizer.eos_token_id}
        self.stop = frozenset(int(i) for i in ends if isinstance(i, int))

    @property
    def profile(self) -> WatcherProfile:
        """See Watcher."""
        voice = self.synthesizer.profile if self.synthesizer else None
        return WatcherProfile(
            self._id, "pictures", voice.sample_rate_hz if voice else NO_RATE_HZ, voice.voices if voice else ()
        )

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Tokens of a text; without `control` none of them is a control token."""
        tokenizer = self.tokenizer if control else self._plain
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    @torch.inference_mode()
    def look(self, image: bytes) -> torch.Tensor:
        """An encoded image as the decoder sees it: [rows, width]. Raises MediaError."""
        # One square, however the picture is shaped: as the model takes images that are not cut into parts.
        square = Image.fromarray(decode(image)).resize((self.side, self.side), Image.Resampling.LANCZOS)
        given = torch.from_numpy(np.asarray(square, np.float32) / 127.5 - 1.0).permute(2, 0, 1)[None, None]
        out: torch.Tensor = self.model.get_image_features(given.to(self.model.device)).pooler_output[0]
        return out

    async def open(self, instructions: str) -> SeeingPictures:
        """See Watcher."""
        return SeeingPictures(self, await self.engine.open(), instructions)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


class SeeingPictures:
    """See Watching."""

    def __init__(self, model: SmolVlm, session: Session, instructions: str) -> None:
        self._model, self._session = model, session
        # Frames that came and are in no question yet, as the decoder sees them.
        self._new: dict[int, tuple[float, torch.Tensor]] = {}
        session.append(model.encode("<|im_start|>System: ", control=True))
        session.append(model.encode(f"{SYSTEM} {instructions}".strip()))
        session.append(model.encode(END, control=True))
        session.pin()

    async def run(self) -> None:
        """Nothing is left for later."""
        await asyncio.Event().wait()

    async def settled(self) -> None:
        """Frames are known when they are seen."""

    async def see(self, frame: Seen) -> None:
        """See Watching."""
        rows = await self._model.engine.ask(lambda: self._model.look(frame.image))
        self._new[frame.number] = (frame.at_s, rows)

    def forget(self, before_s: float) -> None:
        """See Watching. What a question was answered from leaves with the context (engine/sequence.py)."""
        self._new = {n: (at_s, rows) for n, (at_s, rows) in self._new.items() if at_s >= before_s}

    def answer(
        self, question: Question, options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[Answer, None]:
        """See Watching."""
        return spoken(_Asked(self, question), self._model.synthesizer, options, voice)

    async def written(self, question: Question, options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """The answer's text."""
        model, session = self._model, self._session
        heard = await words_of(question, model.transcriber)
        told = f'Somebody said: "{heard}".' if heard and question.text.strip() else heard
        session.append(model.encode("\n"))
        session.start_turn()
        session.append(model.encode("User:"))
        for number in sorted(self._new):
            at_s, rows = self._new[number]
            if number in question.frames:
                session.append(model.encode(f"\nFrame from {int(at_s) // 60:02d}:{int(at_s) % 60:02d}:"))
                session.append(model.encode(AROUND + WHOLE, control=True))
                session.append_embeddings(rows)
                session.append(model.encode(AROUND, control=True))
        # Those that were passed over when a question was asked are old at the next.
        self._new.clear()
        asked = session.length
        session.append(model.encode("\n\n" + " ".join(filter(None, (told, question.text)))))
        session.append(model.encode(END, control=True))
        session.append(model.encode("\nAssistant:"))
        stream, count, complete = TextStream(model.tokenizer), 0, False
        sampling = Sampling(
            max_tokens=options.max_tokens or MAX_TOKENS, temperature=options.temperature or 0.0, stop=model.stop
        )
        prompt = session.length
        try:
            async with aclosing(session.generate(sampling)) as tokens:
                async for token in tokens:
                    count += 1
                    if token.id not in model.stop and (text := stream.feed(token.id)):
                        yield TextDelta(text)
            if text := stream.flush():
                yield TextDelta(text)
            complete = True
            if session.finish is not Finish.STOP:
                session.append(model.encode(END, control=True))
            yield ReplyDone("stop" if session.finish is Finish.STOP else "length", prompt, 0, count)
        finally:
            if not complete:
                # What it was asked is forgotten with the answer; what it saw is not.
                session.rollback(asked)
                session.append(model.encode(END, control=True))

    def close(self) -> None:
        """See Watching."""
        self._session.close()


class _Asked:
    """One question as a dialogue: see Dialogue."""

    def __init__(self, watching: SeeingPictures, question: Question) -> None:
        self._watching, self._question = watching, question

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """It is in the KV already."""

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """The question's answer."""
        return self._watching.written(self._question, options)

    def close(self, *, keep: bool = False) -> None:
        """The session lives on."""
