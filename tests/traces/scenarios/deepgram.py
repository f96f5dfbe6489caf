"""Deepgram's clients: live transcripts, Flux, files, and speech in both forms."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from tests.traces.harness import Socket, Stage, f32, pcm16, pieces, scenario, wav

LISTEN, FLUX, SPEAK = "/v1/listen", "/v2/listen", "/v1/speak"
RAW = {"model": "nova-3", "encoding": "linear16", "sample_rate": "16000"}
RATE_HZ = 16_000


def url(path: str, **query: str) -> str:
    """The URL with this query."""
    return f"{path}?{urlencode(query)}"


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float = 0.0) -> None:
    """Say this, as fast as it sounds, 100 ms a frame."""
    for piece in pieces(pcm16(text, silence_s, RATE_HZ), RATE_HZ // 10 * 2):
        await socket.send(piece)
        await stage.wait(len(piece) / (2 * RATE_HZ))


def finals(socket: Socket) -> list[str]:
    """The texts that a client joins."""
    results = [frame for frame in socket.of("Results") if frame["is_final"]]
    return [frame["channel"]["alternatives"][0]["transcript"] for frame in results]


@scenario()
async def deepgram_listen(stage: Stage) -> None:
    wishes = {"interim_results": "true", "vad_events": "true", "smart_format": "true", "utterance_end_ms": "1000"}
    socket = await stage.connect(url(LISTEN, **RAW, **wishes, endpointing="300", keyterm="story", tag="a"))
    await speak(stage, socket, "what is the time?", 1.5)
    await socket.until("UtteranceEnd")
    await socket.say("KeepAlive")
    await speak(stage, socket, "tell me a story")
    await socket.say("Finalize")
    assert (await socket.until("Results", is_final=True))["from_finalize"] is True
    await socket.say("Configure", keyterms=["weather"])
    await speak(stage, socket, "hello")
    await socket.say("CloseStream")
    assert await socket.end() == (1000, "")
    assert finals(socket) == ["what is the time?", "tell me a story", "hello"]
    assert socket.kinds[-1] == "Metadata"
    assert len(socket.of("SpeechStarted")) == 3


@scenario()
async def deepgram_listen_plain(stage: Stage) -> None:
    """No wishes: finals only, without punctuation. A WAV file is found out from its bytes; an empty frame ends it."""
    socket = await stage.connect(url(LISTEN, model="nova-2"))
    for piece in pieces(wav("what is the time?", 1.0), 3200):
        await socket.send(piece)
        await stage.wait(0.1)
    assert (await socket.until("Results", is_final=True))["speech_final"] is True
    await socket.send(b"")
    await socket.end()
    assert finals(socket) == ["what is the time"]
    floats = await stage.connect(url(LISTEN, **RAW | {"encoding": "linear32", "language": "multi"}))
    for piece in pieces(f32("hello.", 1.0), 6400):
        await floats.send(piece)
        await stage.wait(0.1)
    result = await floats.until("Results", is_final=True)
    assert result["channel"]["alternatives"][0]["languages"] == ["en"]


@scenario()
async def deepgram_listen_errors(stage: Stage) -> None:
    refused: list[dict[str, str]] = [
        {"model": "nova-3", "encoding": "linear16"},
        {"model": "nova-3", "encoding": "g729", "sample_rate": "8000"},
        {**RAW, "sample_rate": "1"},
        {**RAW, "channels": "2", "multichannel": "true"},
        {**RAW, "redact": "pci"},
        {**RAW, "diarize": "true"},
        {**RAW, "model": "nobody"},
        {**RAW, "language": "tlh"},
        {**RAW, "interim_results": "maybe"},
        {**RAW, "endpointing": "soon"},
        {**RAW, "utterance_end_ms": "1000"},
    ]
    for query in refused:
        assert (await stage.connect(url(LISTEN, **query))).status == 400, query
    socket = await stage.connect(url(LISTEN, **RAW, what="1"))
    wrong: list[Any] = ["{", {"type": "Speak", "text": "x"}, {}, {"type": "Configure", "keyterms": 1}]
    for frame in wrong:
        await socket.send(frame)
        await socket.until("Error")
    await speak(stage, socket, "fail", 0.5)
    await socket.until("Error", variant="processing_error")
    await stage.wait(10.1)
    assert await socket.end() == (1011, "NET-0001")
    noise = await stage.connect(url(LISTEN, model="nova-3"))
    for _ in range(12):
        await noise.send(b"\x07" * 4000)
    assert await noise.end() == (1008, "DATA-0000")


@scenario()
async def deepgram_flux(stage: Stage) -> None:
    query = {**RAW, "model": "flux-general-en", "eager_eot_threshold": "0.4", "eot_timeout_ms": "1500"}
    socket = await stage.connect(url(FLUX, **query))
    await socket.until("Connected")
    await speak(stage, socket, "what is the time?", 2.0)
    done = await socket.until("TurnInfo", event="EndOfTurn")
    assert done["transcript"] == "what is the time?"
    await speak(stage, socket, "tell me a story.", 0.6)
    await speak(stage, socket, "and now please stop", 0.1)
    await socket.say("Configure", thresholds={"eot_threshold": 0.8, "eot_timeout_ms": 3000}, keyterms=["story"])
    await socket.until("ConfigureSuccess")
    await socket.say("ForceEndTurn")
    await socket.until("TurnInfo", event="EndOfTurn", turn_index=1)
    await socket.say("Configure", thresholds={"eot_threshold": 7})
    await socket.until("ConfigureFailure")
    await socket.say("what")
    await socket.until("Warning")
    await speak(stage, socket, "hello")
    await socket.say("CloseStream")
    assert await socket.end() == (1000, "")
    turns = socket.of("TurnInfo", event="EndOfTurn")
    assert [turn["turn_index"] for turn in turns] == [0, 1, 2]
    assert [frame["sequence_id"] for frame in socket.seen] == list(range(len(socket.seen)))
    assert (await stage.connect(url(FLUX, **query | {"eot_threshold": "2"}))).status == 400


@scenario()
async def deepgram_speak(stage: Stage) -> None:
    socket = await stage.connect(url(SPEAK, model="aura-2-thalia-en", encoding="linear16", sample_rate="24000"))
    await socket.until("Metadata")
    for word in ("Hello ", "there. ", "How ", "are ", "you? "):
        await socket.say("Speak", text=word)
    await socket.say("Flush")
    await socket.until("Flushed")
    await socket.say("Speak", text="This is bad. A sentence of a few words to be stopped. ")
    await socket.say("Speak", text="Another that is never begun.")
    await stage.wait(0.06)
    await socket.say("Clear")
    await socket.until("Cleared")
    await socket.say("Speak")
    await socket.until("Warning")
    await socket.say("Speak", text="Goodbye")
    await socket.say("Close")
    assert await socket.end() == (1000, "")
    assert socket.kinds[:3] == ["Metadata", "binary", "Flushed"]
    quiet = await stage.connect(url(SPEAK, encoding="mulaw"))
    await quiet.say("Flush")
    await quiet.until("Flushed")
    assert (await stage.connect(url(SPEAK, encoding="mp3"))).status == 400
    assert (await stage.connect(url(SPEAK, model="nobody"))).status == 400


@scenario()
async def deepgram_rest(stage: Stage) -> None:
    """Files and speech over HTTP."""
    audio = {"content-type": "audio/wav"}
    said = wav("what is the time? tell me a story.", 0.3)
    plain = (await stage.request("POST", url(LISTEN, model="nova-3"), body=said, headers=audio)).json
    assert plain["results"]["channels"][0]["alternatives"][0]["transcript"] == "what is the time tell me a story"
    wishes = {"smart_format": "true", "utterances": "true", "paragraphs": "true", "detect_language": "true"}
    whole = (await stage.request("POST", url(LISTEN, model="nova-3", **wishes), body=said, headers=audio)).json
    assert whole["results"]["utterances"][0]["transcript"] == "what is the time? tell me a story."
    samples = pcm16("hello.", 0.2, RATE_HZ)
    raw = await stage.request("POST", url(LISTEN, **RAW), body=samples, headers={"content-type": "audio/raw"})
    assert raw.json["results"]["channels"][0]["alternatives"][0]["transcript"] == "hello"
    for query, body in (
        ({"model": "nova-3"}, b""),
        ({"model": "nova-3"}, b"hello, this is no audio"),
        ({"model": "nova-3", "summarize": "v2"}, said),
        ({"model": "nova-3", "diarize": "true"}, said),
        ({"model": "nobody"}, said),
    ):
        assert (await stage.request("POST", url(LISTEN, **query), body=body, headers=audio)).status == 400, query
    there = {"url": "http://127.0.0.1/a.wav"}
    assert (await stage.request("POST", url(LISTEN, model="nova-3"), there)).json["err_code"] == "Bad Request"
    failed = await stage.request("POST", url(LISTEN, model="nova-3"), body=wav("fail"), headers=audio)
    assert failed.status == 500
    text = {"text": "Hello there."}
    for query in ({}, {"encoding": "linear16"}, {"encoding": "linear16", "container": "none"}, {"encoding": "mulaw"}):
        spoken = await stage.request("POST", url(SPEAK, model="aura-2-thalia-en", **query), text)
        assert spoken.status == 200
        assert spoken.headers["dg-model-name"] == "voice"
    for query, wrong in (({"encoding": "g729"}, text), ({"model": "nobody"}, text), ({}, {"text": " "}), ({}, {})):
        assert (await stage.request("POST", url(SPEAK, **query), wrong)).status == 400


@scenario(server={"api_keys": ("key",)})
async def deepgram_keys(stage: Stage) -> None:
    token = {"authorization": "Token key"}
    assert (await stage.connect(url(LISTEN, **RAW))).status == 401
    assert (await stage.request("POST", LISTEN, body=b"x")).json["err_code"] == "INVALID_AUTH"
    await stage.connect(url(LISTEN, **RAW), headers=token)
    browser = await stage.connect(url(LISTEN, **RAW), subprotocols=["token", "key"])
    assert browser.status == 101
    assert (await stage.request("POST", SPEAK, {"text": "Hello."}, headers=token)).status == 200


@scenario()
async def deepgram_agent(stage: Stage) -> None:
    socket = await stage.connect("/v1/agent/converse")
    await socket.until("Welcome")
    await socket.say("UpdatePrompt", prompt="x")
    await socket.until("Error")
    functions = [{"name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}]
    settings: dict[str, Any] = {
        "audio": {"input": {"encoding": "linear16", "sample_rate": RATE_HZ}, "output": {"sample_rate": 16_000}},
        "agent": {
            "language": "en",
            "listen": {"provider": {"type": "deepgram", "model": "nova-3", "keyterms": ["story"]}},
            "think": {"provider": {"model": "gpt-4o"}, "prompt": "Be brief.", "functions": functions},
            "speak": {"provider": {"type": "deepgram", "model": "aura-2-thalia-en"}},
            "context": {"messages": [{"type": "History", "role": "user", "content": "I am Ann."}]},
        },
    }
    away = {"name": "far", "endpoint": {"url": "http://example.org"}}
    await socket.say("Settings", **settings | {"agent": {"think": {"functions": [away]}}})
    await socket.until("Error")
    await socket.say("Settings", **settings)
    await socket.until("SettingsApplied")
    await speak(stage, socket, "hello.", 2.0)
    await socket.until("AgentAudioDone")
    await speak(stage, socket, "the weather", 2.5)
    request = await socket.until("FunctionCallRequest")
    call = request["functions"][0]
    await socket.say("FunctionCallResponse", id="nobody", name="x", content="")
    await socket.until("Error")
    await socket.say("FunctionCallResponse", id=call["id"], name=call["name"], content="clear")
    await socket.until("AgentAudioDone")
    await socket.say("UpdateSpeak", speak={"provider": {"type": "deepgram", "model": "two"}})
    await socket.until("SpeakUpdated")
    await socket.say("UpdateThink", think={"provider": {"type": "open_ai"}, "prompt": "Tell.", "functions": []})
    await socket.until("ThinkUpdated")
    await socket.say("UpdateListen", listen={"provider": {"type": "deepgram", "language": "de"}})
    await socket.until("ListenUpdated")
    await socket.say("InjectUserMessage", content="tell me a story")
    await socket.until("AgentStartedSpeaking")
    await stage.wait(0.5)
    await speak(stage, socket, "please stop and tell me the time now.", 2.5)
    await socket.until("ConversationText", role="user")
    assert socket.of("UserStartedSpeaking")
    await socket.say("InjectAgentMessage", message="Goodbye.")
    await socket.say("ForceEndTurn")
    await socket.say("KeepAlive")
    await stage.wait(5)
    assert not socket.of("Warning")
