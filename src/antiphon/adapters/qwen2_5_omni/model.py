"""Qwen2.5-Omni as a conversation model: the thinker hears, sees and writes, and the talker speaks.

A checkpoint without a talker or without voices leaves speaking to a synthesizer: what it writes is spoken, sentence by
sentence, as a cascade's text is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import torch

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen2_5_omni.checkpoint import RATE_HZ, VoiceParts, read
from antiphon.adapters.qwen2_5_omni.talker import Talker
from antiphon.adapters.qwen2_5_omni.voice import VoicedStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ConversationProfile, ConversationStream, Synthesizer
from antiphon.engine.api import Engine, EngineSettings
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.local.weights import weights_for
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.omni.checkpoint import ThinkerParts
from antiphon.modeling.omni.hidden_rows import HiddenRows
from antiphon.modeling.omni.media_encoder import OmniMediaEncoder
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.pipelines.cascade import Cascade


class Qwen25Omni:
    """A ConversationModel that hears, sees, writes and speaks. It takes no turns by itself (`native` is None).

    `folder` holds a checkpoint as it was released. `thinker`: its language model, which also answers by itself in text;
    `talker`: its voice, None for a checkpoint that has none.
    """

    native = None

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        synthesizer: Synthesizer | None = None,
        parts: tuple[ThinkerParts, VoiceParts | None] | None = None,
    ) -> None:
        """Load the checkpoint and start an engine for each of its decoders. Waits for a minute and more.

        Of the options' KV memory, three quarters are the thinker's and the rest is the talker's. `synthesizer`: speaks
        what the thinker writes where there is no talker; it belongs to the caller. `parts`: the loaded parts, where the
        folder's are not to be loaded. Raises ModelError for a checkpoint that does not load.
        """
        device, talker_device = options.device, options.talker_device or options.device
        weights_for(talker_device, options.weights)
        on_cpu = talker_device == "cpu"
        (thinker, talker), compute, dtype = load_parts(
            model_id,
            parts or folder,
            options,
            lambda folder, dtype: read(folder, device, talker_device, dtype),
            # Only a CPU multiplies int8.
            lambda parts: (parts[0].decoder, *((parts[1].decoder,) if parts[1] and on_cpu else ())),
        )
        given = options.settings
        settings = replace(given, kv_bytes=given.kv_bytes // 4 * 3) if talker else given
        with load_errors(model_id, folder):
            runner = _runner(thinker.decoder, device, compute, dtype)
            self.thinker = _chat_model(folder, model_id, thinker, runner, settings, options)
        encoder = self.thinker.media_encoder
        assert encoder
        self.talker: Talker | None = None
        self._embed = thinker.model.get_input_embeddings()
        self._spoken = Cascade(self.thinker, None if talker else synthesizer)
        spoken = self._spoken.profile
        if talker:
            settings = replace(given, kv_bytes=given.kv_bytes // 4, context_rows=0)
            runner = _runner(talker.decoder, talker_device, compute if on_cpu else dtype, dtype)
            engine = LocalEngine(runner, settings, observe=options.observe)
            self.talker = Talker(talker, self._embed, engine, engine.thread, encoder.joined)
            spoken = ConversationProfile(model_id, RATE_HZ, self.talker.voices)
        window_ms = round(1000 * encoder.window_s)
        self.profile = replace(
            spoken,
            accepts_media=True,
            keeps_to_schemas=True,
            video_window_s=encoder.window_s,
            audio_window_ms=window_ms,
        )

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Return a new conversation. The talker's session is opened with the first response that is spoken.

        Raises Refused where the thinker's engine has no room for the conversation's KV.
        """
        if self.talker is None:
            return await self._spoken.open(owner)
        chat = await self.thinker.open(owner)
        chat.hidden = HiddenRows(self._embed, self._embed.weight.device)
        return VoicedStream(self.thinker, self.talker, chat)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the thinker and the talker, for whoever watches their threads."""
        return (self.thinker.engine, *((self.talker.engine,) if self.talker else ()))

    def close(self) -> None:
        """Stop the engines' threads. Conversations that are still open fail."""
        self.thinker.close()
        if self.talker:
            self.talker.close()


def _runner(decoder: TextDecoder, device: str, compute: torch.dtype, dtype: torch.dtype) -> Runner:
    return Runner(decoder, torch.device(device), compute, dtype, position_axes=3, input_width=decoder.input_width)


def _chat_model(
    folder: Path,
    model_id: str,
    thinker: ThinkerParts,
    runner: Runner,
    settings: EngineSettings,
    options: EngineModelOptions,
) -> ChatModel:
    """The thinker with its template and its media encoder. Raises OSError, ValueError, with no engine left behind."""
    words = thinker.tokenizer
    engine = LocalEngine(runner, settings, tokenizer=words.backend_tokenizer, observe=options.observe)
    try:
        chat = ChatModel(folder, model_id, engine, words)
        chat.template = ChatTemplate(words, takes_media=True)
        chat.media_encoder = OmniMediaEncoder(folder, thinker.model, thinker.tokenizer, engine.thread)
    except BaseException:
        engine.close()
        raise
    return chat
