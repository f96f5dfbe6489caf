"""SIP messages, digests, SDP and RTP, as telephones send them, and as nobody should."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.errors import AntiphonError, RemoteProtocolError
from antiphon.protocols.telephony.sip import rtp, sdp
from antiphon.protocols.telephony.sip.digest import NONCE_S, Challenger, answered, params_of, response_of
from antiphon.protocols.telephony.sip.messages import (
    MAX_MESSAGE_BYTES,
    Address,
    SipFramer,
    SipRequest,
    SipResponse,
    SipUri,
    answer,
    parse,
)

# The INVITE of RFC 3665, section 3.1 (F1), with a second proxy, compact names and a folded line.
INVITE = (
    b"INVITE sip:bob@biloxi.example.com SIP/2.0\r\n"
    b"Via: SIP/2.0/UDP proxy.example.com:5060;branch=z9hG4bK2d4790.1, SIP/2.0/TCP "
    b"client.atlanta.example.com:5060;branch=z9hG4bK74bf9\r\n"
    b"Max-Forwards: 70\r\n"
    b'f: "Alice, <the> one" <sip:alice@atlanta.example.com>;tag=9fxced76sl\r\n'
    b"t: Bob <sip:bob@biloxi.example.com>\r\n"
    b"i: 3848276298220188511@atlanta.example.com\r\n"
    b"CSeq: 1 INVITE\r\n"
    b"m: <sip:alice@client.atlanta.example.com;transport=tcp>\r\n"
    b"Subject: a call\r\n about nothing\r\n"
    b"X-Order: 17\r\n"
    b"l: 4\r\n\r\nv=0\n"
)
PCMU_OFFER = (
    b"v=0\r\no=- 1 1 IN IP4 192.0.2.1\r\ns=-\r\nc=IN IP4 192.0.2.1\r\nt=0 0\r\n"
    b"m=audio 49170 RTP/AVP 0 8 9 96 101\r\na=rtpmap:96 opus/48000/2\r\na=rtpmap:101 telephone-event/8000\r\n"
    b"a=fmtp:101 0-15\r\na=sendrecv\r\nm=video 51372 RTP/AVP 99\r\na=rtpmap:99 h264/90000\r\n"
)
KEY = "d0RmdmcmVCspeEc3QGZiNWpVLFJhQX1cfHAwJSoj"
# The example of RFC 3711, with the key of RFC 4568.
SRTP_OFFER = (
    b"v=0\r\no=- 1 1 IN IP4 192.0.2.1\r\ns=-\r\nc=IN IP4 192.0.2.1\r\nt=0 0\r\nm=audio 49170 RTP/SAVP 0\r\n"
    b"a=crypto:1 AES_256_CM_HMAC_SHA1_80 inline:" + KEY.encode() + b"\r\n"
    b"a=crypto:2 AES_CM_128_HMAC_SHA1_32 inline:" + KEY.encode() + b"|2^20\r\n"
    b"a=crypto:3 AES_CM_128_HMAC_SHA1_80 inline:" + KEY.encode() + b"|2^20|1:4\r\n"
)


def test_an_invite_is_read_and_answered() -> None:
    request = parse(INVITE)
    assert isinstance(request, SipRequest)
    assert (request.method, request.uri, request.body) == ("INVITE", "sip:bob@biloxi.example.com", b"v=0\n")
    assert (request.call_id, request.cseq) == ("3848276298220188511@atlanta.example.com", (1, "INVITE"))
    assert (request.from_tag, request.to_tag) == ("9fxced76sl", "")
    assert request.via.branch == "z9hG4bK2d4790.1"
    assert [a.uri for a in map(Address.read, request.all("contact"))] == [
        "sip:alice@client.atlanta.example.com;transport=tcp"
    ]
    assert request.get("subject") == "a call about nothing"
    assert request.get("x-order") == "17"
    back = parse(answer(request, 180, tag="a1", headers=[("contact", "<sip:b@192.0.2.4>")]).encode())
    assert isinstance(back, SipResponse)
    assert (back.status, back.reason, back.to_tag, back.from_tag) == (180, "Ringing", "a1", "9fxced76sl")
    assert len(back.all("via")) == 2
    assert back.cseq == request.cseq
    # A request within a dialog keeps its tag.
    request.set("to", "Bob <sip:bob@biloxi.example.com>;tag=b2")
    assert answer(request, 200, tag="a1").to_tag == "b2"


def test_the_address_of_a_request_is_noted_in_its_via() -> None:
    request = parse(INVITE.replace(b"2d4790.1,", b"2d4790.1;rport,"))
    shown = request.via.stamped("198.51.100.7", 40_000)
    assert shown == ("SIP/2.0/UDP proxy.example.com:5060;branch=z9hG4bK2d4790.1;received=198.51.100.7;rport=40000")


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("sip:bob@[2001:db8::9]:5070;transport=TCP", ("sip", "bob", "2001:db8::9", 5070, "tcp")),
        ("sip:192.0.2.4", ("sip", "", "192.0.2.4", 0, "udp")),
        ("sips:+49301@example.com?subject=x", ("sips", "+49301", "example.com", 0, "udp")),
        ("tel:+49301;phone-context=x", ("tel", "+49301", "", 0, "udp")),
        ("sip:bob:secret@example.com", ("sip", "bob", "example.com", 0, "udp")),
    ],
)
def test_uris_are_read(uri: str, expected: tuple[str, str, str, int, str]) -> None:
    found = SipUri.read(uri)
    assert (found.scheme, found.user, found.host, found.port, found.transport) == expected


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        INVITE.replace(b"\r\n\r\n", b"\r\n"),
        INVITE.replace(b"l: 4", b"l: 5"),
        INVITE.replace(b"l: 4", b"l: -1"),
        INVITE.replace(b"CSeq: 1 INVITE", b"CSeq: 1 BYE"),
        INVITE.replace(b"CSeq: 1", b"CSeq: 99999999999"),
        INVITE.replace(b"CSeq: 1", b"CSeq: \xc2\xb2"),
        INVITE.replace(b"i: 38", b"no 38"),
        INVITE.replace(b"i: ", b"x: "),
        INVITE.replace(b"z9hG4bK2d4790.1", b"1"),
        INVITE.replace(b"SIP/2.0/UDP ", b"UDP "),
        INVITE.replace(b"Order: 17", b"Order: 1\n7"),
        INVITE.replace(b"X-Order: 17\r\n", b"X-Order: 17\r\n" * 200),
        INVITE.replace(b"Subject: a", b"Subject: " + b"a" * MAX_MESSAGE_BYTES),
        INVITE.replace(b"<sip:bob@biloxi", b"<sip:bo b@biloxi"),
    ],
)
def test_what_is_no_sip_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        parse(data)
    assert caught.value.code == "bad_sip"


@given(st.integers(0, 2**32), st.sampled_from([INVITE, answer(parse(INVITE), 200, body=PCMU_OFFER).encode()]))  # type: ignore[arg-type]
def test_no_message_raises_anything_else(seed: int, data: bytes) -> None:
    draw, raw = random.Random(seed), bytearray(data)
    for _ in range(draw.randrange(1, 8)):
        at = draw.randrange(len(raw))
        raw[at : at + draw.randrange(4)] = draw.choice(
            [b"", b"\r\n", b"<", b'"', b";", b":", b",", bytes([draw.randrange(256)])]
        )
    try:
        message = parse(bytes(raw))
        if isinstance(message, SipRequest):
            parse(answer(message, 200, tag="t").encode())
        sdp.read(message.body)
    except AntiphonError:
        pass


@given(st.lists(st.integers(1, 400), max_size=20))
def test_messages_in_a_stream_are_found_at_any_cut(cuts: list[int]) -> None:
    data, framer, found = b"\r\n\r\n" + INVITE + b"\r\n" + INVITE, SipFramer(), list[bytes]()
    for length in (*cuts, len(data)):
        found += framer.feed(data[:length])
        data = data[length:]
    assert found == [INVITE, INVITE]


def test_a_stream_without_an_end_is_refused() -> None:
    framer = SipFramer()
    with pytest.raises(RemoteProtocolError):
        framer.feed(b"x" * (MAX_MESSAGE_BYTES + 1))
    with pytest.raises(RemoteProtocolError):
        SipFramer().feed(INVITE.replace(b"l: 4", b"l: 9999999"))


# --- digest


def test_the_digest_is_that_of_the_rfc() -> None:
    """RFC 2617, section 3.5, and RFC 7616, section 3.9.1."""
    given = {"realm": "testrealm@host.com", "nonce": "dcd98b7102dd2f0e8b11d0f600bfb0c093", "uri": "/dir/index.html"}
    given |= {"qop": "auth", "nc": "00000001", "cnonce": "0a4f113b"}
    assert response_of(given, "GET", "Mufasa", "Circle Of Life") == "6629fae49393a05397450978507c4ef1"
    given = {"realm": "http-auth@example.org", "nonce": "7ypf/xlj9XXwfDPEoM4URrv/xwf94BcCAzFZH4GiTo0v"}
    given |= {"uri": "/dir/index.html", "qop": "auth", "nc": "00000001", "algorithm": "SHA-256"}
    given |= {"cnonce": "f2/wE4q74E6zIJEtWaHKaf5wv/H5QzzpXusqGemxURZJ"}
    right = "753927fa0e85d155564e2e272a28d1802ca10daf4496794697cf8db5856cb6c1"
    assert response_of(given, "GET", "Mufasa", "Circle of Life") == right


def asked(challenger: Challenger, password: str, status: int = 401) -> SipRequest:
    """Answer a challenge, as a telephone does."""
    request = parse(INVITE)
    assert isinstance(request, SipRequest)
    challenge = answer(request, status, headers=challenger.challenges())
    header = answered(request, challenge, "bob", password)
    assert header
    request.headers.append(header)
    return request


def test_a_challenge_admits_the_password_once_and_not_for_long() -> None:
    now_s = 100.0
    challenger = Challenger("secret", lambda: now_s)
    request = asked(challenger, "secret")
    assert params_of(request.get("authorization"))["algorithm"] == "SHA-256"
    assert challenger.admits(request)
    # A replayed answer, a wrong password, another server's nonce, none at all, and one that comes too late.
    assert not challenger.admits(request)
    assert not challenger.admits(asked(challenger, "Secret"))
    assert not Challenger("secret", lambda: now_s).admits(asked(challenger, "secret"))
    assert not challenger.admits(parse(INVITE))  # type: ignore[arg-type]
    late = asked(challenger, "secret")
    now_s += NONCE_S + 1
    assert not challenger.admits(late)


def test_a_challenge_that_is_not_understood_is_not_answered() -> None:
    request = parse(INVITE)
    assert isinstance(request, SipRequest)
    for challenge in (
        'Digest realm="a", nonce="b", qop="auth-int"',
        'Digest realm="a", nonce="b", algorithm=X',
        "Basic",
    ):
        response = answer(request, 407, headers=[("proxy-authenticate", challenge)])
        assert answered(request, response, "bob", "x") is None


# --- SDP


def test_an_offer_is_answered_with_one_codec_and_the_other_media_are_refused() -> None:
    theirs = sdp.read(PCMU_OFFER)
    assert (theirs.host, theirs.port, theirs.direction, theirs.holds) == ("192.0.2.1", 49170, "sendrecv", False)
    agreed = sdp.agree(theirs, ("g722", "pcmu"))
    assert agreed == sdp.Agreed(9, "g722", 8000, 101)
    own = sdp.answer(theirs, agreed, ("192.0.2.9", 16384), 1, None).decode()
    assert "m=audio 16384 RTP/AVP 9 101\r\n" in own
    assert "m=video 0 RTP/AVP 99\r\n" in own
    assert own.endswith("m=video 0 RTP/AVP 99\r\n")
    back = sdp.read(own.encode())
    assert (back.codecs, back.events) == (((9, "g722", 8000),), {8000: 101})
    # Opus has another clock, for which no events are offered.
    assert sdp.agree(theirs, ("opus",)) == sdp.Agreed(96, "opus", 48_000, None)
    assert sdp.agree(theirs, ("speex",)) is None


@pytest.mark.parametrize(
    ("line", "direction", "holds"),
    [("sendonly", "recvonly", True), ("inactive", "inactive", True), ("recvonly", "sendonly", False)],
)
def test_hold_is_understood(line: str, direction: str, holds: bool) -> None:
    theirs = sdp.read(PCMU_OFFER.replace(b"a=sendrecv", b"a=" + line.encode()))
    assert theirs.holds is holds
    agreed = sdp.agree(theirs, ("pcmu",))
    assert agreed
    assert f"a={direction}\r\n".encode() in sdp.answer(theirs, agreed, ("192.0.2.9", 16384), 1, None)


def test_our_own_offer_can_be_agreed_to() -> None:
    theirs = sdp.read(sdp.offer(("2001:db8::1", 16384), 7, ("opus", "g722", "pcmu", "pcma")))
    assert (theirs.host, theirs.port) == ("2001:db8::1", 16384)
    assert [name for _, name, _ in theirs.codecs] == ["opus", "g722", "pcmu", "pcma"]
    assert theirs.events == {48_000: 100, 8000: 101}


def test_keys_of_srtp_are_read_where_they_are_understood() -> None:
    theirs = sdp.read(SRTP_OFFER)
    assert theirs.is_secure
    assert [(c.tag, c.suite, len(c.key)) for c in theirs.crypto] == [(2, "AES_CM_128_HMAC_SHA1_32", 30)]
    agreed = sdp.agree(theirs, ("pcmu",))
    assert agreed
    own = sdp.Crypto(2, theirs.crypto[0].suite, bytes(range(30)))
    back = sdp.read(sdp.answer(theirs, agreed, ("192.0.2.9", 16384), 1, own))
    assert (back.is_secure, back.crypto) == (True, (own,))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<sdp/>",
        PCMU_OFFER.replace(b"c=IN IP4 192.0.2.1\r\n", b""),
        # A name would have to be looked up while the server waits.
        PCMU_OFFER.replace(b"c=IN IP4 192.0.2.1\r\n", b"c=IN IP4 example.com\r\n"),
        PCMU_OFFER.replace(b"c=IN IP4 192.0.2.1\r\n", b"c=IN IP4 224.0.0.1\r\n"),
        PCMU_OFFER.replace(b"m=audio 49170", b"m=audio 0"),
        PCMU_OFFER.replace(b"m=audio 49170", b"m=audio 99999"),
        PCMU_OFFER.replace(b"m=audio 49170 RTP/AVP", b"m=audio 49170 TCP/MSRP"),
        PCMU_OFFER.replace(b"m=audio 49170 RTP/AVP", b"m=audio"),
        PCMU_OFFER + b"a=x\r\n" * 600,
    ],
)
def test_what_cannot_be_answered_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        sdp.read(data)
    assert caught.value.code == "invalid_offer"


# --- RTP


def test_packets_are_written_and_read() -> None:
    packet = rtp.RtpPacket(9, 65_535, 160, 7, b"abc", True)
    assert rtp.read(rtp.encode(packet)) == packet
    # With a source, an extension and padding.
    data = b"\xb1\x09\x00\x01" + bytes(8) + bytes(4) + b"\xbe\xde\x00\x01" + bytes(4) + b"abc" + b"\x00\x02"
    assert rtp.read(data).payload == b"abc"


@pytest.mark.parametrize(
    "data", [b"", bytes(12), b"\x80\xc8" + bytes(10), b"\x8f\x00" + bytes(10), b"\xa0\x00" + bytes(9) + b"\xff"]
)
def test_what_is_no_rtp_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        rtp.read(data)


@given(st.binary(max_size=60))
def test_no_packet_raises_anything_else(data: bytes) -> None:
    try:
        packet = rtp.read(data)
        rtp.RtpOrder().put(packet)
        rtp.KeyReader().read(packet)
    except RemoteProtocolError:
        pass


def ordered(numbers: list[int], ssrc: int = 7) -> list[int | None]:
    order = rtp.RtpOrder()
    packets = [rtp.RtpPacket(0, n % 65_536, 0, ssrc, b"") for n in numbers]
    return [due and due.sequence for packet in packets for due in order.put(packet)]


def test_sequence_numbers_begin_again_without_a_gap() -> None:
    numbers = list(range(65_530, 65_540))
    assert ordered(numbers) == [n % 65_536 for n in numbers]
    swapped = [65_534, 65_536, 65_535, 65_537]
    assert ordered(swapped) == [65_534, 65_535, 0, 1]


def test_lost_late_and_doubled_packets_are_counted() -> None:
    order = rtp.RtpOrder()
    for n in (1, 2, 4, 5, 6, 7, 8, 3, 9, 9):
        order.put(rtp.RtpPacket(0, n, 0, 7, b""))
    assert (order.num_lost, order.num_late) == (1, 2)
    # Another source begins with any number.
    assert order.put(rtp.RtpPacket(0, 60_000, 0, 8, b""))


def test_keys_are_read_once_however_often_their_packets_come() -> None:
    reader, timestamp, pressed = rtp.KeyReader(), 0, ""
    for key in "190*#D":
        timestamp += 1600
        for payload in rtp.key_payloads(key, 8000):
            pressed += reader.read(rtp.RtpPacket(101, 1, timestamp, 7, payload))
    assert pressed == "190*#D"
    # Only the last packet arrives; and an event that is no key (a flash).
    assert reader.read(rtp.RtpPacket(101, 1, 99_999, 7, rtp.key_payloads("5", 8000)[-1])) == "5"
    assert reader.read(rtp.RtpPacket(101, 1, 88_888, 7, b"\x10\x00\x00\x00")) == ""
    with pytest.raises(ValueError, match="is not a key"):
        rtp.key_payloads("x", 8000)
