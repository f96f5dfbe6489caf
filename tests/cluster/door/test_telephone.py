"""Telephone calls at a door: the door has the leg, and the hosts that have the conversation die during the call.

The hosts have no settings of the telephone: those of the door count.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from bench import carrier
from bench.sip_phone import Telephone
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from antiphon.server.telephone.tickets import signature_of
from tests.cluster.door.line import KEY, LIMIT_S, MEDIA, application, call, id_of_call, listed
from tests.cluster.processes import Cluster, Host, cluster, until
from tests.scripted import speech, text
from tests.server.scripted import WORD_S
from tests.server.telephone.peers import Site, site
from tests.store.servers import free_port

pytestmark = pytest.mark.server
TOKEN, ACCOUNT = "0123456789abcdef0123456789abcdef", "AC" + "0" * 32
HEADERS = {"Authorization": f"Bearer {KEY}"}
ENV = {"ANTIPHON_API_KEYS": KEY, "ANTIPHON_TWILIO_AUTH_TOKEN": TOKEN}


@pytest.fixture(scope="module")
def api() -> Iterator[Site]:
    """Twilio's REST API."""
    with site(lambda _: (201, b'{"sid": "CA1"}')) as found:
        yield found


@pytest.fixture(scope="module")
def hosts() -> Iterator[Cluster]:
    with cluster("", num_hosts=2, pace_s=0.05, api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module")
def door(hosts: Cluster, api: Site) -> Host:
    calls_out = ("--twilio-account", ACCOUNT, "--twilio-number", "+4930999", "--twilio-api", api.url)
    found = hosts.add_door("--state", hosts.state, *calls_out, "--telephone-dial", "+49", env=ENV)
    found.wait()
    return found


def busiest(hosts: Cluster) -> Host:
    return max(hosts.hosts, key=Host.num_sessions)


async def lose(hosts: Cluster) -> Host:
    """Kill the host that has the call."""
    dying = await asyncio.to_thread(busiest, hosts)
    await asyncio.to_thread(dying.kill)
    return dying


async def restart(host: Host) -> None:
    host.start()
    await asyncio.to_thread(host.wait)


def twiml(door: Host, token: str = TOKEN) -> httpx.Response:
    """Ask for TwiML as Twilio does, signed with `token`."""
    fields = {"CallSid": "CA1", "AccountSid": "AC1", "From": "+4930111", "To": "+4930222"}
    url = f"{door.url}/v1/telephone/twilio"
    signature = signature_of(token, url.replace("http", "https", 1), fields.items())
    return httpx.post(url, data=fields, headers={"X-Twilio-Signature": signature}, timeout=LIMIT_S)


def stream_of(twiml: str) -> tuple[str, dict[str, str]]:
    """Return the path of the stream in TwiML, and the headers with which Twilio opens it."""
    found = re.search(r'<Stream url="([^"]*)"/>', twiml)
    assert found, twiml
    return urlsplit(found[1]).path, {"X-Twilio-Signature": signature_of(TOKEN, found[1])}


def test_when_the_host_dies_then_the_answer_begins_anew_and_the_history_is_what_was_heard(
    hosts: Cluster, door: Host
) -> None:
    path, signed = stream_of(twiml(door).text)

    async def main() -> None:
        async with call(door.ws, path, carrier.start(), additional_headers=signed) as line:
            id = await id_of_call(door)
            async with application(door, id) as app:
                # It takes 3 s to be generated, and 18 s to be heard.
                await app.ask(text(1, 60))
                await line.until(lambda: line.buffer.played_s > 0.6)
            dying = await lose(hosts)
            # The rest of what the dead host said is not played.
            await line.until(lambda: line.clears == 1)
            begun_s = line.buffer.played_s
            async with application(door, id) as app:
                await line.until(lambda: line.buffer.played_s > begun_s + 1.0)
                line.speak(speech(1, 4, 31))
                cut = await app.until("conversation.item.truncated")
                await line.until(lambda: line.clears == 2)
                heard_s = line.buffer.played_s - begun_s
                await app.say("conversation.item.retrieve", item_id=cut["item_id"])
                kept = (await app.until("conversation.item.retrieved"))["item"]["content"][0]["transcript"]
                # What Twilio gives back without having played it is not heard.
                num_kept = len(kept.split())
                assert kept == text(1, num_kept)
                assert WORD_S <= cut["audio_end_ms"] / 1000 <= heard_s
                assert 1 <= num_kept <= heard_s / WORD_S + 1
            assert line.closed == (0, "")
            await restart(dying)

    asyncio.run(main())


@pytest.mark.heavy
def test_what_a_caller_says_and_presses_while_no_host_has_the_call_is_answered(hosts: Cluster, door: Host) -> None:
    async def main() -> None:
        async with call(door.ws, MEDIA, carrier.start(order="17")) as line:
            id = await id_of_call(door)
            async with application(door, id) as app:
                await app.ask("Hello.")
                await app.until("response.done")
            dying = await lose(hosts)
            line.speak(speech(2, 3, 31))
            async with application(door, id) as app:
                assert (await app.until("response.output_audio_transcript.done"))["transcript"] == text(2, 3)
                await line.press("5")
                await line.press("#")
                assert "telephone: 5#" in (await app.until("response.output_audio_transcript.done"))["transcript"]
                # The functions of the call are there at the next host too.
                await app.ask('call send_digits {"digits": "1x"}')
                assert "'digits'" in (await app.until("response.output_audio_transcript.done"))["transcript"]
                await app.say("session.update", session={"type": "realtime", "tools": []})
                while not (tools := (await app.until("session.updated"))["session"]["tools"]):
                    pass
                assert [tool["name"] for tool in tools] == ["hang_up", "send_digits"]
                await app.ask("call hang_up {}")
                await line.until(lambda: line.closed == (1000, "hang_up"))
            await restart(dying)

    asyncio.run(main())
    until(lambda: sum(host.num_sessions() for host in hosts.hosts) == 0)
    assert door.metric('antiphon_telephone_calls_ended_total{carrier="twilio",reason="hang_up"}') == 1


def test_when_no_host_is_left_then_the_call_ends_with_the_reason(hosts: Cluster) -> None:
    (host, *_) = hosts.hosts
    door = hosts.add_door("--behind", host.url, "--grace-s", "0.3")
    door.wait()

    async def main() -> None:
        async with call(door.ws, MEDIA, carrier.start()) as line:
            await id_of_call(door)
            await asyncio.to_thread(host.kill)
            await line.until(lambda: line.closed == (1011, "host_lost"))
        async with call(door.ws, MEDIA, carrier.start()) as line:
            await line.until(lambda: line.closed == (1013, "resource_exhausted"))
        await restart(host)

    asyncio.run(main())


def test_who_may_call_and_see_calls_at_a_door(hosts: Cluster, door: Host, api: Site) -> None:
    assert twiml(door, "f" * 32).status_code == 401
    path, _ = stream_of(twiml(door).text)

    async def refused(path: str, headers: dict[str, str]) -> int:
        with pytest.raises(InvalidStatus) as error:
            await connect(door.ws + path, additional_headers=headers)
        return error.value.response.status_code

    async def main() -> None:
        async with call(door.ws, f"{MEDIA}-of-another", carrier.start()) as line:
            await line.until(lambda: line.closed == (1008, "invalid_api_key"))
        # A page of another site.
        assert await refused(MEDIA, {"Origin": "https://other.example"}) == 403
        assert await refused(path, {}) == 401
        dialled = {"to": "+4930111", "voicemail": "ignore"}
        async with httpx.AsyncClient(base_url=door.url) as http:
            for headers, status in ({"Authorization": "Bearer key-2"}, 401), (HEADERS, 201):
                num_asked = len(api.got)
                made = await http.post("/v1/telephone/calls", json=dialled, headers=headers)
                assert (made.status_code, len(api.got) - num_asked) == (status, int(status == 201))
            id = made.json()["id"]
            path_out, signed_out = stream_of(parse_qs(api.got[-1].body.decode())["Twiml"][0])
            async with call(door.ws, path_out, carrier.start("CA1", ACCOUNT), additional_headers=signed_out) as line:
                assert await id_of_call(door) == id
                assert await listed(door, "key-2") == []
                for headers, status in ({"Authorization": "Bearer key-2"}, 404), (HEADERS, 200):
                    answer = await http.post(f"/v1/realtime/calls/{id}/hangup", headers=headers)
                    assert answer.status_code == status
                await line.until(lambda: line.closed == (1000, "hung_up"))
        # A ticket opens one stream.
        async with call(door.ws, path_out, carrier.start("CA1", ACCOUNT), additional_headers=signed_out) as line:
            await line.until(lambda: line.closed == (1008, "invalid_api_key"))

    asyncio.run(main())


@pytest.mark.heavy
def test_a_call_over_sip_goes_on_at_another_host(hosts: Cluster) -> None:
    port = free_port()
    flags = ("--sip", f"127.0.0.1:{port}", "--sip-codecs", "PCMU", "--telephone-greeting", "Hello.")
    door = hosts.add_door("--state", hosts.state, *flags, env=ENV)
    door.wait()

    async def main() -> None:
        async with Telephone(port) as phone:
            assert (await phone.invite()).status == 200
            id = await id_of_call(door)
            async with application(door, id) as app:
                await app.until("response.output_audio_transcript.done")
                dying = await lose(hosts)
            await phone.say(speech(1, 3, 31))
            async with application(door, id) as app:
                await app.ask("call hang_up {}")
                assert "hang_up" in (await phone.asked("BYE")).get("reason")
            assert phone.loud_s > WORD_S
            await restart(dying)

    asyncio.run(main())


@pytest.mark.heavy
def test_a_call_goes_on_when_its_host_drains(hosts: Cluster, door: Host) -> None:
    async def main() -> None:
        async with call(door.ws, MEDIA, carrier.start()) as line:
            id = await id_of_call(door)
            for _ in range(3):
                async with application(door, id) as app:
                    await app.ask(text(1, 6))
                    await app.until("response.done")
                played_s = line.buffer.played_s
                host = await asyncio.to_thread(busiest, hosts)
                host.send(signal.SIGTERM)
                await asyncio.to_thread(host.end)
                # The answer is heard to its end.
                await line.until(lambda: line.buffer.played_s > played_s + 0.5)  # noqa: B023 (it is awaited here)
                await restart(host)
            assert (line.clears, line.closed) == (0, (0, ""))

    asyncio.run(main())


@pytest.mark.heavy
def test_a_door_that_stops_ends_its_calls(hosts: Cluster) -> None:
    door = hosts.add_door("--state", hosts.state, "--drain-s", "0.3")
    door.wait()

    async def main() -> None:
        async with call(door.ws, MEDIA, carrier.start()) as line:
            await id_of_call(door)
            door.send(signal.SIGTERM)
            await line.until(lambda: line.closed == (1000, "hung_up"))

    asyncio.run(main())
    assert door.end() == 0
    until(lambda: sum(host.num_sessions() for host in hosts.hosts) == 0)
