"""Calls over SIP on real sockets: a telephone that sends every message by itself, and scripted models."""

from __future__ import annotations

import asyncio
import random
from typing import Any, cast

import numpy as np
import pytest
from bench.sip_phone import LIMIT_S, Telephone

from antiphon.errors import RemoteProtocolError, SettingsError
from antiphon.protocols.telephony.sip import rtp, sdp
from antiphon.protocols.telephony.sip.digest import REALM, params_of, response_of
from antiphon.protocols.telephony.sip.messages import SipRequest, SipResponse, answer, parse
from antiphon.protocols.telephony.stream import Call
from antiphon.server.credentials import Caller
from antiphon.server.http.forwarded import Networks
from antiphon.server.metrics import Metrics
from antiphon.server.sip.agent import SipAgent
from antiphon.server.sip.calls import Calls
from antiphon.server.sip.listening import check_sip
from antiphon.server.state import ServerState
from antiphon.server.telephone.tickets import HoldOptions
from antiphon.signals import become
from tests.fuzz.mutations import mutated_bytes
from tests.scripted import speech
from tests.server.scripted import Echo, scripted_models
from tests.server.sip.harness import port, settings

WORDS_S = 3 * 0.3


def run(main: Any) -> None:
    asyncio.run(main())


async def ended(served: Any) -> None:
    """Wait until no call is left."""
    state = served.state
    async with asyncio.timeout(LIMIT_S):
        await become(lambda: not state.sessions.calls and not state.admission.num_under_way, 0.01)


@pytest.mark.parametrize("tcp", [False, True])
def test_a_call_is_answered_heard_and_hung_up_by_the_caller(tcp: bool) -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number, tcp=tcp) as phone:
            response = await phone.invite(("x-order", "17"))
            assert (response.status, response.get("content-type")) == (200, "application/sdp")
            (live,) = served.state.sessions.calls.values()
            opened = bytes(live.wire.opening.session)  # type: ignore[attr-defined]
            assert all(fact in opened for fact in (b"bob", b"x-order", b"17"))
            if not tcp:
                await phone.say(speech(1, 3, 31))
                # The model says the words that it heard, 300 ms each.
                assert await phone.heard_all(WORDS_S) == pytest.approx(WORDS_S, abs=0.05)
            assert (await phone.ask(phone.request("BYE"))).status == 200
            await ended(served)
            # The call is over for both.
            assert (await phone.ask(phone.request("BYE"))).status == 481

    run(main)


def test_the_model_hangs_up_and_a_drain_ends_the_call() -> None:
    async def main() -> None:
        async with port(telephone_call_s=0.2) as served, Telephone(served.number) as phone:
            assert (await phone.invite()).status == 200
            bye = await phone.asked("BYE")
            assert "time_limit" in bye.get("reason")
            await ended(served)
        async with port() as served, Telephone(served.number) as phone:
            assert (await phone.invite()).status == 200
            served.state.admission.draining = True
            other = Telephone(served.number)
            async with other:
                refused = await other.invite()
                assert (refused.status, refused.get("retry-after")) == (503, "5")
            for live in list(served.state.sessions.live):
                live.drain(1.0)
            assert "server_shutting_down" in (await phone.asked("BYE")).get("reason")
            await ended(served)

    run(main)


def test_keys_are_the_users_input_and_hold_is_silence() -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            await phone.invite()
            # The server sends as soon as it listens.
            async with asyncio.timeout(LIMIT_S):
                await become(lambda: bool(phone.heard), 0.01)
            for payload in rtp.key_payloads("4", 8000):
                phone.say_packet(payload, 101, timestamp=1)
            await asyncio.sleep(0.1)
            relayed = b"Signal=2\r\nDuration=160\r\n"
            info = phone.request("INFO", ("content-type", "application/dtmf-relay"), body=relayed)
            assert (await phone.ask(info)).status == 200
            info = phone.request("INFO", ("content-type", "application/dtmf"), body=b"#")
            assert (await phone.ask(info)).status == 200
            # The model answers.
            async with asyncio.timeout(LIMIT_S):
                await become(lambda: phone.loud_s > 0.5, 0.01)
            assert "42#" in served.echo.asked[-1][-1]
            unknown = phone.request("INFO", ("content-type", "text/plain"), body=b"x")
            assert (await phone.ask(unknown)).status == 415
            response = await phone.invite(body=phone.offer(direction="sendonly"))
            assert b"a=recvonly" in response.body
            await asyncio.sleep(0.1)
            num_heard = len(phone.heard)
            await asyncio.sleep(0.3)
            assert len(phone.heard) == num_heard
            assert b"a=sendrecv" in (await phone.invite()).body
            await asyncio.sleep(0.3)
            assert len(phone.heard) > num_heard
            # A change to a codec that the call does not have leaves the call as it is.
            assert (await phone.invite(body=phone.offer("8"))).status == 488
            await phone.say(np.zeros(1600, np.float32))
            assert list(served.state.sessions.calls)

    run(main)


