"""MiniCPM-o 4.5 as a model that converses in units of a second, on the engine: one long-lived KV a conversation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import torch
from PIL import Image

from antiphon.adapters.minicpmo import token2wav
from antiphon.adapters.minicpmo.audio_encoder import AudioEncoderState
from antiphon.adapters.minicpmo.checkpoint import MiniCpmOParts, read
from antiphon.adapters.minicpmo.sampling import MAX_TOKENS, UnitChooser, UnitSampling
from antiphon.adapters.minicpmo.speech_decoder import SAMPLE_RATE_HZ, CodeStream, CodeVocoder, SpeechDecoder
from antiphon.contracts import ListenStep, NativeOptions, NativeProfile, NativeStep, SpeakStep, Unit
from antiphon.engine.api import EngineSettings, Sampling, Token
from antiphon.engine.local.engine import Engine, EngineSession
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import quantize_linear_layers, weights_for
from antiphon.engine.threads import load_in_own_thread
from antiphon.modeling.chat_template import plain_tokenizer
from antiphon.modeling.detokenizer import Detokenizer
from antiphon.vision.images import decode

UNIT_S = 1.0
MAX_FRAMES = 4
# Larger images are scaled down to this before they are looked at.
MAX_SIDE = 2048
# Rows of context that are left for the largest unit when the window is full.
MARGIN_ROWS = 512
# Rows of context at which the oldest units leave, and down to which (the released window "basic").
WINDOW = (8000, 6000)
PROMPT = "Streaming Omni Conversation."
# Rows a conversation is promised: the system prompt with a voice of 30 s, and two minutes of units.
RESERVE_ROWS = 2560
VOICE_RESERVE_ROWS = 512


class MiniCpmO:
    """The loaded model: `source` is the released checkpoint's folder, or its parts on `device` in the type that `weights` says."""

    def __init__(
        self,
        source: Path | MiniCpmOParts,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
        window: tuple[int, int] = WINDOW,
        vocoder: CodeVocoder | None = None,
    ) -> None:
        """Raises ModelError for a folder that is no such checkpoint."""
        kind, dtype = weights_for(device, weights)
        where = torch.device(device)
        self.parts = load_in_own_thread(
            lambda: _load(source, where, dtype, rounded=kind == "int8"), device=device, threads=threads
        )
        if isinstance(source, Path):
            vocoder = vocoder or token2wav.load(source)
        self.vocoder = vocoder
        wide = torch.float32 if kind == "int8" else dtype
        decoder = Runner(self.parts.decoder, where, wide, dtype, rotate_half=True)
        self.engine = Engine(decoder, settings, observe=observe)
        self.voices = Engine(Runner(self.parts.codes, where, dtype, dtype), settings, observe=observe)
        context = self.engine.context_rows
        high = min(window[0], max(context - MARGIN_ROWS, context // 2))
        self.profile = NativeProfile(
            model_id,
            UNIT_S,
            SAMPLE_RATE_HZ if vocoder else 0,
            ("default",) if vocoder else (),
            MAX_FRAMES,
            self.parts.max_slices,
            (high, min(window[1], high * 3 // 4)),
        )
        self._plain = plain_tokenizer(self.parts.tokenizer)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Tokens of a text; without `control` none of them is a control token."""
        tokenizer = self.parts.tokenizer if control else self._plain
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def open(self, options: NativeOptions) -> MiniCpmOStream:
        """See NativeModel."""
        given = UnitSampling()
        manner = UnitSampling(
            temperature=given.temperature if options.temperature is None else options.temperature,
            listen_first=given.listen_first if options.listen_only_units is None else options.listen_only_units,
            seed=options.seed,
        )
        session = await self.engine.open(RESERVE_ROWS)
        try:
            voice = CodeStream(
                self.voices,
                await self.voices.open(VOICE_RESERVE_ROWS),
                self.parts.conditions,
                manner,
                self.parts.code_end,
            )
        except BaseException:
            session.close()
            raise
        talk = MiniCpmOStream(self, session, SpeechDecoder(voice, self.vocoder, options.voice_reference), manner)
        try:
            await talk.begin(options)
        except BaseException:
            talk.close()
            raise
        return talk

    def close(self) -> None:
        """Stop both engines."""
        self.engine.close()
        self.voices.close()


def _load(source: Path | MiniCpmOParts, device: torch.device, dtype: torch.dtype, *, rounded: bool) -> MiniCpmOParts:
    parts = source if isinstance(source, MiniCpmOParts) else read(source, device, dtype)
    if rounded:
        quantize_linear_layers(parts.decoder)
    return parts


class MiniCpmOStream:
    """One conversation: see NativeTalk."""

    def __init__(self, model: MiniCpmO, session: EngineSession, speaker: SpeechDecoder, manner: UnitSampling) -> None:
        self._model, self._session, self._speaker = model, session, speaker
        parts = model.parts
        self.decider = UnitChooser(
            parts.ids, manner, parts.forbidden, lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=True)
        )
        if manner.seed is None:
            self.decider.random.seed()
        else:
            self.decider.random.manual_seed(manner.seed)
        self._heard: AudioEncoderState = parts.hearing.open()
        self._text = Detokenizer(parts.tokenizer)
        # Rows of each unit that is in the context, the oldest first.
        self._units: deque[int] = deque()
        self._system = self._started = self._gone = 0
        self._interrupted = False

    async def begin(self, options: NativeOptions) -> None:
        """The system prompt, with the voice to speak with."""
        model, session = self._model, self._session
        session.append(model.encode("<|im_start|>system\n", control=True))
        session.append(model.encode(f"{options.instructions or PROMPT}\n"))
        session.append(model.encode("<|audio_start|>", control=True))
        if options.voice_reference is not None:
            pcm = options.voice_reference
            session.append_embeddings(await model.engine.call(lambda: model.parts.hearing.whole(pcm)))
        session.append(model.encode("<|audio_end|><|im_end|>", control=True))
        session.pin()
        self._system = session.length

    @property
    def context_rows(self) -> int:
        """Rows in the context now."""
        return self._system + sum(self._units)

    async def append(self, unit: Unit) -> None:
        """See NativeTalk."""
        frames = unit.frames[-self._model.profile.max_frames :]
        images = [Image.fromarray(await asyncio.to_thread(decode, frame, MAX_SIDE)) for frame in frames]
        parts, ids, session = self._model.parts, self._model.parts.ids, self._session
        seen, heard = await self._model.engine.call(
            lambda: (
                [parts.seeing.look(image, unit.max_slices) for image in images],
                parts.hearing.take(self._heard, unit.pcm),
            )
        )
        self._started = session.length
        session.start_turn()
        session.append([ids.unit])
        for looks in seen:
            for i, look in enumerate(looks):
                opening, closing = (ids.image, ids.image_end) if i == 0 else (ids.slice, ids.slice_end)
                session.append([opening])
                session.append_embeddings(look)
                session.append([closing])
        session.append_embeddings(heard)

    async def step(self) -> NativeStep:
        """See NativeTalk."""
        ids, session, decider = self._model.parts.ids, self._session, self.decider
        interrupted, self._interrupted = self._interrupted, False
        if decider.begin(listen=interrupted):
            session.append([ids.turn_eos])
        if interrupted:
            self._speaker.end_turn()
            self._text = Detokenizer(self._model.parts.tokenizer)
        tokens: list[Token] = []
        sampling = Sampling(max_tokens=MAX_TOKENS, stop=ids.terminators, chooser=decider, hidden=True)
        async with aclosing(session.generate(sampling)) as stream:
            async for token in stream:
                tokens.append(token)
        session.append([ids.unit_end])
        await self._keep_window()
        return await self._said(tokens)

    async def _said(self, tokens: Sequence[Token]) -> NativeStep:
        """`tokens` of a unit, its terminator last. Each comes with the state it was drawn from: the one its forerunner left."""
        ids = self._model.parts.ids
        spoken = [t.id for t in tokens[:-1]]
        if not spoken:
            if tokens[-1].id == ids.listen:
                return ListenStep()
            return SpeakStep("", await self._speaker.speak((), (), last=False), end_of_turn=False)
        over = spoken[-1] == ids.turn_eos
        words, thoughts = spoken[1:], [t.hidden for t in tokens[2:]]
        pcm = await self._speaker.speak(words, thoughts, last=over)
        text = "".join(self._text.feed(token) for token in words)
        if over:
            text += self._text.flush()
            self._text = Detokenizer(self._model.parts.tokenizer)
        return SpeakStep(text, pcm, over)

    async def _keep_window(self) -> None:
        """Let the oldest units leave once there are too many rows: what stays keeps its KV."""
        high, low = self._model.profile.window
        self._units.append(self._session.length - self._started)
        if self.context_rows <= high:
            return
        # What stays was computed beside what goes, the last row too.
        await self._session.settle(include_newest=True)
        self._see_cuts()
        gone = 0
        while self.context_rows > low and len(self._units) > 1:
            gone += self._units.popleft()
        if gone:
            self._gone += gone
            self._session.evict(gone)

    def _see_cuts(self) -> None:
        """Where there was no room the engine has cut the oldest rows by itself: they are in no unit any more."""
        cut = self._session.context_start - self._system - self._gone
        self._gone += cut
        while cut > 0 and self._units:
            rows = self._units.popleft()
            if rows > cut:
                self._units.appendleft(rows - cut)
            cut -= rows

    def interrupt(self) -> None:
        """See NativeTalk."""
        self._interrupted = True

    def close(self) -> None:
        """See NativeTalk."""
        self._session.close()
        self._speaker.close()
