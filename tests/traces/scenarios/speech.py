"""Text to speech: /v1/audio/speech/stream over a WebSocket, and over REST."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Frame, Socket, Stage, scenario

URL = "/v1/audio/speech/stream"


async def opened(stage: Stage, **config: Any) -> Socket:
    """A speech stream with this configuration."""
    socket = await stage.connect(URL)
    await socket.say("session.config", **config)
    return socket


@scenario()
async def speech_stream(stage: Stage) -> None:
    """Text in pieces, a file a sentence; two utterances."""
    socket = await opened(stage, model="tts-1", voice="alloy")
    for text in ("Hello the", "re. How are y", "ou? I am", " fine"):
        await socket.say("input.text", text=text)
        await stage.wait(0.05)
    await socket.say("input.done")
    assert (await socket.until("session.done"))["total_sentences"] == 3
    starts = socket.of("audio.start")
    assert [f["sentence_text"] for f in starts] == ["Hello there.", "How are you?", "I am fine"]
    await socket.say("session.config", voice="two", response_format="pcm", split_granularity="clause")
    await socket.say("input.text", text="First this, then that; and the end.")
    await socket.say("input.done")
    await socket.until("session.done")
    await socket.say("session.close")
    await socket.end()
    assert socket.kinds.count("binary") >= 4


@scenario()
async def speech_stream_words(stage: Stage) -> None:
    """Sound as it is made, with word times; a unit an utterance."""
    socket = await opened(stage, response_format="pcm", stream_audio=True, word_timestamps=True)
    await socket.say("input.text", text="One two three. Four.")
    await socket.say("input.done")
    await socket.until("session.done")
    last = [f for f in socket.of("audio.chunk") if f["timestamps"]]
    assert [w["word"] for f in last for w in f["timestamps"]] == ["One", "two", "three.", "Four."]
    await socket.say("session.config", response_format="pcm", stream_audio=True, split_granularity="none", seed=7)
    await socket.say("input.text", text="Five six. Seven.")
    await socket.say("input.done")
    await socket.until("session.done")


@scenario()
async def speech_stream_cancel(stage: Stage) -> None:
    socket = await opened(stage, response_format="pcm", stream_audio=True)
    await socket.say("input.cancel")
    await socket.say("input.text", text="A sentence of a few words to be stopped. Another that is never begun. ")
    await socket.until("audio.start")
    await stage.wait(0.06)
    await socket.say("input.cancel")
    assert (await socket.until("session.done"))["cancelled"] is True
    await socket.say("input.text", text="Afterwards.")
    await socket.say("input.done")
    await socket.until("session.done")
    assert [f.get("cancelled", False) for f in socket.of("audio.done")] == [True, False]


@scenario(speech={"config_timeout_s": 2.0, "idle_timeout_s": 3.0})
async def speech_stream_errors(stage: Stage) -> None:
    socket = await opened(stage)
    await socket.say("input.text", text="This is bad. And foreign. But this is fine.")
    await socket.say("input.done")
    done = await socket.until("session.done")
    assert done["total_sentences"] == 3
    assert [bool(f["error"]) for f in socket.of("audio.done")] == [True, True, False]
    wrong: list[Any] = [
        {"type": "boo"},
        {"type": "input.text"},
        {"type": "input.text", "text": 1},
        {"type": "session.config", "voice": "nobody"},
        {"type": "session.config", "response_format": "mp7"},
        {"type": "session.config", "stream_audio": True, "response_format": "wav"},
        {"type": "session.config", "word_timestamps": True},
        {"type": "session.config", "speed": 9},
        {"type": "session.config", "language": "tlh"},
        {"type": "session.config", "ref_audio": "AAAA"},
        {"type": "session.config", "task_type": "Base"},
        [],
    ]
    for event in wrong:
        await socket.send(event)
    await socket.send("{")
    await socket.send(b"\x00")
    assert len(socket.of("error")) >= len(wrong)
    await socket.end()
    first: Frame
    for first in ({"type": "input.text", "text": "x"}, {"type": "session.config", "voice": "nobody"}):
        other = await stage.connect(URL)
        await other.send(first)
        await other.end()
        assert other.of("error")
    silent = await stage.connect(URL)
    await silent.end()


@scenario()
async def speech_stream_resume(stage: Stage) -> None:
    """The connection breaks within an utterance: what was missed comes again; binary frames count without saying so."""
    socket = await stage.connect(f"{URL}?resume=1")
    created = await socket.until("session.created")
    await socket.say("session.config", response_format="pcm", stream_audio=True)
    await socket.say("input.text", text="One two three four five. Six seven eight nine ten.")
    await socket.until("audio.start")
    await stage.wait(0.1)
    await socket.leave(1006)
    await stage.wait(1)
    again = await stage.connect(f"{URL}?resume={created['session_id']}")
    await again.say(
        "session.resume",
        session_id=created["session_id"],
        resume_token=created["resume_token"],
        last_received_server_event_seq=2,
    )
    await again.until("session.resumed")
    await again.say("input.done")
    await again.until("session.done")
    await again.say("session.event_ack", server_event_seq=6)
    wrong = await stage.connect(f"{URL}?resume={created['session_id']}")
    await wrong.say("session.resume", session_id=created["session_id"], resume_token="x", event_id="mine")
    await wrong.end()
    assert len([f for f in again.seen if isinstance(f, bytes)]) == 9


@scenario()
async def speech_rest(stage: Stage) -> None:
    url = "/v1/audio/speech"
    asked = {"model": "tts-1", "input": "Hello there. How are you?", "voice": "one"}
    wav = await stage.request("POST", url, asked | {"response_format": "wav"})
    assert wav.body[:4] == b"RIFF"
    pcm = await stage.request("POST", url, asked | {"response_format": "pcm"})
    assert len(pcm.body) == 5 * 14_400
    await stage.request("POST", url, asked | {"response_format": "wav", "stream": True, "voice": {"id": "two"}})
    events = asked | {"response_format": "pcm", "stream_format": "sse", "word_timestamps": True}
    sse = (await stage.request("POST", url, events)).events
    assert sse[-1]["type"] == "speech.audio.done"
    assert [w["word"] for w in sse[-1]["words"]] == ["Hello", "there.", "How", "are", "you?"]
    for wrong in (
        {"input": ""},
        {"input": "x" * 5000},
        {"voice": "nobody"},
        {"response_format": "mp7"},
        {"speed": 9},
        {"stream_format": "smoke"},
        {"model": "nobody"},
        {"input": "bad"},
        {"input": "foreign"},
        {"ref_audio": "AAAA"},
    ):
        refused = await stage.request("POST", url, asked | {"response_format": "pcm"} | wrong)
        assert refused.status >= 400
    # What fails once sound was sent is broken off.
    broken = await stage.request("POST", url, asked | {"response_format": "pcm", "input": "this is bad"})
    assert (broken.status, broken.broken) == (200, True)
    await stage.request("POST", url, body=b"{")
    items = [{"input": "One."}, {"input": "this is bad", "voice": "two"}, {"input": "Two.", "word_timestamps": True}]
    batch = (
        await stage.request("POST", f"{url}/batch", {"items": items, "response_format": "pcm", "voice": "one"})
    ).json
    assert (batch["total"], batch["succeeded"], batch["failed"]) == (3, 2, 1)
    await stage.request("POST", f"{url}/batch", {"items": []})
    # Numbers as text, names in capitals, what other servers take, and nothing to say, as a form or a workflow sends it.
    for more in (
        {"speed": "1.5", "seed": "5", "sample_rate": "24000"},
        {"response_format": "WAV", "speed": None, "voice": None, "model": "tts-1-hd", "instructions": None},
        {
            "chime": True,
            "providerOptions": {"openai": {}},
            "normalization_options": {"normalize": True},
            "voice": "Nova",
        },
        {"input": " ... ", "response_format": "wav"},
    ):
        answer = await stage.request("POST", url, {"model": "tts-1", "input": "Hi.", "response_format": "pcm"} | more)
        assert answer.status == 200
    for more in ({"speed": "fast"}, {"seed": "1.5"}, {"input": ""}):
        assert (await stage.request("POST", url, {"input": "Hi."} | more)).status == 400
    await stage.request("GET", "/v1/audio/voices")


@scenario(speaks=False)
async def speech_without_a_voice(stage: Stage) -> None:
    """Where nobody speaks: refused over REST and over the stream, and a conversation is written."""
    await stage.request("POST", "/v1/audio/speech", {"model": "tts-1", "input": "x", "voice": "one"})
    socket = await opened(stage)
    await socket.end()
    talk = await stage.connect("/v1/realtime")
    created = await talk.until("session.created")
    assert created["session"]["output_modalities"] == ["text"]
