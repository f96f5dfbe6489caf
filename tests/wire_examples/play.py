"""Play the examples in this process: `python -m tests.wire_examples.play FOLDER [NAME ...]`.

Writes FOLDER/NAME.error for each that is not as shown, and FOLDER/NAME.jsonl: what the client and the server said.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.traces import clock
from tests.wire_examples.reading import PLACEHOLDER, Example, Line, difference, examples, shown

if TYPE_CHECKING:
    from tests.traces.harness import Response, Socket, Stage

_OPENS = re.compile(r"GET (\S+) \(WebSocket(.*)\)")
_REQUEST = re.compile(r"([A-Z]+) (\S+)(?: \(([^)]*)\))?\s*(.*)", re.DOTALL)
_AUDIO = re.compile(r"(pcm16|float32|wav)(?: (\d+) kHz)?: (.*)")
_SILENCE = re.compile(r"(?:(.*), )?([\d.]+) s of silence")
_LATER = re.compile(r"\(([\d.]+) s later\)")
_HEADS = {"wav": b"RIFF", "pcm16": b""}
APPEND, PIECE_S = "input_audio_buffer.append", 0.1
BOUNDARY = "line"
OFFER = "<an SDP offer>"
# Of the frames that came in place of one that did not: how many are shown, and how much of each.
SHOWN, MAX_LINE = 12, 400


class NotAsShown(Exception):
    """What the server said is not what the example shows."""


def media(name: str) -> bytes | None:
    """What a placeholder in a client's line stands for where the server did not choose it."""
    from tests.traces import harness

    if name.startswith("png "):
        return harness.image(40 * int(name.removeprefix("png ")))
    found = _AUDIO.fullmatch(name)
    if found is None:
        return None
    kind, khz, words = found.groups()
    silence_s = 0.0
    if silent := _SILENCE.fullmatch(words):
        words, silence_s = silent[1] or "", float(silent[2])
    make = {"pcm16": harness.pcm16, "float32": harness.f32, "wav": harness.wav}[kind]
    return make(words, silence_s, int(khz or 16) * 1000)


def pieces(name: str) -> list[bytes]:
    """The audio that a placeholder stands for, 100 ms each; empty where it is no PCM."""
    found, data = _AUDIO.fullmatch(name), media(name)
    if found is None or data is None or found[1] == "wav":
        return []
    size = int(int(found[2] or 16) * 1000 * PIECE_S) * (2 if found[1] == "pcm16" else 4)
    return [data[at : at + size] for at in range(0, len(data), size)]


