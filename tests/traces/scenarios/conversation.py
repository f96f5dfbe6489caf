"""Conversations over /v1/realtime in OpenAI's names."""

from __future__ import annotations

from typing import Any

from tests.traces.harness import Frame, Socket, Stage, b64, image, pcm16, pieces, scenario

WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SERVER_VAD = {"type": "server_vad", "silence_duration_ms": 500}
# 200 ms at 24 kHz.
PIECE = 9600
APPEND = "input_audio_buffer.append"
DONE = "response.done"


async def opened(stage: Stage, query: str = "?model=gpt-realtime", **session: Any) -> Socket:
    """A conversation of the GA dialect, with this session.update."""
    socket = await stage.connect(f"/v1/realtime{query}")
    await socket.until("session.created")
    if session:
        await socket.say("session.update", session={"type": "realtime"} | session)
        await socket.until("session.updated")
    return socket


def listening(turn_detection: Any = SERVER_VAD, **more: Any) -> Frame:
    """The `audio` of a session that hears and transcribes."""
    return {"input": {"transcription": {"model": "whisper-1"}, "turn_detection": turn_detection, **more}}


async def speak(stage: Stage, socket: Socket, text: str, silence_s: float = 0.0) -> None:
    """Say this, as fast as it sounds."""
    for piece in pieces(pcm16(text, silence_s), PIECE):
        await socket.say(APPEND, audio=b64(piece))
        await stage.wait(len(piece) / 48_000)


async def write(socket: Socket, text: str, **more: Any) -> None:
    """A typed message."""
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]} | more
    await socket.say("conversation.item.create", item=item)


async def answered(socket: Socket, **response: Any) -> Frame:
    """Ask for an answer and read to its end."""
    await socket.say("response.create", **({"response": response} if response else {}))
    done: Frame = (await socket.until(DONE))["response"]
    return done


@scenario()
async def spoken_turn(stage: Stage) -> None:
    socket = await opened(stage, audio=listening(), instructions="Answer briefly.")
    await speak(stage, socket, "what is the time", 1.0)
    done = (await socket.until(DONE))["response"]
    assert done["status"] == "completed"
    heard = socket.of("conversation.item.input_audio_transcription.completed")
    assert [f["transcript"] for f in heard] == ["what is the time"]
    assert done["output"][0]["content"][0]["transcript"] == "You said: what is the time."
    assert socket.num_bytes("response.output_audio.delta") == 6 * 14_400
    await stage.wait(3)
    await speak(stage, socket, "tell me a story please", 1.2)
    await socket.until(DONE)


