"""Telephone calls over SIP and RTP: beside the same conversations over a WebSocket, and many at once.

    python -m bench.sip_calls [--data DIR] [--sections latency,barge_in,held] [--turns N] [--calls N] [--minutes M]

`latency` and `barge_in` are those of `bench.telephone`, with a telephone of this benchmark that sends and plays µ-law
in packets of 20 ms. `held` has sipp (Debian's sip-tester) hold calls that say a recording again and again, with
scripted models. It reads the packets that the server sends from the network, with the kernel's times, so that it needs
root. The jitter is how far the distance of two packets is from 20 ms.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
import subprocess
import time
import urllib.request
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
from bench.common import Server, beside, measured, percentile, server, show
from bench.common import options as arguments
from bench.driver import INSTRUCTIONS, in_loops
from bench.engines import backend
from bench.hearing.clips import whole_turns, with_data
from bench.sip_phone import Telephone
from bench.softphones import free_ports, missing, sipp
from bench.telephone import ANSWER, LOUD, SILENCE, PhoneCaller, barge_in, latency

from antiphon.audio.line.g711 import from_ulaw
from antiphon.protocols.telephony.sip.rtp import RtpPacket

FRAME_S = 0.02
# Ports of the audio of the server, by which its packets are recognized: below those that the system gives to others.
RTP_PORTS = range(10_000, 11_000)
# From linux/if_ether.h and asm-generic/socket.h.
ETH_P_IP, SO_TIMESTAMPNS, SO_RCVBUFFORCE = 0x0800, 35, 33
# Samples of a packet at 8 kHz.
PER_FRAME = 160


class SipCaller(PhoneCaller):
    """One call over SIP, used with `async with`."""

    sip_port = 0

    def __init__(self, srv: Server, instructions: str = INSTRUCTIONS) -> None:
        super().__init__(srv, instructions)
        self._phone = Telephone(self.sip_port)
        self._phone.on_packet = self._hear

    async def __aenter__(self) -> Self:
        await self._phone.__aenter__()
        response = await self._phone.invite()
        assert response.status == 200, response.status
        self._begun_s = time.monotonic()
        self._tasks = [asyncio.create_task(self._speak())]
        await self.follow()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._phone.ask(self._phone.request("BYE"))
        await self._phone.__aexit__()
        await self.application.__aexit__()

    async def _speak(self) -> None:
        while True:
            await asyncio.sleep(max(0.0, self._begun_s + (self._sent + 1) * FRAME_S - time.monotonic()))
            self._sent += 1
            self._phone.say_packet(self._queue.pop(0) if self._queue else SILENCE)

    def _hear(self, packet: RtpPacket) -> None:
        """Play a packet at once. A packet is a moment of a sound if it is loud."""
        if np.abs(from_ulaw(packet.payload)).max() >= LOUD:
            now_s = time.monotonic()
            self.sounds_s.append(now_s)
            self.buffer.spans.append((now_s, now_s + FRAME_S))


class Departures:
    """Reads the packets that the server sends from the loopback interface, with their times."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ETH_P_IP))
        self._socket.bind(("lo", ETH_P_IP))
        self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 64 << 20)
        self._socket.settimeout(0.2)
        # The packets of each stream, by the server's port: when each left, its sequence number and its timestamp.
        self.packets: dict[int, list[tuple[float, int, int]]] = {}

    def read(self, for_s: float, caller: subprocess.Popen[str]) -> None:
        """Read until the time is over, or the caller has ended."""
        until_s = time.monotonic() + for_s
        while time.monotonic() < until_s and caller.poll() is None:
            try:
                data, more, _, address = self._socket.recvmsg(128, 64)
            except TimeoutError:
                continue
            # Loopback shows each packet twice: as it leaves, and as it arrives.
            if address[2] == socket.PACKET_OUTGOING or len(data) < 28 or data[9] != socket.IPPROTO_UDP:
                continue
            at = 4 * (data[0] & 0x0F)
            port = int.from_bytes(data[at : at + 2])
            if port in RTP_PORTS:
                seconds, nanoseconds = struct.unpack("qq", more[0][2])
                sequence, timestamp = struct.unpack_from(">HI", data, at + 8 + 2)
                self.packets.setdefault(port, []).append((seconds + nanoseconds / 1e9, sequence, timestamp))


