"""The contract of synthesizers: hibari and a small Piper voice in this process, and hibari on another antiphon over
real sockets.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from antiphon.adapters.hibari.synthesizer import Hibari
from antiphon.adapters.piper.synthesizer import Piper
from antiphon.adapters.spec import LaneModelOptions
from antiphon.audio import Pcm
from antiphon.contracts import SpeechChunk, Synthesizer, Urgency, VoiceOptions
from antiphon.loading.loader import prepare, store_of
from antiphon.loading.selection import SPEECH_ROLES, selected_models
from antiphon.pipelines.reading import ReadingVoice
from antiphon.remote.address import parse_address
from antiphon.remote.synthesizer.synthesizer import RemoteSynthesizer
from antiphon.settings import RemoteSettings
from antiphon.settings import load as load_settings
from tests.adapters.tiny_piper import write_voice
from tests.server.scripted import Echo, scripted_models, serving

LIMIT_S = 60
TEXT = "Hello there, how are you today? It is 5 °C."
# The forms in which another server speaks: what follows its URL, and the settings.
REMOTE: dict[str, tuple[str, dict[str, Any]]] = {
    "a WAV": ("http{}/v1", {}),
    "samples": ("http{}/v1/audio/speech", {"synthesizer_format": "pcm"}),
    "events": ("http{}/v1", {"synthesizer_format": "sse"}),
    "a WebSocket": ("ws{}/v1/audio/speech/stream", {}),
}


@pytest.fixture(scope="module")
def local() -> Iterator[ReadingVoice]:
    settings = load_settings({}, os.environ)
    (source,) = selected_models(settings, SPEECH_ROLES)
    loaded = Hibari(prepare(settings, store_of(settings.models), source), source.id, LaneModelOptions(workers=1))
    yield ReadingVoice(loaded)
    loaded.lane.close()


@pytest.fixture(scope="module")
def piper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReadingVoice]:
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng (Debian)")
    folder = tmp_path_factory.mktemp("piper")
    write_voice(folder, "en_US-tiny-medium", rate_hz=22_050, inference={"length_scale": 4})
    loaded = Piper(folder, "piper", LaneModelOptions(workers=1))
    yield ReadingVoice(loaded)
    loaded.lane.close()


@pytest.fixture(scope="module")
def server(local: ReadingVoice) -> Iterator[str]:
    """Yield the address of another antiphon that speaks with hibari, without its scheme."""
    models = replace(scripted_models(Echo()), synthesizer=local, names=(local.profile.id,))
    with serving(models=models) as (url, _, _):
        yield url.removeprefix("ws")


@pytest.fixture(params=["hibari", "piper", *REMOTE])
def voice(request: pytest.FixtureRequest, local: ReadingVoice) -> Synthesizer:
    if request.param == "hibari":
        return local
    if request.param == "piper":
        piper: ReadingVoice = request.getfixturevalue("piper")
        return piper
    url, given = REMOTE[request.param]
    server = request.getfixturevalue("server")
    address = parse_address(f"{url.format(server)}#{local.profile.id}", "--synthesizer", schemes=("http", "ws"))
    return ReadingVoice(RemoteSynthesizer(address, "", (), RemoteSettings(**given)))


@pytest.fixture
def same(voice: Synthesizer, local: ReadingVoice) -> ReadingVoice:
    """The voice in this process that is the same."""
    return voice if isinstance(voice, ReadingVoice) and voice.profile.id != local.profile.id else local


async def chunks_of(voice: Synthesizer, text: str = TEXT, **options: Any) -> list[SpeechChunk]:
    chosen = VoiceOptions(voice.profile.voices[0], seed=0, **options)
    async with aclosing(voice.speak(text, chosen, lambda: Urgency.FINAL)) as chunks:
        return [chunk async for chunk in chunks]


def spoken(voice: Synthesizer, text: str = TEXT, **options: Any) -> Pcm:
    return np.concatenate([chunk.pcm for chunk in run(chunks_of(voice, text, **options))])


def run(use: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(use, LIMIT_S))


def test_its_facts_are_those_of_the_model(voice: Synthesizer, same: ReadingVoice) -> None:
    assert voice.profile.id == same.profile.id
    assert voice.profile.sample_rate_hz == same.profile.sample_rate_hz
    assert voice.profile.voices == same.profile.voices
    assert voice.profile.languages == same.profile.languages


def test_a_text_is_spoken_in_chunks(voice: Synthesizer, same: ReadingVoice) -> None:
    chunks = run(chunks_of(voice))
    assert len(chunks) > 2
    assert all(chunk.pcm.dtype == np.float32 and chunk.pcm.ndim == 1 for chunk in chunks)
    np.testing.assert_allclose(np.concatenate([chunk.pcm for chunk in chunks]), spoken(same), atol=1e-4)


def test_a_tempo_within_its_range_changes_the_length(voice: Synthesizer) -> None:
    if voice.profile.speeds[1] >= 2.0:
        assert len(spoken(voice, speed=2.0)) == pytest.approx(len(spoken(voice)) / 2, rel=0.15)


def test_closing_ends_the_text_and_the_next_one_is_whole(voice: Synthesizer, same: ReadingVoice) -> None:
    async def cut() -> Pcm:
        chunks = voice.speak(TEXT * 20, VoiceOptions(voice.profile.voices[0], seed=0), lambda: Urgency.FINAL)
        await anext(chunks)
        await chunks.aclose()
        return np.concatenate([chunk.pcm for chunk in await chunks_of(voice)])

    np.testing.assert_allclose(run(cut()), spoken(same), atol=1e-4)


def test_texts_are_spoken_at_the_same_time(voice: Synthesizer, same: ReadingVoice) -> None:
    async def both() -> list[list[SpeechChunk]]:
        return list(await asyncio.gather(*(chunks_of(voice, text) for text in ("Good morning.", "Good night."))))

    first, second = run(both())
    for chunks, text in ((first, "Good morning."), (second, "Good night.")):
        np.testing.assert_allclose(np.concatenate([c.pcm for c in chunks]), spoken(same, text), atol=1e-4)


def test_a_text_without_words_has_no_audio(voice: Synthesizer) -> None:
    assert not run(chunks_of(voice, "…")) or not spoken(voice, "…").any()
