"""Speech goes on at another host: a stream and a request behind a door, whose clients know nothing of it, and ours."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Iterator

import httpx
import pytest

from antiphon.audio.pcm import to_pcm16
from antiphon.client import Client
from antiphon.signals import become
from tests.cluster.chaos import HOST_TTL_S, busiest
from tests.cluster.processes import Cluster, Host, cluster
from tests.cluster.scripted_voice import sound_of
from tests.cluster.speakers import SEED, Speaker

pytestmark = pytest.mark.server
LIMIT_S = 60.0
# The metric with the seconds of audio that a host has spoken.
SPOKEN = 'antiphon_audio_seconds_total{kind="spoken"}'
# One second of speech takes a sixth of a second.
PACE_S = 0.05
SENTENCES = ("The boats came in at noon today.", "Nobody had seen them, and nobody asked.", "Then it was quiet again.")
TEXT = " ".join(SENTENCES)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    flags = ("--host-ttl-s", str(HOST_TTL_S), "--max-sessions", "50")
    with cluster("", *flags, num_hosts=2, pace_s=PACE_S, voices="one,two") as found:
        found.add_door().wait()
        yield found


def door_of(hosts: Cluster) -> Host:
    return hosts.doors[0]


async def befalls(hosts: Cluster, number: signal.Signals, speaking: Host | None = None) -> None:
    """Send a signal to the host that is speaking, or that has the session. A hanging host goes on when another host has
    spoken or has the session.
    """
    num_hit, host = (1, speaking) if speaking else await asyncio.to_thread(busiest, hosts)
    assert num_hit
    other = next(each for each in hosts.hosts if each is not host)
    before_s = other.metric(SPOKEN)
    host.send(number)
    if number is signal.SIGSTOP:
        await become(lambda: other.num_sessions() or other.metric(SPOKEN) > before_s, 0.1)
        host.send(signal.SIGCONT)
        return
    await asyncio.to_thread(host.end)
    host.start()
    await asyncio.to_thread(host.wait)


Phase = Callable[[Speaker], Awaitable[None]]


async def before_text(_: Speaker) -> None:
    await asyncio.sleep(0.1)


async def in_a_sentence(speaker: Speaker) -> None:
    await speaker.say(TEXT)
    await speaker.send(type="input.done")
    await speaker.until(lambda: len(speaker.sound) > 2 * len(sound_of(SENTENCES[0], SEED)) * 1.3)


async def in_unfinished_text(speaker: Speaker) -> None:
    await speaker.say(f"{SENTENCES[0]} {SENTENCES[1]} Then it was")
    await speaker.until(lambda: len(speaker.sound) >= 2 * len(sound_of(f"{SENTENCES[0]} {SENTENCES[1]}", SEED)))
    await speaker.say("quiet again.")
    await speaker.send(type="input.done")


@pytest.mark.parametrize("phase", [before_text, in_a_sentence, in_unfinished_text], ids=lambda phase: phase.__name__)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_when_its_host_is_lost_then_a_stock_client_of_a_door_hears_each_sample_once(
    hosts: Cluster, number: signal.Signals, phase: Phase
) -> None:
    if number is signal.SIGSTOP and phase is not in_a_sentence:
        pytest.skip("a host that hangs is noticed after six seconds")

    async def main() -> Speaker:
        async with asyncio.timeout(LIMIT_S), Speaker(door_of(hosts).ws) as speaker:
            await phase(speaker)
            done = 1
            striking = asyncio.create_task(befalls(hosts, number))
            if phase is before_text:
                await striking
                await speaker.say(TEXT)
                await speaker.send(type="input.done")
            await speaker.until(lambda: speaker.num_done == done)
            await striking
            await speaker.say("It is over.")
            await speaker.send(type="input.done")
            await speaker.until(lambda: speaker.num_done == done + 1)
            return speaker

    speaker = asyncio.run(main())
    expected = to_pcm16(sound_of(f"{TEXT} It is over.", SEED))
    assert len(speaker.sound) == len(expected)
    assert speaker.sound == expected
    starts = [(e["utterance_index"], e["sentence_text"]) for e in speaker.events if e["type"] == "audio.start"]
    assert starts == [*((0, sentence) for sentence in SENTENCES), (1, "It is over.")]
    totals = [e["total_bytes"] for e in speaker.events if e["type"] == "audio.done"]
    assert totals == [2 * len(sound_of(sentence, SEED)) for sentence in (*SENTENCES, "It is over.")]
    assert [e["total_sentences"] for e in speaker.events if e["type"] == "session.done"] == [3, 1]
    assert not [e for e in speaker.events if e["type"] in ("error", "session.created", "session.continued")]


@pytest.mark.parametrize("through_door", [True, False])
def test_when_its_host_is_killed_then_our_client_goes_on(hosts: Cluster, through_door: bool) -> None:
    async def main(url: str) -> bytes:
        async with asyncio.timeout(LIMIT_S), Client(url) as client, client.speech(config={"seed": SEED}) as speech:
            await speech.say(TEXT)
            await speech.finish()
            sound, killed = b"", None
            async for piece in speech:
                sound += piece.pcm
                if killed is None and len(sound) > len(to_pcm16(sound_of(SENTENCES[0], SEED))) * 1.3:
                    killed = asyncio.create_task(befalls(hosts, signal.SIGKILL))
            assert killed
            await killed
            return sound

    url = door_of(hosts).url if through_door else hosts.hosts[0].url
    assert asyncio.run(main(url)) == to_pcm16(sound_of(TEXT, SEED))


@pytest.mark.parametrize(("number", "seed"), [(signal.SIGKILL, None), (signal.SIGSTOP, SEED)])
def test_when_its_host_is_lost_then_a_request_through_a_door_gets_the_same_audio(
    hosts: Cluster, number: signal.Signals, seed: int | None
) -> None:
    # Long enough that the host is still speaking when the signal arrives, on a busy machine too.
    text = " ".join([TEXT] * 6)
    body = {"input": text, "response_format": "pcm", "stream": True, "model": "default"}

    async def main() -> bytes:
        async with asyncio.timeout(LIMIT_S), httpx.AsyncClient(trust_env=False, timeout=None) as client:
            url, sound, striking = f"{door_of(hosts).url}/v1/audio/speech", b"", None
            spoken_s = {host.name: host.metric(SPOKEN) for host in hosts.hosts}
            async with client.stream("POST", url, json=body | ({} if seed is None else {"seed": seed})) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for piece in answer.aiter_bytes():
                    sound += piece
                    if striking is None and len(sound) > 50_000:
                        (speaking,) = (host for host in hosts.hosts if host.metric(SPOKEN) > spoken_s[host.name])
                        striking = asyncio.create_task(befalls(hosts, number, speaking))
            assert striking
            await striking
            return sound

    sound, expected = asyncio.run(main()), to_pcm16(sound_of(text, SEED))
    assert len(sound) == len(expected)
    assert seed is None or sound == expected


def test_when_the_other_host_lacks_the_voice_then_the_door_tries_the_next_one(hosts: Cluster) -> None:
    """The stream does not end at a host that would refuse it, and its client does not hear of that host."""

    async def main(found: Cluster, door: Host, first: Host) -> Speaker:
        async with asyncio.timeout(LIMIT_S), Speaker(door.ws, voice="one") as speaker:
            await in_a_sentence(speaker)
            other = found.add_host(env={"ANTIPHON_TEST_VOICES": "two"})
            await asyncio.to_thread(other.wait)
            await asyncio.to_thread(first.kill)
            await become(lambda: other.metric("antiphon_sessions_started_total{"), 0.05)
            await asyncio.to_thread(found.add_host(env={"ANTIPHON_TEST_VOICES": "one"}).wait)
            await speaker.until(lambda: speaker.num_done == 1)
            return speaker

    with cluster("", "--host-ttl-s", str(HOST_TTL_S), num_hosts=0, pace_s=PACE_S) as found:
        first = found.add_host(env={"ANTIPHON_TEST_VOICES": "one"})
        first.wait()
        door = found.add_door()
        door.wait()
        speaker = asyncio.run(main(found, door, first))
    assert speaker.sound == to_pcm16(sound_of(TEXT, SEED))
    assert not [event for event in speaker.events if event["type"] == "error"]
