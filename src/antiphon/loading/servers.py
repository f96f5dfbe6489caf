"""Connects to models on other servers (`URL#MODEL`), and finds the pools of servers that loaded models use."""

from __future__ import annotations

from functools import partial
from typing import Any

from antiphon.contracts import ConversationModel, LanguageModel, Synthesizer
from antiphon.loading.placement import remote_key
from antiphon.loading.selection import RemoteModel
from antiphon.pipelines.cascade import Cascade
from antiphon.pipelines.fallback import ConversationWithFallback, VoiceWithFallback, whole_audio
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
        return RemoteSynthesizer(model.address, key, settings.speech.voices, settings.remote)
    if model.role == "transcriber":
        return RemoteTranscriber(model.address, key, settings.remote)
    return RemoteLanguageModel(model.address, key, settings.remote, settings.engine.context_tokens)


def pools_of(model: Any) -> list[Pool[Any]]:
    """Return the pools of servers that a loaded model uses: its own and its engines'. Empty for most models."""
    owners = [model, *getattr(model, "engines", ()), getattr(model, "native", None)]
    return [pool for owner in owners if isinstance(pool := getattr(owner, "pool", None), Pool)]


def voice_with_fallback(remote: Synthesizer, voice: Synthesizer) -> Synthesizer:
    """Combine a voice on other servers with the one of this process, if it is another one."""
    return remote if voice is remote else VoiceWithFallback(remote, voice)


def with_fallback(
    settings: Settings, partner: ConversationModel, language: LanguageModel | None, voice: Synthesizer | None
) -> ConversationModel:
    """Return a conversation model with what continues while its servers fail. A model of this process needs nothing.

    Args:
        settings: Whether there is a fallback, and the line that is spoken after a failure.
        partner: The conversation model.
        language: The language model of the fallback.
        voice: The voice of the fallback, which also speaks the line.
    """
    line, native = settings.speech.failure_line, getattr(partner, "native", None)
    is_remote = isinstance(partner, RemoteConversationModel)
    if isinstance(native, RemoteNativeModel):
        is_remote, native.has_fallback = True, settings.remote.fallback and language is not None
        if voice:
            native.say = partial(whole_audio, voice, rate_hz=native.profile.sample_rate_hz)
    if is_remote and settings.remote.fallback and language:
        return ConversationWithFallback(partner, Cascade(language, voice, line), line)
    return partner
