"""What the jobs of a Wyoming connection answer, with scripted models on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from tests.scripted import ScriptedTranscriber, speech
from tests.server.wyoming.harness import WORD_SAMPLES, Client, Port, connect, port

Play = Callable[[Client, Port], Awaitable[None]]


def played(play: Play, **values: Any) -> Port:
    """Play a client against a port, and return the port when it is drained."""

    async def main() -> Port:
        async with port(**values) as served, connect(served) as client:
            await play(client, served)
            return served

    return asyncio.run(main())


def test_when_a_client_asks_what_there_is_then_all_fields_that_it_needs_are_there() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("describe")
        info = await client.until("info")
        (asr,), (tts,), (handle,) = info["asr"], info["tts"], info["handle"]
        for program in (asr, tts, handle, *asr["models"], *tts["voices"], *handle["models"]):
            assert {"name", "attribution", "installed", "description", "version"} <= program.keys()
            assert {"name", "url"} <= program["attribution"].keys()
        assert {v["name"]: v["languages"] for v in tts["voices"]} == {"one": ["de", "en"], "zwei": ["de"]}
        assert not asr["requires_external_vad"]
        assert asr["supports_transcript_streaming"]
        assert tts["supports_synthesize_streaming"]
        assert not handle["supports_home_control"]
        # A satellite would hide all services, and intents are Home Assistant's.
        assert "satellite" not in info
        assert info["intent"] == info["wake"] == []

    played(play)


def test_when_the_client_finds_the_end_then_the_info_says_so() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("describe")
        assert (await client.until("info"))["asr"][0]["requires_external_vad"]

    played(play, wyoming_endpointing="client")


@pytest.mark.parametrize("who", ["server", "client"])
def test_when_the_client_ends_its_audio_then_the_transcript_has_all_of_it(who: str) -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("transcribe", language="en-US")
        client.say("audio-start", rate=16_000, width=2, channels=1, timestamp=0)
        client.sound(speech(1, 6))
        client.say("audio-stop")
        assert await client.until("transcript") == {"text": "w1 w2 w3 w4 w5 w6", "language": "en"}
        assert client.seen.count("transcript-start") <= 1

    played(play, wyoming_endpointing=who)


def test_when_a_client_streams_everything_then_the_pause_ends_the_command() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("transcribe", language="en")
        client.sound(speech(1, 4, silence_frames=80))
        assert (await client.until("transcript"))["text"] == "w1 w2 w3 w4"
        assert {"voice-started", "voice-stopped"} <= set(client.seen)
        # The rest of the stream is ignored, and the next command is another job.
        client.sound(speech(50, 4))
        client.say("audio-stop")
        client.say("transcribe")
        client.sound(speech(7, 3))
        client.say("audio-stop")
        assert (await client.until("transcript"))["text"] == "w7 w8 w9"

    played(play)


def test_when_nobody_speaks_then_the_transcript_is_empty() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("transcribe")
        client.sound(np.zeros(11 * 16_000, np.float32))
        assert await client.until("transcript") == {"text": ""}

    played(play)


@pytest.mark.parametrize("who", ["server", "client"])
def test_when_no_audio_comes_then_the_transcript_is_empty(who: str) -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("transcribe")
        client.say("audio-stop")
        assert await client.until("transcript") == {"text": ""}

    played(play, wyoming_endpointing=who)


def test_when_audio_comes_first_then_the_defaults_hold() -> None:
    async def play(client: Client, _: Port) -> None:
        client.sound(speech(1, 4))
        client.say("audio-stop")
        assert (await client.until("transcript"))["text"] == "w1 w2 w3 w4"

    played(play)


def test_when_data_are_in_the_first_line_then_they_count() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("ping", inline=True, text="inline")
        assert await client.until("pong") == {"text": "inline"}
        client.say("ping")
        assert await client.until("pong") == {}

    played(play)


@pytest.mark.parametrize(("rate", "width", "channels"), [(48_000, 2, 2), (96_000, 3, 2), (32_000, 4, 1)])
def test_when_the_audio_has_another_form_then_it_is_converted(rate: int, width: int, channels: int) -> None:
    async def play(client: Client, _: Port) -> None:
        pcm = np.repeat(speech(1, 4), rate // 16_000)
        samples = (np.repeat(pcm, channels) * 2**31).astype("<i4")
        data = samples.view(np.uint8).reshape(-1, 4)[:, 4 - width :].tobytes()
        for at in range(0, len(data), 24_000):
            client.say("audio-chunk", data[at : at + 24_000], rate=rate, width=width, channels=channels)
        client.say("audio-stop")
        # The resampler's filter rings at the edges of scripted words, so only the words' order is exact.
        text = (await client.until("transcript"))["text"]
        assert [w for w in text.split() if w in ("w1", "w2", "w3", "w4")] == ["w1", "w2", "w3", "w4"]

    played(play)


def test_when_the_transcriber_fails_then_an_error_comes_and_the_connection_closes() -> None:
    async def main() -> None:
        async with port(ScriptedTranscriber(fail=2)) as served, connect(served) as client:
            client.sound(speech(1, 4))
            client.say("audio-stop")
            assert (await client.until("error"))["code"] == "model_failed"
            assert await client.closed()

    asyncio.run(main())


def test_when_a_text_is_spoken_then_its_audio_is_between_start_and_stop() -> None:
    async def play(client: Client, served: Port) -> None:
        client.say("synthesize", text="Hallo Welt.", voice={"name": "zwei"})
        assert await client.until("audio-start") == {"rate": 24_000, "width": 2, "channels": 1}
        num_bytes = 0
        while (event := await client.read()) and event.kind == "audio-chunk":
            num_bytes += len(event.payload)
        assert event
        assert event.kind == "audio-stop"
        assert num_bytes == 2 * 2 * WORD_SAMPLES
        assert served.voice.spoken == [("zwei", "Hallo Welt.")]

    played(play)


def test_when_a_text_is_streamed_and_comes_twice_then_it_is_spoken_once() -> None:
    async def play(client: Client, served: Port) -> None:
        client.say("synthesize-start", voice={"language": "en"})
        client.say("synthesize-chunk", text="The light is on. Any")
        # The first sentence sounds before the text is complete.
        await client.until("audio-chunk")
        client.say("synthesize-chunk", text="thing else?")
        client.say("synthesize", text="The light is on. Anything else?")
        client.say("synthesize-stop")
        await client.until("synthesize-stopped")
        assert client.seen.count("audio-start") == client.seen.count("audio-stop") == 1
        assert " ".join(text for _, text in served.voice.spoken) == "The light is on. Anything else?"
        # The connection may do another job.
        client.say("synthesize", text="Yes.")
        await client.until("audio-stop")

    played(play)


def test_when_there_is_nothing_to_say_then_the_stream_still_ends() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("synthesize-start")
        client.say("synthesize-stop")
        await client.until("synthesize-stopped")
        assert client.seen == ["audio-start", "audio-stop", "synthesize-stopped"]

    played(play)


@pytest.mark.parametrize(
    ("data", "code"),
    [
        ({"text": "Hi.", "voice": {"name": "nobody"}}, "voice_not_found"),
        ({"text": "Hi.", "voice": {"language": "fr"}}, "invalid_value"),
        ({"text": "<speak/>", "text_format": "ssml"}, "unsupported_text"),
        ({"text": "fail."}, "not_spoken"),
        ({"text": "x" * 600_000}, "too_much_text"),
        ({"text": 7}, "invalid_event"),
    ],
)
def test_when_a_text_cannot_be_spoken_then_the_error_says_why(data: dict[str, Any], code: str) -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("synthesize", **data)
        error = await client.until("error")
        assert error["code"] == code
        assert error["text"]
        assert await client.closed()

    played(play)


def test_when_a_text_is_asked_then_the_answer_continues_its_conversation() -> None:
    async def play(client: Client, served: Port) -> None:
        context = {"conversation_id": "c1", "device_id": "d"}
        client.say("transcript", text="first question", language="en", context=context)
        assert await client.until("handled") == {"text": "2 first question", "context": context}
        assert client.seen[0] == "handled-start"
        assert "handled-chunk" in client.seen
        client.say("transcript", text="second", context=context)
        assert (await client.until("handled"))["text"] == "4 second"
        client.say("transcript", text="third", context={"conversation_id": "c2"})
        assert (await client.until("handled"))["text"] == "2 third"
        client.say("transcript", text="fail", context=context)
        assert "text" in await client.until("not-handled")
        client.say("recognize", text="turn on the light")
        await client.until("not-recognized")

    played(play)


def test_when_a_client_begins_another_job_then_the_unfinished_one_ends() -> None:
    async def play(client: Client, _: Port) -> None:
        client.say("transcribe")
        client.sound(speech(1, 2))
        client.say("synthesize", text="Yes.")
        await client.until("audio-stop")
        assert "transcript" not in client.seen

    played(play)
