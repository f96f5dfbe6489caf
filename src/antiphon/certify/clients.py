"""The clients of a certificate: each holds one session and takes turn after turn in real time, as people do.

They use only the wire protocols, so they can measure any server that speaks them. `OBJECTIVES` defines the delay of a
turn for each kind. `python -m antiphon.certify.clients` runs a process of clients.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import websockets

from antiphon.admission.certificate import Kind, Objective
from antiphon.certify.native_client import UNIT_S, UNITS_A_TURN, hold_native
from antiphon.certify.recordings import Recording, read_recordings, speech_begin_s
from antiphon.certify.wire import (
    PATIENCE_S,
    WIRE_HZ,
    Events,
    Failed,
    Loudspeaker,
    Microphone,
    begin,
    connected,
    read_event,
    while_running,
)

# The delay that is measured for each kind, and its default limit in seconds.
OBJECTIVES: dict[Kind, Objective] = {
    "captions": Objective(1.5, "from the end of speech to its final transcript"),
    "conversation": Objective(2.0, "from the end of a question to the first sound of the answer"),
    "speech": Objective(1.0, "from a text to its first sound"),
    "video": Objective(3.0, "from a question to the first text of the answer"),
    "duplex": Objective(2.0, "from the end of a question to the first sound of the answer"),
    "native": Objective(UNIT_S, "from the end of a unit to its result", allowed=0.0),
}
# The range of a person's pause after an answer, in seconds.
PAUSE_S = (0.4, 1.6)
# A client does not wait for speech onsets that are later than SETTLED_S after the end of a recording.
SETTLED_S = 0.3
# A turn fails if its sound arrives more than LATE_S too late, because the gap is audible.
LATE_S = 0.06
FRAMES_A_S = 4
ASKED = "What does the page say now?"
INSTRUCTIONS = "You are a voice assistant. Answer in one short sentence."


class Turn(msgspec.Struct, frozen=True):
    """One turn of a client. All delays are in seconds."""

    # The kind of the session.
    kind: str
    # The delay that OBJECTIVES defines; None if the turn failed.
    delay_s: float | None
    # Why the turn failed; "" if it did not.
    failed: str = ""
    # The text of the recording.
    said: str = ""
    # The transcript of the recording.
    heard: str = ""
    # Delay from the true start of speech to the first transcribed text; None if unknown.
    first_words_s: float | None = None
    # Same as `delay_s`, but to the first sound of the answer that is not silence.
    audible_s: float | None = None
    # Units of a native session in this turn.
    units: int = 0
    # Those of them whose result came too late.
    missed: int = 0


@dataclass(slots=True)
class Chances:
    """The random choices of one client: the recordings that it says, and its pauses."""

    recordings: Sequence[Recording]
    random: random.Random

    def recording(self) -> Recording:
        return self.random.choice(self.recordings)

    def pause_s(self) -> float:
        return self.random.uniform(*PAUSE_S)


Report = Callable[[Turn], None]
# Exceptions that may occur while reading the events of a server that does not follow the protocol.
ODD = (LookupError, TypeError, ValueError, AttributeError)


async def run_client(
    kind: Kind, url: str, key: str, recordings: Sequence[Recording], seed: int, report: Report
) -> None:
    """Hold one session of a kind and report its turns, until cancelled. Starts a new session if one breaks.

    `url` is the address of the server, http:// or ws://. `key` is its API key, or "".
    """
    chances = Chances(recordings, random.Random(seed))
    while True:
        try:
            await _CLIENTS[kind](url.replace("http", "ws", 1), key, chances, report)
        except (OSError, websockets.WebSocketException, Failed, TimeoutError, *ODD) as error:
            report(Turn(kind, None, f"{type(error).__name__}: {error}"[:200]))
            await asyncio.sleep(1.0)


async def _say_turns(
    socket: Any,
    chances: Chances,
    report: Report,
    outcome: Callable[[float, Recording, Events], Awaitable[Turn]],
) -> None:
    """Say one recording after another. After the speech of each, report the turn that `outcome` returns."""
    microphone, events = Microphone(socket), Events(socket)

    async def turns() -> None:
        while True:
            await asyncio.sleep(chances.pause_s())
            events.forget()
            recording = chances.recording()
            report(await outcome(microphone.say(recording), recording, events))

    await while_running(turns, microphone.run, events.run)


# --- captions ---------------------------------------------------------------------------------------------------------


CAPTIONS_PATH = "/v1/realtime?intent=transcription"


def captions_sessions() -> tuple[str, ...]:
    """Return a transcription session, and a conversation without answers for servers without transcription sessions."""
    sound = {"type": "audio/pcm", "rate": WIRE_HZ}
    heard = {"format": sound, "transcription": {"language": "en"}, "turn_detection": {"type": "server_vad"}}
    unanswered = heard | {"turn_detection": {"type": "server_vad", "create_response": False}}
    return (
        json.dumps({"type": "transcription", "audio": {"input": heard}}),
        json.dumps({"type": "realtime", "audio": {"input": unanswered, "output": {"format": sound}}}),
    )


async def _captions(url: str, key: str, chances: Chances, report: Report) -> None:
    async with connected(url + CAPTIONS_PATH, key) as socket:
        await begin(socket, *captions_sessions())
        await _say_turns(socket, chances, report, captioned)


async def captioned(end_s: float, recording: Recording, events: Events) -> Turn:
    """Wait until a recording is transcribed: a final has arrived, no speech is under way, and no final is pending.

    A pause inside the recording also ends a turn, and the server may detect the end of speech too early.
    """
    pending, heard = set[str](), list[str]()
    speaking, final_s = False, 0.0
    begin_s = end_s - recording.speech_end_s + speech_begin_s(recording.pcm)
    first_s: float | None = None
    while True:
        is_over = bool(heard) and not pending and not speaking
        try:
            at_s, event = await events.next(end_s + (SETTLED_S if is_over else PATIENCE_S))
        except Failed as failure:
            if is_over:
                first_words_s = None if first_s is None else max(0.0, first_s - begin_s)
                delay_s = max(0.0, final_s - end_s)
                return Turn("captions", delay_s, "", recording.text, " ".join(heard), first_words_s)
            return Turn("captions", None, str(failure), recording.text, " ".join(heard))
        match event.type:
            case "input_audio_buffer.speech_started":
                speaking = True
            case "input_audio_buffer.committed":
                speaking = False
                pending.add(event.item_id)
            case "conversation.item.input_audio_transcription.delta" if event.delta:
                first_s = at_s if first_s is None else first_s
            case "conversation.item.input_audio_transcription.completed":
                first_s = at_s if first_s is None else first_s
                pending.discard(event.item_id)
                heard.append(event.transcript)
                final_s = at_s
            case "error" | "conversation.item.input_audio_transcription.failed":
                return Turn("captions", None, event.problem, recording.text)


# --- conversation, duplex ---------------------------------------------------------------------------------------------

CONVERSATION_PATH = "/v1/realtime?model=gpt-realtime"
SOUND = ("response.output_audio.delta", "response.audio.delta")


def conversation_session(instructions: str = INSTRUCTIONS, max_tokens: int = 60, turns: str = "server_vad") -> str:
    """Return the configuration of a conversation as JSON. `turns` is its type of turn detection."""
    fields = {
        "input": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}, "turn_detection": {"type": turns}},
        "output": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}},
    }
    session = {"type": "realtime", "instructions": instructions, "max_output_tokens": max_tokens, "audio": fields}
    return json.dumps(session)


async def _conversation(url: str, key: str, chances: Chances, report: Report) -> None:
    await _talk("conversation", url + CONVERSATION_PATH, key, conversation_session(), chances, report)


async def _duplex(url: str, key: str, chances: Chances, report: Report) -> None:
    session = {
        "instructions": INSTRUCTIONS,
        "max_response_output_tokens": 60,
        "sample_rate_hz": WIRE_HZ,
        "turn_detection": {"type": "server_vad"},
    }
    await _talk("duplex", f"{url}/v1/realtime?duplex=1", key, json.dumps(session), chances, report)


async def _talk(kind: Kind, url: str, key: str, session: str, chances: Chances, report: Report) -> None:
    async with connected(url, key) as socket:
        await begin(socket, session)
        await _say_turns(socket, chances, report, partial(answered, kind, socket))


async def answered(kind: Kind, socket: Any, end_s: float, recording: Recording, events: Events) -> Turn:
    """Wait for the answer to a question, and play it to its end. A full-duplex client acknowledges its playback.

    If the question continues after a pause, an answer that has already begun does not count.
    """
    speaker, heard, done, silent = Loudspeaker(), "", False, ""
    while True:
        try:
            at_s, event = await events.next(end_s + (SETTLED_S if done else PATIENCE_S))
        except Failed as failure:
            if done:
                break
            return Turn(kind, None, silent or str(failure), recording.text, heard)
        if event.type in SOUND:
            speaker.take(event, at_s)
        elif event.type == "conversation.item.input_audio_transcription.completed":
            heard = event.transcript
        elif event.type == "input_audio_buffer.speech_started":
            speaker, done = Loudspeaker(), False
        elif event.type == "error":
            return Turn(kind, None, event.problem[:200], recording.text, heard)
        elif event.type == "response.listen":
            silent = f"not answered: {event.reason or None}"
        elif event.type == "response.done" and speaker.begun_s is None:
            silent = f"an answer without audio: {event.response and event.response.status}"
        elif event.type == "response.done":
            done = True
            if at_s > end_s + SETTLED_S:
                break
    assert speaker.begun_s is not None
    await asyncio.sleep(max(0.0, speaker.heard_by_s - time.monotonic()))
    if kind == "duplex":
        for item, seconds in speaker.items.items():
            ack = {"type": "playback.ack", "item_id": item, "played_ms": round(seconds * 1000)}
            await socket.send(json.dumps(ack))
    if speaker.late_s > LATE_S:
        return Turn(kind, None, f"sound was {speaker.late_s * 1000:.0f} ms late", recording.text, heard)
    audible_s = None if speaker.audible_s is None else max(0.0, speaker.audible_s - end_s)
    return Turn(kind, max(0.0, speaker.begun_s - end_s), said=recording.text, heard=heard, audible_s=audible_s)


# --- speech -----------------------------------------------------------------------------------------------------------


async def _speech(url: str, key: str, chances: Chances, report: Report) -> None:
    async with connected(f"{url}/v1/audio/speech/stream", key) as socket:
        while True:
            await asyncio.sleep(chances.pause_s())
            config = {"type": "session.config", "response_format": "pcm", "stream_audio": True}
            text = chances.recording().text
            for event in (config, {"type": "input.text", "text": text}, {"type": "input.done"}):
                await socket.send(json.dumps(event))
            report(await _spoken(socket))


async def _spoken(socket: Any) -> Turn:
    begun_s, speaker = time.monotonic(), Loudspeaker()
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            message = await socket.recv()
            at_s = time.monotonic()
            if isinstance(message, bytes):
                speaker.take_sound(message, at_s)
                continue
            event = read_event(message)
            if event.type == "error":
                return Turn("speech", None, event.message[:200])
            if event.type == "session.done":
                break
    await asyncio.sleep(max(0.0, speaker.heard_by_s - time.monotonic()))
    if speaker.begun_s is None:
        return Turn("speech", None, "no sound arrived")
    if speaker.late_s > LATE_S:
        return Turn("speech", None, f"sound was {speaker.late_s * 1000:.0f} ms late")
    return Turn("speech", speaker.begun_s - begun_s)


# --- video ------------------------------------------------------------------------------------------------------------


def picture(number: int) -> str:
    """Return an image of a page whose text changes once a second, as a JPEG in base64."""
    import io

    from PIL import Image, ImageDraw

    image = Image.new("RGB", (640, 480), (238, 236, 228))
    ImageDraw.Draw(image).text(
        (60, 200), f"Page {number // FRAMES_A_S}: the train leaves at {number // FRAMES_A_S % 24}:30", "black"
    )
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return base64.b64encode(file.getvalue()).decode()


async def _video(url: str, key: str, chances: Chances, report: Report) -> None:
    async with connected(f"{url}/v1/video/chat/stream", key) as socket:
        config = {"type": "session.config", "modalities": ["text"], "num_frames": 1}
        await socket.send(json.dumps(config))
        events = Events(socket)

        async def show() -> None:
            begun_s, number = time.monotonic(), chances.random.randrange(1000)
            first = number
            while True:
                frame = {"type": "video.frame", "frame_id": str(number), "data": picture(number)}
                await socket.send(json.dumps(frame))
                number += 1
                await asyncio.sleep(max(0.0, begun_s + (number - first) / FRAMES_A_S - time.monotonic()))

        async def turns() -> None:
            while True:
                await asyncio.sleep(1.0 + chances.pause_s())
                events.forget()
                asked_s = time.monotonic()
                await socket.send(json.dumps({"type": "video.query", "text": ASKED}))
                report(await _looked(events, asked_s))

        await while_running(turns, show, events.run)


async def _looked(events: Events, asked_s: float) -> Turn:
    delay_s: float | None = None
    while True:
        try:
            at_s, event = await events.next(asked_s + PATIENCE_S)
        except Failed as failure:
            return Turn("video", None, str(failure))
        match event.type:
            case "response.text.delta" if delay_s is None:
                delay_s = at_s - asked_s
            case "response.text.done":
                return Turn("video", at_s - asked_s if delay_s is None else delay_s)
            case "error":
                return Turn("video", None, event.message[:200])


# --- native -----------------------------------------------------------------------------------------------------------


async def _native(url: str, key: str, chances: Chances, report: Report) -> None:
    def turn(delay_s: float | None, missed: int, failed: str) -> None:
        report(Turn("native", delay_s, failed, units=UNITS_A_TURN, missed=missed))

    await hold_native(url, key, chances.recording, turn, chances.random.random() * UNIT_S)


_CLIENTS = {
    "captions": _captions,
    "conversation": _conversation,
    "speech": _speech,
    "video": _video,
    "duplex": _duplex,
    "native": _native,
}


# --- a process of clients, which `antiphon certify` starts ------------------------------------------------------------


class Work(msgspec.Struct, frozen=True):
    """The task of a process of clients, which it reads as one line of JSON."""

    # Address of the server, http:// or ws://.
    url: str
    # API key of the server, or "".
    key: str
    # Folder of the recordings.
    data: str
    # Number of sessions to hold, by kind.
    sessions: dict[Kind, int]
    # The clients start evenly spread over this time, in seconds.
    spread_s: float
    # Seed of the first client's random choices. Each further client has the next higher number as its seed.
    seed: int


async def _run(work: Work) -> None:
    """Write a line of JSON for each turn, until the process is killed.

    The first turn of each client warms up and is not reported, unless it failed.
    """
    recordings = read_recordings(Path(work.data))
    kinds = [kind for kind, count in work.sessions.items() for _ in range(count)]
    async with asyncio.TaskGroup() as group:
        for number, kind in enumerate(kinds):
            client = partial(run_client, kind, work.url, work.key, recordings, work.seed + number)
            group.create_task(_client(client, work.spread_s * number / len(kinds)))


async def _client(run: Callable[[Report], Coroutine[Any, Any, None]], after_s: float) -> None:
    await asyncio.sleep(after_s)
    is_reported = False

    def report(turn: Turn) -> None:
        nonlocal is_reported
        # A failure is always reported.
        if is_reported or turn.failed:
            sys.stdout.buffer.write(msgspec.json.encode(turn) + b"\n")
            sys.stdout.buffer.flush()
        is_reported = True

    await run(report)


if __name__ == "__main__":
    asyncio.run(_run(msgspec.json.decode(sys.stdin.buffer.readline(), type=Work)))
