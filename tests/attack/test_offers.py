"""WebRTC offers from hostile clients: broken ones, and ones that are slow to parse."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import httpx
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection

from antiphon.errors import RemoteProtocolError
from antiphon.server.state import ServerState
from antiphon.transports.player import ResponsePlayer
from antiphon.transports.webrtc import RTC_HZ, OutputTrack, WebRtcCall
from tests.server.scripted import serving

LIMIT_S = 30
SDP = {"content-type": "application/sdp"}


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, ServerState]]:
    with serving() as (ws, state, _):
        yield ws.replace("ws", "http", 1), state


@pytest.fixture(scope="module")
def offer() -> str:
    async def make() -> str:
        peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        peer.addTrack(OutputTrack(ResponsePlayer(RTC_HZ)))
        peer.createDataChannel("oai-events")
        await peer.setLocalDescription(await peer.createOffer())
        sdp = str(peer.localDescription.sdp)
        await peer.close()
        return sdp

    return asyncio.run(make())


def mutated(offer: str, seed: int) -> str:
    """Return the offer with a few of its lines deleted, duplicated, truncated or garbled."""
    draw, lines = random.Random(seed), offer.split("\r\n")
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(lines))
        match draw.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, draw.choice(lines))
            case 2:
                lines[at] = lines[at][: draw.randrange(len(lines[at]) + 1)]
            case _:
                lines[at] = lines[at].replace(draw.choice("0123456789abc:= "), draw.choice("9z:= "))
    return "\r\n".join(lines)


def without_audio(offer: str) -> str:
    return offer[: offer.index("m=audio")] + offer[offer.index("m=application") :]


def test_when_offers_are_broken_then_each_is_answered_or_refused_and_its_call_hangs_up(offer: str) -> None:
    async def attempt(sdp: str) -> str:
        call, outcome = WebRtcCall(()), "answered"
        try:
            await call.answer(sdp)
        except RemoteProtocolError as error:
            outcome = error.code
        await call.hang_up()
        await call.hang_up()
        return outcome

    async def main() -> list[str]:
        return [await attempt(mutated(offer, seed)) for seed in range(150)]

    outcomes = asyncio.run(main())
    assert set(outcomes) == {"answered", "invalid_offer"}


@pytest.mark.parametrize("multipart", [False, True])
def test_when_an_offer_has_no_audio_then_it_is_a_400_and_holds_no_place(
    server: tuple[str, ServerState], offer: str, multipart: bool
) -> None:
    url, state = server
    sdp = without_audio(offer)
    body = {"files": {"sdp": (None, sdp)}} if multipart else {"content": sdp, "headers": SDP}
    response = httpx.post(f"{url}/v1/realtime/calls", timeout=LIMIT_S, **body)  # type: ignore[arg-type]
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_offer")
    assert state.admission.num_sessions == 0


@pytest.mark.parametrize("multipart", [False, True])
@pytest.mark.parametrize(
    ("line", "count", "status", "code"),
    [
        ("a=candidate:1 1 udp 2130706431 192.0.2.2 1000 typ host\r\n", 65, 400, "invalid_offer"),
        ("a=candidate:1 1 udp 2130706431 192.0.2.2 1000 typ host\r\n", 8000, 413, "request_too_large"),
        ("a=rtpmap:96 opus/48000/2\r\n", 4000, 413, "request_too_large"),
    ],
)
def test_when_an_offer_would_take_long_to_parse_then_it_is_refused_by_name(
    server: tuple[str, ServerState], offer: str, multipart: bool, line: str, count: int, status: int, code: str
) -> None:
    url, state = server
    at = offer.index("a=ice-ufrag")
    sdp = offer[:at] + line * count + offer[at:]
    body = {"files": {"sdp": ("offer", sdp)}} if multipart else {"content": sdp, "headers": SDP}
    response = httpx.post(f"{url}/v1/realtime/calls", timeout=LIMIT_S, **body)  # type: ignore[arg-type]
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert state.admission.num_sessions == 0
