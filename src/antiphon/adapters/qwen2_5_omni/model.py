"""Qwen2.5-Omni as a conversation model: the thinker hears, sees and writes. Its talker is not built yet.

With a synthesizer what it writes is spoken, sentence by sentence, as a cascade's text is.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import torch

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen2_5_omni.checkpoint import read
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ConversationStream, Synthesizer
from antiphon.engine.api import Engine
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.threads import load_errors
from antiphon.modeling.chat import ChatModel
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.omni.checkpoint import ThinkerParts
from antiphon.modeling.omni.media_encoder import OmniMediaEncoder
from antiphon.pipelines.cascade import Cascade


class Qwen25Omni:
    """A ConversationModel that hears, sees and writes. It takes no turns by itself (`native` is None).

    `folder` holds a checkpoint as it was released. `thinker`: its language model, which also answers by itself in text.
    """

    native = None

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        synthesizer: Synthesizer | None = None,
        parts: ThinkerParts | None = None,
    ) -> None:
        """Load the thinker and start its engine. Waits for a minute and more.

        `synthesizer`: speaks what the thinker writes; it belongs to the caller. `parts`: the loaded parts, where the
        folder's are not to be loaded. Raises ModelError for a checkpoint that does not load.
        """
        device = options.device
        thinker, compute, dtype = load_parts(
            model_id,
            parts or folder,
            options,
            lambda folder, dtype: read(folder, device, dtype),
            lambda parts: (parts.decoder,),
        )
        with load_errors(model_id, folder):
            self.thinker = _chat_model(folder, model_id, thinker, options, compute, dtype)
        self._spoken = Cascade(self.thinker, synthesizer)
        spoken = self._spoken.profile
        assert self.thinker.media_encoder
        window_s = self.thinker.media_encoder.window_s
        self.profile = replace(
            spoken, accepts_media=True, video_window_s=window_s, audio_window_ms=round(1000 * window_s)
        )

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Return a new conversation. Raises Refused where the engine has no room for the conversation's KV."""
        return await self._spoken.open(owner)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engine of the thinker, for whoever watches its thread."""
        return (self.thinker.engine,)

    def close(self) -> None:
        """Stop the engine's thread. Conversations that are still open fail."""
        self.thinker.close()


def _chat_model(
    folder: Path,
    model_id: str,
    thinker: ThinkerParts,
    options: EngineModelOptions,
    compute: torch.dtype,
    dtype: torch.dtype,
) -> ChatModel:
    """The thinker with its template and its media encoder. Raises OSError, ValueError, with no engine left behind."""
    decoder = thinker.decoder
    runner = Runner(
        decoder, torch.device(options.device), compute, dtype, position_axes=3, input_width=decoder.input_width
    )
    words = thinker.tokenizer
    engine = LocalEngine(runner, options.settings, tokenizer=words.backend_tokenizer, observe=options.observe)
    try:
        chat = ChatModel(folder, model_id, engine, words)
        chat.template = ChatTemplate(words, takes_media=True)
        chat.media_encoder = OmniMediaEncoder(folder, thinker.model, thinker.tokenizer, engine.thread)
    except BaseException:
        engine.close()
        raise
    return chat
