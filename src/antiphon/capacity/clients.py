"""The clients of a certificate: each holds one session and takes turn after turn, in real time, as people do.

They know the wires and nothing of the server, so that they measure any server that speaks them. A turn's delay is
what its kind is certified for (`DELAYS`).
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np
import soxr
import websockets

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.capacity.certificate import Kind, Objective
from antiphon.capacity.recordings import Recording, speech_begin_s

# What is measured of each kind, and by default within which time, in seconds.
OBJECTIVES: dict[Kind, Objective] = {
    "captions": Objective(1.5, "from the end of speech to its final transcript"),
    "conversation": Objective(2.0, "from the end of a question to the first sound of the answer"),
    "speech": Objective(1.0, "from a text to its first sound"),
    "video": Objective(3.0, "from a question to the first text of the answer"),
    "duplex": Objective(2.0, "from the end of a question to the first sound of the answer"),
}
WIRE_HZ, CHUNK_S = 24_000, 0.04
CHUNK_BYTES = 2 * int(WIRE_HZ * CHUNK_S)
# A server has so long to say that it takes a session.
BEGIN_S = 3.0
# A turn whose answer has not come by then has failed.
PATIENCE_S = 15.0
# What a person waits after an answer, in seconds, at least and at most.
PAUSE_S = (0.4, 1.6)
# Behind the end of a recording nobody begins to speak any more that was not found to speak by then.
SETTLED_S = 0.3
# 16-bit samples above this are heard: 45 dB below the loudest that there can be.
AUDIBLE = 184
# Sound that comes later than it is due by this was heard to stop.
LATE_S = 0.06
FRAMES_A_S = 4
ASKED = "What does the page say now?"
INSTRUCTIONS = "You are a voice assistant. Answer in one short sentence."


class Turn(msgspec.Struct, frozen=True):
    """One turn of a client. `delay_s`: None where it failed, and `failed` says why. `heard`: what was transcribed.

    `first_words_s`: from the true beginning of speech to its first transcribed text, where that is streamed.
    `audible_s`: as `delay_s`, to the first sound of an answer that is not silence.
    """

    kind: str
    delay_s: float | None
    failed: str = ""
    said: str = ""
    heard: str = ""
    first_words_s: float | None = None
    audible_s: float | None = None


class Failed(Exception):
    """A turn went wrong; the text says how."""


@dataclass(slots=True)
class Chances:
    """The draws of one client: which recordings it says, and how long it waits."""

    recordings: Sequence[Recording]
    random: random.Random

    def recording(self) -> Recording:
        return self.random.choice(self.recordings)

    def pause_s(self) -> float:
        return self.random.uniform(*PAUSE_S)


Report = Callable[[Turn], None]
# What reading the events of a server raises that sends others than it should.
ODD = (LookupError, TypeError, ValueError, AttributeError)


async def run_client(
    kind: Kind, url: str, key: str, recordings: Sequence[Recording], seed: int, report: Report
) -> None:
    """Hold one session of a kind and report its turns, until cancelled. A session that breaks is begun anew.

    `url`: of the server, http:// or ws://. `key`: its API key, or "".
    """
    chances = Chances(recordings, random.Random(seed))
    while True:
        try:
            await _CLIENTS[kind](url.replace("http", "ws", 1), key, chances, report)
        except (OSError, websockets.WebSocketException, Failed, TimeoutError, *ODD) as error:
            report(Turn(kind, None, f"{type(error).__name__}: {error}"[:200]))
            await asyncio.sleep(1.0)


@asynccontextmanager
async def connected(url: str, key: str) -> AsyncIterator[Any]:
    """Yield a connection to a server, with its API key unless that is ""."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with websockets.connect(
        url, additional_headers=headers, max_size=None, compression=None, open_timeout=PATIENCE_S
    ) as socket:
        yield socket


async def begin(socket: Any, *sessions: dict[str, Any]) -> None:
    """Ask for a session, or for the next one where the server refuses it. Raises Failed where it refuses all.

    A server that says nothing for BEGIN_S is taken to have agreed.
    """
    for session in sessions:
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        refusal = ""
        with suppress(TimeoutError):
            async with asyncio.timeout(BEGIN_S):
                while not refusal:
                    event = json.loads(await socket.recv())
                    if event["type"] == "session.updated":
                        return
                    if event["type"] == "error":
                        refusal = str(event["error"].get("message") or event["error"])
        if not refusal:
            return
    raise Failed(f"the session is refused: {refusal}"[:200])


def wire_pcm(pcm: Pcm) -> bytes:
    """Return float32 at 16 kHz as 16-bit PCM at 24 kHz."""
    return to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, WIRE_HZ), np.float32))


