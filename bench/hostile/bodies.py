"""Attacks with what a request carries: bodies, files, texts, JSON, offers, images."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import AsyncIterator
from typing import Any

import av
import numpy as np
from aiortc import RTCConfiguration, RTCPeerConnection
from aiortc.mediastreams import AudioStreamTrack
from bench.hostile.client import Target
from PIL import Image

FORM = "multipart/form-data; boundary=B"
CHAT, FILES = "/v1/chat/completions", "/v1/audio/transcriptions"
MB = 1 << 20


def part(name: str, more: str = "") -> bytes:
    return f'--B\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode()


async def endless(head: bytes, num_bytes: int) -> AsyncIterator[bytes]:
    yield head
    for _ in range(num_bytes >> 16):
        yield b"x" * (1 << 16)


async def bodies(target: Target) -> None:
    """Bodies without a length that do not end, and form fields in a charset that costs quadratic time."""
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
    """Silence as FLAC: a few kilobytes an hour."""
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
    """Eight hours of silence in a small file, four at once, and senders that leave before the answer."""
    data = silence(0.02 if target.quick else 8)
    form = {"data": {"model": "default"}, "files": {"file": ("a.flac", data)}}
    async with target.client() as client:
        await asyncio.gather(*(target.request(client, "POST", FILES, **form) for _ in range(4)))
        await asyncio.gather(*(target.request(client, "POST", FILES, timeout=1.0, **form) for _ in range(4)))


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "default", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi."}]} | fields


async def text(target: Target) -> None:
    """Words of megabytes for the tokenizer: chat, instructions, items, a transcriber's prompt."""
    word = "a" * ((256 << 10) if target.quick else 3 * MB)
    async with target.client() as client, target.socket() as socket:
        await target.request(client, "POST", CHAT, json=chat(messages=[{"role": "user", "content": word}]))
        await target.request(client, "POST", "/v1/audio/speech", json={"input": word, "voice": "alloy"})
        small = {"data": {"prompt": word[: 200 << 10]}, "files": {"file": ("a.flac", silence(0.02))}}
        await target.request(client, "POST", FILES, **small)
        if socket is None:
            return
        noting = asyncio.create_task(target.note_errors(socket))
        for _ in range(1 if target.quick else 8):
            target.tried += 1
            await socket.send(json.dumps({"type": "response.create", "response": {"instructions": word * 2}}))
        await asyncio.wait([noting], timeout=1 if target.quick else 10)
        noting.cancel()


async def json_documents(target: Target) -> None:
    """JSON that is deep, wide or odd, and fields that cost: schemas, logit_bias, tools."""
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
    async with target.client() as client, target.socket() as socket:
        for document in documents:
            await target.request(client, "POST", CHAT, content=document, headers={"Content-Type": "application/json"})
        for fields in (
            {"logit_bias": {str(n): 1 for n in range(100_000)}},
            {"logit_bias": {"0": 1e308}},
            {"logit_bias": {"-1": 5}},
            {"tools": tools},
        ):
            await target.request(client, "POST", CHAT, json=chat(**fields))
        if socket is None:
            return
        noting = asyncio.create_task(target.note_errors(socket))
        for document in documents:
            target.tried += 1
            await socket.send(document.decode(errors="replace"))
        await asyncio.wait([noting], timeout=0.5 if target.quick else 2)
        noting.cancel()


async def offer() -> str:
    """A whole WebRTC offer, as a browser makes it."""
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    peer.addTrack(AudioStreamTrack())
    peer.createDataChannel("oai-events")
    await peer.setLocalDescription(await peer.createOffer())
    sdp = str(peer.localDescription.sdp)
    await peer.close()
    return sdp


async def sdp(target: Target) -> None:
    """Offers with thousands of candidates or formats, cut ones, and calls that nobody joins."""
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
    """One colour, as a data URI: a few kilobytes that decode to side x side pixels."""
    out = io.BytesIO()
    Image.new("RGBA" if kind == "png" else "RGB", (side, side)).save(out, kind)
    return f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode()}"


async def images(target: Target) -> None:
    """Small files of tens of millions of pixels: in chat, as items of a conversation, as frames of video."""
    sides = (1000,) if target.quick else (6300, 2880, 9000)
    pictures = [picture(side, kind) for side in sides for kind in ("png", "webp")]

    async def frames() -> None:
        async with target.socket("/v1/video/chat/stream") as socket:
            if socket is None:
                return
            noting = asyncio.create_task(target.note_errors(socket))
            await socket.send(
                json.dumps({"type": "session.config", "modalities": ["text"], "num_frames": 2, "max_frames": 8})
            )
            for uri in pictures * (1 if target.quick else 4):
                target.tried += 1
                await socket.send(json.dumps({"type": "video.frame", "data": uri.partition(",")[2]}))
            await asyncio.wait([noting], timeout=0.5 if target.quick else 5)
            noting.cancel()

    async def items() -> None:
        async with target.socket() as socket:
            if socket is None:
                return
            noting = asyncio.create_task(target.note_errors(socket))
            for uri in pictures:
                target.tried += 1
                item = {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": uri}]}
                await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
            await asyncio.wait([noting], timeout=0.5 if target.quick else 5)
            noting.cancel()

    async with target.client() as client:
        for uri in pictures:
            content = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": "What is it?"}]
            await target.request(client, "POST", CHAT, json=chat(messages=[{"role": "user", "content": content}]))
    await asyncio.gather(*(frames() for _ in range(1 if target.quick else 4)), items())
