"""A conversation that speaks by itself: the thinker's text on one engine, the talker's codes on another, and audio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import numpy as np

from antiphon.adapters.qwen2_5_omni.checkpoint import RATE_HZ
from antiphon.adapters.qwen2_5_omni.talker import SpokenRows, Talker, TalkerStream
from antiphon.adapters.spoken_tokens import write_spoken
from antiphon.contracts import Message, ReplyOptions, ResponseAudio, ResponseChunk, VoiceOptions
from antiphon.events.tools import Tool
from antiphon.modeling.chat import ChatModel, ChatStream
from antiphon.modeling.tool_grammar import CALL_OPENING
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.text.word_timing import WordPacer

NO_AUDIO = np.zeros(0, np.float32)


class VoicedStream:
    """A ConversationStream: the thinker's conversation, and the talker's, once something was spoken.

    `chat` is the thinker's side, which has `hidden` set, and `talker` the talker's. The stream owns both, and `close`
    closes them.
    """

    def __init__(self, thinker: ChatModel, talker: Talker, chat: ChatStream) -> None:
        self.chat = chat
        self._thinker, self._model = thinker, talker
        self.talker: TalkerStream | None = None

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Have the thinker compute these messages ahead. The talker's rows are computed with the response.

        Waits for the encoders of new audio and images, not for the rows. Raises RemoteProtocolError, ModelError.
        """
        await self.chat.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message: text as it is written, and its audio from the first 24 codes (480 ms) on.

        With `voice` None there is no audio. Calls of tools are not spoken. The audio's words have guessed times.
        Closing the generator ends both decoders and the diffusion within a step. Raises Refused, ModelError,
        RemoteProtocolError.
        """
        chunks: AsyncGenerator[ResponseChunk, None]
        if voice is None:
            chunks = self.chat.reply(messages, options)
        else:
            if self.talker is None:
                self.talker = await self._model.open()
            chunks = self._respond_aloud(self.talker, messages, options, voice)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _respond_aloud(
        self, talker: TalkerStream, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions
    ) -> AsyncGenerator[ResponseChunk, None]:
        call_opening = self._thinker.tokenizer.convert_tokens_to_ids(CALL_OPENING)
        spoken = SpokenRows(self.chat, self._thinker.stop_tokens, call_opening)
        speaker = self._model.parts.speakers[voice.voice]
        seed = options.seed if voice.seed is None else voice.seed
        # Codes are made while the audio of those before is; None ends them. Bound: MAX_CODES.
        waiting: asyncio.Queue[int | None] = asyncio.Queue()
        pacer = WordPacer()

        async def write(put: PutChunk) -> None:
            await write_spoken(self.chat, messages, options, spoken, pacer, put)

        async def choose(_: PutChunk) -> None:
            codes = talker.codes(spoken, self.chat.media_rows, speaker, seed)
            try:
                async with aclosing(codes):
                    async for code in codes:
                        waiting.put_nowait(code)
            finally:
                waiting.put_nowait(None)

        async def sound(put: PutChunk) -> None:
            wav = talker.wav(speaker, seed)
            while (code := await waiting.get()) is not None:
                if len(pcm := await wav.feed([code])):
                    await put(ResponseAudio(pcm, pacer.advance(len(pcm) / RATE_HZ)))
            if len(pcm := await wav.feed([], last=True)):
                await put(ResponseAudio(pcm, pacer.advance(len(pcm) / RATE_HZ)))
            if words := pacer.finish():
                await put(ResponseAudio(NO_AUDIO, words))

        async with aclosing(side_by_side(write, choose, sound)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Close both sessions."""
        self.chat.close()
        if self.talker:
            self.talker.close()