class Microphone:
    """Sends sound in real time without a gap: what it is given, and silence. `clock`: when the last chunk was due."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._waiting = socket, b""
        self._due_s = time.monotonic()

    def say(self, recording: Recording) -> float:
        """Say a recording from the next chunk on, and return when its speech will have been sent, monotonic."""
        begins_s = self._due_s + CHUNK_S
        self._waiting = wire_pcm(recording.pcm)
        return begins_s + recording.speech_end_s

    async def run(self) -> None:
        silence = bytes(CHUNK_BYTES)
        while True:
            self._due_s += CHUNK_S
            await asyncio.sleep(max(0.0, self._due_s - time.monotonic()))
            data, self._waiting = self._waiting[:CHUNK_BYTES], self._waiting[CHUNK_BYTES:]
            sound = data + silence[len(data) :]
            event = {"type": "input_audio_buffer.append", "audio": base64.b64encode(sound).decode()}
            await self._socket.send(json.dumps(event))


class Events:
    """The server's events, as they come. A reader sees each once."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._queue: asyncio.Queue[tuple[float, dict[str, Any]]] = asyncio.Queue()

    async def run(self) -> None:
        async for message in self._socket:
            if isinstance(message, str):
                self._queue.put_nowait((time.monotonic(), json.loads(message)))
        raise Failed("the server closed the connection")

    async def next(self, until_s: float) -> tuple[float, dict[str, Any]]:
        """Return the next event and when it came. Raises Failed where none comes by `until_s`, monotonic."""
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic())):
                return await self._queue.get()
        except TimeoutError:
            raise Failed("no answer came in time") from None

    def forget(self) -> None:
        """Drop what has come and was not read."""
        while not self._queue.empty():
            self._queue.get_nowait()


async def while_running(turns: Callable[[], Any], *tasks: Callable[[], Any]) -> None:
    """Take turns until they, or one of the tasks, end; raise what one failed with."""
    running = [asyncio.ensure_future(work()) for work in (*tasks, turns)]
    try:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _say_turns(
    socket: Any,
    chances: Chances,
    report: Report,
    outcome: Callable[[float, Recording, Events], Awaitable[Turn]],
) -> None:
    """Say recordings one after another, and report what becomes of each: `outcome` is given the end of its speech."""
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


def captions_sessions() -> tuple[dict[str, Any], ...]:
    """The session of a client that has its speech transcribed, and one for servers that know no such sessions."""
    sound, words = {"type": "audio/pcm", "rate": WIRE_HZ}, {"language": "en"}
    vad: dict[str, Any] = {"type": "server_vad"}
    fields = {"format": sound, "transcription": words, "turn_detection": vad}
    unanswered = fields | {"turn_detection": vad | {"create_response": False}}
    return (
        {"type": "transcription", "audio": {"input": fields}},
        {"type": "realtime", "audio": {"input": unanswered, "output": {"format": sound}}},
    )


async def _captions(url: str, key: str, chances: Chances, report: Report) -> None:
    async with connected(url + CAPTIONS_PATH, key) as socket:
        await begin(socket, *captions_sessions())
        await _say_turns(socket, chances, report, captioned)