@scenario()
async def spoken_turn_beta(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?model=gpt-4o-realtime-preview", headers={"OpenAI-Beta": "realtime=v1"})
    await socket.until("session.created")
    session = {
        "modalities": ["text", "audio"],
        "instructions": "Answer briefly.",
        "voice": "two",
        "input_audio_format": "pcm16",
        "input_audio_transcription": {"model": "whisper-1", "language": "en"},
        "turn_detection": SERVER_VAD,
        "temperature": 0.8,
        "max_response_output_tokens": 64,
    }
    await socket.say("session.update", session=session)
    await socket.until("session.updated")
    await speak(stage, socket, "hello", 0.9)
    await socket.until(DONE)
    assert socket.joined("response.audio_transcript.delta") == "You said: hello."
    assert socket.num_bytes("response.audio.delta") == 3 * 14_400
    await socket.say("session.update", session={"modalities": ["text"], "turn_detection": None})
    await socket.until("session.updated")
    await speak(stage, socket, "tell me")
    await socket.say("input_audio_buffer.commit")
    await socket.say("response.create", response={"modalities": ["text"], "instructions": "Once more."})
    await socket.until(DONE)
    assert socket.joined("response.text.delta") == "You said: tell me."
    await write(socket, "typed")
    await socket.say("response.create")
    await socket.until(DONE)
    assert "conversation.item.created" in socket.kinds


@scenario()
async def barge_in(stage: Stage) -> None:
    socket = await opened(stage, audio=listening())
    await write(socket, "tell me a story")
    await socket.say("response.create")
    await socket.until("response.output_audio.delta", count=3)
    await speak(stage, socket, "stop now please", 1.0)
    cut = socket.of(DONE)[0]["response"]
    assert (cut["status"], cut["status_details"]["reason"]) == ("cancelled", "turn_detected")
    assert cut["output"][0]["status"] == "incomplete"
    # What of it was heard is what the client says.
    item = cut["output"][0]["id"]
    await socket.say("conversation.item.truncate", item_id=item, content_index=0, audio_end_ms=700)
    await socket.until("conversation.item.truncated")
    await socket.say("conversation.item.retrieve", item_id=item)
    kept = (await socket.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
    assert "Once upon a time".startswith(kept.strip())
    await stage.wait(3)
    last = socket.of(DONE)[-1]["response"]
    assert last["status"] == "completed"
    assert last["output"][0]["content"][0]["transcript"] == "You said: stop now please."


@scenario()
async def false_start(stage: Stage) -> None:
    """The user goes on after a response has begun: both parts are answered as one, unless the client declines that."""
    socket = await opened(stage, audio=listening())
    await speak(stage, socket, "what is", 0.8)
    await socket.until("response.output_audio.delta")
    await speak(stage, socket, "the time now", 1.2)
    await socket.until(DONE, count=2)
    # The first was written faster than it was heard.
    first, second = (f["response"] for f in socket.of(DONE))
    assert first["output"][0]["content"][0]["transcript"] == "You said: what is."
    assert second["output"][0]["content"][0]["transcript"] == "You said: what is the time now."
    vad = SERVER_VAD | {"false_start_ms": 0}
    await socket.say("session.update", session={"type": "realtime", "audio": {"input": {"turn_detection": vad}}})
    shown = await socket.until("session.updated")
    assert shown["session"]["audio"]["input"]["turn_detection"]["false_start_ms"] == 0
    await stage.wait(3)
    await speak(stage, socket, "what is", 0.8)
    await socket.until("response.output_audio.delta")
    await speak(stage, socket, "the weather", 1.2)
    await socket.until(DONE, count=2)
    assert socket.of(DONE)[-1]["response"]["output"][0]["content"][0]["transcript"] == "You said: the weather."


@scenario()
async def truncate(stage: Stage) -> None:
    socket = await opened(stage)
    await write(socket, "tell me a story")
    item = (await answered(socket))["output"][0]
    assert item["content"][0]["transcript"].startswith("Once upon a time there was a king.")
    cut = {"item_id": item["id"], "content_index": 0}
    for end_ms in (1500, 99_000, 700, 0):
        await socket.say("conversation.item.truncate", **cut, audio_end_ms=end_ms)
        await socket.until("conversation.item.truncated")
        await socket.say("conversation.item.retrieve", item_id=item["id"])
        await socket.until("conversation.item.retrieved")
    assert [f["audio_end_ms"] for f in socket.of("conversation.item.truncated")] == [1500, 1500, 700, 0]
    kept = [f["item"]["content"][0]["transcript"] for f in socket.of("conversation.item.retrieved")]
    assert kept[0] == kept[1] == "Once upon a time there"
    await socket.say("conversation.item.truncate", **cut, audio_end_ms=-1, event_id="negative")
    await socket.until("error")
    await socket.say("conversation.item.truncate", **cut | {"content_index": 1}, audio_end_ms=0, event_id="part")
    await socket.until("error")
    await write(socket, "and now")
    await answered(socket, output_modalities=["text"])


@scenario()
async def typed_items(stage: Stage) -> None:
    socket = await opened(stage, output_modalities=["text"], instructions="Be kind.")
    await write(socket, "hello", id="msg_1")
    await write(socket, "from the system", role="system")
    item = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I was here."}]}
    await socket.say("conversation.item.create", item=item, previous_item_id="msg_1")
    await socket.say("conversation.item.create", item=item, previous_item_id="root")
    await socket.say("conversation.item.create", item=item, previous_item_id="nobody", event_id="behind")
    await write(socket, "again", id="msg_1")
    assert [f["error"]["code"] for f in socket.of("error")] == [
        "item_create_invalid_item_id",
        "item_create_duplicate_item_id",
    ]
    await answered(socket, metadata={"topic": "greeting"}, max_output_tokens=2)
    await socket.say("conversation.item.retrieve", item_id="msg_1")
    await socket.say("conversation.item.delete", item_id="msg_1")
    await socket.say("conversation.item.retrieve", item_id="msg_1", event_id="gone")
    sound = {"type": "input_audio", "audio": b64(pcm16("what is the time")), "transcript": "what is the time"}
    await socket.say("conversation.item.create", item={"type": "message", "role": "user", "content": [sound]})
    done = await answered(socket)
    assert done["output"][0]["content"] == [{"type": "output_text", "text": "You said: what is the time."}]
    assert socket.of("conversation.item.deleted")[0]["item_id"] == "msg_1"


@scenario()
async def images(stage: Stage) -> None:
    socket = await opened(stage, output_modalities=["text"])
    url = "data:image/png;base64," + b64(image(128))
    content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url, "detail": "high"}]
    await socket.say("conversation.item.create", item={"type": "message", "role": "user", "content": content})
    done = await answered(socket)
    assert "4228 bytes" in done["output"][0]["content"][0]["text"]
    for bad in ("https://example.com/a.png", "data:image/png;base64,AAAA", "data:image/png;base64,*"):
        part = [{"type": "input_image", "image_url": bad}]
        await socket.say("conversation.item.create", item={"type": "message", "role": "user", "content": part})
    assert [f["error"]["code"] for f in socket.of("error")] == ["invalid_value", "invalid_image"]


