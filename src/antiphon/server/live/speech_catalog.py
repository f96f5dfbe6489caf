"""The voices and languages that a request for speech may name: the synthesizer's, and the caller's uploaded voices.

Also fetches a voice's audio if a request names it by a URL.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from antiphon.events.speech import SpeechConfig, VoiceSample
from antiphon.protocols.model_names import ModelNames
from antiphon.protocols.speech.fields import MAX_SAMPLE_BYTES, SpeechCatalog
from antiphon.server.credentials import Caller
from antiphon.server.state import ServerState
from antiphon.shares.fair_cache import FairCache
from antiphon.shares.places import current_owner
from antiphon.store.voices import VoiceStore

# Cached files of recently used voices, each of at most 10 MB.
_samples = FairCache[tuple[Path, int], bytes](4)


def speech_catalog(state: ServerState, caller: Caller) -> SpeechCatalog:
    """Return the catalog of a caller. It also finds voices that the caller's key uploads later.

    Use the catalog in a thread: looking up an uploaded voice reads files. Raises LookupError if no synthesizer is
    loaded, and Refused while models load and while the server drains.
    """
    store, loop = state.uploaded_voices(caller), asyncio.get_running_loop()

    def log_alias(name: str, model: str) -> None:
        # The catalog is used in a thread, but the state belongs to the event loop.
        loop.call_soon_threadsafe(state.log_alias, name, model)

    profile = state.loaded().required_synthesizer.profile
    return SpeechCatalog(
        ModelNames((profile.id,), strict=state.settings.server.strict_models),
        profile.voices,
        profile.languages,
        profile.clones_voices,
        lambda name: _uploaded(store, name, with_audio=profile.clones_voices),
        state.fetcher.check,
        log_alias,
        profile.tasks,
        profile.parameters,
    )


async def with_sample(state: ServerState, config: SpeechConfig) -> SpeechConfig:
    """Return the configuration with the audio of its voice fetched, if the voice is given by a URL.

    Waits for the other server. Raises RemoteProtocolError that names `ref_audio`, as `Fetcher.audio` does.
    """
    sample = config.sample
    if sample is None or not sample.url:
        return config
    audio = await state.fetcher.audio(sample.url, "ref_audio", MAX_SAMPLE_BYTES)
    return replace(config, sample=replace(sample, audio=audio, url=""))


def _uploaded(store: VoiceStore, name: str, *, with_audio: bool) -> VoiceSample | None:
    """Read an uploaded voice from its files, with its audio only if the synthesizer clones voices."""
    voice = store.get(name)
    if voice is None:
        return None
    path = store.sample(name) if with_audio else None
    sample = _sample(path, path.stat().st_mtime_ns) if path else b""
    return VoiceSample(sample, voice.ref_text, voice.embedding)


def _sample(path: Path, mtime_ns: int) -> bytes:
    """Return a voice's file of at most 10 MB, from the cache if possible. `mtime_ns` changes when it is replaced."""
    owner, key = current_owner.get(), (path, mtime_ns)
    sample = _samples.get(owner, key)
    if sample is None:
        sample = path.read_bytes()
        _samples.put(owner, key, sample)
    return sample
