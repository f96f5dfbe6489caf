"""Transcription sessions go on at another host: under clients of a door that know nothing of it, and under ours."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from websockets.exceptions import ConnectionClosed

from antiphon.audio.pcm import to_pcm16
from antiphon.client import Client, held_session
from antiphon.contracts import TranscriberProfile
from antiphon.errors import StoreError
from antiphon.server.live.moving import stored_copy
from antiphon.settings.sections import ResumeSettings
from antiphon.signals import become
from tests.cluster.chaos import HOST_TTL_S, busiest
from tests.cluster.listeners import AUDIO, OPENAI, PREFIX, Captions, Listener
from tests.cluster.processes import Cluster, cluster
from tests.cluster.taking_turns import taking_turns
from tests.cluster.test_moving import dies, door
from tests.scripted import ScriptedTranscriber, speech, text
from tests.server.clients import Wire, b64, connect
from tests.server.live.test_ownership import Server, last_seq, resuming, sharing

LIMIT_S = 60.0
TURN = speech(1, 6)


class SdkListener(Listener):
    """A `Listener` that uses OpenAI's own client."""

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[None]:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"{self._urls[0].replace('ws', 'http', 1)}/v1")
        async with client.realtime.connect(extra_query={"intent": "transcription"}) as self._connection:
            await self.send("session.update", session=OPENAI)
            self._reader = asyncio.create_task(self._read())
            self._reader.add_done_callback(lambda _: self._took.set())
            try:
                yield
            finally:
                self._reader.cancel()

    async def send(self, kind: str, **fields: Any) -> None:
        await self._connection.send({"type": kind, **fields})  # type: ignore[misc,arg-type]

    async def _read(self) -> None:
        async for event in self._connection:
            self.captions.take(event.to_dict(mode="json", warnings=False))
            self._took.set()
        raise AssertionError("the door has closed")


class AnotherTranscriber(ScriptedTranscriber):
    @property
    def profile(self) -> TranscriberProfile:
        return replace(super().profile, id="another-model")


async def befalls(hosts: Cluster, listeners: list[Listener], number: signal.Signals) -> None:
    """Send a signal to the host with most sessions while somebody speaks. A hanging host goes on after its TTL."""
    await become(lambda: any(each.is_speaking and each.captions.is_open for each in listeners), 0.01)
    num_hit, host = await asyncio.to_thread(busiest, hosts)
    assert num_hit
    host.send(number)
    if number is signal.SIGSTOP:
        await asyncio.sleep(2 * HOST_TTL_S)
        host.send(signal.SIGCONT)
        return
    await asyncio.to_thread(host.end)
    host.start()
    await asyncio.to_thread(host.wait)


@pytest.mark.server
def test_when_hosts_are_killed_hang_and_drain_then_stock_clients_of_a_door_get_each_word_once() -> None:
    async def main(hosts: Cluster, url: str) -> None:
        listeners = [
            SdkListener(1, [url], 1, lengths=[5]),
            Listener(2, [url], 2, vllm=True, lengths=[5]),
            Listener(3, [url], 3, lengths=[5]),
        ]
        async with asyncio.timeout(LIMIT_S), taking_turns(listeners):
            for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
                await befalls(hosts, listeners, number)
        # Word times go on over all hosts: each listener has spoken for longer than any host has lived.
        for listener in listeners:
            assert len(listener.captions.words) == 5 * len(listener.said)

    with cluster("", "--host-ttl-s", str(HOST_TTL_S), num_hosts=2) as hosts:
        front = hosts.add_door()
        front.wait()
        asyncio.run(main(hosts, front.ws))