@scenario()
async def function_calls(stage: Stage) -> None:
    socket = await opened(stage, tools=[WEATHER], tool_choice="auto")
    await write(socket, "the weather")
    (call,) = (await answered(socket))["output"]
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "get_weather", '{"city": "Paris"}')
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": '{"sky": "clear"}'}
    await socket.say("conversation.item.create", item=output)
    done = await answered(socket, tool_choice="none")
    assert done["output"][0]["content"][0]["transcript"] == 'It says {"sky": "clear"}.'
    await socket.say(
        "session.update", session={"type": "realtime", "tool_choice": {"type": "function", "name": "get_weather"}}
    )
    await write(socket, "the weather again")
    await answered(socket, output_modalities=["text"])


@scenario()
async def cancelled(stage: Stage) -> None:
    socket = await opened(stage)
    await socket.say("response.cancel", event_id="early")
    await write(socket, "tell me a story")
    await socket.say("response.create", response={"metadata": {"a": "b"}})
    await socket.until("response.output_audio.delta", count=2)
    await socket.say("response.create", event_id="second")
    await socket.say("session.update", session={"type": "realtime", "audio": {"output": {"voice": "two"}}})
    await socket.say("response.cancel", response_id="resp_of_nobody", event_id="other")
    await socket.say("response.cancel")
    await socket.until(DONE)
    done = socket.of(DONE)[0]["response"]
    assert (done["status"], done["status_details"]["reason"]) == ("cancelled", "client_cancelled")
    await socket.say("output_audio_buffer.clear")
    await write(socket, "hello")
    assert (await answered(socket))["status"] == "completed"
    assert len(socket.of("error")) >= 4


@scenario()
async def out_of_band(stage: Stage) -> None:
    socket = await opened(stage, output_modalities=["text"])
    await write(socket, "my name is Ada")
    own = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "yes"}]}
    done = await answered(socket, conversation="none", input=[own], metadata={"topic": "yes"})
    assert done["output"][0]["content"][0]["text"] == "You said: yes."
    await socket.say("conversation.item.retrieve", item_id=done["output"][0]["id"])
    assert (await socket.until("error"))["error"]["code"] == "item_retrieve_invalid_item_id"
    known = socket.of("conversation.item.done")[0]["item"]["id"]
    await answered(socket, conversation="none", input=[{"type": "item_reference", "id": known}, own])
    # Beside one that goes on.
    await write(socket, "tell me a story")
    await socket.say("response.create")
    await socket.until("response.output_text.delta")
    await socket.say("response.create", response={"conversation": "none", "input": [own]})
    await socket.until(DONE, count=2)
    assert [f["response"]["status"] for f in socket.of(DONE)] == ["completed"] * 4


@scenario()
async def conversation_errors(stage: Stage) -> None:
    socket = await opened(stage, output_modalities=["text"])
    user = {"type": "message", "role": "user"}
    update = {"type": "session.update"}
    events: list[Any] = [
        {"type": "boo"},
        {"type": 7},
        {"kind": "none"},
        [1],
        {"type": "conversation.item.create"},
        {"type": "conversation.item.create", "item": {"type": "song"}},
        {"type": "conversation.item.create", "item": user | {"content": [{"type": "output_text", "text": "x"}]}},
        {"type": "conversation.item.create", "item": user | {"content": "x"}},
        {"type": "conversation.item.retrieve", "item_id": "x"},
        {"type": "conversation.item.retrieve", "item_id": 5},
        {"type": "conversation.item.delete", "item_id": "x"},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": 0},
        {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0},
        {"type": "response.cancel"},
        {"type": "response.create", "response": {"what": 1}},
        {"type": "response.create", "response": {"conversation": "maybe"}},
        {"type": "response.create", "response": {"input": "x"}},
        update | {"session": {"type": "realtime", "what": 1}},
        update | {"session": {"type": "transcription"}},
        update | {"session": {"type": "realtime", "output_modalities": ["smell"]}},
        update | {"session": {"type": "realtime", "max_output_tokens": 0}},
        update | {"session": {"type": "realtime", "tools": [{"type": "hammer"}]}},
        update | {"session": {"type": "realtime", "audio": {"output": {"speed": 9}}}},
        update | {"session": {"type": "realtime", "audio": {"output": {"voice": 3}}}},
        update | {"session": {"type": "realtime", "audio": {"input": {"format": {"type": "audio/opus"}}}}},
        update | {"session": {"type": "realtime", "audio": {"input": {"turn_detection": {"type": "psychic"}}}}},
        update | {"session": {"type": "realtime", "audio": listening({"type": "semantic_vad", "eagerness": "x"})}},
        {"type": APPEND, "audio": "not base64!"},
        {"type": APPEND, "audio": "AAA="},
        {"type": APPEND},
        {"type": "input_audio_buffer.commit"},
    ]
    for number, event in enumerate(events):
        named = {"event_id": f"mine_{number}"} if isinstance(event, dict) else {}
        await socket.send(event | named if named else event)
    await socket.send("{")
    await socket.send(b"\xff\xfe")
    await socket.send("")
    await stage.wait(0.1)
    errors = socket.of("error")
    # An empty frame is answered or not; all else is.
    assert len(errors) >= len(events) + 2
    assert errors[0]["error"]["event_id"] == "mine_0"
    await write(socket, "fail")
    assert (await answered(socket))["status"] == "failed"
    await write(socket, "hello")
    assert (await answered(socket))["status"] == "completed"


