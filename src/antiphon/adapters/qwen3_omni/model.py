"""Qwen3-Omni as a conversation model. A checkpoint without a talker returns text only."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path

from antiphon.adapters.parts import load_parts
from antiphon.adapters.qwen3_omni.checkpoint import TalkerParts, read
from antiphon.adapters.qwen3_omni.talker import OmniTalker
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import ConversationProfile
from antiphon.engine.local.weights import weights_for
from antiphon.engine.threads import load_errors
from antiphon.modeling.omni.conversation import RATE_HZ, OmniModel, OmniStream, ThinkerParts, share_kv, start_engine


class Qwen3Omni(OmniModel[OmniTalker]):
    """A ConversationModel. `folder` contains a released checkpoint."""

    taps_media = True

    def __init__(
        self,
        folder: Path,
        model_id: str,
        options: EngineModelOptions,
        *,
        parts: tuple[ThinkerParts, TalkerParts | None] | None = None,
    ) -> None:
        """Load the checkpoint and start an engine for each of its decoders. Takes a minute or more.

        int8 weights are refused, because the model is a mixture of experts. `parts`: parts that are already loaded;
        None: they are loaded from the folder. Raises ModelError if the checkpoint does not load.
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
        settings, talker_settings = share_kv(options.settings)
        words, observe = thinker.tokenizer.backend_tokenizer, options.observe
        with load_errors(model_id, folder):
            engine = start_engine(thinker.decoder, device, dtype, dtype, settings, observe, words)
            super().__init__(folder, model_id, thinker, engine)
        if talker:
            engine = start_engine(talker.decoder, talker_device, dtype, dtype, talker_settings, observe)
            embed, graphs = thinker.model.get_input_embeddings(), talker_settings.graphs
            self.talker = OmniTalker(talker, embed, engine, engine.thread, graphs=graphs)
        voices = self.talker.voices if self.talker else ()
        self.profile = self.with_media(ConversationProfile(model_id, RATE_HZ, voices))

    async def open(self, owner: Hashable | None = None) -> OmniStream:
        """Return a new conversation. The talker's session is opened with the first spoken response.

        Raises Refused if the thinker's engine has no room for the conversation's KV.
        """
        return OmniStream(self, await self.thinker.open(owner))