@pytest.mark.server
def test_when_its_host_is_killed_then_our_client_goes_on_in_the_same_session() -> None:
    async def main(hosts: Cluster, url: str) -> None:
        pcm = speech(1, 12, 4)
        async with asyncio.timeout(LIMIT_S), Client(url) as client, client.captions() as captions:

            async def speak() -> None:
                for at in range(0, len(pcm), 1600):
                    await captions.send(to_pcm16(pcm[at : at + 1600]))
                    await asyncio.sleep(0.05)
                await captions.finish()

            speaking = asyncio.create_task(speak())
            killed = False
            async for _ in captions:
                if not killed:
                    killed = True
                    _, host = await asyncio.to_thread(busiest, hosts)
                    host.kill()
            await speaking
            assert captions.text.strip() == text(1, 12)
            starts = [word.start_s for word in captions.words]
            assert np.allclose(starts, np.arange(12) * 0.32, atol=0.02)
            assert captions.num_sessions == 1

    with cluster("", num_hosts=2) as hosts:
        front = hosts.add_door()
        front.wait()
        asyncio.run(main(hosts, front.url))


def test_a_real_models_transcript_may_differ_from_its_deltas_and_a_scripted_one_may_not() -> None:
    delta = {"type": f"{PREFIX}delta", "item_id": "a", "delta": "five, five"}
    done = {"type": f"{PREFIX}completed", "item_id": "a", "transcript": "5, 5."}
    real, scripted = Captions(is_exact=False), Captions()
    for captions in (real, scripted):
        captions.take(delta)
        assert captions.is_open
    real.take(done)
    assert (real.completed, real.streamed, real.is_open) == (["5, 5."], ["five, five"], False)
    with pytest.raises(AssertionError):
        scripted.take(done)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[list[Server]]:
    """Three hosts of one store."""
    with sharing(tmp_path, 3) as found:
        yield found


@asynccontextmanager
async def in_a_turn(host: Server) -> AsyncIterator[tuple[Wire, str, str]]:
    """Yield a transcription with an open turn of which words were sent, its id and its token."""
    async with connect(host.ws, "?resume=1&intent=transcription") as wire:
        created = await wire.read()
        await wire.say("session.update", session=OPENAI)
        await wire.say("input_audio_buffer.append", audio=b64(TURN, 24_000))
        await wire.until("transcription.delta")
        yield wire, created["session"]["id"], created["resume_token"]


def test_a_host_without_the_model_refuses_by_its_name_and_another_host_goes_on(hosts: list[Server]) -> None:
    one, two, three = hosts
    assert two.state.models
    two.state.models = replace(two.state.models, transcriber=AnotherTranscriber())

    async def main() -> None:
        async with in_a_turn(one) as (wire, session_id, token):
            dies(one, two)
            row = three.row(session_id)
            async with resuming(two, session_id, token, last_seq(wire)) as (again, refused):
                with pytest.raises(ConnectionClosed):
                    await again.socket.recv()
            assert (refused["error"]["code"], refused["error"]["retryable"]) == ("model_not_loaded", True)
            assert f"`{ScriptedTranscriber().profile.id}`" in refused["error"]["message"]
            assert three.row(session_id) == row
            async with resuming(three, session_id, token, last_seq(wire)) as (again, resumed):
                assert resumed["how"] == "claimed"
                await again.say("input_audio_buffer.append", audio=b64(np.append(TURN, np.zeros(16_000, "f4")), 24_000))
                done = await again.until("transcription.completed")
                assert done["transcript"] == text(1, 6)
                # What was sent is not sent again.
                assert wire.joined() + again.joined() == text(1, 6)

    asyncio.run(main())


