"""Qwen3-TTS as a synthesizer: each text a session of the engine, its frames' sound given out as they are made."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap

import torch

from antiphon.adapters.qwen3_tts.checkpoint import END, Qwen3TtsParts, read
from antiphon.adapters.qwen3_tts.voice_cloning import RATE_HZ, ClonedVoice, codes_of
from antiphon.audio import Pcm
from antiphon.audio.containers import decode_beginning
from antiphon.contracts import SpeechChunk, SynthesizerProfile, Urgency, VoiceOptions
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import Engine
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import quantize_linear_layers, weights_for
from antiphon.engine.threads import load_errors, load_in_own_thread
from antiphon.errors import EngineError, MediaError, ModelError, RemoteProtocolError
from antiphon.events.speech import VoiceSample
from antiphon.modeling.codec_talker import (
    MAX_VOCODER_FRAMES,
    CodecSampling,
    CodePredictorBatch,
    TextRows,
    chunk_sizes,
    generate_frames,
)
from antiphon.modeling.codec_vocoder import VocoderState
from antiphon.text.sentences import SentenceSplitter

CODES = {
    "chinese": "zh",
    "english": "en",
    "german": "de",
    "italian": "it",
    "portuguese": "pt",
    "spanish": "es",
    "japanese": "ja",
    "korean": "ko",
    "french": "fr",
    "russian": "ru",
}
# A longer text is spoken in parts: a sound of the model has an end.
MAX_CHARS = 600
RESERVE_ROWS = 512
DESIGNED = "designed"
# Of a sample so much is heard, in seconds; so many are remembered.
MAX_SAMPLE_S, MIN_SAMPLE_S, MAX_HEARD = 30, 0.25, 8
# Text that comes without a space or a mark is cut here, in characters.
MAX_WORD = 200
MARKS = "，。！？；：、"


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """How a text is put to the talker. `sample`: whose voice it is instead of one of its own. `whole`: all of the text before the first frame, else a
    token a frame."""

    voice: str
    language: str | None = None
    instructions: str = ""
    sample: ClonedVoice | None = None
    whole: bool = True


class Qwen3Tts:
    """See Synthesizer. `source` is a checkpoint's folder as it was released, or its parts on `device`."""

    def __init__(
        self,
        source: Path | Qwen3TtsParts,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
    ) -> None:
        """Raises ModelError for a checkpoint that does not load."""
        kind, dtype = weights_for(device, weights)
        where = torch.device(device)
        with load_errors(model_id, source):
            self.parts = load_in_own_thread(
                lambda: _load(source, where, dtype, rounded=kind == "int8"), device=device, threads=threads
            )
        parts = self.parts
        runner = Runner(parts.decoder, where, torch.float32 if kind == "int8" else dtype, dtype)
        self.engine = Engine(runner, settings, observe=observe)
        self.inners = CodePredictorBatch(self.engine, parts.inner, parts.decoder.get_input_embeddings())
        known = [CODES[n] for n in parts.languages if n in CODES]
        # English first: what is not told to be of another is aligned as that.
        languages = sorted(dict.fromkeys(known), key=lambda code: code != "en")
        self.profile = SynthesizerProfile(
            model_id,
            parts.sample_rate_hz,
            voices=tuple(parts.speakers) or (DESIGNED if parts.kind == "voice_design" else "default",),
            languages=tuple(languages) or ("en",),
            speeds=(1.0, 1.0),
            word_times=False,
            clones_voices=parts.kind == "base",
            follows_instructions=parts.instructed,
            streams_text=True,
            tasks=({"custom_voice": "CustomVoice", "voice_design": "VoiceDesign", "base": "Base"}[parts.kind],),
        )
        # The voices heard last, so that a conversation in one voice hears it once.
        self._heard: dict[tuple[bytes, str], tuple[ClonedVoice, VocoderState]] = {}
        self._names = {CODES[n]: n for n in parts.languages if n in CODES}

    async def speak(
        self, text: str, options: VoiceOptions, urgency: Callable[[], Urgency]
    ) -> AsyncGenerator[SpeechChunk, None]:
        """See Synthesizer."""
        if not any(c.isalnum() for c in text):
            raise RemoteProtocolError("unsupported_text", f"there is nothing to say in {text[:40]!r}", "input")
        for part in _in_parts(text):
            ids = self.parts.vocabulary.plain(part)
            async with aclosing(self._sounds(ids, None, options)) as sounds:
                async for sound in sounds:
                    yield sound

    async def speak_live(self, texts: AsyncIterator[str], options: VoiceOptions) -> AsyncGenerator[SpeechChunk, None]:
        """See Synthesizer."""
        feed = _words(texts, self.parts.vocabulary.plain)
        # A sound has an end; where there is more text, it goes on with another.
        async for first in feed:
            async with aclosing(self._sounds(first, feed, options)) as sounds:
                async for sound in sounds:
                    yield sound

    async def _sounds(
        self, ids: Sequence[int], more: AsyncIterator[list[int]] | None, options: VoiceOptions
    ) -> AsyncGenerator[SpeechChunk, None]:
        sample, past = await self._sample(options.sample) if options.sample else (None, VocoderState())
        # As its makers do: a text in a voice of the model's own is read before it is spoken, one in another's while it is.
        whole = more is None and sample is None
        reading = TalkerPrompt(options.voice, options.language, options.instructions, sample, whole=whole)
        seeded = self.parts.manner
        if options.seed is not None:
            seeded = CodecSampling(
                replace(seeded.first, seed=options.seed), replace(seeded.rest, seed=options.seed + 1)
            )
        held, sizes = list[list[int]](), chunk_sizes(options.first_frames)
        size, count = next(sizes), 0
        async with aclosing(self.frames(ids, more, reading, seeded, options.max_frames)) as made:
            async for frame in made:
                held.append(frame)
                if len(held) == size:
                    yield await self._sound(held, past, count)
                    count, held, size = count + len(held), [], next(sizes)
        if held:
            yield await self._sound(held, past, count)

    async def _sound(self, held: list[list[int]], past: VocoderState, before: int) -> SpeechChunk:
        pcm = await self.engine.call_model(lambda: self.parts.vocoder(held, past))
        return SpeechChunk(pcm.numpy(), num_symbols=0 if before else 1, num_frames=len(held))

    async def frames(
        self,
        ids: Sequence[int],
        more: AsyncIterator[list[int]] | None,
        reading: TalkerPrompt,
        manner: CodecSampling,
        most: int | None = None,
    ) -> AsyncGenerator[list[int], None]:
        """Frames of codes of a text's tokens; `more` follow them, token by token. Raises ModelError, EngineError, Refused."""
        session, parts = await self.engine.open(RESERVE_ROWS), self.parts
        try:
            rows, left = await self.engine.call_model(lambda: self._rows(ids, reading, live=more is not None))
            session.append_embeddings(rows)
            session.pin()
            marks = parts.marks
            text = TextRows(self.engine, self.text_rows, marks.text_eos, marks.text_pad, left, more)
            size = int(parts.decoder.config.vocab_size)
            async with aclosing(
                generate_frames(session, self.inners, text.next, manner, parts.marks.end, size, most)
            ) as made:
                async for frame in made:
                    yield frame
        except EngineError as error:
            raise ModelError(f"the engine failed: {error}") from error
        finally:
            session.close()

    async def _sample(self, given: VoiceSample) -> tuple[ClonedVoice, VocoderState]:
        """A voice, and what the vocoder has seen of it: its sound goes on from the sample's.

        Raises RemoteProtocolError for what is no sound, or another model's embedding.
        """
        parts = self.parts
        if given.embedding:
            width = int(parts.decoder.config.hidden_size)
            if len(given.embedding) != width or parts.speaker is None:
                raise RemoteProtocolError(
                    "invalid_value", f"speaker_embedding has {width} numbers here", "speaker_embedding"
                )
            return ClonedVoice(torch.tensor(given.embedding)), VocoderState()
        key = (given.audio, given.text)
        if key not in self._heard:
            try:
                pcm = await asyncio.to_thread(decode_beginning, io.BytesIO(given.audio), RATE_HZ, MAX_SAMPLE_S)
            except MediaError as error:
                raise RemoteProtocolError(
                    "invalid_value", f"Invalid value for 'ref_audio': {error}.", "ref_audio"
                ) from None
            made, past = await self.listen(pcm, given.text), VocoderState()
            for at in range(0, len(made.codes), MAX_VOCODER_FRAMES):
                await self._sound([list(f) for f in made.codes[at : at + MAX_VOCODER_FRAMES]], past, at)
            while len(self._heard) >= MAX_HEARD:
                self._heard.pop(next(iter(self._heard)))
            self._heard[key] = (made, past)
        found, primed = self._heard[key]
        return found, VocoderState(dict(primed.tails), primed.frames)

    async def listen(self, pcm: Pcm, text: str = "") -> ClonedVoice:
        """A voice to speak with, from a sample of it: float32 [num_samples], 24 kHz; with what it says it is followed more closely.

        Raises RemoteProtocolError where the checkpoint clones no voices.
        """
        parts = self.parts
        if parts.speaker is None:
            raise RemoteProtocolError("not_supported", "The loaded model speaks with its own voices only.", "ref_audio")
        if len(pcm) < MIN_SAMPLE_S * RATE_HZ:
            raise RemoteProtocolError("invalid_value", f"a voice needs {MIN_SAMPLE_S} s of sound and more", "ref_audio")
        speaker = parts.speaker
        who = await self.engine.call_model(lambda: speaker(pcm))
        if not text or parts.encoder is None:
            return ClonedVoice(who)
        count = len(parts.inner.lm_head) + 1
        codes = await self.engine.call_model(lambda: codes_of(parts.encoder, pcm, count, parts.frame_samples))
        return ClonedVoice(who, tuple(parts.vocabulary.plain(text)), codes)

    @torch.inference_mode()
    def text_rows(self, ids: Sequence[int]) -> torch.Tensor:
        """Text tokens as the talker reads them: [n, width]. In the engine's thread."""
        parts = self.parts
        out: torch.Tensor = parts.projection(parts.text(torch.tensor(list(ids), device=parts.text.weight.device)))
        return out

    @torch.inference_mode()
    def _rows(
        self, ids: Sequence[int], reading: TalkerPrompt, *, live: bool = False
    ) -> tuple[torch.Tensor, list[int] | None]:
        """What the talker knows before its first frame [n, width], and the text's tokens that are left for the frames; None: its end was told too.
        `live`: these are not all of the text's.

        In the engine's thread.
        """
        parts, marks, words, sample = self.parts, self.parts.marks, self.parts.vocabulary, reading.sample
        language = self._language(reading)
        if language is None:
            told = self._codes(marks.no_think, marks.think_bos, marks.think_eos)
        else:
            told = self._codes(marks.think, marks.think_bos, parts.languages[language], marks.think_eos)
        if sample is not None:
            told = torch.cat((told, sample.speaker[None].to(told)))
        elif reading.voice in parts.speakers:
            told = torch.cat((told, self._codes(parts.speakers[reading.voice])))
        codec = torch.cat((told, self._codes(marks.pad)))
        written = self.text_rows([marks.text_pad] * (len(codec) - 1) + [marks.text_bos])
        out = [self.text_rows(words.control("<|im_start|>assistant\n")), written + codec]
        if reading.instructions and parts.instructed:
            before = [
                *words.control("<|im_start|>user\n"),
                *words.plain(reading.instructions),
                *words.control(f"{END}\n"),
            ]
            out.insert(0, self.text_rows(before))
        bos, left = self._codes(marks.bos), None
        if sample is not None and sample.codes:
            said = torch.cat((bos, self._frames(sample.codes)))
            text = [*sample.text, *ids, *([] if live else [marks.text_eos])]
            if reading.whole:
                out += [self.text_rows(text) + self._codes(marks.pad), said + self.text_rows([marks.text_pad])]
            else:
                beside = text[: len(said)] + [marks.text_pad] * (len(said) - len(text))
                out.append(self.text_rows(beside) + said)
                # The end is one of these, or is still to come.
                left = text[len(said) :] or ([] if live else None)
        elif reading.whole:
            out.append(self.text_rows([*ids, marks.text_eos]) + self._codes(marks.pad))
            out.append(self.text_rows([marks.text_pad]) + bos)
        else:
            out.append(self.text_rows(ids[:1]) + bos)
            left = list(ids[1:])
        return torch.cat(out), left

    def _codes(self, *which: int) -> torch.Tensor:
        """The first codes' rows [n, width]."""
        like = self.parts.text.weight
        out: torch.Tensor = self.parts.decoder.get_input_embeddings()(torch.tensor(which, device=like.device))
        return out.to(like.dtype)

    def _frames(self, frames: Sequence[Sequence[int]]) -> torch.Tensor:
        """Whole frames' rows [n, width]."""
        first, *others = zip(*frames, strict=True)
        rows = self._codes(*first)
        for table, codes in zip(self.parts.inner.codec_embedding, others, strict=True):
            rows = rows + table(torch.tensor(codes, device=rows.device))
        return rows

    def _language(self, reading: TalkerPrompt) -> str | None:
        """Its name; None leaves it to the talker."""
        name = self._names.get(reading.language or "")
        if name in (None, "chinese") and (dialect := self.parts.dialects.get(reading.voice)):
            return dialect
        return name

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()


