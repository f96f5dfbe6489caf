"""A client of the server under test: live sessions over sockets, and whole files over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
import time
import wave
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

import httpx
import numpy as np
from bench.common import Server
from bench.driver import WIRE_HZ, Session, on_wire
from bench.hearing.clips import Clip

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16

TRANSCRIPTION = "/v1/realtime?intent=transcription"
CHUNK_S = 0.032
# Seconds of silence after a clip. Text that is heard during it still belongs to the clip.
TRAIL_S = 2.5
# Seconds before a clip's first sample from which text belongs to the clip, because padding extends into the silence.
PADDING_MS = 500
# When sending faster than real time: seconds of audio that may wait in the server before the client pauses.
MAX_BACKLOG_S = 1.0
# Seconds to wait for the remaining transcripts after all audio was sent.
PATIENCE_S = 60.0
FILES_AT_ONCE = 2
FILE_TIMEOUT_S = 600.0


@dataclass(slots=True)
class Heard:
    """The result of one clip. Times are in seconds since its first sample was sent."""

    # The monotonic time at which the first sample was sent.
    zero: float = 0.0
    # Where the clip is in the session's audio.
    from_ms: float = 0.0
    # Deltas, each with its time.
    deltas: list[tuple[float, str]] = field(default_factory=list)
    # Finals, each with its time.
    finals: list[tuple[float, str]] = field(default_factory=list)
    # For each turn that ended: its joined deltas, and its final.
    turns: list[tuple[str, str]] = field(default_factory=list)
    # Error events, and turns whose transcript failed.
    failures: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The joined finals."""
        return " ".join(t for _, t in self.finals if t)

    @property
    def shown(self) -> str:
        """The joined deltas: the text on the screen at the end, for a client that shows deltas."""
        return " ".join(joined for joined, _ in self.turns if joined)


class Listener(Session):
    """Plays audio to one live transcription session of the OpenAI dialect.

    - `session`: fields of `session.audio.input`.
    - `speed`: sending speed relative to real time. Above 1, the client also pauses while more than a second of audio
      waits in the server, so that nothing overflows. Times are then meaningless, and fewer partials are decoded than in
      real time.
    """

    def __init__(
        self, srv: Server, *, chunk_s: float = CHUNK_S, session: dict[str, Any] | None = None, speed: float = 1.0
    ) -> None:
        fields = {"type": "transcription", "audio": {"input": session}}
        super().__init__(srv.url, TRANSCRIPTION, {"session": fields} if session else None)
        self._server, self._chunk_s, self._speed = srv, chunk_s, speed
        self._partial: dict[str, str] = defaultdict(str)
        self.heard = Heard()
        self._clips = [self.heard]
        self._of_item: dict[str, Heard] = {}
        self._open: set[str] = set()
        # Seconds of audio that were sent, with silences.
        self.sent_s = 0.0
        # Cleared while too much audio waits in the server. A separate task checks that, because a session takes a gap
        # of more than half a second between messages for the end of a turn.
        self._may_send = asyncio.Event()
        self._may_send.set()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        if self._speed > 1:
            self._tasks.append(asyncio.create_task(self._watch_backlog()))
        return self

    async def _watch_backlog(self) -> None:
        while True:
            # Tries again, because the server may not have replied in time.
            with suppress(OSError):
                if await self._backlog_s() > MAX_BACKLOG_S:
                    self._may_send.clear()
                else:
                    self._may_send.set()
            await asyncio.sleep(0.1)

    async def _backlog_s(self) -> float:
        return await asyncio.to_thread(self._server.metric, "antiphon_backlog_seconds")

    def begin(self) -> Heard:
        """Start a new clip, and return its record. Transcripts of audio that is sent from now on belong to it."""
        self.heard = Heard(zero=time.monotonic(), from_ms=self.sent_s * 1000)
        self._clips.append(self.heard)
        return self.heard

    async def play(self, pcm: Pcm, silence_s: float = 0.0) -> None:
        """Send 16 kHz audio and silence at the client's speed.

        A chunk is sent when its last sample would be recorded.
        """
        wire = on_wire(np.concatenate((pcm, np.zeros(int(silence_s * SAMPLE_RATE_HZ), np.float32))))
        step = int(self._chunk_s * WIRE_HZ) * 2
        begun = time.monotonic()
        self.sent_s += len(pcm) / SAMPLE_RATE_HZ + silence_s
        for at in range(0, len(wire), step):
            end_s = min(at + step, len(wire)) / 2 / WIRE_HZ
            await asyncio.sleep(max(0.0, begun + end_s / self._speed - time.monotonic()))
            await self._may_send.wait()
            await self.append(wire[at : at + step])

    async def caught_up(self) -> None:
        """Wait until less than a second of audio waits in each session of the server."""
        while await self._backlog_s() > MAX_BACKLOG_S:
            await asyncio.sleep(0.02)

    async def drained(self) -> None:
        """Wait for the transcripts of all turns that began, for at most a minute."""
        end = time.monotonic() + PATIENCE_S
        await self.caught_up()
        await asyncio.sleep(0.5)
        while self._open and not self._ended and time.monotonic() < end:
            await asyncio.sleep(0.05)

    async def hear(self, at: float, event: dict[str, Any]) -> None:
        item = event.get("item_id", "")
        name = event["type"].removeprefix("conversation.item.input_audio_transcription.")
        if name == "input_audio_buffer.speech_started":
            # A transcript belongs to the clip of its audio, however late it arrives.
            at_ms = event["audio_start_ms"] + PADDING_MS
            self._of_item[item] = next(c for c in reversed(self._clips) if c.from_ms <= at_ms)
            self._open.add(item)
        heard = self._of_item.get(item, self.heard)
        if name == "delta":
            heard.deltas.append((at - heard.zero, event["delta"]))
            self._partial[item] += event["delta"]
        elif name == "completed":
            heard.finals.append((at - heard.zero, event["transcript"]))
            heard.turns.append((self._partial.pop(item, ""), event["transcript"]))
        elif name in ("error", "failed"):
            heard.failures.append(json.dumps(event["error"]))
        if name in ("completed", "failed"):
            self._open.discard(item)


