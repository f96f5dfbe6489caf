"""Clients of ElevenLabs', AssemblyAI's and Cartesia's services."""

from __future__ import annotations

import base64
from typing import Any

from tests.traces.harness import Frame, Socket, Stage, b64, pcm16, pieces, scenario

ELEVENLABS = "/v1/text-to-speech/one"
SCRIBE = "/v1/speech-to-text/realtime"
AGENT = "/v1/convai/conversation"
VOICE_ID = "21m00Tcm4TlvDq8ikWAM"
ASSEMBLYAI = "/v3/ws?sample_rate=16000&encoding=pcm_s16le&format_turns=True"
RAW: Frame = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24_000}
VOICE: Frame = {"mode": "id", "id": "one"}


async def until(socket: Socket, **fields: Any) -> Frame:
    """Read up to the next frame with these fields."""
    while True:
        frame = await socket.next()
        if isinstance(frame, dict) and fields.items() <= frame.items():
            return frame


async def heard(stage: Stage, socket: Socket, text: str, silence_s: float = 1.5) -> None:
    """Send these words as a microphone does, 100 ms each."""
    data = pcm16(text, silence_s, rate_hz=16_000)
    for at in range(0, len(data), 3200):
        await socket.send(data[at : at + 3200])
        await stage.wait(0.1)


def sound(frames: list[Any], field: str = "audio") -> bytes:
    return b"".join(base64.b64decode(frame[field]) for frame in frames if frame.get(field))


@scenario()
async def elevenlabs_stream(stage: Stage) -> None:
    """Text in pieces, as the SDK sends it; the alignment has each character."""
    socket = await stage.connect(f"{ELEVENLABS}/stream-input?model_id=eleven_flash_v2_5&output_format=pcm_24000")
    schedule = {"chunk_length_schedule": [50]}
    await socket.send({"text": " ", "voice_settings": None, "generation_config": schedule})
    for text in ("Hello ", "there. ", "How are ", "you? "):
        await socket.send({"text": text, "try_trigger_generation": True})
        await stage.wait(0.05)
    await socket.send({"text": ""})
    assert await socket.end() == (1000, "")
    aligned = [frame["alignment"] for frame in socket.seen if frame.get("alignment")]
    assert "".join("".join(found["chars"]) for found in aligned) == "Hello there. How are you? "
    assert all(len(found["chars"]) == len(found["charStartTimesMs"]) for found in aligned)
    lasted_ms = sum(sum(found["charDurationsMs"]) for found in aligned)
    assert lasted_ms == 1500
    assert len(sound(socket.seen)) == 5 * 14_400
    assert [frame["isFinal"] for frame in socket.seen if frame["isFinal"]] == [True]


@scenario()
async def elevenlabs_contexts(stage: Stage) -> None:
    """A context that is interrupted, one that is flushed and closed, and one too many."""
    url = f"{ELEVENLABS}/multi-stream-input?model_id=eleven_flash_v2_5&output_format=pcm_16000&auto_mode=true"
    socket = await stage.connect(url)
    await socket.send({"text": "A sentence of a few words to be stopped. ", "context_id": "a"})
    await until(socket, contextId="a")
    await socket.send({"context_id": "a", "close_context": True})
    await until(socket, contextId="a", isFinal=True)
    await socket.send({"text": " ", "context_id": "b", "voice_settings": {"speed": 2.0, "stability": 0.5}})
    await socket.send({"text": "Afterwards. ", "context_id": "b"})
    await socket.send({"context_id": "b", "flush": True})
    await socket.send({"context_id": "b", "close_context": True})
    await socket.send({"text": ""})
    await until(socket, contextId="b", isFinal=True)
    of = {name: sound([f for f in socket.seen if f["contextId"] == name]) for name in "ab"}
    assert len(of["a"]) < 9 * 9_600
    assert len(of["b"]) == 4_800
    for name in "cdefgh":
        await socket.send({"text": "More ", "context_id": name})
    assert await socket.end() == (1008, "max_active_conversations")