async def captioned(end_s: float, recording: Recording, events: Events) -> Turn:
    """Wait until all of a recording is transcribed: its last final after which nobody speaks, and nothing is pending.

    A pause inside the recording ends a turn too, and speech may be found to have ended before it truly did.
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
        match event["type"]:
            case "input_audio_buffer.speech_started":
                speaking = True
            case "input_audio_buffer.committed":
                speaking = False
                pending.add(event["item_id"])
            case "conversation.item.input_audio_transcription.delta" if event.get("delta"):
                first_s = at_s if first_s is None else first_s
            case "conversation.item.input_audio_transcription.completed":
                first_s = at_s if first_s is None else first_s
                pending.discard(event["item_id"])
                heard.append(event["transcript"])
                final_s = at_s
            case "error" | "conversation.item.input_audio_transcription.failed":
                return Turn("captions", None, str(event.get("error", {}).get("message", "failed")), recording.text)


# --- conversation, duplex ---------------------------------------------------------------------------------------------

CONVERSATION_PATH = "/v1/realtime?model=gpt-realtime"
SOUND = ("response.output_audio.delta", "response.audio.delta")


class Loudspeaker:
    """Plays what comes by the clock, and knows how late sound was, and when it will have been heard.

    `begun_s`: when sound first came. `audible_s`: when the first of it that is no silence was heard. Monotonic.
    """

    def __init__(self) -> None:
        self.begun_s: float | None = None
        self.audible_s: float | None = None
        self.late_s = 0.0
        self._until_s = 0.0
        self.items: dict[str, float] = {}

    def take(self, event: dict[str, Any], at_s: float) -> None:
        """Take in a delta of sound."""
        seconds = len(event["delta"]) * 3 / 4 / 2 / WIRE_HZ
        if self.begun_s is None:
            self.begun_s = self._until_s = at_s
        self.late_s = max(self.late_s, at_s - self._until_s)
        if self.audible_s is None and isinstance(event["delta"], str):
            samples = np.frombuffer(base64.b64decode(event["delta"]), "<i2")
            if len(loud := np.flatnonzero(np.abs(samples.astype(np.int32)) > AUDIBLE)):
                self.audible_s = max(self._until_s, at_s) + float(loud[0]) / WIRE_HZ
        self._until_s = max(self._until_s, at_s) + seconds
        item = event.get("item_id", "")
        self.items[item] = self.items.get(item, 0.0) + seconds

    @property
    def heard_by_s(self) -> float:
        """When all that has come will have been heard, monotonic."""
        return self._until_s


def conversation_session(
    instructions: str = INSTRUCTIONS, max_tokens: int = 60, turns: str = "server_vad"
) -> dict[str, Any]:
    """The session of a client that talks. `turns`: how their ends are found."""
    fields = {
        "input": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}, "turn_detection": {"type": turns}},
        "output": {"format": {"type": "audio/pcm", "rate": WIRE_HZ}},
    }
    return {"type": "realtime", "instructions": instructions, "max_output_tokens": max_tokens, "audio": fields}


async def _conversation(url: str, key: str, chances: Chances, report: Report) -> None:
    await _talk("conversation", url + CONVERSATION_PATH, key, conversation_session(), chances, report)


async def _duplex(url: str, key: str, chances: Chances, report: Report) -> None:
    session = {
        "instructions": INSTRUCTIONS,
        "max_response_output_tokens": 60,
        "sample_rate_hz": WIRE_HZ,
        "turn_detection": {"type": "server_vad"},
    }
    await _talk("duplex", f"{url}/v1/realtime?duplex=1", key, session, chances, report)


async def _talk(kind: Kind, url: str, key: str, session: dict[str, Any], chances: Chances, report: Report) -> None:
    async with connected(url, key) as socket:
        await begin(socket, session)
        await _say_turns(socket, chances, report, partial(answered, kind, socket))


async def answered(kind: Kind, socket: Any, end_s: float, recording: Recording, events: Events) -> Turn:
    """Wait for the answer to a question, and hear it to its end. A client of full duplex says what it has played.

    Where the question goes on behind a pause, what was begun is not its answer.
    """
    speaker, heard, done, silent = Loudspeaker(), "", False, ""
    while True:
        try:
            at_s, event = await events.next(end_s + (SETTLED_S if done else PATIENCE_S))
        except Failed as failure:
            if done:
                break
            return Turn(kind, None, silent or str(failure), recording.text, heard)
        if event["type"] in SOUND:
            speaker.take(event, at_s)
        elif event["type"] == "conversation.item.input_audio_transcription.completed":
            heard = event["transcript"]
        elif event["type"] == "input_audio_buffer.speech_started":
            speaker, done = Loudspeaker(), False
        elif event["type"] == "error":
            return Turn(kind, None, str(event["error"].get("message", "error"))[:200], recording.text, heard)
        elif event["type"] == "response.listen":
            silent = f"not answered: {event['response']['metadata'].get('reason')}"
        elif event["type"] == "response.done" and speaker.begun_s is None:
            silent = f"an answer without audio: {event['response'].get('status')}"
        elif event["type"] == "response.done":
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
                # The same seconds as base64 of them would have.
                speaker.take({"delta": range(len(message) * 4 // 3)}, at_s)
                continue
            event = json.loads(message)
            if event["type"] == "error":
                return Turn("speech", None, str(event.get("message", "error"))[:200])
            if event["type"] == "session.done":
                break
    await asyncio.sleep(max(0.0, speaker.heard_by_s - time.monotonic()))
    if speaker.begun_s is None:
        return Turn("speech", None, "no sound came")
    if speaker.late_s > LATE_S:
        return Turn("speech", None, f"sound was {speaker.late_s * 1000:.0f} ms late")
    return Turn("speech", speaker.begun_s - begun_s)


# --- video ------------------------------------------------------------------------------------------------------------


def picture(number: int) -> str:
    """Return a page with a line that changes once a second, as a JPEG in base64."""
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
        match event["type"]:
            case "response.text.delta" if delay_s is None:
                delay_s = at_s - asked_s
            case "response.text.done":
                return Turn("video", at_s - asked_s if delay_s is None else delay_s)
            case "error":
                return Turn("video", None, str(event.get("message", "error"))[:200])


_CLIENTS = {"captions": _captions, "conversation": _conversation, "speech": _speech, "video": _video, "duplex": _duplex}
