"""deepgram-sdk, of today and of a year ago: transcripts, Flux, a file, speech. drive_deepgram.py URL RECORDING [TURNS]

Each frame is checked against the SDK's own types, which the SDK itself does not check.
"""

import asyncio
import inspect
import sys
import threading

import soundfile
from deepgram import AsyncDeepgramClient, DeepgramClient, DeepgramClientEnvironment
from deepgram.core.events import EventType

try:
    from deepgram.agent.v1.types import AgentV1InjectUserMessage as INJECT
    from deepgram.agent.v1.types import AgentV1Settings as SETTINGS
    from deepgram.speak.v1.types import SpeakV1Text as SPEAK
except ImportError:
    # Before version 6.
    from deepgram.extensions.types import sockets
    from deepgram.extensions.types.sockets import AgentV1InjectUserMessageMessage as INJECT
    from deepgram.extensions.types.sockets import AgentV1SettingsMessage as SETTINGS
    from deepgram.extensions.types.sockets import SpeakV1TextMessage as SPEAK

RATE_HZ = 16_000
RAW = {"encoding": "linear16", "sample_rate": str(RATE_HZ)}
TEXTS = ("Hello there.", "How are you today? I am fine.", "Goodbye.")
refused, num_frames = [], 0


def check(message):
    """Count a message that the SDK's types do not accept."""
    global num_frames
    num_frames += 1
    if isinstance(message, bytes):
        return
    try:
        type(message).model_validate(message.model_dump(by_alias=True))
    except Exception as error:
        refused.append(f"{message!r:.300}: {error}")


def samples(path):
    data, rate = soundfile.read(path, dtype="int16")
    assert rate == RATE_HZ, rate
    return data.astype("<i2").tobytes()


class Heard:
    """The messages of one connection."""

    def __init__(self, connection):
        self.messages, self.changed, self.errors = [], asyncio.Event(), []
        connection.on(EventType.MESSAGE, self.take)
        connection.on(EventType.ERROR, self.errors.append)

    def take(self, message):
        check(message)
        self.messages.append(message)
        self.changed.set()

    def of(self, kind, **fields):
        return [
            m
            for m in self.messages
            if getattr(m, "type", None) == kind and all(getattr(m, k, None) == v for k, v in fields.items())
        ]

    async def until(self, count, kind, **fields):
        async with asyncio.timeout(60):
            while len(self.of(kind, **fields)) < count:
                self.changed.clear()
                await self.changed.wait()


async def say(connection, pcm, silence_s):
    data = pcm + bytes(int(silence_s * RATE_HZ) * 2)
    for at in range(0, len(data), 8000):
        await connection.send_media(data[at : at + 8000])
        await asyncio.sleep(0.002)


async def tell(connection, name, **fields):
    """Send a message that is no audio. Each has a method since version 6."""
    method = "send_" + "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    api = ".".join(type(connection).__module__.split(".")[1:3])
    if name == "Speak":
        await connection.send_text(SPEAK(type="Speak", **fields))
    elif hasattr(connection, method):
        await getattr(connection, method)()
    elif api == "listen.v2":
        await connection.send_control(sockets.ListenV2ControlMessage(type=name))
    else:
        kind = sockets.ListenV1ControlMessage if api == "listen.v1" else sockets.SpeakV1ControlMessage
        await connection.send_control(kind(type=name))


async def listen(client, pcm, turns):
    """Turns that a pause ends, and turns that the client ends, in one stream."""
    wishes = {"interim_results": "true", "vad_events": "true", "punctuate": "true", "utterance_end_ms": "1000"}
    async with client.listen.v1.connect(
        model="nova-3", language="en", endpointing="300", **RAW, **wishes
    ) as connection:
        heard = Heard(connection)
        reading = asyncio.create_task(connection.start_listening())
        for number in range(turns):
            if number % 2:
                await say(connection, pcm, 0.1)
                await tell(connection, "Finalize")
            else:
                await say(connection, pcm, 1.5)
            await tell(connection, "KeepAlive")
            await heard.until(number + 1, "Results", is_final=True)
        await tell(connection, "CloseStream")
        await heard.until(1, "Metadata")
        await asyncio.wait_for(reading, 10)
    texts = [m.channel.alternatives[0].transcript for m in heard.of("Results", is_final=True)]
    right = sum("surpassed" in text for text in texts)
    assert right >= 0.9 * turns, texts
    assert heard.of("SpeechStarted")
    assert heard.of("UtteranceEnd")
    assert heard.of("Results", is_final=False)
    assert heard.of("Results", from_finalize=True)
    assert not heard.errors, heard.errors
    return right