class Player:
    """One example's clients. `chosen`: the values that the server chose, by the names that the example gives them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._chosen: dict[str, Any] = {}
        self._socket: Socket
        self._response: Response | None = None
        self._events: list[Any] = []

    async def play(self, example: Example) -> None:
        """Raises NotAsShown."""
        for line in example.lines:
            try:
                await self._line(line)
            except NotAsShown as error:
                raise NotAsShown(f"docs/wire/{example.page}:{line.number}: {error}\n    {line.text}") from None

    async def _line(self, line: Line) -> None:
        if line.mark == "->":
            await self._client(line.text)
        elif line.mark == "<-":
            await self._server(line.text)
        elif later := _LATER.fullmatch(line.text):
            await self._stage.wait(float(later[1]))
        else:
            raise NotAsShown("time passes as in (2 s later)")

    # --- the client's lines

    async def _client(self, text: str) -> None:
        if opens := _OPENS.fullmatch(text):
            await self._connect(opens[1], opens[2])
        elif text.startswith("close"):
            await self._socket.leave(int(text.removeprefix("close") or 1000))
        elif text.startswith("{"):
            await self._frames(json.loads(text))
        elif placeholder := PLACEHOLDER.fullmatch(text):
            for piece in pieces(placeholder[1]):
                await self._socket.send(piece)
                await self._stage.wait(PIECE_S)
        elif request := _REQUEST.fullmatch(text):
            method, url, given, body = request.groups()
            await self._request(method, url, dict(_pairs(given or "")), body)
        else:
            raise NotAsShown("no line of a client")

    async def _frames(self, frame: dict[str, Any]) -> None:
        """One frame; an append of audio as a microphone sends it."""
        from tests.traces.harness import b64

        name = PLACEHOLDER.fullmatch(frame["audio"]) if frame.get("type") == APPEND else None
        parts = pieces(name[1]) if name else []
        for part in parts:
            await self._socket.send(frame | {"audio": b64(part)})
            await self._stage.wait(PIECE_S)
        if not parts:
            await self._socket.send(self._filled(frame))

    async def _connect(self, url: str, more: str) -> None:
        headers: dict[str, str] = {}
        subprotocols: list[str] = []
        for part in filter(None, (p.strip() for p in more.split(","))):
            if part.startswith("subprotocol "):
                subprotocols.append(self._filled(part.removeprefix("subprotocol ")))
            else:
                headers |= dict(_pairs(self._filled(part)))
        self._response = None
        self._socket = await self._stage.connect(self._filled(url), headers, subprotocols)

    async def _request(self, method: str, url: str, headers: dict[str, str], body: str) -> None:
        url = self._filled(url)
        if OFFER in body:
            self._chosen[OFFER[1:-1]] = await _offer()
        if body.startswith("{"):
            self._response = await self._stage.request(method, url, self._filled(json.loads(body)), headers=headers)
        elif body:
            headers["content-type"] = f"multipart/form-data; boundary={BOUNDARY}"
            data = b"".join(self._field(*field.split("=", 1)) for field in body.splitlines())
            end = f"--{BOUNDARY}--\r\n".encode()
            self._response = await self._stage.request(method, url, body=data + end, headers=headers)
        else:
            self._response = await self._stage.request(method, url, headers=headers)
        if self._response.headers.get("content-type", "").startswith("text/event-stream"):
            self._events = list(self._response.events)

    def _field(self, name: str, value: str) -> bytes:
        value = self._chosen[OFFER[1:-1]] if value == OFFER else value
        file = media(value[1:-1]) if PLACEHOLDER.fullmatch(value) else None
        named = f'; filename="{name}.wav"' if file is not None else ""
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{named}\r\n\r\n'
        return head.encode() + (value.encode() if file is None else file) + b"\r\n"

    def _filled(self, value: Any) -> Any:
        """A client's value with what its placeholders stand for."""
        from tests.traces.harness import b64

        def fill(found: re.Match[str]) -> str:
            data = media(found[1])
            if data is None and found[1] not in self._chosen:
                raise NotAsShown(f"nothing was chosen for {found[0]}")
            return self._chosen[found[1]] if data is None else b64(data)

        if isinstance(value, dict):
            return {k: self._filled(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self._filled(v) for v in value]
        if not isinstance(value, str):
            return value
        whole = PLACEHOLDER.fullmatch(value)
        return self._chosen[whole[1]] if whole and whole[1] in self._chosen else PLACEHOLDER.sub(fill, value)

    # --- the server's lines

    async def _server(self, text: str) -> None:
        if text.startswith("close"):
            code, reason = await self._socket.end()
            if f"close {code} {reason}".strip() != text:
                raise NotAsShown(f"the server closed with {code} {reason}")
        elif text.startswith("data: "):
            expected = shown(text[6:]) if text[6] == "{" else text[6:]
            self._event(expected)
        elif text[0].isdigit():
            self._status(int(text[:3]), text[3:].strip())
        elif text.startswith("{"):
            await self._frame(shown(text))
        else:
            await self._binary(text[1:-1])

    def _event(self, expected: Any) -> None:
        passed = []
        while self._events:
            event = self._events.pop(0)
            problem = difference(expected, event, self._chosen)
            if problem is None:
                return
            passed.append(f"{problem}: {event}")
        raise NotAsShown("no such event came:\n" + "\n".join(passed))

    def _status(self, status: int, body: str) -> None:
        if self._response is None:
            refused = self._socket.status
            if refused != status:
                raise NotAsShown(f"the server answered {refused}")
            return
        if self._response.status != status:
            raise NotAsShown(f"the server answered {self._response.status}: {self._response.body[:400]!r}")
        if body.startswith("{"):
            if problem := difference(shown(body), self._response.json, self._chosen):
                raise NotAsShown(f"{problem}: {self._response.json}")
        elif body and not self._response.headers["content-type"].startswith(body):
            raise NotAsShown(f"the body is {self._response.headers['content-type']}")

    async def _next(self, passed: list[str]) -> Any:
        from tests.traces.harness import Closed

        try:
            return await self._socket.next()
        except Closed as closed:
            why = f"the server closed with {closed.args}"
        except TimeoutError:
            why = "nothing more came"
        raise NotAsShown("\n".join((f"{why}, after {len(passed)} others:", *passed[-SHOWN:])))

    async def _frame(self, expected: Any) -> None:
        passed: list[str] = []
        while True:
            frame = await self._next(passed)
            if not isinstance(frame, dict):
                passed.append("a binary frame")
                continue
            trial = dict(self._chosen)
            problem = difference(expected, frame, trial)
            if problem is None:
                self._chosen |= trial
                return
            passed.append(f"{problem}: {json.dumps(frame)}"[:MAX_LINE])

    async def _binary(self, kind: str) -> None:
        passed: list[str] = []
        while True:
            frame = await self._next(passed)
            if isinstance(frame, bytes) and frame.startswith(_HEADS[kind]):
                return
            passed.append(str(frame)[:300])


async def _offer() -> str:
    """The offer of a peer connection with one audio track and the channel for events."""
    from aiortc import RTCPeerConnection

    peer = RTCPeerConnection()
    peer.addTransceiver("audio")
    peer.createDataChannel("oai-events")
    await peer.setLocalDescription(await peer.createOffer())
    offer = peer.localDescription.sdp
    await peer.close()
    return offer


def _pairs(text: str) -> list[tuple[str, str]]:
    """Headers, as `Name: value, Name: value`."""
    found = (part.split(":", 1) for part in text.split(", ") if ":" in part)
    return [(name.strip().lower(), value.strip()) for name, value in found]


def main(folder: Path, names: list[str]) -> None:
    clock.install()
    # The clocks are replaced: from here on the server may be imported.
    from tests.traces.harness import SCENARIOS, Trace, scenario

    for example in examples():
        if names and example.name not in names and example.page not in names:
            continue
        server = {"api_keys": ("key",)} if "key" in example.options else {}

        async def play(stage: Stage, example: Example = example) -> None:
            await Player(stage).play(example)

        play.__name__ = example.name
        scenario(native="native" in example.options, server=server)(play)
        trace = Trace()
        file = folder / example.name
        try:
            clock.run(SCENARIOS[example.name](trace))
        except BaseExceptionGroup as errors:
            causes = [e for e in errors.exceptions if isinstance(e, NotAsShown)]
            text = str(causes[0]) if causes else traceback.format_exc()
            file.with_name(f"{example.name}.error").write_text(text, encoding="utf-8")
        except Exception:
            file.with_name(f"{example.name}.error").write_text(traceback.format_exc(), encoding="utf-8")
        file.with_name(f"{example.name}.jsonl").write_text(trace.text(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
