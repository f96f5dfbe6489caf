"""The dialects of other vendors beside OpenAI's, on one server: finals, first sound, barge-in.

    python -m bench.dialects [--sections commit,turns,talk] [--rounds 9]

In each round, one session in each dialect hears the same recording at the same time, in pieces of 20 ms, and the
sessions take turns at going first. Every dialect is compared with OpenAI's in the same round: the median of the
differences, with its 95 % interval (bootstrap over rounds). The transcriber, the language model and the voice are
processes of this benchmark that answer at once, so that only the ways to them differ.

- commit: from the end of a recording, which the client commits, to the final transcript.
- turns: from the true end of speech to the final transcript of a turn that the server ends.
- talk: from the true end of speech to the first sound of the answer. Another recording is then played over the answer:
  from its onset to the event that ends the answer. OpenAI Live has no such event: to the end of the last sound.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np
import soxr
from bench.common import HERE, Server, beside, measured, options, percentile, server, show
from bench.driver import in_loops
from bench.engines import backend
from bench.hearing.clips import Clip, loaded, read_manifest, with_data
from websockets.asyncio.client import connect

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16

STEP_S, STAGGER_S, LIMIT_S = 0.02, 0.004, 10.0
# Silence before a recording, how much of an answer is heard before somebody speaks over it, and how long an answer has
# to be silent to have ended, in seconds.
LEAD_S, HEARD_S, QUIET_S = 0.3, 1.5, 0.6
# What the scripted transcriber hears of each recording: a whole turn, so that turns end after a short pause.
SAID = "What is the time?"
# An answer of twelve sentences; the scripted voice speaks each for a second.
ANSWER = "This is a sentence of the answer. " * 12
OPENAI = "OpenAI"
# What a message reports: the session is ready, the final transcript, sound of an answer, silence, or its end.
Kind = Literal["ready", "final", "sound", "silence", "stop"]
# Ends nothing by itself, so that only the client's commit does.
NO_TURNS: dict[str, Any] = {"turn_detection": None}


@dataclass(frozen=True, slots=True)
class Way:
    """How a client speaks one dialect. `kind` returns what a message of the server reports.

    `first`: the messages that open the session. `audio` makes the message for PCM16 at `rate_hz`. `commit`: the message
    that ends the user's turn.
    """

    path: str
    audio: Callable[[bytes], str | bytes]
    kind: Callable[[Any], Kind | None]
    first: Sequence[dict[str, Any]] = ()
    commit: dict[str, Any] | None = None
    rate_hz: int = SAMPLE_RATE_HZ


def in_json(field: str, **fields: Any) -> Callable[[bytes], str]:
    return lambda pcm: json.dumps(fields | {field: base64.b64encode(pcm).decode()})


def by_type(types: dict[str, Kind], field: str = "type") -> Callable[[Any], Kind | None]:
    """Return a function that looks up the type of a message. Bytes are sound."""
    return lambda message: "sound" if isinstance(message, bytes) else types.get(message.get(field, ""))


def only(kind: Kind, at: Callable[[Any], bool]) -> Callable[[Any], Kind | None]:
    return lambda message: kind if at(message) else None


def transcription(**audio: Any) -> dict[str, Any]:
    known = {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}}
    return {"type": "session.update", "session": {"type": "transcription", "audio": {"input": known | audio}}}


def kind_of_gemini(message: Any) -> Kind | None:
    content = message.get("serverContent", {})
    if "setupComplete" in message:
        return "ready"
    return "stop" if content.get("interrupted") else "sound" if "modelTurn" in content else None


def kind_of_live(message: Any) -> Kind | None:
    if message["type"] == "session.output_audio.delta":
        return "sound" if any(base64.b64decode(message["delta"])) else "silence"
    return "ready" if message["type"] == "session.started" else None


HEARD: dict[str, Kind] = {
    "session.updated": "ready",
    "conversation.item.input_audio_transcription.completed": "final",
}
RAW = "encoding=linear16&sample_rate=16000"
APPEND = in_json("audio", type="input_audio_buffer.append")
COMMIT = {
    OPENAI: Way(
        "/v1/realtime?intent=transcription",
        APPEND,
        by_type(HEARD),
        [transcription(**NO_TURNS)],
        {"type": "input_audio_buffer.commit"},
    ),
    "Deepgram": Way(
        f"/v1/listen?{RAW}&endpointing=false",
        bytes,
        only("final", lambda m: m.get("from_finalize")),
        commit={"type": "Finalize"},
    ),
    "ElevenLabs": Way(
        "/v1/speech-to-text/realtime?model_id=scribe_v2_realtime&audio_format=pcm_16000",
        in_json("audio_base_64", message_type="input_audio_chunk"),
        by_type({"session_started": "ready", "committed_transcript": "final"}, "message_type"),
        commit={"message_type": "input_audio_chunk", "audio_base_64": "", "commit": True},
    ),
    "AssemblyAI": Way(
        "/v3/ws?sample_rate=16000&max_turn_silence=9000&min_turn_silence=9000",
        bytes,
        lambda m: "ready" if m["type"] == "Begin" else "final" if m.get("end_of_turn") else None,
        commit={"type": "ForceEndpoint"},
    ),
    "Cartesia": Way(
        "/stt/websocket?model=ink-2&encoding=pcm_s16le&sample_rate=16000",
        bytes,
        only("final", lambda m: m.get("is_final")),
        commit={"type": "finalize"},
    ),
}
TURNS = {
    OPENAI: Way(
        "/v1/realtime?intent=transcription",
        APPEND,
        by_type(HEARD),
        [transcription(turn_detection={"type": "semantic_vad"})],
    ),
    "Deepgram Flux": Way(
        f"/v2/listen?model=flux-general-en&{RAW}",
        bytes,
        lambda m: "ready" if m["type"] == "Connected" else "final" if m.get("event") == "EndOfTurn" else None,
    ),
    "Cartesia": Way(
        "/stt/turns/websocket?model=ink-2&encoding=pcm_s16le&sample_rate=16000",
        bytes,
        by_type({"connected": "ready", "turn.end": "final"}),
    ),
}
LINE_HZ = 24_000
TALK = {
    OPENAI: Way(
        "/v1/realtime?model=gpt-realtime",
        APPEND,
        by_type(
            {
                "session.updated": "ready",
                "response.output_audio.delta": "sound",
                "input_audio_buffer.speech_started": "stop",
            }
        ),
        [
            {
                "type": "session.update",
                "session": {
                    "type": "realtime",
                    "instructions": "x",
                    "audio": {"input": {"turn_detection": {"type": "semantic_vad"}}},
                },
            }
        ],
        rate_hz=LINE_HZ,
    ),
    "OpenAI Live": Way(
        "/v1/live/sessions",
        in_json("audio", type="session.input_audio.append"),
        kind_of_live,
        [{"type": "session.start", "session": {"model": "gpt-live-1", "instructions": "x"}}],
        rate_hz=LINE_HZ,
    ),
    "Gemini Live": Way(
        "/ws/google.ai.generativelanguage.v1beta.GenerativeService.BidiGenerateContent",
        lambda pcm: json.dumps(
            {
                "realtimeInput": {
                    "audio": {"data": base64.b64encode(pcm).decode(), "mimeType": f"audio/pcm;rate={LINE_HZ}"}
                }
            }
        ),
        kind_of_gemini,
        [{"setup": {"model": "models/gemini-live", "systemInstruction": {"parts": [{"text": "x"}]}}}],
        rate_hz=LINE_HZ,
    ),
    "Deepgram agent": Way(
        "/v1/agent/converse",
        bytes,
        by_type({"SettingsApplied": "ready", "UserStartedSpeaking": "stop"}),
        [
            {
                "type": "Settings",
                "audio": {"input": {"encoding": "linear16", "sample_rate": LINE_HZ}},
                "agent": {"think": {"prompt": "x"}},
            }
        ],
        rate_hz=LINE_HZ,
    ),
}


class Line:
    """One session in one dialect, used with `async with`. `marks` are the times at which it reported something."""

    def __init__(self, srv: Server, way: Way) -> None:
        self.way = way
        self.marks: list[tuple[float, Kind]] = []
        self._url = srv.ws + way.path
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._socket = await connect(self._url, max_size=None, compression=None, ping_interval=None, proxy=None)
        self._reading = asyncio.create_task(self._read())
        for message in self.way.first:
            await self.tell(message)
        if self.way.first:
            await self.until("ready")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading.cancel()
        await self._socket.close()

    async def tell(self, message: dict[str, Any]) -> None:
        await self._socket.send(json.dumps(message))

    async def say(self, pcm: bytes) -> None:
        await self._socket.send(self.way.audio(pcm))

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        async for data in self._socket:
            at_s = loop.time()
            # Gemini's JSON comes in binary frames.
            is_json = isinstance(data, str) or data[:1] == b"{"
            if kind := self.way.kind(json.loads(data) if is_json else data):
                self.marks.append((at_s, kind))
                self._changed.set()

    def first(self, kind: Kind, since_s: float = 0.0) -> float | None:
        return next((at_s for at_s, found in self.marks if found == kind and at_s >= since_s), None)

    def stopped(self, since_s: float) -> float | None:
        """Return when the answer ended that sounded at `since_s`; None if it has not, or if it may not have yet."""
        if any(kind == "silence" for _, kind in self.marks):
            # Each sound has 40 ms. The server plays it when it is due.
            ends_s = [at_s + 2 * STEP_S for at_s, kind in self.marks if kind == "sound"]
            next_s = [*ends_s[1:], asyncio.get_running_loop().time()]
            ended = (a for a, b in zip(ends_s, next_s, strict=True) if a >= since_s and b - a > QUIET_S)
            return next(ended, None)
        return self.first("stop", since_s)

    async def until(self, kind: Kind, since_s: float = 0.0) -> float:
        """Return the time of the first such report after `since_s`. Raises TimeoutError after LIMIT_S."""
        async with asyncio.timeout(LIMIT_S):
            while (found := self.first(kind, since_s)) is None:
                self._changed.clear()
                await self._changed.wait()
        return found


async def play(
    lines: Sequence[Line], pcm: Pcm, until: Callable[[], bool] | None = None
) -> Callable[[Line, int], float]:
    """Send audio of 16 kHz over all lines in real time, and silence after it until `until` holds, for LIMIT_S at most.

    Returns a function for the time at which a sample of `pcm` was sent over a line.
    """
    loop, begun_s, step = asyncio.get_running_loop(), asyncio.get_running_loop().time(), int(STEP_S * SAMPLE_RATE_HZ)
    wires = {
        rate_hz: to_pcm16(np.asarray(soxr.resample(pcm, SAMPLE_RATE_HZ, rate_hz), np.float32))
        for rate_hz in {line.way.rate_hz for line in lines}
    }
    sent = dict[tuple[Line, int], float]()
    number = 0
    while number * step < len(pcm) or (until and not until() and number * STEP_S < len(pcm) / SAMPLE_RATE_HZ + LIMIT_S):
        for place, line in enumerate(lines):
            await asyncio.sleep(max(0.0, begun_s + number * STEP_S + place * STAGGER_S - loop.time()))
            size = 2 * int(STEP_S * line.way.rate_hz)
            await line.say(wires[line.way.rate_hz][number * size :][:size].ljust(size, b"\0"))
            sent[line, number] = loop.time()
        number += 1
    return lambda line, sample: sent[line, min(sample // step, number - 1)]


def quiet(seconds: float) -> Pcm:
    return np.zeros(int(seconds * SAMPLE_RATE_HZ), np.float32)


def led(clip: Clip) -> Pcm:
    return np.concatenate((quiet(LEAD_S), clip.pcm))


Found = dict[str, float]


async def committed(lines: dict[str, Line], clip: Clip, _: Clip) -> list[Found]:
    await play([*lines.values()], led(clip))
    found = Found()
    for name, line in lines.items():
        assert line.way.commit
        at_s = asyncio.get_running_loop().time()
        await line.tell(line.way.commit)
        found[name] = await line.until("final", at_s) - at_s
    return [found]


async def ended(lines: dict[str, Line], clip: Clip, _: Clip) -> list[Found]:
    every = [*lines.values()]
    sent_s = await play(every, led(clip), lambda: all(line.first("final") for line in every))
    end = int((LEAD_S + clip.speech_end) * SAMPLE_RATE_HZ)
    return [{name: at_s - sent_s(line, end) for name, line in lines.items() if (at_s := line.first("final"))}]


async def talked(lines: dict[str, Line], clip: Clip, over: Clip) -> list[Found]:
    every = [*lines.values()]
    sent_s = await play(every, led(clip), lambda: all(line.first("sound") for line in every))
    end = int((LEAD_S + clip.speech_end) * SAMPLE_RATE_HZ)
    sound = {name: at_s - sent_s(line, end) for name, line in lines.items() if (at_s := line.first("sound"))}
    await play(every, quiet(HEARD_S))
    since_s = asyncio.get_running_loop().time()
    sent_s = await play(every, over.pcm, lambda: all(line.stopped(since_s) for line in every))
    onset = int(over.speech_start * SAMPLE_RATE_HZ)
    stop = {name: at_s - sent_s(line, onset) for name, line in lines.items() if (at_s := line.stopped(since_s))}
    return [sound, stop]


@dataclass(frozen=True, slots=True)
class Section:
    """What is measured: the dialects, one round of it, and the names of its figures."""

    ways: dict[str, Way]
    round: Callable[[dict[str, Line], Clip, Clip], Any]
    figures: tuple[str, ...]


SECTIONS = {
    "commit": Section(COMMIT, committed, ("final",)),
    "turns": Section(TURNS, ended, ("final",)),
    "talk": Section(TALK, talked, ("sound", "stop")),
}


def compared(rounds: Sequence[Found], name: str) -> dict[str, Any]:
    """Return the median time of a dialect, and the median of its differences from OpenAI's, in milliseconds."""
    both = [(found[name], found[OPENAI]) for found in rounds if name in found and OPENAI in found]
    if not both:
        return {"rounds": 0}
    more = np.array([1000 * (mine - theirs) for mine, theirs in both])
    chosen = np.random.default_rng(0).integers(0, len(more), (2000, len(more)))
    low, high = np.percentile(np.median(more[chosen], axis=1), (2.5, 97.5))
    row = {"rounds": len(both), "p50_ms": round(percentile([1000 * mine for mine, _ in both], 50), 1)}
    return row | {
        "more_ms": round(float(np.median(more)), 1),
        "interval": [round(float(low), 1), round(float(high), 1)],
    }


