"""Speech: Qwen3-TTS over the server's WebSocket, and live streams of Qwen3-ASR."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import replace

import anyio
import numpy as np
import torch
from bench import models
from bench.common import percentile, together
from bench.gpu.speech_client import TEXT
from bench.gpu.suite import Plan, Recorder, counted

from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr
from antiphon.contracts import Synthesizer, Urgency, VoiceOptions, Window
from antiphon.engine.api import GRAPHS
from antiphon.errors import Refused
from antiphon.loading.loaded import LoadedModels
from antiphon.server.metrics import Metrics
from antiphon.server.run import bind, http_server
from antiphon.server.state import ServerState
from antiphon.settings import Settings

# Frames of codes of each text (4 s of audio), and of each text of which only the first sound is measured.
TTS_FRAMES, FIRST_FRAMES = 50, 8
# Seconds of the test in which texts arrive at random times.
ARRIVALS_S = 5
# Seconds after its audio within which a partial has to arrive, for a live stream to count as held.
HELD_S = 1.5
# Tokens of Qwen per second of speech, and the number of tokens that the next partial generates again.
TOKENS_A_S, ROLLED_BACK = 3.5, 5
# Seconds to which a stream's window grows before the next window begins.
WINDOW_S = 12


def tts(plan: Plan, recorder: Recorder) -> None:
    """The section `tts`: first sound, and speed relative to real time, by the number of concurrent texts.

    The server is antiphon's own, on a socket, with only the synthesizer loaded. The client is another process.
    """
    for size in plan.pick(["tiny"], ["0.6B", "1.7B"]):
        with recorder.part(size):
            counts, rates = plan.pick([2], [64, 32, 1, 8]), plan.pick([20], [10, 20])
            asyncio.run(measure_tts(plan, recorder, size, counts, rates))


async def measure_tts(
    plan: Plan, recorder: Recorder, size: str, counts: Sequence[int], rates: Sequence[int] = ()
) -> None:
    """Measure one model size: with some numbers of concurrent texts, then with texts at random times."""
    name, whole = f"Qwen3-TTS {size}", plan.pick(8, TTS_FRAMES)
    with closing(models.synthesizer(size, plan.options(16))) as model:
        async with serving(model) as url:
            for count in counts:
                load, before = counted(count, "text"), model.engine.runner.stats.steps
                said = await _client(url, count, 0, *[FIRST_FRAMES] * (8 if count == 1 else 0), whole)
                steps = model.engine.runner.stats.steps - before
                first_ms = {p: percentile([s["first_s"] for s in said], p) * 1000 for p in (50, 95)}
                recorder.figure(name, "first sound p50", load, first_ms[50], "ms", texts=len(said), steps=steps)
                recorder.figure(name, "first sound p95", load, first_ms[95], "ms")
                factors = [s["last_s"] / s["sound_s"] for s in said[-count:]]
                recorder.figure(name, "real-time factor p50", load, percentile(factors, 50), "")
            for rate in rates:
                said = await _client(url, plan.pick(4, ARRIVALS_S * rate), rate, whole)
                load = f"{rate} texts a second"
                first_ms = {p: percentile([s["first_s"] for s in said], p) * 1000 for p in (50, 95)}
                recorder.figure(name, "first sound p50", load, first_ms[50], "ms", texts=len(said))
                recorder.figure(name, "first sound p95", load, first_ms[95], "ms")


def check(plan: Plan, recorder: Recorder) -> None:
    """The section `check`: whether parts that are replayed as graphs compute the same as without graphs.

    If a part cannot be captured, or computes other numbers at once, this is logged, and the part is not replayed.
    """
    size = plan.pick("tiny", "0.6B")
    with recorder.part(size):
        asyncio.run(_check(plan, recorder, size))


async def _check(plan: Plan, recorder: Recorder, size: str) -> None:
    texts, heard = 8, dict[str, list[np.ndarray]]()
    for label, graphs in {"graphs": frozenset(GRAPHS), "none": frozenset[str]()}.items():
        options = plan.options(4)
        options = replace(options, settings=replace(options.settings, graphs=graphs))
        with closing(models.synthesizer(size, options)) as model:
            # Takes the most likely codes, which rounding seldom changes.
            greedy = {"temperature": 0.0, "subtalker_temperature": 0.0}
            voice = VoiceOptions(model.profile.voices[0], max_frames=FIRST_FRAMES, parameters=greedy)

            async def say(number: int, model: Synthesizer = model, voice: VoiceOptions = voice) -> np.ndarray:
                text = TEXT[: 20 + number]
                return np.concatenate([c.pcm async for c in model.speak(text, voice, lambda: Urgency.FINAL)])

            heard[label] = [await say(0), *await together(texts, say)]
    apart = [float(np.abs(a - b).max()) for a, b in zip(heard["graphs"], heard["none"], strict=True)]
    name = f"Qwen3-TTS {size}"
    recorder.figure(name, "audio apart, at most", "1 text", apart[0], "of 1")
    recorder.figure(name, "texts with other audio", counted(texts, "text"), sum(a > 0.05 for a in apart[1:]), "texts")


@asynccontextmanager
async def serving(synthesizer: Synthesizer) -> AsyncIterator[str]:
    """Serve a synthesizer on a free port, as `antiphon serve` does, and yield the server's ws:// URL."""
    loaded = LoadedModels(
        transcriber=None,
        vad=None,
        turn_detector=None,
        language_model=None,
        synthesizer=synthesizer,
        image_reader=None,
        conversation_model=None,
        video_model=None,
        names=(synthesizer.profile.id,),
        lanes=(),
    )
    await loaded.warm()
    settings = Settings()
    settings = replace(settings, server=replace(settings.server, sessions_per_key=settings.server.max_sessions))
    state = ServerState(settings, Metrics(), loaded)
    sock = bind("127.0.0.1", 0)
    http = http_server(state)
    async with anyio.create_task_group() as state.group:
        state.group.start_soon(http.serve, [sock])
        while not http.started:
            await anyio.sleep(0.01)
        yield f"ws://127.0.0.1:{sock.getsockname()[1]}"
        http.should_exit = True
    sock.close()