def test_an_invite_without_an_offer_gets_ours() -> None:
    async def main() -> None:
        async with port(sip_codecs="G722,PCMU") as served, Telephone(served.number) as phone:
            request = phone.request("INVITE")
            phone.send(request.encode())
            response = await phone.last_response(request)
            theirs = sdp.read(response.body)
            assert [name for _, name, _ in theirs.codecs] == ["g722", "pcmu"]
            # The telephone's own ACK had no answer, so that there is nothing to agree on.
            assert "failed" in (await phone.asked("BYE")).get("reason")
            await ended(served)

    run(main)


def test_who_is_asked_for_a_password_shows_it_once() -> None:
    async def main() -> None:
        async with port(sip_caller_password="secret") as served:
            async with Telephone(served.number, password="secret") as phone:
                assert (await phone.invite()).status == 200
                assert [m.status for m in phone.messages if isinstance(m, SipResponse)] == [401, 100, 200]
                # The same INVITE once more, from the network: its password is not asked for again.
                phone.send(phone.sent[-2])
                assert (await phone.ask(phone.request("OPTIONS"))).status == 200
                assert 401 not in [m.status for m in phone.messages[1:] if isinstance(m, SipResponse)]
                # Requests within the call need no password.
                assert (await phone.ask(phone.request("BYE"))).status == 200
            for password in ("", "wrong"):
                async with Telephone(served.number, password=password) as phone:
                    assert (await phone.invite()).status == 401
            await ended(served)

    run(main)


@pytest.mark.parametrize(
    ("formats", "protocol", "status"),
    [("3 18", "RTP/AVP", 488), ("0", "RTP/SAVP", 488), ("0", "TCP/MSRP", 488), ("0 101", "RTP/AVPF", 200)],
)
def test_a_call_without_a_common_codec_is_refused(formats: str, protocol: str, status: int) -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            assert (await phone.invite(body=phone.offer(formats, protocol=protocol))).status == status
            if status != 200:
                await ended(served)

    run(main)


def test_a_call_with_srtp_gets_its_keys() -> None:
    pytest.importorskip("pylibsrtp")

    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            own = sdp.Crypto(1, sdp.SUITES[0], bytes(30))
            body = phone.offer(protocol="RTP/SAVP") + own.line().encode() + b"\r\n"
            theirs = sdp.read((await phone.invite(body=body)).body)
            assert theirs.is_secure
            assert (theirs.crypto[0].tag, theirs.crypto[0].suite) == (1, own.suite)
            assert theirs.crypto[0].key != own.key

    run(main)


def test_requests_that_no_call_is_made_of_are_answered() -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            options = await phone.ask(phone.request("OPTIONS"))
            assert (options.status, "INVITE" in options.get("allow")) == (200, True)
            assert (await phone.ask(phone.request("REGISTER"))).status == 405
            # Call-ID and tags of no call.
            phone.to_tag = "nobody"
            assert (await phone.ask(phone.request("BYE"))).status == 481
            phone.to_tag = ""
            required = phone.request("INVITE", ("require", "100rel, x"))
            refused = await phone.ask(required)
            assert (refused.status, refused.get("unsupported")) == (420, "100rel, x")
            for junk in (b"", b"\r\n\r\n", b"\x00" * 50, b"INVITE sip:x SIP/2.0\r\n\r\n", b"x" * 60_000):
                phone.send(junk)
            assert (await phone.ask(phone.request("OPTIONS"))).status == 200

    run(main)


def test_a_caller_does_not_choose_whom_the_server_calls() -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            await phone.invite()
            refer = phone.request("REFER", ("refer-to", "<sip:0900@example.com>"))
            assert (await phone.ask(refer)).status == 603
            assert list(served.state.sessions.calls)

    run(main)


def test_a_repeated_invite_is_one_call_and_a_replayed_request_is_refused() -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            request = phone.request("INVITE", ("content-type", "application/sdp"), body=phone.offer())
            for _ in range(3):
                phone.send(request.encode())
            response = await phone.last_response(request)
            await asyncio.sleep(0.1)
            assert len(served.state.sessions.calls) == 1
            tags = {m.to_tag for m in phone.messages if isinstance(m, SipResponse) and m.status == 200}
            assert tags == {response.to_tag}
            phone.to_tag = response.to_tag
            info = phone.request("INFO")
            assert (await phone.ask(info)).status == 200
            # The same number again, in another transaction.
            again = phone.request("INFO", number=info.cseq[0])
            assert (await phone.ask(again)).status == 500

    run(main)


