"""A server that stops: what is being said is said to its end, in the time that there is."""

from __future__ import annotations

from tests.traces.harness import DRAIN_S, Socket, Stage, b64, pcm16, pieces, scenario
from tests.traces.scenarios.conversation import APPEND, DONE, opened, speak, write

COMPLETED = "conversation.item.input_audio_transcription.completed"


async def is_told(stage: Stage, socket: Socket, before_s: float) -> None:
    """The session ends with its reason, at `before_s` of the clock or earlier."""
    assert (await socket.end())[0] == 1001
    assert [f["error"]["code"] for f in socket.of("error")] == ["server_shutting_down"]
    assert stage.now_s < before_s


@scenario()
async def shutting_down(stage: Stage) -> None:
    """It tells its sessions, and lets nobody in. Nobody goes on with a sentence: its turn ends, and its words come."""
    socket = await stage.connect("/v1/realtime?intent=transcription")
    await socket.until("session.created")
    await socket.say(APPEND, audio=b64(pcm16("hello.")))
    idle = await stage.connect("/v1/realtime?intent=transcription")
    await idle.until("session.created")
    began_s = stage.now_s
    stage.drain()
    await is_told(stage, idle, began_s + 0.1)
    assert (await stage.request("GET", "/ready")).status == 503
    late = await stage.connect("/v1/realtime")
    assert late.status == 503
    await stage.request(
        "POST", "/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": "x"}]}
    )
    await is_told(stage, socket, began_s + DRAIN_S)
    assert [f["transcript"] for f in socket.of(COMPLETED)] == ["hello."]


@scenario()
async def shutting_down_in_a_sentence(stage: Stage) -> None:
    """Who speaks is heard to the end of the turn, and no longer."""
    socket = await stage.connect("/v1/realtime?intent=transcription")
    await socket.until("session.created")
    began_s = stage.now_s
    sound = pieces(pcm16("what is the time?", 1.2), 9600)
    for number, piece in enumerate(sound):
        if number == 2:
            stage.drain()
        await socket.say(APPEND, audio=b64(piece))
        await stage.wait(0.2)
        if socket.closed:
            break
    await is_told(stage, socket, began_s + 0.6 * DRAIN_S)
    assert [f["transcript"] for f in socket.of(COMPLETED)] == ["what is the time?"]


@scenario()
async def shutting_down_in_an_answer(stage: Stage) -> None:
    """An answer is given and heard to its end; so is one that a turn before it is owed."""
    socket = await opened(stage)
    await write(socket, "hello")
    await socket.say("response.create")
    await socket.until("response.output_audio.delta")
    spoken = await opened(stage)
    await speak(stage, spoken, "what is the time", 0.4)
    began_s = stage.now_s
    stage.drain()
    for _ in range(3):
        await spoken.say(APPEND, audio=b64(bytes(9600)))
        await stage.wait(0.2)
    for one in (socket, spoken):
        await is_told(stage, one, began_s + 0.7 * DRAIN_S)
        assert [f["response"]["status"] for f in one.of(DONE)] == ["completed"]


@scenario()
async def shutting_down_in_a_long_answer(stage: Stage) -> None:
    """What takes longer than the time there is, is cut, which its client is not said to have done."""
    socket = await opened(stage)
    await write(socket, "tell me a story")
    await socket.say("response.create")
    await socket.until("response.output_audio.delta")
    began_s = stage.now_s
    stage.drain()
    await socket.until(DONE)
    await stage.wait(began_s + 0.74 * DRAIN_S - stage.now_s)
    await socket.say("response.create")
    await is_told(stage, socket, began_s + DRAIN_S)
    assert stage.now_s > began_s + 0.7 * DRAIN_S
    cut = socket.of(DONE)[-1]["response"]
    assert (cut["status"], cut["status_details"]) == ("cancelled", {"type": "cancelled"})


@scenario()
async def shutting_down_in_an_utterance(stage: Stage) -> None:
    """Text that comes in pieces is spoken to its end, and the next utterance is not begun."""
    stream = await stage.connect("/v1/audio/speech/stream")
    await stream.say("session.config", response_format="pcm", voice="two")
    await stream.say("input.text", text="One two three. Four")
    await stage.wait(1)
    stage.drain()
    await stage.wait(1)
    await stream.say("input.text", text=" five.")
    await stream.say("input.done")
    assert (await stream.end())[0] == 1001
    assert [f["sentence_text"] for f in stream.of("audio.start")] == ["One two three.", "Four five."]
