"""Connects to models on other servers (`URL#MODEL`), and finds the pools of servers that loaded models use."""

from __future__ import annotations

from typing import Any

from antiphon.loading.placement import remote_key
from antiphon.loading.selection import RemoteModel
from antiphon.pipelines.native_conversation import NativeConversationModel
from antiphon.remote.chat.language import RemoteLanguageModel
from antiphon.remote.conversation.model import RemoteConversationModel
from antiphon.remote.conversation.native import RemoteNativeModel
from antiphon.remote.pool import Pool
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.settings import Settings


def remote_model(settings: Settings, model: RemoteModel) -> Any:
    """Connect to the servers of a model, and return an implementation of its role's contract, which has a `pool`.

    Takes up to some seconds, because the servers are asked what they are. Raises SettingsError for an invalid address
    or an unreadable key file, and ModelError if the servers do not accept the key or do not serve the model.
    """
    key = remote_key(settings, model.role)
    if model.is_native:
        native = RemoteNativeModel(model.address, key, settings.remote, settings.speech.failure_line)
        return NativeConversationModel(native)
    if model.role == "conversation_model":
        return RemoteConversationModel(model.address, key, settings.remote)
    if model.role == "synthesizer":
        return RemoteSynthesizer(model.address, key, settings.speech, settings.remote)
    if model.role == "transcriber":
        return RemoteTranscriber(model.address, key, settings.remote)
    return RemoteLanguageModel(model.address, key, settings.remote, settings.engine.context_tokens)


def pools_of(model: Any) -> list[Pool[Any]]:
    """Return the pools of servers that a loaded model uses: its own and its engines'. Empty for most models."""
    owners = [model, *getattr(model, "engines", ()), getattr(model, "native", None)]
    return [pool for owner in owners if isinstance(pool := getattr(owner, "pool", None), Pool)]
