"""Qwen3-Omni as who answers: the thinker's text on one engine, the talker's sound on another, for all conversations at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from antiphon.adapters.qwen3_omni.checkpoint import RATE_HZ, TalkerParts, ThinkerParts, read
from antiphon.adapters.qwen3_omni.media_encoder import OmniMediaEncoder
from antiphon.adapters.qwen3_omni.talker import OmniTalker, OmniTalkerStream
from antiphon.contracts import (
    ConversationProfile,
    Message,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
)
from antiphon.engine.api import EngineSettings
from antiphon.engine.local.engine import Engine
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import weights_for
from antiphon.engine.threads import load_errors, load_in_own_thread
from antiphon.events.tools import Tool
from antiphon.modeling.chat import ChatModel, ChatRow, ChatStream
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tool_grammar import CALL_OPENING
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.text.word_timing import WordPacer

# A call that an answer must begin with has no more tokens than these.
FORCED_ROWS = 4
NO_SOUND = np.zeros(0, np.float32)


class Qwen3Omni:
    """See Partner. `folder` holds a checkpoint as it was released. `thinker` is its language model by itself."""

    native = None

    def __init__(
        self,
        folder: Path,
        model_id: str,
        *,
        settings: EngineSettings | None = None,
        device: str = "cpu",
        speaking: str = "",
        weights: str = "auto",
        threads: int = 0,
        observe: Callable[[int, int, float], None] | None = None,
        parts: tuple[ThinkerParts, TalkerParts | None] | None = None,
    ) -> None:
        """`speaking`: the talker's device, where it is another. `parts`: its own, where they are loaded already.

        Raises ModelError for a checkpoint that does not load.
        """
        _, dtype = weights_for(device, weights, mixture=True)
        second = speaking or device
        weights_for(second, weights, mixture=True)
        given = settings or EngineSettings()
        # A row of the talker's is a fifth of one of the thinker's.
        thinks = replace(given, kv_bytes=given.kv_bytes // 4 * 3)
        talks = replace(given, kv_bytes=given.kv_bytes // 4, context_rows=0)
        with load_errors(model_id, folder):
            thinker, talker = load_in_own_thread(
                lambda: parts or read(folder, device, second, dtype), device=device, threads=threads
            )

            def runner(decoder: TextDecoder, where: str) -> Runner:
                width = decoder.input_width
                return Runner(decoder, torch.device(where), dtype, dtype, position_axes=3, input_width=width)

            self.thinker = ChatModel(
                folder,
                model_id,
                runner(thinker.decoder, device),
                thinker.tokenizer,
                thinks,
                observe,
            )
            self.thinker.template = ChatTemplate(thinker.tokenizer, takes_media=True)
            try:
                self.thinker.media_encoder = OmniMediaEncoder(folder, thinker, self.thinker.engine)
            except (OSError, ValueError):
                self.thinker.close()
                raise
        self.voice: OmniTalker | None = None
        if talker:
            engine = Engine(runner(talker.decoder, second), talks, observe=observe)
            self.voice = OmniTalker(talker, thinker.model.get_input_embeddings(), engine)
        voices = self.voice.speakers if self.voice else ()
        self.profile = ConversationProfile(model_id, RATE_HZ, voices, accepts_media=True)
        self.opening = thinker.tokenizer.convert_tokens_to_ids(CALL_OPENING)

    async def open(self) -> OmniStream:
        """A new conversation. Raises Refused where there is no room for its KV."""
        return OmniStream(self, await self.thinker.open())

    def close(self) -> None:
        """Stop the engines."""
        self.thinker.close()
        if self.voice:
            self.voice.close()


class OmniStream:
    """See Talk."""

    def __init__(self, model: Qwen3Omni, chat: ChatStream) -> None:
        self._model, self._chat = model, chat
        self._speaker: OmniTalkerStream | None = None

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """See Talk."""
        await self._chat.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """See Talk."""
        if voice is None or self._model.voice is None:
            async with aclosing(self._chat.reply(messages, options)) as replies:
                async for reply in replies:
                    yield reply
            return
        if self._speaker is None:
            self._speaker = await self._model.voice.open()
        speaker, said = self._speaker, _SpokenTokens(self._chat, self._model.thinker.stop_tokens, self._model.opening)
        paced = WordPacer()

        async def write(put: PutChunk) -> None:
            self._chat.on_token = said.tell
            try:
                async with aclosing(self._chat.reply(messages, options)) as replies:
                    async for reply in replies:
                        if isinstance(reply, TextDelta):
                            paced.feed(reply.text)
                        await put(reply)
            finally:
                self._chat.on_token = None
                said.end()

        async def speak(put: PutChunk) -> None:
            prompt = await said.prompt()
            seed = options.seed if voice.seed is None else voice.seed
            sounds = speaker.say(prompt, self._chat.media_rows, said.tokens(), voice.voice, seed)
            async with aclosing(sounds):
                async for pcm in sounds:
                    await put(ResponseAudio(pcm, paced.advance(len(pcm) / RATE_HZ)))
            if words := paced.finish():
                await put(ResponseAudio(NO_SOUND, words))

        async with aclosing(side_by_side(write, speak)) as answers:
            async for answer in answers:
                yield answer

    def close(self) -> None:
        """See Talk."""
        self._chat.close(keep=True)
        if self._speaker:
            self._speaker.close()


class _SpokenTokens:
    """The tokens of an answer that are to be spoken, as they come. `stop` ends it; what follows `opening` is a call of a tool."""

    def __init__(self, chat: ChatStream, stop: frozenset[int], opening: int | None) -> None:
        self._chat, self._stop, self._opening = chat, stop, opening
        self._prompt: list[ChatRow] = []
        self._waiting: asyncio.Queue[int | None] = asyncio.Queue()
        self._began = asyncio.Event()
        self._over = False

    def tell(self, token: int) -> None:
        """See ChatStream.on_token."""
        if not self._began.is_set():
            self._prompt = self._chat.rows[:-1]
            self._began.set()
            if self._opening in self._prompt[-FORCED_ROWS:]:
                # The answer must be a call.
                self.end()
        if token in self._stop or token == self._opening:
            self.end()
        elif not self._over:
            self._waiting.put_nowait(token)

    def end(self) -> None:
        """Nothing more of it is spoken."""
        if not self._over:
            self._over = True
            self._waiting.put_nowait(None)
        self._began.set()

    async def prompt(self) -> list[ChatRow]:
        """The conversation's rows up to the answer, once it has begun."""
        await self._began.wait()
        return self._prompt

    async def tokens(self) -> AsyncIterator[int]:
        """Until the answer's end."""
        while (token := await self._waiting.get()) is not None:
            yield token