async def _client(url: str, texts: int, rate: int, *rounds: int) -> list[dict[str, float]]:
    """Run the client of speech_client.py to its end. Return its figures for each text."""
    command = ["-m", "bench.gpu.speech_client", url, *map(str, (texts, rate, *rounds))]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    if process.returncode:
        raise RuntimeError(f"the client of {texts} texts ended with {process.returncode}")
    found: list[dict[str, float]] = json.loads(out)
    return found


def asr(plan: Plan, recorder: Recorder) -> None:
    """The section `asr`: the number of streams that are held. Each grows by a second of audio per second.

    The transcriber gets a stream's audio as it does in a session, but without the protocol and the VAD.
    """
    sizes = plan.pick(["tiny"], ["0.6B", "1.7B"])
    until = time.monotonic() + 0.9 * plan.seconds
    for number, size in enumerate(sizes):
        with recorder.part(size):
            seconds = (until - time.monotonic()) / (len(sizes) - number)
            room_gb = 0 if plan.dry else (torch.cuda.mem_get_info()[0] >> 30) - 20
            with closing(models.transcriber(size, plan.options(room_gb))) as model:
                asyncio.run(_search(plan, recorder, f"Qwen3-ASR {size}", model, seconds))


async def _search(plan: Plan, recorder: Recorder, name: str, model: Qwen3Asr, seconds: float) -> None:
    """Double the number of streams until they are not held, then bisect while time remains."""
    first, most = plan.pick((2, 4), (512, 2048))
    trial = Trial(pace_s=0.05, steps=4, unmeasured=1) if plan.dry else Trial(pace_s=1.0, steps=6, unmeasured=2)
    until, held, failed, count = time.monotonic() + seconds, 0, most + 1, first
    while count <= most and count > held and time.monotonic() + 1.5 * trial.most_s < until:
        p95_s = await trial.p95_s(model, count)
        recorder.figure(name, "partial p95", f"{count} streams", p95_s * 1000, "ms")
        held, failed = (count, failed) if p95_s <= HELD_S else (held, count)
        recorder.figure(name, "streams held", f"p95 <= {HELD_S} s, {count} tried", held, "streams")
        count = 2 * held if failed > most else (held + failed) // 2 if failed - held > held // 8 else held


class Trial:
    """A trial of one number of streams, for `steps` steps of `pace_s` each. The first `unmeasured` do not count.

    On a GPU, a step is one second, in which a stream grows by a second of audio.
    """

    def __init__(self, *, pace_s: float, steps: int, unmeasured: int) -> None:
        self._pace_s, self._steps, self._unmeasured = pace_s, steps, unmeasured
        self._sound = models.sound(WINDOW_S)

    @property
    def most_s(self) -> float:
        """The time limit of the trial. A stream that is later than this is not held, and is not waited for."""
        return self._pace_s * self._steps + 2 * HELD_S

    async def p95_s(self, model: Qwen3Asr, count: int) -> float:
        """Return the 95th percentile of the seconds from the arrival of audio to the partial that includes it.

        It is infinite if the streams do not end within `most_s`, or if the engine has no room for them.
        """
        took: list[float] = []
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.most_s), asyncio.TaskGroup() as group:
                for number in range(count):
                    group.create_task(self._stream(model, number, count, began, took))
        except TimeoutError:
            return math.inf
        except ExceptionGroup as failures:
            if failures.split(Refused)[1]:
                raise
            return math.inf
        return percentile(took, 95)

    async def _stream(self, model: Qwen3Asr, number: int, count: int, began: float, took: list[float]) -> None:
        """Run one stream. If a step becomes due while another is decoded, both are decoded together, as in sessions."""
        stream, drawn = model.open(), np.random.default_rng(number)
        due, step, first = began + self._pace_s * number / count, 0, 1 + number % WINDOW_S
        try:
            while step < self._steps:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                missed = min(int((time.perf_counter() - due) / self._pace_s), self._steps - 1 - step)
                windows, second = divmod(first + step + missed, WINDOW_S)
                await stream.decode(self._window(windows, second + 1, drawn))
                if step >= self._unmeasured:
                    took.append(time.perf_counter() - due)
                step, due = step + 1 + missed, due + (1 + missed) * self._pace_s
        finally:
            stream.close()

    def _window(self, number: int, seconds: int, drawn: np.random.Generator) -> Window:
        """Return `seconds` of the stream's window with this number."""
        fresh = ROLLED_BACK + int(TOKENS_A_S)
        prefix = tuple(int(i) for i in drawn.integers(0, 250, max(0, int(seconds * TOKENS_A_S) - fresh)))
        return Window(
            self._sound[: seconds * 16_000],
            prefix=prefix,
            language="en",
            final=seconds == WINDOW_S,
            max_tokens=fresh + 1,
            start_sample=number * WINDOW_S * 16_000,
        )