@scenario()
async def elevenlabs_errors(stage: Stage) -> None:
    """A voice, a format and a message that are not there; a sentence that fails; a client that says nothing."""
    for url in (
        "/v1/text-to-speech/nobody/stream-input",
        f"{ELEVENLABS}/stream-input?output_format=mp3_1_1",
        f"{ELEVENLABS}/stream-input?model_id=nobody",
        f"{ELEVENLABS}/stream-input?inactivity_timeout=soon",
    ):
        refused = await stage.connect(url)
        assert (await refused.end())[0] == 1008
        assert refused.seen[0]["message"]
    for wrong in ("{", '{"text": 1}', "[]", '{"text": "a", "voice_settings": {"speed": 9}}'):
        socket = await stage.connect(f"{ELEVENLABS}/stream-input?output_format=pcm_16000")
        await socket.send(wrong)
        assert (await socket.end())[0] == 1008
    socket = await stage.connect(f"{ELEVENLABS}/stream-input?output_format=pcm_16000&inactivity_timeout=5")
    await socket.send({"text": "This is bad. But this is fine. "})
    await until(socket, error="generation_failed")
    await until(socket, isFinal=None)
    assert await socket.end() == (1008, "input_timeout_exceeded")


@scenario()
async def elevenlabs_rest(stage: Stage) -> None:
    for path in ("", "/stream"):
        answer = await stage.request("POST", f"{ELEVENLABS}{path}?output_format=pcm_24000", {"text": "Hello there."})
        assert len(answer.body) == 2 * 14_400
    ulaw = await stage.request(
        "POST", f"{ELEVENLABS}?output_format=ulaw_8000", {"text": "Hello.", "model_id": "default"}
    )
    assert len(ulaw.body) == 2_400
    timed = await stage.request("POST", f"{ELEVENLABS}/with-timestamps?output_format=pcm_24000", {"text": "Hello."})
    assert timed.json["alignment"]["characters"] == list("Hello.")
    lines = await stage.request(
        "POST", f"{ELEVENLABS}/stream/with-timestamps?output_format=pcm_24000", {"text": "Hello."}
    )
    assert lines.body.count(b"\n") >= 2
    url = f"{ELEVENLABS}?output_format=pcm_24000"
    for wrong in (
        {"text": ""},
        {"text": "x" * 10_001},
        {},
        {"text": "Hi.", "language_code": "tlh"},
        {"text": "foreign"},
    ):
        assert (await stage.request("POST", url, wrong)).status == 400
    for name in ("two", "nobody"):
        await stage.request("GET", f"/v1/voices/{name}")
    assert (await stage.request("POST", "/v1/text-to-speech/nobody", {"text": "Hi."})).status == 404


async def told(stage: Stage, socket: Socket, text: str, silence_s: float = 2.0) -> None:
    """Say this to an agent, as fast as it sounds, 250 ms a message."""
    for piece in pieces(pcm16(text, silence_s, 16_000), 8000):
        await socket.send({"user_audio_chunk": b64(piece)})
        await stage.wait(len(piece) / 32_000)