def test_words_that_only_the_client_has_are_neither_sent_again_nor_lost_though_the_store_was_down(
    hosts: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, three = hosts
    pcm = speech(1, 30)

    def down(*_: object) -> None:
        raise StoreError("down")

    async def main() -> None:
        async with connect(one.ws, "?resume=1&keeps_words=1&intent=transcription") as wire:
            created = await wire.read()
            session_id, token = created["session"]["id"], created["resume_token"]
            await wire.say("session.update", session=OPENAI)
            sent = 0
            while not (kept := [f["resume_words"] for f in wire.seen if "resume_words" in f]):
                assert sent < len(pcm), wire.seen
                await wire.say("input_audio_buffer.append", audio=b64(pcm[sent : sent + 1600], 24_000))
                sent += 1600
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await wire.read()
            (before,) = json.loads(three.row(session_id).snapshot)["continued"]["transcription"]["unread"]
            assert before["turn"] == 0
            stored = json.loads(three.row(session_id).snapshot)["continued"]["transcription"]["sent"]
            assert len(stored) < len(wire.joined().split())
            dies(one, two)
            with monkeypatch.context() as patch:
                for name in ("get", "claim", "tail"):
                    patch.setattr(two.store, name, down)
                async with resuming(two, session_id, token, last_seq(wire)) as (_, refused):
                    assert (refused["error"]["code"], refused["error"]["retryable"]) == ("resource_exhausted", True)
            about = {"session_id": session_id, "resume_token": token, "last_received_server_event_seq": last_seq(wire)}
            async with connect(two.ws, f"?resume={session_id}") as again:
                await again.say("session.resume", **about, resume_words=kept[-1])
                received = (await again.until("session.resumed"))["received_events"]
                assert received == 1
                await again.say("input_audio_buffer.append", audio=b64(np.append(pcm, np.zeros(16_000, "f4")), 24_000))
                assert (await again.until("transcription.completed"))["transcript"] == text(1, 30)
                assert wire.joined() + again.joined() == text(1, 30)

    asyncio.run(main())


def test_a_token_of_another_kind_of_session_resumes_nothing(hosts: list[Server]) -> None:
    one, two, _ = hosts

    async def main() -> None:
        async with in_a_turn(one) as (_, session_id, _), connect(one.ws, "?resume=1") as other:
            token = (await other.read())["resume_token"]
            await other.say("session.update", session={"type": "realtime", "output_modalities": ["text"]})
            await other.until("session.updated")
            dies(one, two)
            async with resuming(two, session_id, token) as (_, refused):
                assert refused["error"]["code"] == "invalid_resume_token"

    asyncio.run(main())


def test_audio_that_a_client_sends_twice_is_heard_after_what_is_settled(hosts: list[Server]) -> None:
    """A client that does not count sends all its audio again, from before what the store has settled."""
    one, two, _ = hosts
    whole = np.concatenate((TURN, np.zeros(16_000, np.float32)))

    async def main() -> None:
        async with in_a_turn(one) as (wire, session_id, token):
            await wire.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
            first = await wire.until("transcription.completed")
            await wire.say("input_audio_buffer.append", audio=b64(speech(7, 6), 24_000))
            await wire.until("transcription.delta")
            dies(one, two)
            async with resuming(two, session_id, token, last_seq(wire)) as (again, resumed):
                # The update and the first turn are settled; the silence after it may be the beginning of a turn.
                assert resumed["received_events"] == 2
                for _ in range(2):
                    await again.say("input_audio_buffer.append", audio=b64(whole, 24_000))
                # The host takes the first copy for the audio of the second turn, in which the second copy goes on.
                second = await again.until("transcription.completed")
                assert second["item_id"] != first["item_id"]
                await again.say("input_audio_buffer.append", audio=b64(speech(20, 3, 40), 24_000))
                assert (await again.until("transcription.completed"))["transcript"] == text(20, 3)
                starts = [f["audio_start_ms"] for f in [*wire.seen, *again.seen] if f["type"].endswith("started")]
                assert starts == sorted(set(starts))

    asyncio.run(main())


def test_a_host_that_drains_waits_for_the_end_of_a_turn(hosts: list[Server]) -> None:
    one, two, _ = hosts

    async def main() -> None:
        async with in_a_turn(one) as (wire, session_id, token):
            stopping = asyncio.create_task(asyncio.to_thread(one.stop.close))
            await asyncio.sleep(0.1)
            await wire.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
            assert (await wire.until("transcription.completed"))["transcript"] == text(1, 6)
            await wire.until("session.moving")
            await stopping
            async with resuming(two, session_id, token, last_seq(wire)) as (again, resumed):
                # A turn might begin in the silence, so it is sent again.
                assert (resumed["how"], resumed["received_events"]) == ("handed_over", 2)
                for pcm in (np.zeros(16_000, np.float32), speech(7, 3, 40)):
                    await again.say("input_audio_buffer.append", audio=b64(pcm, 24_000))
                assert (await again.until("transcription.completed"))["transcript"] == text(7, 3)

    asyncio.run(main())


def written(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir() if path.is_file())


@pytest.mark.parametrize("drains", [False, True])
def test_when_the_settings_say_so_then_no_text_is_in_the_store_and_a_session_ends_with_its_host(
    hosts: list[Server], tmp_path: Path, drains: bool
) -> None:
    one, two, _ = hosts
    for host in hosts:
        host.state.settings = replace(host.state.settings, resume=ResumeSettings(store_captions=False))

    async def main() -> None:
        async with in_a_turn(one) as (wire, session_id, token):
            assert one.store.get(session_id) is None
            if drains:
                await wire.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
                await wire.until("transcription.completed")
                await asyncio.to_thread(one.stop.close)
            else:
                dies(one, two)
            assert b"w1" not in written(tmp_path)
            async with resuming(two, session_id, token) as (_, refused):
                assert refused["error"]["code"] == "unknown_session"

    asyncio.run(main())


def test_when_a_door_no_longer_keeps_the_audio_of_a_turn_then_its_client_goes_on_without_these_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_session, "MAX_CAPTIONS_BYTES", 40_000)
    monkeypatch.setattr(stored_copy, "MAX_TURN_S", 0.0)

    async def main(url: str, hosts: list[Server]) -> None:
        async with connect(url, "?intent=transcription") as wire:
            await wire.say("session.update", session=OPENAI)
            pcm = speech(1, 12)
            for at in range(0, len(pcm), 1600):
                await wire.say("input_audio_buffer.append", audio=b64(pcm[at : at + 1600], 24_000))
            await wire.until("transcription.delta")
            (owner,) = (host for host in hosts if host.state.admission.num_sessions)
            await asyncio.to_thread(owner.stop.close)
            await wire.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
            cut = await wire.until("transcription.completed")
            # The next host has heard the end of the turn, and silence before it.
            assert set(cut["transcript"].split()) < set(text(1, 12).split())
            await wire.say("input_audio_buffer.append", audio=b64(speech(20, 3, 40), 24_000))
            assert (await wire.until("transcription.completed"))["transcript"] == text(20, 3)

    with sharing(tmp_path, 2, reachable=True) as hosts, door(*hosts) as url:
        asyncio.run(main(url, hosts))


def test_when_the_beta_names_are_in_use_then_a_client_of_a_door_goes_on_too(tmp_path: Path) -> None:
    beta = {"input_audio_format": "pcm16", "turn_detection": AUDIO["turn_detection"]}

    async def main(url: str, hosts: list[Server]) -> None:
        headers = {"openai-beta": "realtime=v1"}
        async with connect(url, "?intent=transcription", additional_headers=headers) as wire:
            created = await wire.read()
            assert created["type"] == "transcription_session.created"
            assert "resume_token" not in created
            await wire.say("transcription_session.update", session=beta)
            await wire.say("input_audio_buffer.append", audio=b64(TURN, 24_000))
            await wire.until("transcription.delta")
            (owner,) = (host for host in hosts if host.state.admission.num_sessions)
            await asyncio.to_thread(owner.stop.close)
            await wire.say("input_audio_buffer.append", audio=b64(np.zeros(16_000, np.float32), 24_000))
            assert (await wire.until("transcription.completed"))["transcript"] == text(1, 6)
            assert wire.joined() == text(1, 6)

    with sharing(tmp_path, 2, reachable=True) as hosts, door(*hosts) as url:
        asyncio.run(main(url, hosts))