async def _words(texts: AsyncIterator[str], encode: Callable[[str], list[int]]) -> AsyncGenerator[list[int], None]:
    """Tokens of a text that comes in pieces: of whole words, as of the whole text's."""
    held, seen = "", 1
    async for text in texts:
        held += text
        cut = max((i for i in range(seen, len(held)) if _apart(held, i)), default=0)
        if not cut and len(held) > MAX_WORD:
            cut = len(held)
        if cut:
            yield encode(held[:cut])
            held = held[cut:]
        # Of the last character it is not known yet.
        seen = max(1, len(held) - 1)
    if held.strip():
        yield encode(held)


def _apart(text: str, at: int) -> bool:
    """No token lies across this place: a space with its word behind it, or what follows a mark of Chinese or Japanese."""
    if text[at] == " ":
        return not text[at - 1].isspace() and not text[at + 1 : at + 2].isspace() and bool(text[at + 1 : at + 2])
    return text[at - 1] in MARKS and text[at].isalnum()


def _in_parts(text: str) -> Iterator[str]:
    """A text at most MAX_CHARS at a time, cut behind sentences, or words where there is none."""
    if len(text) <= MAX_CHARS:
        yield text
        return
    splitter = SentenceSplitter("sentence")
    held = ""
    sentences = (*splitter.feed(text), *splitter.flush())
    for unit in (part for sentence in sentences for part in wrap(sentence, MAX_CHARS)):
        if held and len(held) + len(unit) > MAX_CHARS:
            yield held
            held = ""
        held = f"{held} {unit}".strip()
    if held:
        yield held


def _load(source: Path | Qwen3TtsParts, device: torch.device, dtype: torch.dtype, *, rounded: bool) -> Qwen3TtsParts:
    parts = source if isinstance(source, Qwen3TtsParts) else read(source, device, dtype)
    if rounded:
        quantize_linear_layers(parts.decoder)
        quantize_linear_layers(parts.inner)
    return parts