@scenario()
async def elevenlabs_agent(stage: Stage) -> None:
    """An agent that greets, calls a tool, is interrupted and corrected, and is written to."""
    socket = await stage.connect(f"{AGENT}?agent_id=agent_1&source=python_sdk&version=2.78.0", subprotocols=["convai"])
    weather = {"type": "client", "name": "get_weather", "description": "The weather.", "parameters": {"type": "object"}}
    prompt = {"prompt": "Be brief with {{name}}.", "llm": "gpt-4o", "tools": [weather]}
    override = {
        "agent": {"prompt": prompt, "first_message": "Hello {{ name }}.", "language": "en"},
        "tts": {"voice_id": VOICE_ID, "speed": 1.0},
        "asr": {"keywords": ["story"]},
    }
    await socket.say(
        "conversation_initiation_client_data",
        conversation_config_override=override,
        dynamic_variables={"name": "Ann"},
        custom_llm_extra_body={},
        source_info={"source": "python_sdk", "version": "2.78.0"},
    )
    await socket.until("conversation_initiation_metadata")
    await socket.until("agent_response")
    await stage.wait(2.0)
    await told(stage, socket, "the weather")
    call = (await socket.until("client_tool_call"))["client_tool_call"]
    assert call["parameters"] == {"city": "Paris"}
    await socket.say("client_tool_result", tool_call_id="nobody", result="", is_error=False)
    await socket.until("error")
    await socket.say("client_tool_result", tool_call_id=call["tool_call_id"], result={"sky": "clear"}, is_error=False)
    await socket.until("agent_response")
    await socket.say("pong", event_id=socket.of("ping")[-1]["ping_event"]["event_id"])
    await socket.say("contextual_update", text="The user is in Rome.")
    await socket.say("user_activity")
    await stage.wait(3.0)
    await socket.say("user_message", text="tell me a story")
    await socket.until("audio")
    await stage.wait(1.0)
    await told(stage, socket, "please stop and tell me the time now.")
    corrected = (await socket.until("agent_response_correction"))["agent_response_correction_event"]
    original, heard = corrected["original_agent_response"], corrected["corrected_agent_response"]
    assert original.startswith(heard)
    assert 0 < len(heard) < len(original)
    interruption = socket.of("interruption")[-1]
    later = [frame for frame in socket.seen[socket.seen.index(interruption) :] if frame["type"] == "audio"]
    assert all(f["audio_event"]["event_id"] > interruption["interruption_event"]["event_id"] for f in later)
    await socket.say("multimodal_message", text={"type": "user_message", "text": "hello"})
    await stage.wait(1.0)
    assert socket.of("agent_response")[-1]["agent_response_event"]["agent_response"] == "You said: hello."
    await socket.say("multimodal_message", file={"type": "file_input", "file_id": "file_1"})
    await socket.say("feedback", event_id=1, score="like")
    await socket.say("nonsense")
    await socket.until("error", count=2)
    await socket.leave()


@scenario()
async def elevenlabs_agent_exported(stage: Stage) -> None:
    """An agent as it is exported, in text only and in µ-law; agents that cannot be served."""
    socket = await stage.connect(AGENT)
    tools = [{"id": "tool_1", "tool_config": {"type": "client", "name": "look", "parameters": None}}]
    tools.append({"id": "tool_2", "tool_config": {"type": "system", "name": "end_call"}})
    exported = {"agent": {"prompt": {"prompt": "Be brief."}}, "conversation": {"text_only": True}}
    await socket.say(
        "enclave_setup_config",
        agent_config_dict={"name": "An agent", "conversation_config": exported},
        override_agent_config_list=[{"conversation_config": {"agent": {"language": "en"}}}],
        tools_config_list=tools,
    )
    await socket.say("conversation_initiation_client_data")
    await socket.until("conversation_initiation_metadata")
    await socket.say("user_message", text="hello")
    await socket.until("agent_response")
    parts = [part["text_response_part"] for part in socket.of("agent_chat_response_part")]
    assert [part["type"] for part in parts][:: len(parts) - 1] == ["start", "stop"]
    assert "".join(part["text"] for part in parts) == "You said: hello."
    assert not socket.of("audio")
    await socket.leave()
    telephone = await stage.connect(AGENT)
    formats = {"asr": {"user_input_audio_format": "ulaw_8000"}, "tts": {"agent_output_audio_format": "ulaw_8000"}}
    await telephone.say("conversation_initiation_client_data", conversation_config_override=formats)
    await telephone.say("user_message", text="hello")
    await telephone.until("audio")
    await telephone.until("agent_response")
    assert len(sound([frame["audio_event"] for frame in telephone.of("audio")], "audio_base_64")) > 4000
    await telephone.leave()
    bare = await stage.connect(AGENT)
    await bare.send({"user_audio_chunk": b64(pcm16("hello.", 2.0, 16_000))})
    await bare.until("conversation_initiation_metadata")
    await bare.until("user_transcript")
    await bare.leave()
    for wrong in (
        {"agent": {"prompt": {"tools": [{"type": "webhook", "name": "far"}]}}},
        {"tts": {"agent_output_audio_format": "mp3_44100_128"}},
        {"tts": {"speed": 9}},
        {"agent": 1},
    ):
        refused = await stage.connect(AGENT)
        await refused.say("conversation_initiation_client_data", conversation_config_override=wrong)
        assert (await refused.end())[0] == 1008
        assert refused.of("error")