async def measure(srv: Server, section: Section, clips: Sequence[Clip], rounds: int) -> dict[str, Any]:
    found: dict[str, list[Found]] = {name: [] for name in section.figures}
    # The first round warms up, and does not count.
    for number in range(rounds + 1):
        names = [*section.ways]
        order = names[number % len(names) :] + names[: number % len(names)]
        clip, over = clips[number % len(clips)], clips[(number + 1) % len(clips)]
        async with AsyncExitStack() as stack:
            lines = {name: await stack.enter_async_context(Line(srv, section.ways[name])) for name in order}
            figures = await section.round(lines, clip, over)
        for name, times in zip(section.figures, figures, strict=True):
            found[name] += [times] if number else []
    out = {figure: {name: compared(times, name) for name in section.ways} for figure, times in found.items()}
    for figure, rows in out.items():
        show(f"{figure}, ms; more than OpenAI's, with 95 % interval", rows)
    return out


def main(argv: Sequence[str] | None = None) -> None:
    parser = with_data(options("python -m bench.dialects", __doc__, SECTIONS))
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each section [%(default)s]")
    args = parser.parse_args(argv)
    clips = loaded(
        clip
        for clip in read_manifest(args.data)
        if clip.language == "en" and clip.text and 1.0 < clip.seconds < 2.0 and clip.kind != "backchannel"
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=HERE.parent, capture_output=True, text=True).stdout
    with ExitStack() as stack:
        words = stack.enter_context(backend(ANSWER))
        models, _ = stack.enter_context(beside("bench.scripted_models", SAID))
        voices, _ = stack.enter_context(beside("bench.scripted_voices"))
        scripted = ("--transcriber", f"{models}#scripted", "--synthesizer", f"{voices}#scripted")
        flags = (*scripted, "--language-model", words, "--max-sessions", "100")
        srv = stack.enter_context(server(*flags))
        sections = {
            name: lambda section=section: measure(srv, section, clips, args.rounds)
            for name, section in SECTIONS.items()
        }
        facts = {"commit": commit.strip(), "load": os.getloadavg()[0], "clips": len(clips)}
        measured("dialects", args.sections, in_loops(sections), **facts)


if __name__ == "__main__":
    main()