def test_an_invite_flood_is_answered_and_bounded() -> None:
    async def main() -> None:
        async with port(max_sessions=4) as served, Telephone(served.number) as phone:
            phones = [Telephone(served.number) for _ in range(4)]
            for other in phones:
                await other.__aenter__()
                assert (await other.invite()).status == 200
            # As many as a socket takes at once, each another call, of a caller who never sends an ACK.
            requests = []
            for number in range(70):
                phone.call_id = f"flood-{number}"
                requests.append(phone.request("INVITE", ("content-type", "application/sdp"), body=phone.offer()))
                phone.send(requests[-1].encode())
            refused = [await phone.last_response(request) for request in requests[-20:]]
            assert {response.status for response in refused} == {503}
            assert {response.get("retry-after") for response in refused} == {"5"}
            # The calls go on.
            assert len(served.state.sessions.calls) == 4
            for other in phones:
                assert (await other.ask(other.request("BYE"))).status == 200
                await other.__aexit__()
            await ended(served)
            async with Telephone(served.number) as late:
                assert (await late.invite()).status == 200

    run(main)


class Sender:
    """A peer at another address."""

    protocol, is_reliable, is_closed, port = "TCP", True, False, 5060

    def __init__(self, host: str) -> None:
        self.host = host
        self.got: list[SipResponse] = []

    def send(self, data: bytes) -> None:
        message = parse(data)
        assert isinstance(message, SipResponse)
        self.got.append(message)


