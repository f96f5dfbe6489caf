"""With `--store-speech`, speech in progress outlives its host, even if the client keeps only its last second."""

from __future__ import annotations

import asyncio
import base64
import signal
from collections.abc import Iterator, Sequence

import pytest

from tests.cluster.processes import Cluster, cluster
from tests.scripted import speech, text
from tests.server.clients import Wire, b64, connect
from tests.server.live.test_ownership import answer, last_seq

pytestmark = pytest.mark.server
SESSION = {
    "type": "realtime",
    "output_modalities": ["text"],
    "audio": {"input": {"transcription": {}, "turn_detection": {"type": "server_vad", "silence_duration_ms": 300}}},
}
FRAME_S = 0.1
# Whole words of 320 ms. A host that stops hands a session over after 3.5 s at most, even during a turn.
BEFORE, AFTER = 10, 16
# The configuration, and a written turn before the speech.
NUM_FIRST = 3


@pytest.fixture
def hosts() -> Iterator[Cluster]:
    with cluster("", "--store-speech", num_hosts=2) as found:
        yield found


async def speak(wire: Wire, frames: Sequence[str]) -> None:
    """Send frames of audio at the pace of a microphone."""
    for frame in frames:
        await wire.say("input_audio_buffer.append", audio=frame)
        await asyncio.sleep(FRAME_S)


@pytest.mark.parametrize("drains", [False, True])
def test_a_turn_that_was_being_said_is_heard_whole_by_the_next_host(hosts: Cluster, drains: bool) -> None:
    one, two = hosts.hosts
    pcm16 = base64.b64decode(b64(speech(1, BEFORE + AFTER, silence_frames=40), 24_000))
    step = round(FRAME_S * 24_000) * 2
    frames = [base64.b64encode(pcm16[at : at + step]).decode() for at in range(0, len(pcm16), step)]
    num_before = round(BEFORE * 0.32 / FRAME_S)

    async def main() -> tuple[int, str]:
        async with connect(one.ws, "?resume=1") as wire:
            created = await wire.read()
            await wire.say("session.update", session=SESSION)
            assert await answer(wire, "one") == "one"
            await speak(wire, frames[:num_before])
            await wire.until("input_audio_buffer.speech_started")
            if drains:
                one.send(signal.SIGTERM)
                # The user keeps speaking until the client is notified of the end.
                async with asyncio.TaskGroup() as both:
                    speaking = both.create_task(speak(wire, frames[num_before:]))
                    await wire.until("session.moving")
                    speaking.cancel()
            last = last_seq(wire)
            if not drains:
                one.kill()
        async with connect(two.ws, f"?resume={created['session']['id']}") as wire:
            about = {"session_id": created["session"]["id"], "resume_token": created["resume_token"]}
            await wire.say("session.resume", **about, last_received_server_event_seq=last)
            resumed = await wire.read()
            assert resumed["how"] == ("handed_over" if drains else "claimed")
            # The first messages are the configuration and the written turn.
            for frame in frames[resumed["received_events"] - NUM_FIRST :]:
                await wire.say("input_audio_buffer.append", audio=frame)
            done = await wire.until("conversation.item.input_audio_transcription.completed")
            await wire.until("response.done")
            return resumed["received_events"], done["transcript"]

    received, transcript = asyncio.run(main())
    assert transcript.strip() == text(1, BEFORE + AFTER)
    # All 3.2 s are stored, except that a killed host loses the audio after the last chunk, at most a second.
    assert received > NUM_FIRST + num_before - (1 if drains else 15)