async def play_clips(srv: Server, clips: Sequence[Clip], **options: Any) -> dict[str, Heard]:
    """Play clips one after another over one session, with silence between them. Options are those of Listener."""
    out: dict[str, Heard] = {}
    async with Listener(srv, **options) as listener:
        for clip in clips:
            out[clip.id] = listener.begin()
            await listener.play(clip.pcm, TRAIL_S)
        await listener.drained()
    return out


async def play_shared(srv: Server, clips: Sequence[Clip], streams: int, **options: Any) -> dict[str, Heard]:
    """Divide the clips among this number of concurrent sessions, and play them."""
    parts = await asyncio.gather(*(play_clips(srv, clips[k::streams], **options) for k in range(streams)))
    return {name: heard for part in parts for name, heard in part.items()}


@dataclass(frozen=True, slots=True)
class FileText:
    """The transcript of a whole file.

    If they were requested, `words` and `segments` have texts with their start and end in seconds.
    """

    text: str
    language: str
    words: tuple[tuple[str, float, float], ...] = ()
    segments: tuple[tuple[str, float, float], ...] = ()


def wav(pcm: Pcm) -> bytes:
    """Return 16 kHz audio as a 16-bit WAV file."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(to_pcm16(pcm))
    return out.getvalue()


async def transcribe_file(
    http: httpx.AsyncClient, pcm: Pcm, *, language: str = "", word_times: bool = False
) -> FileText:
    """Let the server transcribe 16 kHz audio as a file. Raises httpx.HTTPStatusError if it refuses."""
    form: dict[str, Any] = {"model": "default", "response_format": "verbose_json"}
    form["timestamp_granularities[]"] = ["segment", "word"] if word_times else ["segment"]
    if language:
        form["language"] = language
    answer = await http.post("/v1/audio/transcriptions", data=form, files={"file": ("clip.wav", wav(pcm))})
    answer.raise_for_status()
    found = answer.json()
    return FileText(
        found["text"],
        found["language"],
        tuple((w["word"], w["start"], w["end"]) for w in found.get("words") or ()),
        tuple((s["text"], s["start"], s["end"]) for s in found.get("segments") or ()),
    )


async def whole_files(
    srv: Server, clips: Sequence[Clip], *, tell_language: bool = True, word_times: bool = False
) -> dict[str, FileText]:
    """Let the server transcribe each clip as a file, two at a time.

    With `tell_language`, requests name the language.
    """
    places = asyncio.Semaphore(FILES_AT_ONCE)

    async def one(clip: Clip) -> FileText:
        async with places:
            language = clip.language if tell_language else ""
            return await transcribe_file(http, clip.pcm, language=language, word_times=word_times)

    async with httpx.AsyncClient(base_url=srv.url, timeout=FILE_TIMEOUT_S) as http:
        texts = await asyncio.gather(*map(one, clips))
    return dict(zip((c.id for c in clips), texts, strict=True))