@scenario()
async def scribe(stage: Stage) -> None:
    """Segments that end with commits, and segments that end at pauses."""
    manual = await stage.connect(f"{SCRIBE}?model_id=scribe_v2_realtime&include_timestamps=true&language_code=en")
    await manual.send({"message_type": "input_audio_chunk", "audio_base_64": b64(pcm16("what is", rate_hz=16_000))})
    await stage.wait(0.5)
    rest = {"message_type": "input_audio_chunk", "audio_base_64": b64(pcm16("the time?", rate_hz=16_000))}
    await manual.send(rest | {"commit": True, "sample_rate": 16_000})
    assert (await until(manual, message_type="committed_transcript"))["text"] == "what is the time?"
    words = (await until(manual, message_type="committed_transcript_with_timestamps"))["words"]
    assert "".join(word["text"] for word in words) == "what is the time?"
    await manual.send({"message_type": "commit"})
    await until(manual, message_type="commit_throttled")
    await manual.leave()
    vad = await stage.connect(f"{SCRIBE}?commit_strategy=vad&vad_silence_threshold_secs=0.5&audio_format=pcm_16000")
    for text in ("hello.", "what is the time?"):
        chunk = b64(pcm16(text, 1.0, rate_hz=16_000))
        await vad.send({"message_type": "input_audio_chunk", "audio_base_64": chunk, "commit": False})
        assert (await until(vad, message_type="committed_transcript"))["text"] == text
    await vad.send({"message_type": "input_audio_chunk", "audio_base_64": "!"})
    assert await vad.end() == (1008, "input_error")
    for query in ("audio_format=mp3_44100", "commit_strategy=never", "model_id=nobody", "language_code=tlh"):
        refused = await stage.connect(f"{SCRIBE}?{query}")
        assert await refused.end() == (1008, "input_error")


@scenario()
async def assemblyai(stage: Stage) -> None:
    """Turns that the server ends, a turn that the client ends, and a changed setting."""
    socket = await stage.connect(f"{ASSEMBLYAI}&max_turn_silence=400&end_of_turn_confidence_threshold=0.5")
    await socket.until("Begin")
    await heard(stage, socket, "what is the time?")
    ended = await socket.until("Turn", end_of_turn=True)
    assert (ended["turn_order"], ended["transcript"], ended["turn_is_formatted"]) == (0, "what is the time?", True)
    await socket.say("UpdateConfiguration", end_of_turn_confidence_threshold=1.0, max_turn_silence=5000)
    await heard(stage, socket, "hello.", 0.3)
    await socket.say("KeepAlive")
    await socket.say("ForceEndpoint")
    assert (await socket.until("Turn", end_of_turn=True))["turn_order"] == 1
    await heard(stage, socket, "tell me", 0.0)
    await socket.say("Terminate")
    assert (await socket.until("Turn", end_of_turn=True))["transcript"] == "tell me"
    await socket.until("Termination")
    assert await socket.end() == (1000, "")


@scenario()
async def assemblyai_errors(stage: Stage) -> None:
    for query in ("encoding=mp7", "sample_rate=1", "speech_model=nobody", "speaker_labels=true", "language_codes=x"):
        socket = await stage.connect(f"/v3/ws?{query}")
        assert (await socket.end())[0] == 3006
    for wrong in ("{", '{"type": "Boo"}', '{"type": "UpdateConfiguration", "vad_threshold": 3}'):
        socket = await stage.connect(ASSEMBLYAI)
        await socket.send(wrong)
        assert (await socket.end())[0] == 3006
    silent = await stage.connect(f"{ASSEMBLYAI}&inactivity_timeout=5")
    assert (await silent.end())[0] == 3005
    failing = await stage.connect(f"{ASSEMBLYAI}&max_turn_silence=300")
    await heard(stage, failing, "fail")
    await failing.until("Warning")


