"""Qwen3-Omni as a conversation model: the thinker's text on one engine, the talker's speech on another.

Both engines serve all conversations at once. The thinker is a ChatModel with a media encoder; the talker is given the
thinker's tokens while they are written (`../spoken_tokens.py`) and speaks them (`talker.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen3_omni.checkpoint import RATE_HZ, TalkerParts, read
from antiphon.adapters.qwen3_omni.talker import OmniTalker, OmniTalkerStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.adapters.spoken_tokens import SpokenTokens, write_spoken
from antiphon.contracts import (
    ConversationProfile,
    Message,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    VoiceOptions,
)
from antiphon.engine.api import Engine, EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import weights_for
from antiphon.engine.threads import load_errors
from antiphon.events.tools import Tool
from antiphon.modeling.chat import ChatModel, ChatStream
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.omni.checkpoint import ThinkerParts
from antiphon.modeling.omni.media_encoder import OmniMediaEncoder
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tool_grammar import CALL_OPENING
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.text.word_timing import WordPacer

NO_AUDIO = np.zeros(0, np.float32)


class Qwen3Omni:
    """A ConversationModel that hears, sees, writes and speaks. It takes no turns by itself (`native` is None).

    `folder` holds a checkpoint as it was released. `thinker`: its language model, which also answers by itself in text;
    `talker`: its voice, None for a checkpoint that has none. `call_opening`: the token that begins a call of a tool.
    """

    native = None

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        parts: tuple[ThinkerParts, TalkerParts | None] | None = None,
    ) -> None:
        """Load the checkpoint and start an engine for each of its two decoders. Waits for a minute and more.

        Of the options' KV memory, three quarters are the thinker's and the rest is the talker's. int8 weights are
        refused: the model is a mixture of experts. `parts`: the loaded parts, where the folder's are not to be loaded.
        Raises ModelError for a checkpoint that does not load.
        """
        device, talker_device = options.device, options.talker_device or options.device
        weights_for(talker_device, options.weights, mixture=True)
        (thinker, talker), _, dtype = load_parts(
            model_id,
            parts or folder,
            options,
            lambda folder, dtype: read(folder, device, talker_device, dtype),
            lambda _: (),
            mixture=True,
        )
        # A row of the talker's is a fifth of one of the thinker's.
        given, observe = options.settings, options.observe
        thinker_settings = replace(given, kv_bytes=given.kv_bytes // 4 * 3)
        talker_settings = replace(given, kv_bytes=given.kv_bytes // 4, context_rows=0)
        with load_errors(model_id, folder):
            runner = _runner(thinker.decoder, device, dtype)
            self.thinker, media_encoder = _chat_model(folder, model_id, thinker, runner, thinker_settings, observe)
        self.talker: OmniTalker | None = None
        if talker:
            engine = LocalEngine(_runner(talker.decoder, talker_device, dtype), talker_settings, observe=observe)
            self.talker = OmniTalker(talker, thinker.model.get_input_embeddings(), engine, engine.thread)
        voices = self.talker.voices if self.talker else ()
        self.profile = ConversationProfile(
            model_id,
            RATE_HZ,
            voices,
            accepts_media=True,
            keeps_to_schemas=True,
            video_window_s=media_encoder.window_s,
            audio_window_ms=10 * media_encoder.window_frames,
        )
        self.call_opening = thinker.tokenizer.convert_tokens_to_ids(CALL_OPENING)

    async def open(self, owner: Hashable | None = None) -> OmniStream:
        """Return a new conversation. The talker's session is opened with the first response that is spoken.

        Raises Refused where the thinker's engine has no room for the conversation's KV.
        """
        return OmniStream(self, await self.thinker.open(owner))

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the thinker and the talker, for whoever watches their threads."""
        return (self.thinker.engine, *((self.talker.engine,) if self.talker else ()))

    def close(self) -> None:
        """Stop both engines' threads. Conversations that are still open fail."""
        self.thinker.close()
        if self.talker:
            self.talker.close()


def _runner(decoder: TextDecoder, device: str, dtype: torch.dtype) -> Runner:
    width = decoder.input_width
    return Runner(decoder, torch.device(device), dtype, dtype, position_axes=3, input_width=width)


def _chat_model(
    folder: Path,
    model_id: str,
    thinker: ThinkerParts,
    runner: Runner,
    settings: EngineSettings,
    observe: Callable[[int, int, float], None] | None,
) -> tuple[ChatModel, OmniMediaEncoder]:
    """The thinker with its template and its media encoder. Raises OSError, ValueError, with no engine left behind."""
    engine = LocalEngine(runner, settings, tokenizer=thinker.tokenizer.backend_tokenizer, observe=observe)
    try:
        chat = ChatModel(folder, model_id, engine, thinker.tokenizer)
        chat.template = ChatTemplate(thinker.tokenizer, takes_media=True)
        chat.media_encoder = encoder = OmniMediaEncoder(
            folder, thinker.model, thinker.tokenizer, engine.thread, has_tap=thinker.decoder.has_tap
        )
    except BaseException:
        engine.close()
        raise
    return chat, encoder


class OmniStream:
    """A ConversationStream: the thinker's conversation, and the talker's, once something was spoken.

    `chat` is the thinker's side. The stream owns both, and `close` closes them.
    """

    def __init__(self, model: Qwen3Omni, chat: ChatStream) -> None:
        self.chat = chat
        self._model = model
        self._talker: OmniTalkerStream | None = None

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Have the thinker compute these messages ahead. The talker's rows are computed with the response.

        Waits for the encoders of new audio and images, not for the rows. Raises RemoteProtocolError, ModelError.
        """
        await self.chat.prefill(messages, tools)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message: text as it is written, and its audio from the first frame (80 ms) on.

        With `voice` None, or without a talker, there is no audio. Calls of tools are not spoken. The audio's words have
        guessed times. Closing the generator ends both decoders within a step. Raises Refused, ModelError,
        RemoteProtocolError.
        """
        chunks: AsyncGenerator[ResponseChunk, None]
        if voice is None or self._model.talker is None:
            chunks = self.chat.reply(messages, options)
        else:
            if self._talker is None:
                self._talker = await self._model.talker.open()
            chunks = self._respond_aloud(self._talker, messages, options, voice)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _respond_aloud(
        self, talker: OmniTalkerStream, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions
    ) -> AsyncGenerator[ResponseChunk, None]:
        spoken = SpokenTokens(self.chat, self._model.thinker.stop_tokens, self._model.call_opening)
        pacer = WordPacer()

        async def write(put: PutChunk) -> None:
            await write_spoken(self.chat, messages, options, spoken, pacer, put)

        async def speak(put: PutChunk) -> None:
            prompt = await spoken.prompt()
            seed = options.seed if voice.seed is None else voice.seed
            audio = talker.speak(prompt, self.chat.media_rows, spoken.tokens(), voice.voice, seed)
            async with aclosing(audio):
                async for pcm in audio:
                    await put(ResponseAudio(pcm, pacer.advance(len(pcm) / RATE_HZ)))
            if words := pacer.finish():
                await put(ResponseAudio(NO_AUDIO, words))

        async with aclosing(side_by_side(write, speak)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Close the talker's session, and the thinker's, whose KV is kept for a conversation that begins alike."""
        self.chat.close(keep=True)
        if self._talker:
            self._talker.close()
