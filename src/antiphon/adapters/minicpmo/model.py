"""MiniCPM-o 4.5 as a native model: conversations in units of one second, each with one long-lived engine session.

`append` adds the images and audio of a unit to the context. In the `step` that follows, the model listens or speaks.
When the context is full, the oldest units are evicted. The server's own rules of turn-taking, such as interruptions,
are not part of this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import torch
from PIL import Image

from antiphon.adapters.minicpmo.audio_batch import AudioBatch, AudioStream
from antiphon.adapters.minicpmo.checkpoint import MiniCpmOParts, read
from antiphon.adapters.minicpmo.sampling import MAX_UNIT_TOKENS, UnitChooser, UnitSampling
from antiphon.adapters.minicpmo.speech_decoder import SAMPLE_RATE_HZ, CodeStream, CodeVocoder, SpeechDecoder
from antiphon.adapters.minicpmo.token2wav import token2wav
from antiphon.adapters.minicpmo.vision_encoder import ImagePatches
from antiphon.adapters.parts import load_parts
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ListenStep, NativeLoad, NativeOptions, NativeProfile, NativeStep, SpeakStep, Unit
from antiphon.engine.api import Sampling, Session, Token
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.kv.cache import pages_of
from antiphon.engine.local.runner import Runner
from antiphon.modeling.chat_template import plain_tokenizer, token_ids
from antiphon.modeling.gathered import GatheredCalls, ImageBatch, Moment
from antiphon.modeling.tokens import Detokenizer
from antiphon.shares.threads import IMAGE_THREADS, in_thread
from antiphon.vision.images import MAX_FRAME_PIXELS, decode

UNIT_S = 1.0
# On a GPU, the units of several conversations wait for a common moment, this number of seconds apart.
UNIT_TICK_S = 0.05
# After their words, they meet again, so that their codes and their audio share passes. A conversation waits for this
# number of seconds at most, and not in the first unit of a turn.
MEET_S = 0.3
MAX_FRAMES = 4
# Limit of an image's longer side in pixels. Larger images are scaled down before they are encoded.
MAX_SIDE = 2048
# Rows of context that are reserved for the largest unit when the window is full.
MARGIN_ROWS = 512
# When the context exceeds the first number of rows, the oldest units are evicted down to the second (the released
# window "basic").
WINDOW = (8000, 6000)
# The share of the smaller window that the history of a continued conversation may take. It is never evicted.
HISTORY_SHARE = 1 / 8
# The default instructions, as in the released code.
PROMPT = "Streaming Omni Conversation."
# Rows that are reserved for a conversation: the system prompt with a voice of 30 s, and two minutes of units.
RESERVE_ROWS = 2560
# Rows that are reserved for a conversation in the code decoder's engine: one turn.
CODE_RESERVE_ROWS = 512
# Shares of the memory for KV: of the language model, and of the code decoder. The rest is about what the audio encoder
# needs for the conversations that the language model holds. A full window, a turn of a minute and 30 s of audio take
# 1179, 110 and 145 MB in bfloat16. A short conversation has less context, and as much audio.
WORDS_KV_SHARE, CODES_KV_SHARE = 5 / 8, 1 / 8


class MiniCpmO:
    """A NativeModel: the loaded parts, and two engines, one for the language model and one for the code decoder.

    `source` is the released checkpoint's folder, or its parts on the device and in the dtype of the options. `window`:
    see WINDOW. `vocoder`: turns codes into audio; None: the folder's token2wav, if it has one. Without a vocoder the
    profile has no voices, and the model's speech is text only. `hearing`: the audio streams of all conversations. On a
    GPU it has room for as many as the language model's engine can promise RESERVE_ROWS.
    """

    def __init__(
        self,
        source: Path | MiniCpmOParts,
        model_id: str,
        options: EngineModelOptions,
        *,
        window: tuple[int, int] = WINDOW,
        vocoder: CodeVocoder | None = None,
    ) -> None:
        """Load the parts and start both engines. Takes seconds to minutes.

        Only the language model may have int8 weights. The engines and the audio encoder share the memory for KV. The
        code decoder and token2wav are on `options.talker_device`. Raises ModelError if the folder is not such a
        checkpoint.
        """
        where, settings, observe = torch.device(options.device), options.settings, options.observe
        voice_where = torch.device(options.talker_device or options.device)
        self.parts, compute_dtype, dtype = load_parts(
            model_id,
            source,
            options,
            lambda folder, dtype: read(folder, where, dtype, voice_where),
            lambda parts: (parts.decoder,),
        )
        decoder = Runner(self.parts.decoder, where, compute_dtype, dtype, rotate_half=True)
        words_kv, codes_kv = (int(settings.kv_bytes * share) for share in (WORDS_KV_SHARE, CODES_KV_SHARE))
        self.engine = LocalEngine(decoder, replace(settings, kv_bytes=words_kv), observe=observe)
        encode_images = self.parts.vision_encoder.encode
        self.images = ImageBatch(self.engine.thread, encode_images, lambda image: image.count, where.type)
        codes = Runner(self.parts.code_decoder, voice_where, dtype, dtype)
        self.code_engine = LocalEngine(codes, replace(settings, kv_bytes=codes_kv), observe=observe)
        self._conditions = GatheredCalls(self.code_engine.thread, self.parts.text_conditions, followed=True)
        # A conversation hears one stream, and is promised RESERVE_ROWS of the language model's KV.
        sessions = max(1, self.engine.scheduler.cache.total_pages // pages_of(RESERVE_ROWS))
        self.hearing = AudioBatch(
            self.engine.thread, self.parts.audio_encoder, sessions, graphs="encoder" in settings.graphs
        )
        if isinstance(source, Path) and not vocoder:
            graphs = "vocoder" in settings.graphs
            vocoder = token2wav.load(source, voice_where, sessions, num_steps=options.flow_steps, graphs=graphs)
        self.vocoder = vocoder
        self.units = options.tick(UNIT_TICK_S)
        self.profile = _profile(model_id, self.parts, self.engine.context_rows, window, speaks=bool(vocoder))
        self._plain = plain_tokenizer(self.parts.tokenizer)

    def encode(self, text: str, *, control: bool = False) -> list[int]:
        """Return the tokens of a text. Control tokens are recognized only with `control`."""
        return token_ids(self.parts.tokenizer if control else self._plain, text)

    async def open(self, options: NativeOptions) -> MiniCpmOStream:
        """Open a session in both engines, and append the system prompt with the reference voice.

        Waits for the audio encoder if there is a reference voice. The prompt itself is computed with the first unit.
        Raises Refused if either engine or the vocoder is full, and ModelError, also for a voice that cannot be read.
        """
        asked = asdict(options.sampling) | {"listen_first": options.listen_only_units}
        params = UnitSampling(**{name: value for name, value in asked.items() if value is not None})
        session = await self.engine.open(RESERVE_ROWS)
        try:
            speech = await self._open_speech(options, params)
        except BaseException:
            session.close()
            raise
        stream = MiniCpmOStream(self, session, speech, params)
        try:
            await stream.begin(options)
        except BaseException:
            stream.close()
            raise
        return stream

    async def _open_speech(self, options: NativeOptions, params: UnitSampling) -> SpeechDecoder:
        codes = await self.code_engine.open(CODE_RESERVE_ROWS)
        stream = CodeStream(codes, self._conditions, params, self.parts.code_end)
        if not self.vocoder:
            return SpeechDecoder(stream)
        try:
            sound = await self.vocoder.open(options.voice_reference)
        except BaseException:
            codes.close()
            raise
        return SpeechDecoder(stream, sound, self.vocoder.lookahead)

    @property
    def engines(self) -> tuple[LocalEngine | CodeVocoder, ...]:
        """Both engines and the vocoder, whose threads the server monitors."""
        return (self.engine, self.code_engine, *([self.vocoder] if self.vocoder else []))

    def load(self) -> NativeLoad:
        """Return the open conversations, and how many more the engines and the vocoder have room for. Does not wait."""
        words, codes = (engine.scheduler.cache for engine in (self.engine, self.code_engine))
        room = [words.room(RESERVE_ROWS), codes.room(CODE_RESERVE_ROWS)]
        return NativeLoad(len(words.leases), min(room + ([self.vocoder.room] if self.vocoder else [])))

    def close(self) -> None:
        """Stop the threads of both engines and of the vocoder. Open conversations fail."""
        for each in self.engines:
            each.close()


def _profile(
    model_id: str, parts: MiniCpmOParts, context_rows: int, window: tuple[int, int], *, speaks: bool
) -> NativeProfile:
    # If the context is smaller than the window, shrink the window, and leave room for the unit that fills it.
    high = min(window[0], max(context_rows - MARGIN_ROWS, context_rows // 2))
    return NativeProfile(
        model_id,
        UNIT_S,
        SAMPLE_RATE_HZ if speaks else 0,
        ("default",) if speaks else (),
        MAX_FRAMES,
        parts.max_slices,
        (high, min(window[1], high * 3 // 4)),
    )


class MiniCpmOStream:
    """A NativeStream: one conversation. `append` and `step` alternate; calls must not overlap.

    Owns its session in the language model's engine and its speech decoder. `chooser` has the tokens of the last step.
    """

    def __init__(self, model: MiniCpmO, session: Session, speech: SpeechDecoder, params: UnitSampling) -> None:
        self._model, self._session, self._speech = model, session, speech
        parts = model.parts
        self.chooser = UnitChooser(
            parts.ids, params, parts.forbidden, lambda ids: parts.tokenizer.decode(ids, skip_special_tokens=True)
        )
        self._heard: AudioStream = model.hearing.open()
        # The common moment at which the unit began.
        self._moment = Moment()
        self._detokenizer = Detokenizer(parts.tokenizer)
        # The number of rows of each unit in the context, oldest first.
        self._unit_rows: deque[int] = deque()
        # The number of rows of the system prompt, the first row of the current unit, and the number of rows evicted so
        # far.
        self._system_rows = self._unit_start = self._rows_gone = 0
        self._interrupted = False

    async def begin(self, options: NativeOptions) -> None:
        """Append the system prompt: the instructions, the history, and the audio of the reference voice, if any.

        Called once, before the first unit. Of the history, the newest tokens are used, at most HISTORY_SHARE of the
        window. Waits for the audio encoder. Raises ModelError and EngineError.
        """
        model, session = self._model, self._session
        session.append(model.encode("<|im_start|>system\n", control=True))
        session.append(await in_thread(model.encode, f"{options.instructions or PROMPT}\n"))
        if said := options.recall():
            history = await in_thread(model.encode, f"{said}\n")
            session.append(history[-int(model.profile.window[1] * HISTORY_SHARE) :])
        session.append(model.encode("<|audio_start|>", control=True))
        if options.voice_reference is not None:
            pcm = options.voice_reference
            session.append_embeddings(
                await model.engine.thread.call(lambda: model.parts.audio_encoder.encode_clip(pcm))
            )
        session.append(model.encode("<|audio_end|><|im_end|>", control=True))
        session.pin()
        self._system_rows = session.length

    @property
    def context_rows(self) -> int:
        """The number of rows of the system prompt and of the units in the context. A unit is counted after its step."""
        return self._system_rows + sum(self._unit_rows)

    async def append(self, unit: Unit) -> None:
        """Encode a unit's frames and audio, and append their rows: frames, text, audio. Waits for both encoders.

        Uses the newest `profile.max_frames` frames. Raises MediaError if a frame is not an image, ModelError, and
        EngineError. If it raises, nothing has been appended.
        """
        frames = unit.frames[-self._model.profile.max_frames :]
        images = [await in_thread(self._patches, f, unit.max_slices, places=IMAGE_THREADS) for f in frames]
        ids, session = self._model.parts.ids, self._session
        self._moment.leave(self)
        self._moment = await self._model.units.wait(self)
        embeddings = iter(await self._model.images.rows(list(chain.from_iterable(images))))
        audio = await self._model.hearing.feed(self._heard, unit.pcm)
        self._unit_start = session.length
        session.start_turn()
        session.append([ids.unit])
        for image in images:
            for i in range(len(image)):
                opening, closing = (ids.image, ids.image_end) if i == 0 else (ids.slice, ids.slice_end)
                session.append([opening])
                session.append_embeddings(next(embeddings))
                session.append([closing])
        if unit.text:
            session.append(await in_thread(self._model.encode, unit.text))
        session.append_embeddings(audio)

    def _patches(self, frame: bytes, max_slices: int) -> list[ImagePatches]:
        """The patches of a frame and of its slices. Called in a helper thread."""
        image = Image.fromarray(decode(frame, MAX_SIDE, MAX_FRAME_PIXELS))
        return self._model.parts.vision_encoder.prepare(image, max_slices)

    async def step(self, *, must_speak: bool = False) -> NativeStep:
        """Let the model listen or speak in the unit that was appended last, and return the result.

        After `interrupt`, the model listens; if it was speaking, its turn is first ended in the context. Otherwise it
        says at least one word if `must_speak`. Waits for both engines and the vocoder, which together must take less
        than `unit_s`. Raises ModelError and EngineError.
        """
        try:
            return await self._step(must_speak=must_speak)
        finally:
            self._moment.leave(self)

    async def _step(self, *, must_speak: bool) -> NativeStep:
        ids, session, chooser = self._model.parts.ids, self._session, self.chooser
        interrupted, self._interrupted = self._interrupted, False
        if chooser.begin(listen=interrupted, speak=must_speak):
            session.append([ids.turn_eos])
        if interrupted:
            self._speech.end_turn()
            self._detokenizer = Detokenizer(self._model.parts.tokenizer)
        sampling = Sampling(max_tokens=MAX_UNIT_TOKENS, stop=ids.terminators, chooser=chooser, hidden=True)
        was_in_turn = chooser.in_turn
        tokens = await session.collect(sampling)
        session.append([ids.unit_end])
        await self._evict_old_units()
        if was_in_turn and tokens[-1].id != ids.listen:
            await self._moment.meet(self, MEET_S)
        else:
            self._moment.leave(self)
        return await self._outcome(tokens)

    async def _outcome(self, tokens: Sequence[Token]) -> NativeStep:
        """Convert the tokens of a unit to a step. The last token is the terminator.

        The words are the tokens from the second on. A Token has the hidden state that it was sampled from, which was
        computed at the token before it. So the hidden state of a word itself is in the Token after it.
        """
        ids = self._model.parts.ids
        spoken = [t.id for t in tokens[:-1]]
        if not spoken:
            if tokens[-1].id == ids.listen:
                return ListenStep()
            return SpeakStep("", await self._speech.speak((), (), last=False), end_of_turn=False)
        ends_turn = spoken[-1] == ids.turn_eos
        words, hidden = spoken[1:], [t.hidden for t in tokens[2:]]
        pcm = await self._speech.speak(words, hidden, last=ends_turn)
        text = "".join(self._detokenizer.feed(token) for token in words)
        if ends_turn:
            text += self._detokenizer.flush()
            self._detokenizer = Detokenizer(self._model.parts.tokenizer)
        return SpeakStep(text, pcm, ends_turn)

    async def _evict_old_units(self) -> None:
        """Evict the oldest units if the context has too many rows. The rows that stay keep their KV."""
        high, low = self._model.profile.window
        self._unit_rows.append(self._session.length - self._unit_start)
        if self.context_rows <= high:
            return
        # The rows that stay, including the newest, must be computed while the evicted ones are still in the context.
        await self._session.settle(include_newest=True)
        self._count_engine_cuts()
        gone = 0
        while self.context_rows > low and len(self._unit_rows) > 1:
            gone += self._unit_rows.popleft()
        if gone:
            self._rows_gone += gone
            self._session.evict(gone)

    def _count_engine_cuts(self) -> None:
        """Subtract rows that the engine has cut, for lack of room, from the units that they belonged to."""
        cut = self._session.context_start - self._system_rows - self._rows_gone
        self._rows_gone += cut
        while cut > 0 and self._unit_rows:
            rows = self._unit_rows.popleft()
            if rows > cut:
                self._unit_rows.appendleft(rows - cut)
            cut -= rows

    def interrupt(self) -> None:
        """Make the next step end the current turn, and listen. Does not wait. May be called at any time."""
        self._interrupted = True

    def close(self) -> None:
        """Close the sessions in both engines and free their KV. A step in progress fails. The model stays open."""
        self._moment.leave(self)
        self._model.hearing.close(self._heard)
        self._session.close()
        self._speech.close()