@scenario()
async def semantic_vad(stage: Stage) -> None:
    """A pause after "and" is waited out; "mm-hm" over an answer is no turn, other words are."""
    vad = {"type": "semantic_vad", "eagerness": "medium", "create_response": True, "interrupt_response": True}
    socket = await opened(stage, audio=listening(vad))
    await speak(stage, socket, "tell me and", 0.8)
    assert not socket.of("input_audio_buffer.speech_stopped")
    await speak(stage, socket, "a story.", 1.5)
    await socket.until("response.output_audio.delta", count=3)
    # A microphone that is heard to be silent while the answer sounds: there is no echo.
    await speak(stage, socket, "", 2.0)
    turns = len(socket.of("input_audio_buffer.speech_started"))
    await speak(stage, socket, "Mm-hm.", 1.5)
    assert len(socket.of("input_audio_buffer.speech_started")) == turns
    assert not socket.of(DONE, response={"status": "cancelled"})
    await speak(stage, socket, "stop now.", 2.5)
    assert len(socket.of("input_audio_buffer.speech_started")) == turns + 1
    await stage.wait(4)
    assert socket.of(DONE)[-1]["response"]["status"] == "completed"


@scenario()
async def turns_by_hand(stage: Stage) -> None:
    """Without turn detection: commit, clear, what is too short; without automatic answers; g711 in."""
    socket = await opened(stage, audio=listening(None, format={"type": "audio/pcmu"}), output_modalities=["text"])
    await socket.say(APPEND, audio=b64(b"\xff" * 400))
    await socket.say("input_audio_buffer.commit", event_id="short")
    await socket.say("input_audio_buffer.clear")
    await socket.until("input_audio_buffer.cleared")
    await socket.say(
        "session.update",
        session={"type": "realtime", "audio": listening(None, format={"type": "audio/pcm", "rate": 24000})},
    )
    await speak(stage, socket, "what is the time")
    await socket.say("input_audio_buffer.commit")
    await answered(socket)
    await socket.say("input_audio_buffer.commit", event_id="empty")
    assert (await socket.until("error"))["error"]["code"] == "input_audio_buffer_commit_empty"
    quiet = SERVER_VAD | {"create_response": False, "interrupt_response": False}
    await socket.say("session.update", session={"type": "realtime", "audio": listening(quiet)})
    await speak(stage, socket, "hello", 1.0)
    await stage.wait(2)
    assert len(socket.of(DONE)) == 1
    await speak(stage, socket, "fail", 1.0)
    await socket.until("conversation.item.input_audio_transcription.failed")


@scenario(server={"session_s": 5.0})
async def session_expires(stage: Stage) -> None:
    socket = await opened(stage, output_modalities=["text"])
    await write(socket, "hello")
    await answered(socket)
    assert (await socket.end())[0] == 1001
    assert socket.of("error")[-1]["error"]["code"] == "session_expired"


@scenario(server={"strict_models": True, "max_sessions": 1})
async def refused_sessions(stage: Stage) -> None:
    socket = await stage.connect("/v1/realtime?model=gpt-realtime")
    await socket.end()
    assert socket.of("error")
    first = await stage.connect("/v1/realtime?model=writer", subprotocols=["realtime"])
    await first.until("session.created")
    second = await stage.connect("/v1/realtime?model=writer")
    assert second.status == 503


@scenario()
async def silence_is_asked_about(stage: Stage) -> None:
    """With `idle_timeout_ms` a user who says nothing after an answer is asked again."""
    socket = await opened(stage, audio=listening(SERVER_VAD | {"idle_timeout_ms": 2000}))
    await speak(stage, socket, "hello.", 1.0)
    await socket.until(DONE)
    await speak(stage, socket, "", 6.0)
    await socket.until("input_audio_buffer.timeout_triggered")
    await socket.until(DONE)
