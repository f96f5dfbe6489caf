"""Telephones over SIP that others have written, unmodified: Debian's baresip, and sipp for many calls at once."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import time
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.line.g711 import to_ulaw
from antiphon.audio.pcm import from_pcm16, to_pcm16

LIMIT_S = 20.0
MODULES = Path("/usr/lib/baresip/modules")
# What it says comes from a file, and what it hears goes into one (`sndfile`).
CONFIG = """
sip_listen 127.0.0.1:{sip}
net_interface 127.0.0.1
audio_source aufile,{folder}/says.wav
audio_player aubridge,nowhere
audio_alert aubridge,nowhere
ausrc_srate {rate_hz}
auplay_srate {rate_hz}
rtp_ports {rtp}-{rtp_end}
jitter_buffer_delay 1-2
module_path {modules}
module {codec}.so
module aufile.so
module aubridge.so
module sndfile.so
snd_path {folder}
module_tmp uuid.so
module_tmp account.so
module_app menu.so
module_app ctrl_tcp.so
ctrl_tcp_listen 127.0.0.1:{control}
"""
ACCOUNT = "<sip:bob@127.0.0.1:{sip}>;regint=0;audio_codecs={codec}{srtp}\n"
CODECS = {"PCMU/8000/1": ("g711", 8000), "G722/16000/1": ("g722", 16_000), "opus/48000/2": ("opus", 48_000)}


def missing(*programs: str) -> str:
    """Return why these programs cannot run here; "" if they can."""
    packages = {"baresip": "baresip-core", "sipp": "sip-tester"}
    absent = [program for program in programs if not shutil.which(program)]
    return f"{absent[0]} is not installed: apt-get install {packages[absent[0]]}" if absent else ""


def free_ports(count: int) -> list[int]:
    """Return ports that are free for TCP and UDP now."""
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


class Baresip:
    """One baresip, used with `with`. It says `pcm` (float32 at the codec's rate), and then is silent for `then_s`.

    The call ends where this audio ends.
    """

    def __init__(self, pcm: Pcm, *, then_s: float = 30.0, codec: str = "PCMU/8000/1", srtp: bool = False) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="antiphon-baresip-"))
        self.codec, self.rate_hz = codec, CODECS[codec][1]
        says = np.concatenate((pcm, np.zeros(int(then_s * self.rate_hz), np.float32)))
        with wave.open(str(self.folder / "says.wav"), "wb") as out:
            channels = int(codec[-1])
            out.setparams((channels, 2, self.rate_hz, 0, "NONE", ""))
            out.writeframes(to_pcm16(np.repeat(says, channels)))
        self.sip, self._control, rtp = free_ports(3)
        fields: dict[str, Any] = {"sip": self.sip, "control": self._control, "rtp": rtp & ~1, "rtp_end": rtp + 100}
        fields |= {"folder": self.folder, "rate_hz": self.rate_hz, "modules": MODULES, "codec": CODECS[codec][0]}
        config = CONFIG.format(**fields) + ("module srtp.so\n" if srtp else "")
        (self.folder / "config").write_text(config)
        account = ACCOUNT.format(sip=self.sip, codec=codec, srtp=";mediaenc=srtp-mand" if srtp else "")
        (self.folder / "accounts").write_text(account)
        (self.folder / "contacts").write_text("")
        self.events: list[dict[str, Any]] = []
        self._rest = b""

    def __enter__(self) -> Self:
        self._log = (self.folder / "log").open("w")
        command = ["baresip", "-f", str(self.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log)
        until_s = time.monotonic() + LIMIT_S
        while True:
            try:
                self._socket = socket.create_connection(("127.0.0.1", self._control), 1)
                return self
            except OSError:
                assert self._process.poll() is None, self.log()
                assert time.monotonic() < until_s, self.log()
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        # Its own end would wait for the answer to its BYE, which a server in this process cannot give now.
        self._process.kill()
        self._process.wait(LIMIT_S)
        self._log.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        """Return what it has written."""
        return (self.folder / "log").read_text()

    def command(self, name: str, params: str = "") -> None:
        """Carry out a command of its menu."""
        text = json.dumps({"command": name, "params": params, "token": "t"})
        self._socket.sendall(f"{len(text)}:{text},".encode())

    def until(self, type: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
        """Wait for an event of this type, as CALL_ESTABLISHED and CALL_CLOSED, and return it."""
        until_s = time.monotonic() + limit_s
        while True:
            for event in self._read():
                self.events.append(event)
            if found := [event for event in self.events if event.get("type") == type]:
                return found[-1]
            assert time.monotonic() < until_s, f"no {type}: {self.events} {self.log()}"

    def _read(self) -> Iterator[dict[str, Any]]:
        """Read netstrings for a moment."""
        self._socket.settimeout(0.1)
        try:
            self._rest += self._socket.recv(1 << 16)
        except TimeoutError:
            return
        while b":" in self._rest:
            length, _, rest = self._rest.partition(b":")
            if len(rest) <= int(length):
                return
            yield json.loads(rest[: int(length)])
            self._rest = rest[int(length) + 1 :]

    def heard(self) -> Pcm:
        """Return what it has recorded of its loudspeaker, at the codec's rate. Call it after the call."""
        (path,) = self.folder.glob("dump-*-dec.wav")
        with wave.open(str(path)) as read:
            return from_pcm16(read.readframes(read.getnframes()))[:: read.getnchannels()]


# A caller who says a recording again and again, and hangs up after a while.
SCENARIO = """<?xml version="1.0" encoding="ISO-8859-1" ?>
<scenario name="caller">
  <send retrans="500"><![CDATA[
INVITE sip:bot@[remote_ip]:[remote_port] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]t[call_number]
To: <sip:bot@[remote_ip]:[remote_port]>
Call-ID: [call_id]
CSeq: 1 INVITE
Contact: sip:sipp@[local_ip]:[local_port]
Max-Forwards: 70
Content-Type: application/sdp
Content-Length: [len]

v=0
o=user1 1 1 IN IP[local_ip_type] [local_ip]
s=-
c=IN IP[media_ip_type] [media_ip]
t=0 0
m=audio [rtpstream_audio_port] RTP/AVP 0
a=rtpmap:0 PCMU/8000
]]></send>
  <recv response="100" optional="true"/>
  <recv response="180" optional="true"/>
  <recv response="200" rrs="true"/>
  <send><![CDATA[
ACK [next_url] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]t[call_number]
To: <sip:bot@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 1 ACK
Contact: sip:sipp@[local_ip]:[local_port]
Max-Forwards: 70
Content-Length: 0

]]></send>
  <nop><action><exec rtp_stream="says.wav,-1,0"/></action></nop>
  <pause milliseconds="{pause_ms}"/>
  <send retrans="500"><![CDATA[
BYE [next_url] SIP/2.0
Via: SIP/2.0/[transport] [local_ip]:[local_port];branch=[branch]
From: sipp <sip:sipp@[local_ip]:[local_port]>;tag=[pid]t[call_number]
To: <sip:bot@[remote_ip]:[remote_port]>[peer_tag_param]
Call-ID: [call_id]
CSeq: 2 BYE
Contact: sip:sipp@[local_ip]:[local_port]
Max-Forwards: 70
Content-Length: 0

]]></send>
  <recv response="200"/>
</scenario>
"""


@contextmanager
def sipp(port: int, pcm: Pcm, *, calls: int, for_s: float, a_second: int = 10) -> Iterator[subprocess.Popen[str]]:
    """Run sipp with `calls` calls to the server at `port`, each of which says `pcm` (float32 at 8 kHz) for `for_s`.

    Its return code is 0 if every call went as in SCENARIO.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-sipp-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        data = to_ulaw(pcm)
        # A header of µ-law, which the standard library does not write.
        head = b"RIFF" + (len(data) + 36).to_bytes(4, "little") + b"WAVEfmt " + (16).to_bytes(4, "little")
        head += b"\x07\x00\x01\x00" + (8000).to_bytes(4, "little") * 2 + b"\x01\x00\x08\x00"
        (folder / "says.wav").write_bytes(head + b"data" + len(data).to_bytes(4, "little") + data)
        (folder / "call.xml").write_text(SCENARIO.replace("{pause_ms}", str(round(for_s * 1000))))
        sip, media = free_ports(2)
        command = ["sipp", f"127.0.0.1:{port}", "-sf", "call.xml", "-i", "127.0.0.1", "-p", str(sip)]
        command += ["-mp", str(media), "-mi", "127.0.0.1", "-nostdin"]
        command += ["-m", str(calls), "-l", str(calls), "-r", str(a_second), "-timeout", f"{for_s + 60:.0f}s"]
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()