def test_others_than_the_allowed_get_no_answer() -> None:
    async def main() -> None:
        state = ServerState(settings(), Metrics(), scripted_models(Echo()))
        agent = SipAgent(state, Networks("192.0.2.7", "--sip-allow"), 5060)
        senders = [Sender(host) for host in ("192.0.2.7", "192.0.2.8", "127.0.0.1")]
        async with Telephone(9) as phone:
            for sender in senders:
                agent.receive(phone.request("OPTIONS").encode(), sender)
        assert [[m.status for m in sender.got] for sender in senders] == [[200], [], [200]]
        assert b'antiphon_refused_total{reason="listener_address"} 1.0' in state.metrics.text()

    run(main)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sip": "0.0.0.0:5060"}, "--sip-allow"),
        ({"sip": "", "sip_register": "sip:a@b"}, "--sip-register needs"),
        ({"sip_rtp_ports": "2000-1000"}, "--sip-rtp-ports"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_sip(settings(**values))


def test_a_port_for_others_is_open_with_a_list_a_password_or_a_provider() -> None:
    for own in ({"sip_allow": "192.0.2.0/24"}, {"sip_caller_password": "x"}, {"sip_register": "sip:a@b"}):
        check_sip(settings(sip="0.0.0.0:5060", **own))


# --- calls of ours


class Provider(asyncio.DatagramProtocol):
    """A registrar with one account, which also takes a call with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.requests: list[SipRequest] = []
        self.arrived = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if not data.strip():
            return
        message = parse(data)
        if not isinstance(message, SipRequest):
            return
        self.requests.append(message)
        self.arrived.set()
        given = params_of(message.get("authorization"))
        headers: list[tuple[str, str]] = []
        body = b""
        if message.method == "ACK":
            return
        if message.method in ("REGISTER", "INVITE") and not given:
            status = 401
            headers.append(("www-authenticate", f'Digest realm="{REALM}", nonce="n1", qop="auth", algorithm=MD5'))
        elif given and response_of(given, message.method, "alice", "secret") != given["response"]:
            status = 403
        elif message.method == "INVITE":
            status, headers = self.status, [("contact", f"<sip:p@127.0.0.1:{self.port}>")]
            body = sdp.offer(("127.0.0.1", 9), 1, ("pcmu",)) if status == 200 else b""
        else:
            status, headers = 200, [("expires", "60")]
        self.transport.sendto(answer(message, status, tag="p", headers=headers, body=body).encode(), addr)

    async def asked(self, method: str, count: int) -> list[SipRequest]:
        async with asyncio.timeout(LIMIT_S):
            while len(found := [r for r in self.requests if r.method == method]) < count:
                self.arrived.clear()
                await self.arrived.wait()
        return found


def call_to(target: str) -> Call:
    return Call("sip", called=target, is_outgoing=True)


async def provider(status: int = 200) -> Provider:
    loop = asyncio.get_running_loop()
    _, made = await loop.create_datagram_endpoint(lambda: Provider(status), local_addr=("127.0.0.1", 0))
    return made


def test_the_server_registers_calls_a_number_and_leaves() -> None:
    async def main() -> None:
        registrar = await provider()
        account = {"sip_register": f"sip:alice@127.0.0.1:{registrar.port}", "sip_password": "secret"}
        async with port(Echo(), **account) as served:
            first, second = (await registrar.asked("REGISTER", 2))[:2]
            assert (first.cseq[0], second.cseq[0], first.call_id) == (1, 2, second.call_id)
            assert b"antiphon_sip_provider_away 0.0" in served.state.metrics.text()
            dialer = cast(Calls, served.state.switchboard.sip)
            await dialer.dial(Caller(), call_to("+4930123"), HoldOptions("rtc_1"), {"x-campaign": "7"})
            assert list(served.state.sessions.calls) == ["rtc_1"]
            invite = (await registrar.asked("INVITE", 2))[-1]
            assert invite.uri == f"sip:+4930123@127.0.0.1:{registrar.port}"
            assert invite.get("x-campaign") == "7"
            await registrar.asked("ACK", 2)
            served.state.sessions.calls["rtc_1"].hang_up()
            assert "hung_up" in (await registrar.asked("BYE", 1))[0].get("reason")
            await ended(served)
        assert (await registrar.asked("REGISTER", 3))[-1].get("expires") == "0"
        registrar.transport.close()

    run(main)


def test_a_call_that_is_not_taken_says_why() -> None:
    async def main() -> None:
        registrar = await provider(486)
        account = {"sip_register": f"sip:alice@127.0.0.1:{registrar.port}", "sip_password": "secret"}
        async with port(Echo(), **account) as served:
            dialer = served.state.switchboard.sip
            assert dialer
            with pytest.raises(RemoteProtocolError, match="486 Busy Here"):
                await dialer.dial(Caller(), call_to("+4930123"), HoldOptions("rtc_1"))
            for wrong in ("tel:+49", "sips:a@127.0.0.1", "a b", "http://x"):
                with pytest.raises(RemoteProtocolError):
                    await dialer.dial(Caller(), call_to(wrong), HoldOptions("rtc_1"))
            await ended(served)
        registrar.transport.close()

    run(main)


def test_the_model_transfers_a_call_and_hears_that_it_failed() -> None:
    """The caller's telephone takes the REFER, and reports how the call to the target goes."""

    async def main() -> None:
        transfers = ("sales=sip:200@192.0.2.1",)
        async with port(telephone_transfer=transfers) as served, Telephone(served.number) as phone:
            await phone.invite()
            (leg,) = served.state.sessions.legs.values()
            assert leg.transfers == {"sales": "sip:200@192.0.2.1"}
            phone.answers["REFER"] = 202
            asked = asyncio.create_task(leg.transfer("sip:200@192.0.2.1"))
            refer = await phone.asked("REFER")
            assert refer.get("refer-to") == "<sip:200@192.0.2.1>"
            for status in ("100 Trying", "486 Busy Here"):
                fragment = f"SIP/2.0 {status}\r\n".encode()
                notice = phone.request("NOTIFY", ("event", "refer"), ("content-type", "message/sipfrag"), body=fragment)
                assert (await phone.ask(notice)).status == 200
            with pytest.raises(RemoteProtocolError, match="not transferred: 486 Busy Here"):
                await asked
            phone.answers["REFER"] = 603
            with pytest.raises(RemoteProtocolError, match="not transferred: 603 Decline"):
                await leg.transfer("200")
            assert (await phone.asked("REFER", 2)).get("refer-to") == "<sip:200@127.0.0.1>"

    run(main)


def test_no_message_that_was_changed_on_the_way_fails_in_the_agent(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with port() as served, Telephone(served.number) as phone:
            assert (await phone.invite()).status == 200
            agent = served.agent
            kinds = ("INVITE", "INFO", "BYE", "REFER", "NOTIFY", "OPTIONS", "ACK", "CANCEL", "PRACK")
            requests = [phone.request(kind, body=phone.offer()).encode() for kind in kinds]
            requests += [answer(parse(data), 200).encode() for data in requests]  # type: ignore[arg-type]
            draw = random.Random(5)
            sender = Sender("127.0.0.1")
            for _ in range(1500):
                agent.receive(mutated_bytes(draw.choice(requests), draw), sender)
            await asyncio.sleep(0.2)
        assert "failed" not in caplog.text

    with caplog.at_level("ERROR"):
        run(main)
