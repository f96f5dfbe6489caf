"""A telephone over SIP that sends single messages and packets: the caller of tests and of benchmarks."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import from_ulaw, to_ulaw
from antiphon.audio.pcm import Resampler
from antiphon.protocols.telephony.sip import rtp, sdp
from antiphon.protocols.telephony.sip.digest import answered
from antiphon.protocols.telephony.sip.messages import Address, SipFramer, SipRequest, SipResponse, answer, parse
from antiphon.signals import become

LIMIT_S = 10.0
SILENCE = to_ulaw(np.zeros(160, np.float32))


class _Socket(asyncio.DatagramProtocol):
    def __init__(self, arrived: asyncio.Queue[bytes]) -> None:
        self.arrived = arrived

    def connection_made(self, transport: Any) -> None:
        self.transport: asyncio.DatagramTransport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.arrived.put_nowait(data)

    def error_received(self, exc: Exception) -> None:
        return


class Telephone:
    """A telephone with one call. With `tcp`, its signalling is over TCP.

    `messages` are all that it has received. Requests of the server are answered with `answers`, 200 by default.
    """

    def __init__(self, server_port: int, *, tcp: bool = False, user: str = "bob", password: str = "") -> None:
        self.server = "127.0.0.1", server_port
        self.tcp, self.user, self.password = tcp, user, password
        self.messages: list[SipRequest | SipResponse] = []
        self.answers: dict[str, int] = {}
        self.sent: list[bytes] = []
        self.heard: list[rtp.RtpPacket] = []
        self.on_packet: Callable[[rtp.RtpPacket], None] = self.heard.append
        self.call_id, self.tag, self.to_tag = secrets.token_hex(8), secrets.token_hex(4), ""
        self.number = 0
        self.remote_rtp = 0
        self.say_type = 0
        self.sequence = 0
        self._arrived: asyncio.Queue[bytes] = asyncio.Queue()
        self._media: asyncio.Queue[bytes] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        if self.tcp:
            self._reader, self._writer = await asyncio.open_connection(*self.server)
            self.sip_port = self._writer.get_extra_info("sockname")[1]
            self._tasks.append(asyncio.create_task(self._read_stream()))
        else:
            _, self._sip = await loop.create_datagram_endpoint(
                lambda: _Socket(self._arrived), local_addr=("127.0.0.1", 0)
            )
            self.sip_port = self._sip.transport.get_extra_info("sockname")[1]
        _, self._rtp = await loop.create_datagram_endpoint(lambda: _Socket(self._media), local_addr=("127.0.0.1", 0))
        self.rtp_port = self._rtp.transport.get_extra_info("sockname")[1]
        self._tasks += [asyncio.create_task(self._take()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.to_tag:
            self.send(self.request("BYE").encode())
            await asyncio.sleep(0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._rtp.transport.close()
        if self.tcp:
            self._writer.close()
        else:
            self._sip.transport.close()

    # --- signalling

    def send(self, data: bytes) -> None:
        self.sent.append(data)
        if self.tcp:
            self._writer.write(data)
        else:
            self._sip.transport.sendto(data, self.server)

    async def _read_stream(self) -> None:
        framer = SipFramer()
        while data := await self._reader.read(1 << 16):
            for message in framer.feed(data):
                self._arrived.put_nowait(message)

    async def _take(self) -> None:
        while True:
            message = parse(await self._arrived.get())
            self.messages.append(message)
            if isinstance(message, SipRequest):
                if message.method != "ACK":
                    self.send(answer(message, self.answers.get(message.method, 200)).encode())
            elif message.cseq[1] == "INVITE" and message.status >= 200:
                self.send(self.request("ACK", number=message.cseq[0], to=message.get("to")).encode())
            self._changed.set()

    def request(
        self,
        method: str,
        *headers: tuple[str, str],
        body: bytes = b"",
        number: int | None = None,
        to: str = "",
        uri: str = "sip:bot@127.0.0.1",
    ) -> SipRequest:
        """Return a request of the call; the first one is outside of a dialog."""
        if number is None:
            self.number += 1
        transport = "TCP" if self.tcp else "UDP"
        tagged = f"<sip:bot@127.0.0.1>;tag={self.to_tag}" if self.to_tag else "<sip:bot@127.0.0.1>"
        own = [
            ("via", f"SIP/2.0/{transport} 127.0.0.1:{self.sip_port};branch=z9hG4bK{secrets.token_hex(6)};rport"),
            ("max-forwards", "70"),
            ("from", f"<sip:{self.user}@127.0.0.1>;tag={self.tag}"),
            ("to", to or tagged),
            ("call-id", self.call_id),
            ("cseq", f"{number or self.number} {method}"),
            ("contact", f"<sip:{self.user}@127.0.0.1:{self.sip_port}>"),
            *headers,
        ]
        return SipRequest(method=method, uri=uri, headers=own, body=body)

    async def ask(self, request: SipRequest) -> SipResponse:
        """Send a request, and return its last response."""
        self.send(request.encode())
        return await self.last_response(request)

    async def last_response(self, request: SipRequest) -> SipResponse:
        async with asyncio.timeout(LIMIT_S):
            while True:
                for message in self.messages:
                    is_last = isinstance(message, SipResponse) and message.status >= 200
                    if is_last and message.cseq == request.cseq and message.via.branch == request.via.branch:
                        return message  # type: ignore[return-value]
                self._changed.clear()
                await self._changed.wait()

    async def asked(self, method: str, count: int = 1) -> SipRequest:
        """Wait for a request of the server."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                found = [m for m in self.messages if isinstance(m, SipRequest) and m.method == method]
                if len(found) >= count:
                    return found[count - 1]
                self._changed.clear()
                await self._changed.wait()

    def offer(self, formats: str = "0 101", direction: str = "sendrecv", protocol: str = "RTP/AVP") -> bytes:
        lines = [
            "v=0",
            "o=- 1 1 IN IP4 127.0.0.1",
            "s=-",
            "c=IN IP4 127.0.0.1",
            "t=0 0",
            f"m=audio {self.rtp_port} {protocol} {formats}",
            "a=rtpmap:101 telephone-event/8000",
            f"a={direction}",
        ]
        return "".join(f"{line}\r\n" for line in lines).encode()

    async def invite(self, *headers: tuple[str, str], body: bytes | None = None) -> SipResponse:
        """Begin the call, or change it. Answers one challenge."""
        body = self.offer() if body is None else body
        given = [("content-type", "application/sdp"), *headers]
        request = self.request("INVITE", *given, body=body)
        response = await self.ask(request)
        if response.status == 401 and self.password:
            header = answered(request, response, self.user, self.password)
            assert header
            response = await self.ask(self.request("INVITE", *given, header, body=body))
        if response.status == 200:
            self.to_tag = Address.read(response.get("to")).tag
            if body:
                self.remote_rtp = sdp.read(response.body).port
        return response

    # --- audio

    async def _listen(self) -> None:
        while True:
            self.on_packet(rtp.read(await self._media.get()))

    def say_packet(self, payload: bytes, type: int = 0, timestamp: int | None = None) -> None:
        self.sequence += 1
        at = 160 * self.sequence if timestamp is None else timestamp
        packet = rtp.RtpPacket(type, self.sequence % 65_536, at, 77, payload)
        self._rtp.transport.sendto(rtp.encode(packet), ("127.0.0.1", self.remote_rtp))

    async def say(self, pcm: Pcm) -> None:
        """Say something at 16 kHz, in real time."""
        data = to_ulaw(Resampler(16_000, 8000).feed(pcm))
        begun_s, loop = asyncio.get_running_loop().time(), asyncio.get_running_loop()
        for number, at in enumerate(range(0, len(data), 160)):
            await asyncio.sleep(begun_s + number * 0.02 - loop.time())
            self.say_packet(data[at : at + 160].ljust(160, SILENCE[:1]))

    @property
    def sound(self) -> Pcm:
        """What was heard so far, µ-law at 8 kHz."""
        payloads = [packet.payload for packet in self.heard if packet.payload_type == 0]
        return from_ulaw(b"".join(payloads)) if payloads else np.zeros(0, np.float32)

    @property
    def loud_s(self) -> float:
        """Seconds of sound that were heard so far."""
        pcm = np.abs(self.sound)
        whole = pcm[: len(pcm) // 160 * 160].reshape(-1, 160)
        return 0.02 * float(np.sum(whole.max(1) > 0.01)) if len(whole) else 0.0

    async def heard_all(self, at_least_s: float) -> float:
        """Wait until some sound was heard, and then until it is silent for half a second. Returns its seconds."""
        async with asyncio.timeout(LIMIT_S):
            await become(lambda: self.loud_s >= at_least_s, 0.05)
            while True:
                before_s = self.loud_s
                await asyncio.sleep(0.5)
                if self.loud_s == before_s:
                    return before_s
