"""Wyoming connections that are invalid, silent, slow or too many, and a server that drains."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from antiphon.errors import SettingsError
from antiphon.server.http.forwarded import Networks
from antiphon.server.listeners import check_listener_exposure
from antiphon.server.wyoming.connection import EVENT_S, IDLE_S
from antiphon.server.wyoming.handling import KEPT_S, MAX_CHARS, MAX_CONVERSATIONS, MAX_EXCHANGES, Histories
from antiphon.server.wyoming.listening import check_wyoming
from tests.scripted import ScriptedTranscriber, speech
from tests.server.test_silent_clients import run
from tests.server.wyoming.harness import connect, port, settings

LINE = b'{"type": "ping", "data": {"text": "%s"}}\n'


@pytest.mark.parametrize(
    "data",
    [
        LINE % (b"x" * 10_000_000),
        b'{"type": "ping", "data_length": -1}\n',
        b'{"type": "audio-chunk", "payload_length": -5}\n',
        b'{"type": "audio-chunk", "payload_length": 2147483648}\n',
        b'{"type": "ping", "data_length": 99999999}\n',
        b'{"data": {}}\n',
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b'{"type": "audio-chunk"}\n',
        b'{"type": "audio-chunk", "data": {"rate": 16000, "width": 2, "channels": 1}, "payload_length": 3}\nabc',
        b'{"type": "audio-start", "data": {"rate": 16000, "width": 9, "channels": 1}}\n',
        b'{"type": "audio-start", "data": {"rate": 1, "width": 2, "channels": 1}}\n',
        b'{"type": "audio-start", "data": {"rate": 16000, "width": 2, "channels": 900}}\n',
        b'{"type": "transcribe", "data": {"language": "klingon"}}\n',
        b'{"type": "transcribe", "data": {"name": "nothing"}}\n',
        b'{"type": "transcribe", "data": {"vad_sensitivity": "high"}}\n',
        b'{"type": "synthesize-chunk", "data": {"text": "x"}}\n',
        b'{"type": "transcript", "data": {"text": "x", "context": {"conversation_id": 7}}}\n',
        b'{"type": "transcript", "data": {"text": "' + b"x" * 9000 + b'"}}\n',
    ],
)
def test_when_an_event_is_not_valid_then_the_connection_ends_with_an_error(data: bytes) -> None:
    async def main() -> None:
        async with port() as served, connect(served) as client:
            client.writer.write(data)
            try:
                error = await client.until("error")
                assert error["text"]
                assert error["code"]
            except ConnectionResetError:
                # The rest of the data was not read.
                pass
            assert await client.closed()
            # Others are served.
            async with connect(served) as other:
                other.say("ping")
                await other.until("pong")

    asyncio.run(main())


@pytest.mark.parametrize(
    ("data", "within_s"),
    [
        (b"", 10.0),
        (b'{"type": "audio-chunk", "payload_length": 100}\n', EVENT_S),
        (b'{"type": "ping"}\n', IDLE_S),
    ],
)
def test_when_nothing_more_comes_then_the_connection_ends(data: bytes, within_s: float) -> None:
    async def main() -> None:
        async with port() as served, connect(served) as client:
            began_s = asyncio.get_running_loop().time()
            client.writer.write(data)
            while await client.reader.read(1 << 16):
                pass
            took_s = asyncio.get_running_loop().time() - began_s
            assert within_s - 2 < took_s < within_s + 5

    run(main)


def test_when_many_connections_say_nothing_then_others_still_find_a_place() -> None:
    async def main() -> None:
        async with port(max_sessions=8, connections_per_address=6) as served:
            silent = [await asyncio.open_connection("127.0.0.1", served.number) for _ in range(100)]
            # The last are closed at once, and counted.
            assert await silent[-1][0].read() == b""
            found = served.state.metrics.registry.get_sample_value
            assert found("antiphon_listener_connections", {"listener": "wyoming"}) == 6
            assert found("antiphon_refused_total", {"reason": "listener_connections"}) == 94
            silent[0][1].close()
            with anyio.fail_after(5):
                while found("antiphon_listener_connections", {"listener": "wyoming"}) == 6:  # noqa: ASYNC110
                    await anyio.sleep(0.001)
            async with connect(served) as client:
                client.say("describe")
                await client.until("info")
            for _, writer in silent:
                writer.close()

    asyncio.run(main())


def test_when_a_client_sends_a_minute_and_reads_nothing_then_it_is_served() -> None:
    async def main() -> None:
        async with port(wyoming_endpointing="client") as served, connect(served) as client:
            for turn in range(12):
                client.sound(speech(10 * turn + 1, 9, silence_frames=66))
                await client.writer.drain()
            client.say("audio-stop")
            text = (await client.until("transcript"))["text"]
            assert text.split()[0] == "w1"
            assert text.split()[-1] == "w119"

    asyncio.run(main())


def test_when_the_server_drains_then_a_command_under_way_gets_its_transcript() -> None:
    async def main() -> None:
        async with port() as served, connect(served) as client, connect(served) as other, connect(served) as idle:
            idle.say("ping")
            await idle.until("pong")
            for each in (client, other):
                each.sound(speech(1, 3))
                await each.until("voice-started")
            async with anyio.create_task_group() as group:
                group.start_soon(served.drain)
                # A connection without work is closed at once, and no further one is accepted.
                assert await idle.closed()
                with pytest.raises(OSError):
                    await asyncio.open_connection("127.0.0.1", served.number)
                # Each of the others is closed when its own work is done.
                for each in (client, other):
                    each.sound(speech(4, 2))
                    each.say("audio-stop")
                    assert (await each.until("transcript"))["text"] == "w1 w2 w3 w4 w5"
                    assert await each.closed()

    asyncio.run(main())


def test_when_the_server_drains_then_a_text_that_is_still_written_is_spoken_to_its_end() -> None:
    async def main() -> None:
        async with port() as served, connect(served) as client, connect(served) as asking:
            client.say("synthesize-start")
            client.say("synthesize-chunk", text="The first sentence is here. And")
            await client.until("audio-chunk")
            async with anyio.create_task_group() as group:
                group.start_soon(served.drain)
                # The connection without work is closed: the server drains.
                assert await asking.closed()
                client.say("synthesize-chunk", text=" the second one too.")
                client.say("synthesize", text="The first sentence is here. And the second one too.")
                client.say("synthesize-stop")
                await client.until("synthesize-stopped")
                assert await client.closed()
            said = " ".join(text for _, text in served.voice.spoken)
            assert said == "The first sentence is here. And the second one too."

    asyncio.run(main())


def test_when_the_drain_is_over_then_unfinished_work_ends_with_an_error() -> None:
    async def main() -> None:
        async with port() as served, connect(served) as client:
            client.sound(speech(1, 3))
            await client.until("voice-started")
            async with anyio.create_task_group() as group:
                group.start_soon(served.drain, 0.1)
                assert (await client.until("error"))["code"] == "server_shutting_down"
                assert await client.closed()

    asyncio.run(main())


def test_when_a_client_leaves_then_its_place_is_free() -> None:
    gate = anyio.Event

    async def main() -> None:
        held = gate()
        transcriber = ScriptedTranscriber(gate=lambda _: held)
        async with port(transcriber) as served:
            async with connect(served) as client:
                client.sound(speech(1, 3))
                client.say("audio-stop")
                await client.until("voice-started")
                assert served.state.admission.num_sessions == 1
            with anyio.fail_after(5):
                await served.state.admission.all_left()

    asyncio.run(main())


def test_when_the_server_is_full_then_the_error_says_so() -> None:
    async def main() -> None:
        async with port(sessions_per_key=1) as served, connect(served) as first, connect(served) as second:
            first.sound(speech(1, 3))
            await first.until("voice-started")
            second.say("synthesize", text="Yes.")
            assert (await second.until("error"))["code"] == "no_room"
            assert await second.closed()

    asyncio.run(main())


@pytest.mark.parametrize("address", ["0.0.0.0:10300", "[::]:10300", "192.168.1.7:10300"])
def test_when_others_reach_the_port_then_the_start_asks_who_may_connect(address: str) -> None:
    with pytest.raises(SettingsError, match="--wyoming-allow"):
        check_wyoming(settings(wyoming=address))
    check_wyoming(settings(wyoming=address, wyoming_allow="192.168.0.0/16"))
    check_wyoming(settings(wyoming=address, allow_anonymous=True))
    check_listener_exposure("--wyoming", "127.0.0.1:10300", "", allow_anonymous=False)


def test_when_an_address_is_not_allowed_then_its_connection_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "192.168.7.1" in Networks("192.168.0.0/16, 10.0.0.7", "--x")
    assert "192.169.7.1" not in Networks("192.168.0.0/16, 10.0.0.7", "--x")
    with pytest.raises(SettingsError, match="--wyoming-allow"):
        Networks("192.168.0.0/99", "--wyoming-allow")
    monkeypatch.setattr("antiphon.server.listeners.is_loopback", lambda _: False)

    async def main() -> None:
        async with port(wyoming_allow="10.0.0.0/8") as served, connect(served) as client:
            assert await client.closed()
            found = served.state.metrics.registry.get_sample_value
            assert found("antiphon_refused_total", {"reason": "listener_address"}) == 1

    asyncio.run(main())


def test_when_conversations_are_many_or_old_then_the_oldest_are_forgotten() -> None:
    now_s = 0.0
    histories = Histories(lambda: now_s)
    said = (("hello", "hi"),)
    for number in range(MAX_CONVERSATIONS + 1):
        histories.put("here", str(number), said)
    assert histories.get("here", "0") == ()
    assert histories.get("here", "1") == said
    assert histories.get("there", "1") == ()
    histories.put("here", "", said)
    assert histories.get("here", "") == ()
    now_s = KEPT_S + 1
    assert histories.get("here", "1") == ()
    histories.put("here", "long", said * (MAX_EXCHANGES + 1))
    assert len(histories.get("here", "long")) == MAX_EXCHANGES
    histories.put("here", "wide", (("x" * MAX_CHARS, "y"), *said))
    assert histories.get("here", "wide") == said