@scenario()
async def cartesia_speech(stage: Stage) -> None:
    """Two contexts at a time, one of which is cut; word times; errors that end nothing."""
    socket = await stage.connect("/tts/websocket?cartesia_version=2026-03-01")
    about = {"model_id": "sonic-3", "voice": VOICE, "output_format": RAW}
    first = about | {"context_id": "a", "add_timestamps": True}
    await socket.send(first | {"transcript": "Hello there. ", "continue": True})
    await socket.send(
        about | {"context_id": "b", "transcript": "A sentence of a few words to be cut.", "continue": True}
    )
    await socket.send({"context_id": "b", "cancel": True})
    await socket.until("done", context_id="b")
    await socket.send(first | {"transcript": "And ", "continue": True, "flush": True})
    await socket.until("flush_done", flush_id=1)
    await socket.send(first | {"transcript": "more. ", "continue": False})
    await socket.until("done", context_id="a")
    times = [frame["word_timestamps"] for frame in socket.of("timestamps")]
    assert [word for found in times for word in found["words"]] == ["Hello", "there.", "And", "more."]
    starts = [start for found in times for start in found["start"]]
    assert starts == sorted(starts)
    assert len(sound(socket.of("chunk", context_id="a"), "data")) == 4 * 14_400
    for wrong in (
        {"context_id": "c"},
        about | {"context_id": "c", "transcript": "x", "voice": {"mode": "id", "id": "nobody"}},
        about | {"context_id": "c", "transcript": "x", "output_format": RAW | {"container": "wav"}},
        about | {"context_id": "c", "transcript": "x", "output_format": RAW | {"sample_rate": 1}},
        about | {"context_id": "c", "transcript": "x", "model_id": "nobody"},
    ):
        await socket.send(wrong)
        await socket.until("error", context_id="c")
    await socket.send("{")
    await socket.until("error")
    await socket.leave()
    for path in ("/tts/bytes", "/tts/sse"):
        body = about | {"transcript": "Hello there.", "add_timestamps": True}
        answer = await stage.request("POST", path, body)
        assert answer.status == 200
        assert (await stage.request("POST", path, {"transcript": "x"})).status == 400
    await stage.request(
        "POST", "/tts/bytes", about | {"transcript": "Hi.", "output_format": RAW | {"container": "wav"}}
    )


@scenario()
async def cartesia_transcripts(stage: Stage) -> None:
    """Turns that the server ends, and transcripts that the client ends."""
    audio = "encoding=pcm_s16le&sample_rate=16000"
    turns = await stage.connect(f"/stt/turns/websocket?model=ink-2&{audio}")
    await turns.until("connected")
    for text in ("what is the time?", "hello."):
        await heard(stage, turns, text, 2.5)
        assert (await turns.until("turn.end"))["transcript"] == text
    await turns.say("config")
    await turns.say("close")
    assert await turns.end() == (1000, "")
    manual = await stage.connect(f"/stt/websocket?model=ink-2&{audio}")
    for text in ("what is the time?", "hello."):
        await heard(stage, manual, text, 0.0)
        await manual.send("finalize")
        await manual.until("flush_done")
    await manual.send("done")
    await manual.until("done")
    assert await manual.end() == (1000, "")
    joined = "".join(frame["text"] for frame in manual.of("transcript", is_final=True))
    assert joined == "what is the time? hello."
    for query in ("encoding=mp3", f"{audio}&model=nobody", "sample_rate=1"):
        refused = await stage.connect(f"/stt/websocket?{query}")
        assert (await refused.end())[0] == 1008
    wrong = await stage.connect(f"/stt/turns/websocket?{audio}")
    await wrong.send("boo")
    assert (await wrong.end())[0] == 1008
