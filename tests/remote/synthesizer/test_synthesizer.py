"""A voice on another server, on a real socket: the forms of its audio, faults in every phase, and its voices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from antiphon.audio.wav import wav_header
from antiphon.contracts import Urgency, VoiceOptions
from antiphon.errors import ModelError, Refused, RemoteError
from antiphon.remote.address import parse_address
from antiphon.remote.breaker import FAILURES_TO_OPEN
from antiphon.remote.sse import MAX_EVENT_BYTES
from antiphon.remote.synthesizer.synthesizer import CHUNK_S, RemoteSynthesizer
from antiphon.settings import RemoteSettings
from tests.remote.chat.scripted_server import Answer, Script, ScriptedServer, fails, hangs, scripted_server
from tests.remote.synthesizer.scripted_voice import (
    RATE_HZ,
    SAMPLES,
    TONE,
    base64,
    lists,
    speaks,
    tells,
    wav,
)

KEY, LIMIT_S = "sk-not-to-be-seen", 30
VOICE = VoiceOptions("default")
Use = Callable[[RemoteSynthesizer, ScriptedServer], Awaitable[Any]]


def asked(
    *scripts: Script,
    use: Use,
    listing: Script | None = None,
    first_s: float = 20.0,
    voices: tuple[str, ...] = (),
    **given: Any,
) -> Any:
    """Run `use` with a voice at a server that follows these scripts."""

    async def main() -> Any:
        async with scripted_server(*scripts) as server:
            server.voices = listing or server.voices
            remote = RemoteSettings(remote_answer_s=first_s, remote_token_s=0.3, **given)
            address = parse_address(f"{server.url}#clever", "--synthesizer")
            voice = await asyncio.to_thread(RemoteSynthesizer, address, KEY, voices, remote)
            return await use(voice, server)

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


async def spoken(voice: RemoteSynthesizer, text: str = "Good morning.", options: VoiceOptions = VOICE) -> np.ndarray:
    async with aclosing(voice.speak(text, options, lambda: Urgency.FINAL)) as chunks:
        return np.concatenate([chunk.pcm async for chunk in chunks])


FORMS: dict[str, tuple[Script, dict[str, Any]]] = {
    "a streamed WAV": (wav, {}),
    "a WAV without a content type": (speaks("application/octet-stream", wav_header(RATE_HZ) + SAMPLES), {}),
    "samples": (speaks("audio/pcm", SAMPLES[:1], SAMPLES[1:]), {"synthesizer_format": "pcm"}),
    "samples with a rate": (speaks("audio/L16; rate=24000; channels=1", SAMPLES), {"synthesizer_rate": 24000}),
    "OpenAI's events": (
        tells(
            {"type": "speech.audio.delta", "audio": base64(SAMPLES[:100])},
            {"type": "speech.audio.delta", "audio": base64(SAMPLES[100:])},
            {"type": "speech.audio.done", "usage": {"input_tokens": 1}},
        ),
        {"synthesizer_format": "sse"},
    ),
    "SGLang-Omni's events": (
        tells(
            {"object": "audio.speech.chunk", "audio": {"data": base64(wav_header(RATE_HZ, 1000) + SAMPLES[:1000])}},
            {"object": "audio.speech.chunk", "audio": {"data": base64(wav_header(RATE_HZ, 3800) + SAMPLES[1000:])}},
            {"object": "audio.speech.chunk", "audio": None, "finish_reason": "stop"},
            "[DONE]",
        ),
        {},
    ),
    "an event that is larger than those of text": (
        tells(
            {"type": "speech.audio.delta", "audio": base64(SAMPLES * (MAX_EVENT_BYTES // len(SAMPLES)))},
            {"type": "speech.audio.done"},
        ),
        {"synthesizer_format": "sse"},
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_audio_arrives_in_every_form(form: str) -> None:
    script, settings = FORMS[form]

    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        pcm = await spoken(voice, "A long text. " * 10)
        np.testing.assert_allclose(pcm, np.tile(TONE, len(pcm) // len(TONE)), atol=1e-4)
        request = server.asked[0]
        assert (request.path, request.body["model"]) == ("/v1/audio/speech", "clever")
        assert request.headers["authorization"] == f"Bearer {KEY}"
        assert "voice" not in request.body

    asked(script, use=use, **settings)


def test_the_rate_in_a_header_or_a_content_type_counts() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        for _ in range(3):
            assert len(await spoken(voice)) == pytest.approx(2 * len(TONE), abs=2)

    half = [
        speaks("audio/wav", wav_header(RATE_HZ // 2) + SAMPLES),
        speaks("audio/pcm;rate=12000", SAMPLES),
        speaks("audio/pcm", SAMPLES, x_sample_rate="12000"),
    ]
    asked(*half, use=use)


async def half_a_wav(answer: Answer) -> None:
    await answer.head(200, "audio/wav")
    await answer.raw(wav_header(RATE_HZ, len(SAMPLES)) + SAMPLES[:-100])


async def stops(answer: Answer) -> None:
    await answer.head(200, "audio/pcm")
    await answer.raw(SAMPLES)
    await answer.gone.wait()


async def endless(answer: Answer) -> None:
    await answer.head(200, "audio/pcm")
    while not answer.gone.is_set():
        await answer.raw(SAMPLES * 50)


async def closes(answer: Answer) -> None:
    answer.writer.close()


async def garbage(answer: Answer) -> None:
    await answer.raw(b"\x00\x01 this is no HTTP\r\n\r\n")


# The faults, with the words of the errors. After the last ones, audio was heard, so they are not tried again.
BEFORE = {
    "closes": (closes, "the voice's server"),
    "hangs": (hangs, "gave no answer within"),
    "garbage": (garbage, "the voice's server"),
    "fails": (fails(500), "status 500"),
    "a redirect": (fails(302, location="http://127.0.0.1:1/"), "status 302"),
    "a page": (speaks("text/html", b"<h1>Welcome</h1>"), "text/html instead of audio"),
    "JSON": (speaks("application/json", b"{}"), "application/json instead of audio"),
    "MP3": (speaks("audio/mpeg", b"\xff\xfb" * 100), "audio/mpeg"),
    "MP3 without a content type": (speaks("", b"ID3\4" + bytes(100)), "MP3"),
    "no audio": (speaks("audio/pcm"), "no audio"),
    "a header without audio": (speaks("audio/wav", wav_header(RATE_HZ)), "no audio"),
    "a compressed answer": (speaks("audio/pcm", SAMPLES, content_encoding="gzip"), "compresses"),
    "a wrong rate": (speaks("audio/wav", wav_header(1_000_000) + SAMPLES), "1000000 Hz"),
    "an error event": (tells({"type": "error", "error": {"message": "out of memory"}}), "out of memory"),
    "a broken event": (tells("{{{"), "no valid event"),
    "no base64": (tells({"type": "speech.audio.delta", "audio": "?"}), "no valid base64"),
}
AFTER = {
    "stops": (stops, "was silent for"),
    "half a WAV": (half_a_wav, "100 bytes before the end"),
    "is cut off": (speaks("audio/pcm", SAMPLES, complete=False), "the voice's server"),
    "ends its events": (tells({"type": "speech.audio.delta", "audio": base64(SAMPLES)}), "ended in the middle"),
    "never ends": (endless, "more audio than the text can take"),
}


@pytest.mark.parametrize("fault", BEFORE)
def test_a_fault_before_the_first_sound_is_tried_again_once(fault: str) -> None:
    script, why = BEFORE[fault]
    first_s = 0.4 if fault == "hangs" else 20.0

    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        assert len(server.asked) == 2
        server.begin([script])
        with pytest.raises(RemoteError, match=why) as error:
            await spoken(voice)
        assert KEY not in str(error.value)
        assert len(server.asked) == 2
        assert voice.pool.is_away

    asked(script, wav, use=use, first_s=first_s)


@pytest.mark.parametrize("fault", AFTER)
def test_a_fault_after_the_first_sound_ends_the_text(fault: str) -> None:
    script, why = AFTER[fault]

    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        with pytest.raises(RemoteError, match=why):
            await spoken(voice)
        assert len(server.asked) == 1
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)

    asked(script, wav, use=use)


def test_a_server_that_has_no_room_is_asked_again_after_a_short_pause_only() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        np.testing.assert_allclose(await spoken(voice), TONE, atol=1e-4)
        with pytest.raises(Refused) as refused:
            await spoken(voice)
        assert refused.value.retry_after_s == 20
        assert len(server.asked) == 3
        with pytest.raises(Refused):
            await spoken(voice)
        assert len(server.asked) == 3

    asked(fails(429, retry_after="0"), wav, fails(503, retry_after="20"), use=use)


def test_a_server_that_fails_again_and_again_is_left_alone() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        for _ in range(FAILURES_TO_OPEN):
            with pytest.raises(RemoteError):
                await spoken(voice)
        count = len(server.asked)
        with pytest.raises(Refused):
            await spoken(voice)
        assert len(server.asked) == count

    asked(closes, use=use)


def test_a_key_or_a_voice_that_is_not_accepted_is_told_and_not_tried_again() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        for why in ("does not accept the key", "there is no voice zoe"):
            with pytest.raises(ModelError, match=why):
                await spoken(voice)
        assert len(server.asked) == 2

    asked(fails(401), fails(400, "there is no voice zoe"), use=use)


def test_a_field_that_a_server_does_not_know_is_left_out_from_then_on() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        for _ in range(2):
            await spoken(voice)
        bodies = [request.body for request in server.asked]
        assert ["stream" in body for body in bodies] == [True, False, False, False]
        assert ["stream_format" in body for body in bodies] == [True, True, False, False]

    refusals = [fails(400, "Unknown parameter: 'stream'."), fails(422, "stream_format: extra fields not permitted")]
    asked(*refusals, wav, use=use)


def test_closing_ends_the_work_at_the_server_at_once() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        chunks = voice.speak("Good morning.", VOICE, lambda: Urgency.FINAL)
        chunk = await anext(chunks)
        assert 0 < len(chunk.pcm) <= CHUNK_S * RATE_HZ
        since_s = time.monotonic()
        await chunks.aclose()
        await server.client_left()
        assert time.monotonic() - since_s < LIMIT_S / 10
        assert voice.pool.all[0].running == 0

    asked(endless, use=use)


VOICE_LISTS = {
    "names": {"voices": ["alba", "bo"]},
    "objects": {"voices": [{"id": "alba", "name": "Alba"}, {"id": "bo", "name": "Bo"}]},
    "a bare list": [{"voice_id": "alba"}, {"name": "bo"}, {"no": "name"}, 7],
}


@pytest.mark.parametrize("form", VOICE_LISTS)
def test_voices_are_those_that_the_server_lists(form: str) -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        assert voice.profile.voices == ("alba", "bo")
        await spoken(voice, options=VoiceOptions("bo"))
        assert server.asked[0].body["voice"] == "bo"

    asked(wav, use=use, listing=lists(VOICE_LISTS[form]))


def test_named_voices_come_first_and_have_to_be_listed() -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        assert voice.profile.voices == ("bo", "alba")
        assert voice.profile.languages == ("en", "de")

    listing = lists({"voices": [{"id": "alba", "languages": ["en"]}, {"id": "bo", "languages": ["de", "English"]}]})
    asked(wav, use=use, listing=listing, voices=("bo",))
    with pytest.raises(ModelError, match="has no zoe; it has alba, bo"):
        asked(wav, use=use, listing=listing, voices=("zoe",))


def test_a_key_that_is_not_accepted_or_a_server_that_is_not_there_is_told_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def use(voice: RemoteSynthesizer, server: ScriptedServer) -> None:
        pytest.fail("it was built")

    with pytest.raises(ModelError, match="does not accept the key"):
        asked(wav, use=use, listing=fails(401))
    address = parse_address("http://127.0.0.1:9/v1#tts-1", "--synthesizer")
    voice = RemoteSynthesizer(address, "", (), RemoteSettings())
    assert voice.pool.is_away
    assert voice.profile.voices == ("default",)
    assert "does not list its voices" in caplog.text
