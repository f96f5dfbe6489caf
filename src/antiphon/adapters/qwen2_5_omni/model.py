"""Qwen2.5-Omni as a conversation model: the thinker hears, sees and writes, and the talker speaks.

If the checkpoint has no talker or no voices, a synthesizer speaks the thinker's text sentence by sentence, as in a
cascade.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen2_5_omni.checkpoint import VoiceParts, read
from antiphon.adapters.qwen2_5_omni.talker import Talker
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ConversationProfile, ConversationStream, Synthesizer
from antiphon.engine.local.weights import weights_for
from antiphon.engine.threads import load_errors
from antiphon.modeling.omni.conversation import RATE_HZ, OmniModel, OmniStream, ThinkerParts, share_kv, start_engine
from antiphon.modeling.omni.hidden_rows import HiddenRows
from antiphon.pipelines.cascade import Cascade


class Qwen25Omni(OmniModel[Talker]):
    """A ConversationModel. `folder` contains a released checkpoint."""

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        synthesizer: Synthesizer | None = None,
        parts: tuple[ThinkerParts, VoiceParts | None] | None = None,
    ) -> None:
        """Load the checkpoint and start an engine for each of its decoders. Takes a minute or more.

        `synthesizer`: speaks the thinker's text if there is no talker; the caller owns it. `parts`: parts that are
        already loaded; None: they are loaded from the folder. Raises ModelError if the checkpoint does not load.
        """
        device, talker_device = options.device, options.talker_device or options.device
        weights_for(talker_device, options.weights)
        on_cpu = talker_device == "cpu"
        (thinker, talker), compute, dtype = load_parts(
            model_id,
            parts or folder,
            options,
            lambda folder, dtype: read(folder, device, talker_device, dtype),
            # The talker gets int8 weights only on a CPU.
            lambda parts: (parts[0].decoder, *((parts[1].decoder,) if parts[1] and on_cpu else ())),
        )
        settings, talker_settings = share_kv(options.settings) if talker else (options.settings, options.settings)
        words, observe = thinker.tokenizer.backend_tokenizer, options.observe
        with load_errors(model_id, folder):
            engine = start_engine(thinker.decoder, device, compute, dtype, settings, observe, words)
            super().__init__(folder, model_id, thinker, engine)
        self._embed = thinker.model.get_input_embeddings()
        self._spoken = Cascade(self.thinker, None if talker else synthesizer)
        profile = self._spoken.profile
        if talker:
            compute = compute if on_cpu else dtype
            engine = start_engine(talker.decoder, talker_device, compute, dtype, talker_settings, observe)
            self.talker = Talker(talker, self._embed, engine, engine.thread, self.media_encoder.joined)
            profile = ConversationProfile(model_id, RATE_HZ, self.talker.voices)
        self.profile = self.with_media(profile)

    async def open(self, owner: Hashable | None = None) -> ConversationStream:
        """Return a new conversation. The talker's session is opened with the first spoken response.

        Raises Refused if the thinker's engine has no room for the conversation's KV.
        """
        if self.talker is None:
            return await self._spoken.open(owner)
        chat = await self.thinker.open(owner)
        chat.hidden = HiddenRows(self._embed, self._embed.weight.device)
        return OmniStream(self, chat)
