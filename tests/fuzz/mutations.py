"""Mutations of clients' input: JSON values, texts and bytes. They depend only on the given `random.Random`.

The mutated frames are those of the clients in tests/traces/recorded, which use every dialect.
"""

from __future__ import annotations

import copy
import functools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "traces" / "recorded"
# Fields that a trace adds to a frame, and that are not part of the frame.
NOTES = {"at", "from", "socket", "spaced"}
# Lines about a connection, and lines of frames that are no JSON objects.
NO_FRAMES = {"opens", "leaves", "binary", "text"}
# Values of every JSON type, among them values on which parsers differ.
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "a", "\0", "\ud800", "\u202e", "9" * 400, "a" * 5000, "pcm16", "audio/pcm", "none", "auto", "inf"),
    *("data:image/png;base64,AAAA", "AAAA", "A", "%00", "../../etc/passwd", "default", "gpt-realtime"),
    *([], [None], [[]], [{}], ["a"], [1, "a", None, {}]),
    *({}, {"": ""}, {"type": None}, {"type": "text"}, {"a": {"b": []}}),
)
PIECES = ("{", "}", "[", "]", '"', ",", ":", "\\u", "\\", "null", "1e999", "\0", "\ud800", "ÿ", "a" * 300)


@functools.cache
def recorded_bodies() -> Mapping[str, tuple[Any, ...]]:
    """Return the different JSON bodies of the recorded requests, by method and path."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(RECORDED.glob("*.jsonl")):
        for entry in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if isinstance(entry.get("body"), dict) and "requests" in entry:
                found.setdefault(entry["requests"], {})[json.dumps(entry["body"])] = entry["body"]
    return {path: tuple(bodies.values()) for path, bodies in found.items()}


@functools.cache
def recorded_frames() -> Mapping[str, tuple[dict[str, Any], ...]]:
    """Return the different JSON frames of the clients in the recorded traces, by the path of the socket."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(RECORDED.glob("*.jsonl")):
        opened: dict[int, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            if entry["from"] != "client":
                continue
            socket = entry.get("socket", 1)
            if "opens" in entry:
                opened[socket] = entry["opens"]
            frame = {k: v for k, v in entry.items() if k not in NOTES}
            if frame and frame.keys().isdisjoint(NO_FRAMES | {"requests"}) and socket in opened:
                found.setdefault(opened[socket], {})[json.dumps(frame)] = frame
    return {path: tuple(frames.values()) for path, frames in found.items()}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a JSON value, at any depth: its container, and its key or index in that container."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from places(inner)


def mutated_value(seeds: Sequence[Any], draw: random.Random) -> Any:
    """Return a seed in which one to three fields are retyped, removed, doubled, renamed, or taken from another seed."""
    value = copy.deepcopy(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        found = list(places(value))
        if not found:
            return draw.choice(ODD)
        container, key = draw.choice(found)
        match draw.randrange(8):
            case 0 | 1 | 2 | 3:
                container[key] = copy.deepcopy(draw.choice(ODD))
            case 4:
                del container[key]
            case 5:
                container[key] = [container[key]] * draw.choice((1, 2, 20))
            case 6 if isinstance(container, dict):
                container[str(draw.choice(ODD))[:50]] = container[key]
            case _:
                others = list(places(draw.choice(seeds)))
                if others:
                    other, at = draw.choice(others)
                    container[key] = copy.deepcopy(other[at])
    return value


def mutated_text(text: str, draw: random.Random) -> str:
    """Return a text in which a piece is cut out, doubled or replaced, or after which the text breaks off."""
    a, b = sorted((draw.randrange(len(text) + 1), draw.randrange(len(text) + 1)))
    match draw.randrange(5):
        case 0:
            return text[:a]
        case 1:
            return text[:a] + text[b:]
        case 2:
            return text[:b] + text[a:]
        case 3:
            return text[:a] + draw.choice(PIECES) + text[a:]
        case _:
            return text[:a] + draw.choice(PIECES) * draw.choice((1, 50)) + text[a + 1 :]


def mutated_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return bytes of which some are flipped, cut off, removed, doubled, or set to an extreme value."""
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4, 16))):
        if not out:
            break
        at = draw.randrange(len(out))
        match draw.randrange(6):
            case 0:
                out[at] ^= 1 << draw.randrange(8)
            case 1:
                out[at] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del out[at:]
            case 3:
                del out[at : at + draw.randrange(1, 17)]
            case 4:
                out[at:at] = out[at : at + draw.randrange(1, 17)]
            case _:
                out[at : at + 4] = draw.choice(
                    (b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\0", b"\xff\xff\xff\x7f")
                )
    return bytes(out)


def mutated_frame(seeds: Sequence[Any], draw: random.Random) -> str:
    """Return a text frame: a mutated JSON object, whose text is sometimes mutated as well.

    As every text frame of a WebSocket must, it can be encoded as UTF-8. Half a surrogate pair therefore is an escape.
    """
    text = json.dumps(mutated_value(seeds, draw), ensure_ascii=draw.random() < 0.5)
    text = mutated_text(text, draw) if draw.random() < 0.15 else text
    return text.encode("utf-8", "replace").decode()
