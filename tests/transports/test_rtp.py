"""A caller's leg over RTP against a telephone without a network, in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest

from antiphon.audio.line.g711 import from_ulaw, to_ulaw
from antiphon.audio.line.line_codecs import line_codec
from antiphon.audio.line.telephone import tones
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPart,
    ContentPartDone,
    ContentPosition,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.tools import ToolResult
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.telephony.sip import rtp, sdp
from antiphon.protocols.telephony.stream import Call
from antiphon.transports.call_tools import CallTools
from antiphon.transports.leg import PIECE_S, LegOptions
from antiphon.transports.rtp import FRAME_S, GONE_AFTER_S, SILENT_AFTER_S, RtpLeg, RtpPort, srtp_session
from tests.transports.test_telephone import OUT_HZ, WORD_S, run

PHONE = "192.0.2.1", 4000
OFFER = (
    b"v=0\r\nc=IN IP4 192.0.2.1\r\nm=audio 4000 RTP/AVP 0 101\r\na=rtpmap:101 telephone-event/8000\r\na=sendrecv\r\n"
)
SILENCE = to_ulaw(np.zeros(160, np.float32))


class Port:
    """The network between the leg and the telephone: what the leg has sent, with the time of each packet."""

    def __init__(self) -> None:
        self.received: Any = None
        self.sent: list[tuple[float, rtp.RtpPacket, tuple[str, int]]] = []
        self.raw: list[bytes] = []

    def send(self, data: bytes, to: tuple[str, int]) -> None:
        self.raw.append(data)
        self.sent.append((asyncio.get_running_loop().time(), rtp.read(data), to))


class Control:
    """The signalling. A transfer fails with `outcome`, if there is one."""

    def __init__(self, outcome: str = "") -> None:
        self.outcome = outcome
        self.asked: list[str] = []

    async def hang_up(self, reason: str) -> None:
        self.asked.append(f"hang up: {reason}")

    async def transfer(self, target: str) -> None:
        self.asked.append(target)
        if self.outcome:
            raise RemoteProtocolError("carrier_refused", self.outcome)


class Phone:
    """A telephone, and the session behind the leg that it calls. It sends silence unless it is `mute`."""

    def __init__(self, *, offer: bytes = OFFER, outcome: str = "", mute: bool = False, **options: Any) -> None:
        self.port, self.control = Port(), Control(outcome)
        theirs = sdp.read(offer)
        agreed = sdp.agree(theirs, ("pcmu",))
        assert agreed
        self.leg = RtpLeg(
            Call("sip"),
            line_codec("pcmu"),
            cast(RtpPort, self.port),
            self.control,
            LegOptions(transfers={"sales": "sip:200@example.com"}),
            sends_keys=agreed.events is not None,
            **options,
        )
        self.tools = CallTools(self.leg)
        self.leg.agree(agreed, theirs)
        self.player = self.leg.playback
        self.player.attach(lambda event: None)
        self.frames: list[dict[str, Any]] = []
        self.heard: list[np.ndarray[Any, Any]] = []
        self.number = 0
        self.loop = asyncio.get_running_loop()
        self.begun_s = self.loop.time()
        self.tasks = [asyncio.create_task(self.leg.run()), asyncio.create_task(self._take())]
        if not mute:
            self.tasks.append(asyncio.create_task(self._speak()))

    async def _speak(self) -> None:
        while not self.leg.ended_by:
            await asyncio.sleep(FRAME_S)
            self.say(SILENCE)

    async def _take(self) -> None:
        while (data := await self.leg.receive()) is not None:
            if isinstance(data, AppendAudio):
                self.heard.append(data.pcm)
            else:
                self.frames.append(json.loads(data))

    def say(self, payload: bytes, *, number: int | None = None, type: int = 0, sender: tuple[str, int] = PHONE) -> None:
        """Send a packet, which arrives at once."""
        self.number += number is None
        sequence = (self.number if number is None else number) % 65_536
        packet = rtp.RtpPacket(type, sequence, 160 * sequence, 7, payload)
        self.port.received(rtp.encode(packet), sender)

    @property
    def heard_s(self) -> float:
        return sum(map(len, self.heard)) / 16_000

    def begin(self) -> ContentPosition:
        at = ContentPosition("resp_1", "item_1", 0)
        self.player.send(ResponseCreated(Response(at.response_id, True, None, None)))
        return at

    def call(self, name: str, arguments: str = "{}") -> asyncio.Task[ToolResult]:
        """Let the session carry out a function of the model."""
        return asyncio.create_task(self.tools.call("telephone", name, arguments))

    def answer(self, num_words: int) -> ContentPosition:
        """Generate a whole response at once: words of 300 ms."""
        at = self.begin()
        self.player.send(ResponseAudioDelta(at, np.full(int(num_words * WORD_S * OUT_HZ), 0.25, np.float32), OUT_HZ))
        self.player.send(ContentPartDone(at, ContentPart("output_audio")))
        self.player.send(ResponseDone(Response(at.response_id, True, None, None)))
        return at

    def sound(self, type: int = 0) -> np.ndarray[Any, Any]:
        """Return what the telephone has played of the packets with this payload type."""
        return np.concatenate([from_ulaw(p.payload) for _, p, _ in self.port.sent if p.payload_type == type])

    async def over(self) -> str:
        await asyncio.gather(*self.tasks)
        return self.leg.ended_by

    async def hang_up(self) -> None:
        self.leg.end("caller_hung_up")
        await self.over()


def test_a_frame_is_sent_every_20_ms_and_its_sound_is_that_of_the_response() -> None:
    async def main() -> None:
        phone = Phone()
        await asyncio.sleep(1.0)
        phone.answer(5)
        await asyncio.sleep(3.0)
        times = [at_s - phone.begun_s for at_s, _, _ in phone.port.sent]
        assert np.diff(times) == pytest.approx(FRAME_S, abs=0.001)
        packets = [packet for _, packet, _ in phone.port.sent]
        assert {(b.sequence - a.sequence) % 65_536 for a, b in pairwise(packets)} == {1}
        assert {(b.timestamp - a.timestamp) % 2**32 for a, b in pairwise(packets)} == {160}
        assert [p.marker for p in packets] == [True] + [False] * (len(packets) - 1)
        loud = np.flatnonzero(np.abs(phone.sound()) > 0.1)
        assert len(loud) / 8000 == pytest.approx(5 * WORD_S, abs=0.03)
        # One stretch, which begins within a frame.
        assert loud[-1] - loud[0] == pytest.approx(len(loud), abs=10)
        assert loud[0] / 8000 == pytest.approx(1.0, abs=0.05)
        await phone.hang_up()

    run(main)


def test_the_history_knows_to_a_frame_what_was_heard_before_a_cut() -> None:
    async def one(seed: int) -> None:
        phone = Phone()
        at = phone.answer(20)
        after_s = random.Random(seed).uniform(0.0, 6.5)
        await asyncio.sleep(after_s)
        cut = {place.item_id: ms for place, ms in phone.player.silence()}
        await asyncio.sleep(0.2)
        played_s = float(np.sum(np.abs(phone.sound()) > 0.1)) / 8000
        assert played_s == pytest.approx(min(after_s, 20 * WORD_S), abs=0.03)
        assert cut.get(at.item_id, 20 * WORD_S * 1000) / 1000 == pytest.approx(played_s, abs=0.03)
        await phone.hang_up()

    async def main() -> None:
        for seed in range(20):
            await one(seed)

    run(main)


def test_keys_come_as_events_and_by_the_signalling() -> None:
    async def main() -> None:
        phone = Phone()
        await asyncio.sleep(0.1)
        for key in "12":
            phone.number += 50
            for payload in rtp.key_payloads(key, 8000):
                # All packets of a key have one timestamp, which `say` takes from the number.
                packet = rtp.RtpPacket(101, (phone.number + 1) % 65_536, ord(key), 7, payload)
                phone.number += 1
                phone.port.received(rtp.encode(packet), PHONE)
            await asyncio.sleep(0.2)
        assert phone.frames == []
        phone.leg.press("#")
        await asyncio.sleep(0.1)
        assert [f["type"] for f in phone.frames] == ["conversation.item.create", "response.create"]
        assert "12#" in phone.frames[0]["item"]["content"][0]["text"]
        await phone.hang_up()

    run(main)


def test_digits_are_sent_as_events_after_the_words_before_them() -> None:
    async def main() -> None:
        phone = Phone()
        phone.answer(2)
        await phone.call("send_digits", '{"digits": "5#"}')
        await asyncio.sleep(3.0)
        keys = [packet for _, packet, _ in phone.port.sent if packet.payload_type == 101]
        reader = rtp.KeyReader()
        assert "".join(map(reader.read, keys)) == "5#"
        assert len({packet.timestamp for packet in keys}) == 2
        assert [packet.marker for packet in keys].count(True) == 2
        loud_s = [at_s for at_s, p, _ in phone.port.sent if not p.payload_type and p.payload != SILENCE]
        assert next(at_s for at_s, p, _ in phone.port.sent if p.payload_type == 101) > max(loud_s)
        # Time goes on for those who do not know the events.
        sound = [packet for _, packet, _ in phone.port.sent if packet.payload_type == 0]
        assert (sound[-1].timestamp - sound[0].timestamp) % 2**32 == pytest.approx(160 * len(phone.port.sent), abs=160)
        await phone.hang_up()

    run(main)


def test_digits_are_tones_for_a_telephone_without_events() -> None:
    async def main() -> None:
        phone = Phone(offer=OFFER.replace(b" 101\r\n", b"\r\n"))
        phone.answer(0)
        await phone.call("send_digits", '{"digits": "5"}')
        await asyncio.sleep(1.0)
        sound, expected = phone.sound(), tones("5", 8000)
        first = int(np.flatnonzero(np.abs(sound) > 0.02)[0])
        best = min(
            float(np.abs(sound[at : at + 400] - expected[:400]).max()) for at in range(max(0, first - 10), first + 1)
        )
        assert best < 0.03
        await phone.hang_up()

    run(main)


def test_a_caller_on_hold_gets_nothing_and_then_the_rest() -> None:
    async def main() -> None:
        phone = Phone()
        phone.answer(5)
        await asyncio.sleep(0.5)
        held = sdp.read(OFFER.replace(b"sendrecv", b"sendonly"))
        agreed = sdp.Agreed(0, "pcmu", 8000, 101)
        phone.leg.agree(agreed, held)
        num_sent = len(phone.port.sent)
        await asyncio.sleep(2.0)
        assert len(phone.port.sent) == num_sent
        phone.leg.agree(agreed, sdp.read(OFFER.replace(b"4000", b"4002")))
        await asyncio.sleep(3.0)
        (_, before, first), (_, after, second) = phone.port.sent[num_sent - 1], phone.port.sent[num_sent]
        assert (first, second) == (PHONE, ("192.0.2.1", 4002))
        assert ((after.timestamp - before.timestamp) % 2**32) / 8000 == pytest.approx(2.0, abs=0.05)
        assert float(np.sum(np.abs(phone.sound()) > 0.1)) / 8000 == pytest.approx(5 * WORD_S, abs=0.03)
        await phone.hang_up()

    run(main)


def test_a_call_on_hold_is_not_ended_for_its_silence() -> None:
    async def main() -> None:
        phone = Phone(mute=True, offer=OFFER.replace(b"sendrecv", b"inactive"))
        await asyncio.sleep(GONE_AFTER_S + 5)
        assert phone.leg.ended_by == ""
        await phone.hang_up()

    run(main)


@pytest.mark.parametrize("comedia", [False, True])
def test_audio_of_another_address_is_dropped_unless_comedia_is_on(comedia: bool) -> None:
    async def main() -> None:
        phone = Phone(mute=True, comedia=comedia)
        await asyncio.sleep(0.1)
        loud, elsewhere = to_ulaw(np.full(160, 0.5, np.float32)), ("198.51.100.9", 9)
        for _ in range(5):
            phone.say(loud, sender=elsewhere)
            await asyncio.sleep(FRAME_S)
        # Only the first address is learned.
        phone.say(loud, sender=("198.51.100.10", 9))
        await asyncio.sleep(0.1)
        assert phone.leg.num_foreign == (1 if comedia else 6)
        assert bool(phone.heard and np.abs(np.concatenate(phone.heard)).max() > 0.4) is comedia
        assert phone.port.sent[-1][2] == (elsewhere if comedia else PHONE)
        await phone.hang_up()

    run(main)


@pytest.mark.parametrize("seed", range(5))
def test_a_bad_network_costs_the_lost_packets_and_no_time(seed: int) -> None:
    """5 % are lost, 5 % come twice, 10 % are overtaken by up to 60 ms."""

    async def main() -> None:
        phone, draw = Phone(mute=True), random.Random(seed)
        arrivals: list[tuple[float, int]] = []
        for number in range(500):
            late_s = draw.uniform(0.0, 0.06) if draw.random() < 0.1 else 0.0
            times = 0 if draw.random() < 0.05 and number < 490 else 2 if draw.random() < 0.05 else 1
            arrivals += [(number * FRAME_S + late_s, number)] * times
        lost = 500 - len({number for _, number in arrivals})
        for at_s, number in sorted(arrivals):
            await asyncio.sleep(max(0.0, phone.begun_s + 0.01 + at_s - phone.loop.time()))
            phone.say(to_ulaw(np.full(160, 0.5, np.float32)), number=number)
        await asyncio.sleep(0.1)
        assert phone.heard_s == pytest.approx(10.0, abs=0.15)
        assert len(phone.heard) == pytest.approx(10.0 / PIECE_S, abs=3)
        loud_s = float(np.sum(np.concatenate(phone.heard) > 0.25)) / 16_000
        assert loud_s == pytest.approx((500 - phone.leg.num_lost) * FRAME_S, abs=0.25)
        assert lost <= phone.leg.num_lost <= lost + 3
        await phone.hang_up()

    run(main)


def test_a_telephone_that_sends_no_silence_is_silent_and_one_that_is_gone_is_hung_up() -> None:
    async def main() -> None:
        phone = Phone(mute=True)
        await asyncio.sleep(5.0)
        assert phone.heard_s == pytest.approx(5.0 - SILENT_AFTER_S, abs=0.1)
        assert await phone.over() == "no_audio"
        assert phone.loop.time() - phone.begun_s == pytest.approx(GONE_AFTER_S, abs=0.1)

    run(main)


def test_the_model_hangs_up_after_its_last_words() -> None:
    async def main() -> None:
        phone = Phone()
        phone.answer(3)
        hangs_up = phone.call("hang_up")
        assert await phone.over() == "hang_up"
        hangs_up.cancel()
        assert float(np.sum(np.abs(phone.sound()) > 0.1)) / 8000 == pytest.approx(3 * WORD_S, abs=0.03)

    run(main)


def test_the_model_transfers_a_call_to_a_name_that_it_has() -> None:
    async def main() -> None:
        phone = Phone()
        phone.answer(2)
        assert (await phone.call("transfer", '{"to": "sales"}')).text == "transferred"
        assert await phone.over() == "transfer"
        assert phone.control.asked == ["sip:200@example.com"]
        assert phone.loop.time() - phone.begun_s > 2 * WORD_S

    run(main)


def test_a_transfer_that_fails_is_told_to_the_model() -> None:
    async def main() -> None:
        phone = Phone(outcome="not transferred: 486 Busy Here")
        phone.answer(1)
        assert "486" in (await phone.call("transfer", '{"to": "sales"}')).text
        assert "sales" in (await phone.call("transfer", '{"to": "0900"}')).text
        assert (len(phone.control.asked), phone.leg.ended_by) == (1, "")
        # A caller who speaks over the last words stays.
        at = phone.answer(3)
        transfers = phone.call("transfer", '{"to": "sales"}')
        await asyncio.sleep(0.3)
        assert [place for place, _ in phone.player.silence()] == [at]
        assert "went on" in (await transfers).text
        assert len(phone.control.asked) == 1
        await phone.hang_up()

    run(main)


def test_after_a_stall_of_the_server_there_is_a_gap_and_no_burst() -> None:
    async def main() -> None:
        phone = Phone()
        await asyncio.sleep(1.0)
        num_sent = len(phone.port.sent)
        phone.loop.now_s += 2.0  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        assert len(phone.port.sent) - num_sent <= 8
        (_, before, _), (_, after, _) = phone.port.sent[num_sent - 1], phone.port.sent[num_sent]
        assert ((after.timestamp - before.timestamp) % 2**32) / 8000 == pytest.approx(2.0, abs=0.05)
        await phone.hang_up()

    run(main)


def test_a_call_with_srtp_hears_only_what_has_its_key() -> None:
    pytest.importorskip("pylibsrtp")

    async def main() -> None:
        theirs = sdp.Crypto(1, sdp.SUITES[0], bytes(range(30)))
        own = sdp.Crypto(1, sdp.SUITES[0], bytes(range(30, 60)))
        offer = OFFER.replace(b"RTP/AVP", b"RTP/SAVP") + theirs.line().encode() + b"\r\n"
        phone = Phone(mute=True)
        phone.leg.agree(sdp.Agreed(0, "pcmu", 8000, 101), sdp.read(offer), own)
        sends, hears = srtp_session(theirs, inbound=False), srtp_session(own, inbound=True)
        await asyncio.sleep(0.1)
        phone.port.raw.clear()
        sound = to_ulaw(np.full(160, 0.5, np.float32))
        plain = [rtp.encode(rtp.RtpPacket(0, n, 160 * n, 7, sound)) for n in range(11)]
        for packet in plain[:6]:
            phone.port.received(sends.protect(packet), PHONE)
        for packet in plain[6:]:
            # Without the key.
            phone.port.received(packet, PHONE)
        await asyncio.sleep(0.1)
        assert sum(float(np.sum(pcm > 0.25)) for pcm in phone.heard) / 320 == pytest.approx(6, abs=0.3)
        assert {rtp.read(hears.unprotect(packet)).payload for packet in phone.port.raw} == {SILENCE}
        await phone.hang_up()

    run(main)