@dataclass(frozen=True)
class Stream:
    """What the packets of a call show.

    - `late_ms`: how far each packet was from the time at which it was due, by its timestamp. The earliest one defines
      when all are due.
    - `gaps_ms`: the time between two packets that follow each other.
    - `left_out`: frames that the server did not send. `unread`: packets that this benchmark did not read.
    """

    late_ms: list[float]
    gaps_ms: list[float]
    left_out: int
    unread: int

    @classmethod
    def of(cls, packets: list[tuple[float, int, int]]) -> Stream:
        """Read the packets of one call."""
        times_s = np.asarray([p[0] for p in packets])
        # Both numbers begin again at 0 after their last.
        sequence = np.cumsum([0, *((b[1] - a[1]) % (1 << 16) for a, b in pairwise(packets))])
        frames = np.cumsum([0, *((b[2] - a[2]) % (1 << 32) for a, b in pairwise(packets))]) / PER_FRAME
        due = times_s - frames * FRAME_S
        follow = np.diff(sequence) == 1
        return cls(
            ((due - due.min()) * 1000).tolist(),
            (1000 * np.diff(times_s)[follow]).tolist(),
            round(frames[-1] - sequence[-1]),
            int(sequence[-1]) + 1 - len(packets),
        )


def lag_s(srv: Server) -> float:
    """Return the upper bound of the longest time for which the server's event loop was busy without a break."""
    text = urllib.request.urlopen(f"{srv.url}/metrics", timeout=10).read().decode()
    buckets = re.findall(r'antiphon_event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', text)
    most = max((float(count) for _, count in buckets), default=0.0)
    return next((float(limit) for limit, count in buckets if float(count) == most), 0.0)


def held(srv: Server, calls: int, minutes: float, pcm: np.ndarray[Any, Any]) -> dict[str, Any] | None:
    """Hold calls with sipp, and measure what the server sends and takes."""
    if why := missing("sipp"):
        print(why)
        return None
    departures, for_s = Departures(), minutes * 60
    with sipp(SipCaller.sip_port, pcm, calls=calls, for_s=for_s + 10, a_second=5) as caller:
        time.sleep(calls / 5 + 5)
        begun_s, cpu_s = time.monotonic(), srv.cpu_s()
        departures.read(for_s - 5, caller)
        took_s, used_s = time.monotonic() - begun_s, srv.cpu_s() - cpu_s
        output = caller.communicate(timeout=90)[0]
    streams = [Stream.of(packets) for packets in departures.packets.values()]
    late = [ms for stream in streams for ms in stream.late_ms]
    jitter = [abs(gap - 1000 * FRAME_S) for stream in streams for gap in stream.gaps_ms]
    out = {
        "calls": len(streams),
        "ended_well": caller.returncode == 0,
        "minutes": round(took_s / 60, 2),
        "packets": len(late),
        "left_out": sum(stream.left_out for stream in streams),
        "unread": sum(stream.unread for stream in streams),
        "jitter_p50_ms": round(percentile(jitter, 50), 2),
        "jitter_p99_ms": round(percentile(jitter, 99), 2),
        "late_p50_ms": round(percentile(late, 50), 2),
        "late_p99_ms": round(percentile(late, 99), 2),
        "late_max_ms": round(max(late), 1),
        "core_a_call_percent": round(100 * used_s / took_s / max(1, len(streams)), 2),
        "loop_lag_max_ms": round(1000 * lag_s(srv), 1),
        "load": round(os.getloadavg()[0], 1),
    }
    if caller.returncode:
        print(output[-2000:])
    show("calls that sipp holds", [out])
    return out


def main() -> None:
    parser = with_data(arguments("python -m bench.sip_calls", __doc__, ("latency", "barge_in", "held")))
    parser.add_argument("--turns", type=int, default=12, help="turns of each way")
    parser.add_argument("--calls", type=int, default=40, help="calls at once")
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes that they are held")
    args = parser.parse_args()
    clips = whole_turns(args.data)[: args.turns]
    (SipCaller.sip_port,) = free_ports(1)
    sip = ("--sip", f"127.0.0.1:{SipCaller.sip_port}", "--sip-codecs", "PCMU")
    found = "sip-calls"
    talks = [section for section in ("latency", "barge_in") if section in args.sections]
    if talks:
        with backend(ANSWER) as url, server("--language-model", url, *sip) as srv:
            sections = {
                "latency": lambda: latency(srv, clips, SipCaller),
                "barge_in": lambda: barge_in(srv, clips, SipCaller),
            }
            measured(found, ",".join(talks), in_loops(sections), data=args.data.name)
    if "held" in args.sections:
        ports = ("--sip-rtp-ports", f"{RTP_PORTS[0]}-{RTP_PORTS[-1]}", "--sip-comedia")
        with beside("bench.scripted_models") as (models, _), beside("bench.scripted_voices") as (voices, _):
            scripted = ("--transcriber", f"{models}#scripted", "--language-model", f"{models}#scripted")
            more = ("--synthesizer", f"{voices}#scripted", "--max-sessions", "100", "--no-headroom")
            with server(*scripted, *more, *sip, *ports) as srv:
                pcm = np.asarray(clips[0].pcm, np.float32)[::2]
                measured(found, "held", {"held": lambda: held(srv, args.calls, args.minutes, pcm)})


if __name__ == "__main__":
    main()