async def flux(client, pcm, turns):
    async with client.listen.v2.connect(model="flux-general-en", eager_eot_threshold="0.4", **RAW) as connection:
        heard = Heard(connection)
        reading = asyncio.create_task(connection.start_listening())
        for number in range(turns):
            await say(connection, pcm, 3.0)
            await heard.until(number + 1, "TurnInfo", event="EndOfTurn")
        await tell(connection, "CloseStream")
        await asyncio.wait_for(reading, 10)
    ends = heard.of("TurnInfo", event="EndOfTurn")
    assert heard.of("Connected")
    assert sum("surpassed" in m.transcript for m in ends) >= 0.9 * turns, [m.transcript for m in ends]
    assert [m.turn_index for m in ends] == list(range(len(ends)))
    assert not heard.errors, heard.errors
    return len(heard.of("TurnInfo", event="EagerEndOfTurn"))


async def speak(client, turns):
    async with client.speak.v1.connect(
        model="aura-2-thalia-en", encoding="linear16", sample_rate="24000"
    ) as connection:
        heard = Heard(connection)
        reading = asyncio.create_task(connection.start_listening())
        for number in range(turns):
            for word in TEXTS[number % len(TEXTS)].split():
                await tell(connection, "Speak", text=f"{word} ")
            await tell(connection, "Flush")
            await heard.until(number + 1, "Flushed")
        await tell(connection, "Close")
        await asyncio.wait_for(reading, 10)
    num_bytes = sum(len(m) for m in heard.messages if isinstance(m, bytes))
    assert num_bytes > turns * 12_000, num_bytes
    assert heard.of("Metadata")
    assert not heard.errors, heard.errors
    return num_bytes / 48_000


async def agent(client, pcm):
    """A spoken turn and a written one, each answered in sound."""
    provider = {"type": "deepgram", "model": "nova-3"}
    settings = {
        "audio": {
            "input": {"encoding": "linear16", "sample_rate": RATE_HZ},
            "output": {"encoding": "linear16", "sample_rate": RATE_HZ, "container": "none"},
        },
        "agent": {
            "language": "en",
            "listen": {"provider": provider},
            "think": {"provider": {"type": "open_ai", "model": "gpt-4o-mini"}, "prompt": "You are terse."},
            "speak": {"provider": provider | {"model": "aura-2-thalia-en"}},
            "greeting": "Hello there.",
        },
    }
    async with client.agent.v1.connect() as connection:
        heard = Heard(connection)
        reading = asyncio.create_task(connection.start_listening())
        await heard.until(1, "Welcome")
        await connection.send_settings(SETTINGS(type="Settings", **settings))
        await heard.until(1, "SettingsApplied")
        await heard.until(1, "AgentAudioDone")
        await say(connection, pcm, 4.0)
        await heard.until(1, "ConversationText", role="user")
        await heard.until(2, "AgentAudioDone")
        await connection.send_inject_user_message(INJECT(type="InjectUserMessage", content="Say goodbye."))
        await heard.until(3, "AgentAudioDone")
        reading.cancel()
    assert "surpassed" in heard.of("ConversationText", role="user")[0].content
    num_bytes = sum(len(m) for m in heard.messages if isinstance(m, bytes))
    assert num_bytes > 30_000, num_bytes
    assert heard.of("AgentStartedSpeaking")
    assert not heard.of("Error"), heard.of("Error")
    assert not heard.errors, heard.errors
    return num_bytes / (2 * RATE_HZ)


def files(client, recording):
    """The sync client, from a thread of its own."""
    with open(recording, "rb") as file:
        answer = client.listen.v1.media.transcribe_file(
            request=file.read(), model="nova-3", smart_format=True, utterances=True, paragraphs=True
        )
    check(answer)
    assert "surpassed" in answer.results.channels[0].alternatives[0].transcript
    assert answer.results.utterances
    mp3 = b"".join(client.speak.v1.audio.generate(text=TEXTS[0], model="aura-2-thalia-en"))
    assert len(mp3) > 1000
    wav = b"".join(client.speak.v1.audio.generate(text=TEXTS[0], model="aura-2-thalia-en", encoding="linear16"))
    assert wav.startswith(b"RIFF")


async def main():
    http, recording = sys.argv[1:3]
    turns = int(sys.argv[3]) if len(sys.argv) > 3 else 100
    ws = http.replace("http", "ws", 1)
    urls = {"base": http, "production": ws, "agent": ws, "agent_rest": http}
    known = inspect.signature(DeepgramClientEnvironment).parameters
    where = DeepgramClientEnvironment(**{name: url for name, url in urls.items() if name in known})
    client = AsyncDeepgramClient(api_key="none", environment=where)
    pcm = samples(recording)
    right = await listen(client, pcm, turns)
    eager = await flux(client, pcm, max(1, turns // 10))
    spoken_s = await speak(client, max(1, turns // 10))
    spoken_s += await agent(client, pcm)
    failures = []
    thread = threading.Thread(target=run, args=(DeepgramClient(api_key="none", environment=where), recording, failures))
    thread.start()
    await asyncio.to_thread(thread.join)
    assert not failures, failures
    assert not refused, refused[:3]
    done = f"{right} of {turns} turns, {eager} guesses, {spoken_s:.1f} s of speech"
    print(f"deepgram: {done}, {num_frames} frames, none refused")


def run(client, recording, failures):
    try:
        files(client, recording)
    except Exception as error:
        failures.append(repr(error))


asyncio.run(main())
