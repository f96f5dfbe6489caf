"""The client of a certificate that holds a session of a native model: it sends units of audio, and times each result.

A *result* is what the server sends for a unit: `response.listen`, or text and audio of a response. Results come in the
order of the units, so the number of results tells which unit a result belongs to.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections import deque
from collections.abc import Callable

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.pcm import to_pcm16
from antiphon.certify.recordings import Recording
from antiphon.certify.wire import PATIENCE_S, Event, Events, Failed, begin, connected, while_running

# The length of a unit, in seconds, which is also the time limit for its result.
UNIT_S = 1.0
# A turn of this client is a stretch of this number of units. Its delay is that of its slowest unit.
UNITS_A_TURN = 10
# What comes for one unit comes at once. Events of a response that are further apart belong to two units.
APART_S = 0.25
# Silence between two recordings, in seconds.
PAUSE_S = 1.5


class UnitResults:
    """Counts the results in a session's events. Pure.

    A turn that the model speaks has a result in each unit: text, audio, or text and then its audio. Audio that comes
    more than half a unit after a text is of the next unit. When the turn ends, its usage tells the number of its units,
    some of which may have had neither. If nothing follows the beginning of a turn for APART_S, its first unit had
    neither.
    """

    def __init__(self) -> None:
        self._before = self._units = 0
        self._speaks = self._has_sound = False
        # When the turn began, and when its last text came.
        self._begun_s = self._text_s = 0.0

    @property
    def count(self) -> int:
        """The number of results so far."""
        return self._before + (max(1, self._units) if self._speaks else 0)

    def see(self, event: Event, at_s: float = 0.0) -> int:
        """Take the next event, which came at `at_s`, and return the new count."""
        if event.delta and self._speaks and not self._units and at_s - self._begun_s > APART_S:
            self._before += 1
        match event.type:
            case "response.listen" if event.reason == "model":
                self._before += 1
            case "response.created":
                self._speaks, self._has_sound, self._begun_s, self._units = True, False, at_s, 0
            case "response.output_audio_transcript.delta" | "response.output_text.delta":
                self._units, self._has_sound, self._text_s = self._units + 1, False, at_s
            case "response.output_audio.delta" | "response.audio.delta" if event.delta:
                if self._has_sound or not self._units or at_s - self._text_s > UNIT_S / 2:
                    self._units += 1
                self._has_sound = True
            case "response.done" if self._speaks:
                self._before = max(self.count, self._before + event.output_tokens)
                self._speaks = False
        return self.count


class UnitTimer:
    """Times the results of a session: when each unit was sent, and when its result came. Times are monotonic seconds.

    `delays` has the delays of the results that have come, in order.
    """

    def __init__(self) -> None:
        self._results = UnitResults()
        self._unanswered_s = deque[float]()
        self._num_done = 0
        self.delays = deque[float]()

    def sent(self, at_s: float) -> None:
        """Record that the last audio of the next unit was sent."""
        self._unanswered_s.append(at_s)

    def see(self, event: Event, at_s: float) -> None:
        """Record an event that came at `at_s`. Results beyond the units that were sent are of silence."""
        count = self._results.see(event, at_s)
        while self._num_done < count:
            self._num_done += 1
            if self._unanswered_s:
                self.delays.append(at_s - self._unanswered_s.popleft())

    @property
    def has_begun(self) -> bool:
        """Whether a result has come."""
        return self._num_done > 0

    def waiting_s(self, now_s: float) -> float:
        """Return how long the oldest unit without a result has waited; 0 if none waits."""
        return now_s - self._unanswered_s[0] if self._unanswered_s else 0.0


async def hold_native(
    url: str,
    key: str,
    choose: Callable[[], Recording],
    report: Callable[[float | None, int, str], None],
    shift_s: float,
) -> None:
    """Hold a session, and speak in it without end, until cancelled.

    Sends a unit every UNIT_S, `shift_s` after the whole second, so that sessions are spread over the unit. After every
    UNITS_A_TURN results, `report` is called with the largest delay, the number of missed units, and "". If no result
    comes within PATIENCE_S, it is called with None, UNITS_A_TURN and the reason, and the session ends with Failed.
    """
    # The model's own rate: a resampler would hold back the end of a unit until the next one comes.
    session = {"instructions": "Streaming Omni Conversation.", "sample_rate_hz": SAMPLE_RATE_HZ, "turn_detection": None}
    async with connected(f"{url}/v1/realtime?duplex=1", key) as socket:
        await begin(socket, json.dumps(session))
        # The client is killed at the end, and its session must not speak on. Another server may not know this event.
        await socket.send('{"type":"session.end"}')
        timer, events = UnitTimer(), Events(socket)

        async def speak() -> None:
            waiting, size = b"", 2 * int(SAMPLE_RATE_HZ * UNIT_S)
            due_s = time.monotonic() // UNIT_S * UNIT_S + shift_s
            while True:
                while len(waiting) < size:
                    waiting += to_pcm16(choose().pcm) + bytes(2 * int(SAMPLE_RATE_HZ * PAUSE_S))
                due_s += UNIT_S
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                audio, waiting = base64.b64encode(waiting[:size]).decode(), waiting[size:]
                await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
                timer.sent(time.monotonic())

        async def hear() -> None:
            while True:
                event = Event()
                try:
                    at_s, event = await events.next(time.monotonic() + UNIT_S)
                    timer.see(event, at_s)
                except Failed:
                    at_s = time.monotonic()
                is_error = event.type == "error" and timer.has_begun
                if is_error or timer.waiting_s(at_s) > PATIENCE_S:
                    reason = event.problem[:200] if is_error else "no result of a unit arrived"
                    report(None, UNITS_A_TURN, reason)
                    raise Failed(reason)
                while len(timer.delays) >= UNITS_A_TURN:
                    delays = [timer.delays.popleft() for _ in range(UNITS_A_TURN)]
                    report(max(delays), sum(delay > UNIT_S for delay in delays), "")

        await while_running(speak, hear, events.run)
