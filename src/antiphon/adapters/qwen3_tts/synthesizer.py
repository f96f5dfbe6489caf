"""Qwen3-TTS as a synthesizer: each text is a session of the engine, and its audio is returned as frames are generated.

`prompt.py` builds the talker's prompt, and `modeling/codec/talker.py` samples frames. This module has the loaded model,
the order of the work for one text, and the cache of cloned voices.
"""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen3_tts.checkpoint import Qwen3TtsParts, read
from antiphon.adapters.qwen3_tts.prompt import LANGUAGE_CODES, PromptRows, TalkerPrompt
from antiphon.adapters.qwen3_tts.text_pieces import long_text_parts, tokens_of_words
from antiphon.adapters.qwen3_tts.voice_cloning import RATE_HZ, ClonedVoice, codes_of
from antiphon.adapters.spec import EngineModelOptions
from antiphon.audio import Pcm
from antiphon.audio.containers import decode_beginning
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.errors import EngineError, MediaError, ModelError, RemoteProtocolError
from antiphon.events.speech import VoiceSample
from antiphon.modeling.codec.frames import (
    MAX_VOCODER_FRAMES,
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
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.places import current_owner
from antiphon.shares.threads import FILE_THREADS, in_thread

# Rows that are reserved for a text.
RESERVE_ROWS = 512
# The voice names of checkpoints without named voices: a voice described by instructions, or a cloned voice.
DESIGNED_VOICE, CLONED_VOICE = "designed", "default"
# The rest of a longer sample is ignored. A shorter sample is refused.
MAX_SAMPLE_S, MIN_SAMPLE_S = 30, 0.25
# Limit of cached cloned voices. The oldest is evicted.
MAX_CLONED_VOICES = 8
# Sampling parameters that a request may set, with the names of the published package (qwen-tts 0.1.1). FIRST_CODE: the
# parameters for the first code of a frame, with their ranges. OTHER_CODES: the parameters for the other codes, with
# their field of Sampling.
FIRST_CODE = {"temperature": (0.0, 2.0), "top_k": (0, 1000), "top_p": (0.01, 1.0), "repetition_penalty": (0.1, 10.0)}
OTHER_CODES = {"subtalker_temperature": "temperature", "subtalker_top_k": "top_k", "subtalker_top_p": "top_p"}
TASKS = {"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}


class Qwen3Tts:
    """A LiveSynthesizer: one checkpoint with named voices, with designed voices, or with cloned voices.

    `source` is the folder of a released checkpoint, or its loaded parts. `engine` steps the talker; the code predictor
    and the vocoder also run in its thread. `parts`: the loaded model. The profile's `tasks` name the kind of the
    checkpoint.
    """

    def __init__(self, source: Path | Qwen3TtsParts, model_id: str, options: EngineModelOptions) -> None:
        """Load the checkpoint and start the engine. Takes several seconds.

        Only the talker and the code predictor may have int8 weights. Raises ModelError if the checkpoint does not load.
        """
        where = torch.device(options.device)
        self.parts, compute_dtype, dtype = load_parts(
            model_id,
            source,
            options,
            lambda folder, dtype: read(folder, where, dtype),
            lambda parts: (parts.decoder, parts.code_predictor),
        )
        parts = self.parts
        runner = Runner(parts.decoder, where, compute_dtype, dtype)
        self.engine = LocalEngine(runner, options.settings, observe=options.observe)
        graphs = options.settings.graphs
        usual = parts.sampling.rest if "codes" in graphs else None
        self.frame_maker = FrameMaker(parts.code_predictor, parts.decoder.get_input_embeddings(), usual)
        self.vocoders = VocoderBatch(self.engine.thread, parts.vocoder, graphs="vocoder" in graphs)
        self.profile = _profile(model_id, parts)
        self._prompts, special = PromptRows(parts), parts.special_ids
        self._text = TextRows(self.engine.thread, self._prompts.text_rows, special.text_eos, special.text_pad)
        # The most recently cloned voices. A conversation in one voice encodes its sample only once.
        self._cloned = FairCache[tuple[bytes, str], tuple[ClonedVoice, VocoderState]](MAX_CLONED_VOICES)

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """Yield the audio of a text, float32 [num_samples] at the profile's rate. The first chunk is a frame of 80 ms.

        A text of more than MAX_PART_CHARS is spoken in parts, one after another. `urgency` is ignored, because all
        texts share the engine's steps. Waits for the engine, and for the encoders if the sample is not cached. Closing
        the generator stops the audio within a step. A text without letters or digits has no audio. Raises
        RemoteProtocolError if the sample cannot be cloned, Refused if the engine is full, and ModelError.
        """
        if not any(c.isalnum() for c in text):
            return
        for part in long_text_parts(text):
            ids = self.parts.vocabulary.plain(part)
            async with aclosing(self._chunks(ids, None, options)) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """Yield the audio of a text that is still being written, beginning after its first whole word.

        `texts`: pieces of text that may end within a word. They are read a word or two ahead of the frames. If the
        model ends its audio before the text ends, the rest is spoken as a separate text. A text without words has no
        audio. Otherwise this is the same as `speak`.
        """
        async with aclosing(TokenPieces(tokens_of_words(texts, self.parts.vocabulary.plain))) as words:
            async for first in words:
                async with aclosing(self._chunks(first, words, options)) as chunks:
                    async for chunk in chunks:
                        yield chunk

    async def _chunks(
        self, ids: Sequence[int], more: TokenPieces | None, options: VoiceOptions
    ) -> AsyncGenerator[SpeechChunk, None]:
        sample, vocoder = await self._clone(options.sample) if options.sample else (None, VocoderState())
        # As in the released code: a named voice reads the text before it speaks, a cloned one while it speaks.
        whole = more is None and (sample is None if options.whole_text is None else options.whole_text)
        prompt = TalkerPrompt(options.voice, options.language, options.instructions, sample, whole=whole)
        sampling = sampling_of(self.parts.sampling, options)
        held, sizes = list[list[int]](), chunk_sizes(options.first_frames)
        size, num_before = next(sizes), 0
        async with aclosing(self.frames(ids, more, prompt, sampling, options.max_frames)) as frames:
            async for frame in frames:
                held.append(frame)
                if len(held) == size:
                    yield await self._vocode(held, vocoder, num_before)
                    num_before, held, size = num_before + len(held), [], next(sizes)
        if held:
            yield await self._vocode(held, vocoder, num_before)

    async def _vocode(self, frames: list[list[int]], state: VocoderState, num_before: int) -> SpeechChunk:
        pcm = await self.vocoders.audio(frames, state)
        return SpeechChunk(pcm, num_symbols=0 if num_before else 1, num_frames=len(frames))

    async def frames(
        self,
        ids: Sequence[int],
        more: TokenPieces | None,
        prompt: TalkerPrompt,
        sampling: CodecSampling,
        max_frames: int | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Yield the frames of a text, one code for each codebook. Opens an engine session, and closes it at the end.

        `ids`: the first tokens of the text. `more`: the tokens that follow later; None: no more. `max_frames`: a limit
        below that of `sampling`. Raises ModelError, also if the engine fails, and Refused.
        """
        session, parts = await self.engine.open(RESERVE_ROWS), self.parts
        try:
            rows, left = await self.prompt_rows(ids, prompt, live=more is not None)
            session.append_embeddings(rows)
            session.pin()
            text, size = TextFeed(self._text, left, more), int(parts.decoder.config.vocab_size)
            made = generate_frames(session, self.frame_maker, text, sampling, parts.special_ids.end, size, max_frames)
            async with aclosing(made) as frames:
                async for frame in frames:
                    yield frame
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error
        finally:
            session.close()

    async def prompt_rows(
        self, ids: Sequence[int], prompt: TalkerPrompt, *, live: bool = False
    ) -> tuple[torch.Tensor, list[int] | None]:
        """Return the rows before the first frame, and the remaining tokens for the frames; see PromptRows.build.

        Waits for the model's thread. Raises ModelError if the model's embeddings fail.
        """
        return await self.engine.thread.call_model(lambda: self._prompts.build(ids, prompt, live=live))

    async def _clone(self, given: VoiceSample) -> tuple[ClonedVoice, VocoderState]:
        """Return a sample's voice, and the vocoder's state after its audio, which the audio of the text continues.

        Raises RemoteProtocolError if the sample is not audio, or is an embedding of a different model.
        """
        parts = self.parts
        if given.embedding:
            width = int(parts.decoder.config.hidden_size)
            if len(given.embedding) != width or parts.speaker_encoder is None:
                raise RemoteProtocolError(
                    "invalid_value", f"speaker_embedding has {width} numbers here", "speaker_embedding"
                )
            return ClonedVoice(torch.tensor(given.embedding)), VocoderState()
        owner, key = current_owner.get(), (given.audio, given.text)
        cloned = self._cloned.get(owner, key)
        if cloned is None:
            try:
                pcm = await in_thread(
                    decode_beginning, io.BytesIO(given.audio), RATE_HZ, MAX_SAMPLE_S, places=FILE_THREADS
                )
            except MediaError as error:
                raise RemoteProtocolError(
                    "invalid_value", f"Invalid value for 'ref_audio': {error}.", "ref_audio"
                ) from None
            voice, state = await self.listen(pcm, given.text), VocoderState()
            for at in range(0, len(voice.codes), MAX_VOCODER_FRAMES):
                await self._vocode([list(f) for f in voice.codes[at : at + MAX_VOCODER_FRAMES]], state, at)
            cloned = voice, state
            self._cloned.put(owner, key, cloned)
        voice, state = cloned
        return voice, state.copy()

    async def listen(self, pcm: Pcm, text: str = "") -> ClonedVoice:
        """Return the voice of a sample: float32 [num_samples], 24 kHz, at least MIN_SAMPLE_S.

        With `text`, the transcript of the sample, the voice also has the sample's codes, and is closer to the original.
        Waits for the model's thread, where both encoders run. Raises RemoteProtocolError if the checkpoint does not
        clone voices or the sample is too short, and ModelError.
        """
        parts = self.parts
        if parts.speaker_encoder is None:
            raise RemoteProtocolError("not_supported", "The loaded model speaks with its own voices only.", "ref_audio")
        if len(pcm) < MIN_SAMPLE_S * RATE_HZ:
            raise RemoteProtocolError("invalid_value", f"a voice needs {MIN_SAMPLE_S} s of sound and more", "ref_audio")
        encoder = parts.speaker_encoder
        speaker = await self.engine.thread.call_model(lambda: encoder(pcm))
        if not text or parts.sample_encoder is None:
            return ClonedVoice(speaker)
        count = len(parts.code_predictor.lm_head) + 1
        codes = await self.engine.thread.call_model(
            lambda: codes_of(parts.sample_encoder, pcm, count, parts.frame_samples)
        )
        return ClonedVoice(speaker, tuple(await in_thread(parts.vocabulary.plain, text)), codes)

    @property
    def engines(self) -> tuple[LocalEngine, ...]:
        """The engine of the talker, whose thread the server monitors."""
        return (self.engine,)

    def close(self) -> None:
        """Stop the model's thread. Texts that are being spoken fail."""
        self.engine.close()


def sampling_of(makers: CodecSampling, options: VoiceOptions) -> CodecSampling:
    """Return the sampling of one text's codes: the released sampling, with the changes of the options."""
    given = options.parameters
    first = replace(makers.first, **{name: _typed(name, v) for name, v in given.items() if name in FIRST_CODE})
    rest = replace(makers.rest, **{o: _typed(o, given[n]) for n, o in OTHER_CODES.items() if n in given})
    if options.seed is not None:
        first, rest = replace(first, seed=options.seed), replace(rest, seed=options.seed + 1)
    return replace(makers, first=first, rest=rest)


def _typed(name: str, value: float) -> Any:
    return int(value) if name == "top_k" else value


def _profile(model_id: str, parts: Qwen3TtsParts) -> SynthesizerProfile:
    codes = [LANGUAGE_CODES[n] for n in parts.languages if n in LANGUAGE_CODES]
    # English first, because text without a language is aligned as English.
    languages = sorted(dict.fromkeys(codes), key=lambda code: code != "en")
    return SynthesizerProfile(
        model_id,
        parts.sample_rate_hz,
        voices=tuple(parts.speakers) or (DESIGNED_VOICE if parts.kind == "voice_design" else CLONED_VOICE,),
        languages=tuple(languages) or ("en",),
        speeds=(1.0, 1.0),
        word_times=False,
        clones_voices=parts.kind == "base",
        follows_instructions=parts.follows_instructions,
        streams_text=True,
        tasks=(TASKS[parts.kind],),
        parameters=FIRST_CODE | {name: FIRST_CODE[of] for name, of in OTHER_CODES.items()},
    )
