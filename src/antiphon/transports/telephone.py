"""A caller's leg of a telephone call as a transport. See docs/design/telephone.md.

`CallerLeg` is the leg over a carrier's media stream; that over RTP is in `transports/rtp.py`. The session behind a leg
is a conversation of OpenAI's dialect whose responses the server plays, as on WebRTC. The leg is its client: it sends
the caller's audio, and frames for keys, for the greeting and for the results of functions.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import anyio
import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import Doubler, Resampler
from antiphon.audio.telephone import JitterBuffer, tones
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    ContentPosition,
    ConversationEvent,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.transcription import AppendAudio, TranscriptionEvent
from antiphon.protocols.telephony.functions import HANG_UP, SEND_DIGITS, TRANSFER, digits_in, transfer_in
from antiphon.protocols.telephony.stream import (
    Arrived,
    Call,
    CallerAudio,
    MarkReturned,
    MediaStream,
    Pressed,
    Started,
    Stopped,
)
from antiphon.protocols.wire import message
from antiphon.signals import Signal
from antiphon.transports.player import ResponsePlayer, padded
from antiphon.transports.transport import TransportClosed

log = logging.getLogger(__name__)
# Seconds of audio that the carrier has in its buffer. A stall of the event loop up to that length is not heard; speech
# that pauses a response pauses it after this time at the latest.
LEAD_S = 0.3
# A mark that the carrier does not return within this time after it was due counts as reached: not every carrier returns
# every mark.
MARK_LATE_S = 2.0
# What is due within this time is due now, because timers are not more exact.
TIMER_S = 0.001
# Seconds after a key in which another key belongs to the same input. The key `#` ends the input at once.
KEYS_PAUSE_S = 1.5
# Most keys of one input, most items that wait for the session, and the largest message of a carrier. Audio of 30 s has
# 1.9 MB at the highest rate.
MAX_KEYS, MAX_ARRIVED_ITEMS, MAX_MESSAGE_BYTES = 64, 1000, 2 << 20
# Most frames that may wait for an application that does not read. It is then left behind.
MAX_UNREAD_FRAMES = 10_000


class LegSocket(Protocol):
    """The WebSocket of a carrier or of an application, as the leg uses it: `transports/websocket.py`."""

    async def receive(self) -> str | bytes | None: ...
    async def send(self, data: str | bytes) -> None: ...
    async def close(self, code: int, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Ending:
    """A call of `hang_up`, or of `transfer` to `target`, which is carried out when the last words were heard."""

    call_id: str
    target: str = ""


class CallPlayer(ResponsePlayer):
    """The player of a caller's leg. It also carries out the functions that the model calls, or lets the leg do it.

    - `to_session` gets frames for the session.
    - `press` sends keys to the other side; None: they are played as tones.
    - `transfers`: where the function `transfer` may lead to, by name.
    """

    def __init__(
        self,
        rate_hz: int,
        to_session: Callable[[str], None],
        *,
        by_marks: bool = True,
        press: Callable[[str], None] | None = None,
        transfers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(rate_hz, by_marks=by_marks)
        self._to_session, self._press, self._transfers = to_session, press, transfers or {}
        # Whether the carrier's buffer has to be emptied.
        self.must_clear = False
        # The ids of the responses under way.
        self._responding: set[str] = set()
        # What ends the call; None if nothing does.
        self._ending: _Ending | None = None
        # Outputs of functions that wait for the end of their response: the id of the call, and the output.
        self._outputs: list[tuple[str, str]] = []

    @property
    def is_responding(self) -> bool:
        """Whether a response is being generated."""
        return bool(self._responding)

    @property
    def has_hung_up(self) -> bool:
        """Whether the model has hung up, and its last words were heard."""
        return self._may_end and self._ending is not None and not self._ending.target

    @property
    def transfer_to(self) -> str:
        """Where the model transfers the call to, after its last words were heard; "" if it does not."""
        return self._ending.target if self._may_end and self._ending else ""

    @property
    def _may_end(self) -> bool:
        return self._ending is not None and not self._responding and self.is_idle

    def transfer_failed(self, why: str) -> None:
        """Tell the model that the call was not transferred, so that it goes on."""
        if self._ending:
            self._to_session(function_output(self._ending.call_id, why))
            self._to_session(frame("response.create"))
            self._ending = None

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the event's audio, and carry out a function that it calls."""
        super().send(event)
        match event:
            case ResponseCreated(response):
                self._responding.add(response.id)
            case ArgumentsDone(_, call_id, name, _) if name == HANG_UP:
                self._ending = _Ending(call_id)
            case ArgumentsDone(_, call_id, name, arguments) if name == SEND_DIGITS:
                self._outputs.append((call_id, self._send_digits(arguments)))
            case ArgumentsDone(_, call_id, name, arguments) if name == TRANSFER:
                self._transfer(call_id, arguments)
            case ResponseDone(response):
                self._responding.discard(response.id)
                self._report_outputs()
                self.changed.notify()
            case _:
                return

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Drop the audio that was not heard. A caller who interrupts the last words is not hung up or transferred."""
        self.must_clear = self.must_clear or self.awaits_marks
        cut = super().silence()
        if cut and self._ending:
            undone = "not transferred" if self._ending.target else "not hung up"
            self._to_session(function_output(self._ending.call_id, f"{undone}: the caller went on"))
            self._ending = None
        return cut

    def _send_digits(self, arguments: str) -> str:
        try:
            keys = digits_in(arguments)
        except RemoteProtocolError as error:
            return error.message
        if self._press:
            self._press(keys)
        else:
            self.play(tones(keys, self.rate_hz))
        return "sent"

    def _transfer(self, call_id: str, arguments: str) -> None:
        try:
            self._ending = _Ending(call_id, transfer_in(arguments, self._transfers))
        except RemoteProtocolError as error:
            self._outputs.append((call_id, error.message))

    def _report_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        for call_id, output in outputs:
            self._to_session(function_output(call_id, output))
        if outputs and not self._ending:
            self._to_session(frame("response.create"))


class Leg:
    """One leg. Call `run` beside the session that it is the transport of. Its classes carry the audio (`_work`).

    - `call`: the facts of the call.
    - `heard_hz`: the rate of the caller's audio.
    - `greeting`: what the model is to say first; "" if the caller speaks first.
    - `max_s`: the longest call, in seconds; 0 for no limit.
    - `clock`: returns monotonic seconds.

    `ended_by` says why the call has ended: `caller_hung_up`, `hang_up` (the model's function), `transferred`,
    `time_limit`, the code of a violation of the protocol, or the reason with which the session was closed; "" until
    then. `playback` is the player of its responses.
    """

    playback: CallPlayer

    def __init__(
        self,
        call: Call,
        heard_hz: int,
        *,
        greeting: str = "",
        max_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.call = call
        self.ended_by = ""
        self._clock = clock
        self._greeting, self._max_s = greeting, max_s
        is_narrow = 2 * heard_hz == SAMPLE_RATE_HZ
        self._resampler = Doubler() if is_narrow else Resampler(heard_hz, SAMPLE_RATE_HZ)
        self._arrived: deque[str | bytes | AppendAudio] = deque()
        # The frames of the session that wait for the application; None without one.
        self._unread: deque[str | bytes] | None = None
        # Notified when something has arrived or was received by the session, and at the end.
        self._changed = Signal()
        self._keys = ""
        self._last_key_s = 0.0

    def _work(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return what carries the audio: functions that run at the same time, until the call ends."""
        raise NotImplementedError

    # --- the session's transport

    async def receive(self) -> str | bytes | AppendAudio | None:
        """Wait for the caller's next audio, or the next frame of the leg or of the application.

        Returns None after the call has ended.
        """
        while not self.ended_by:
            if self._arrived:
                arrived = self._arrived.popleft()
                self._changed.notify()
                return arrived
            await self._changed.wait()
        return None

    async def send(self, data: str | bytes) -> None:
        """Pass a frame of the session to the application. Without one, it is dropped: a telephone shows none."""
        self._tell(data)

    async def close(self, code: int, reason: str) -> None:
        """End the call with a WebSocket close code. Raises TransportClosed if the other side ended it first."""
        self.end(reason)

    # --- the call

    async def transfer(self, target: str) -> str:
        """Have the caller connected to `target`, a URI or a number, instead of us. Returns "" if it is, or why not.

        Only calls over SIP can be transferred. The leg has to be ended afterwards (`end`).
        """
        return "not transferred: a call of this carrier cannot be"

    def end(self, reason: str) -> None:
        """End the call. Only the first reason counts. Does not wait."""
        if not self.ended_by:
            self.ended_by = reason
            self._changed.notify()

    async def run(self) -> None:
        """Carry audio in both directions until the call ends. Does not raise."""
        if self._greeting:
            wanted = f"The call has just begun. Greet the caller with these words: {self._greeting}"
            self._to_session(frame("response.create", response={"instructions": wanted}))
        async with anyio.create_task_group() as group:
            for work in (*self._work(), *([self._limit] if self._max_s else [])):
                group.start_soon(self._guarded, work)
            while not self.ended_by:
                await self._changed.wait()
            group.cancel_scope.cancel()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except TransportClosed:
            self.end("caller_hung_up")
        except Exception:
            # The boundary of the call: any failure in it ends only this call.
            log.exception("the leg of a call failed")
            self.end("server_error")

    async def _limit(self) -> None:
        await anyio.sleep(self._max_s)
        self.end("time_limit")

    def _to_session(self, data: str | bytes | AppendAudio) -> None:
        self._arrived.append(data)
        self._changed.notify()

    async def _for_room(self) -> None:
        while len(self._arrived) >= MAX_ARRIVED_ITEMS:
            await self._changed.wait()

    # --- the application

    async def control(self, application: LegSocket) -> None:
        """Let an application follow the call and take part in it: it gets the frames of the session from now on, and
        its own frames go to the session. Returns when the application leaves, is replaced by another one, does not
        read, or when the call ends.
        """
        unread = self._unread = deque[str | bytes]()
        self._changed.notify()
        async with anyio.create_task_group() as group:

            async def read() -> None:
                while (data := await application.receive()) is not None:
                    await self._for_room()
                    self._to_session(data)
                group.cancel_scope.cancel()

            group.start_soon(read)
            with suppress(TransportClosed):
                while self._unread is unread and not self.ended_by:
                    if unread:
                        await application.send(unread.popleft())
                    else:
                        await self._changed.wait()
            group.cancel_scope.cancel()
        if self._unread is unread:
            self._unread = None

    def _tell(self, data: str | bytes) -> None:
        if self._unread is not None:
            self._unread.append(data)
            if len(self._unread) > MAX_UNREAD_FRAMES:
                log.warning("an application of a call does not read, and is left behind")
                self._unread = None
            self._changed.notify()

    # --- what the caller says and presses

    def _hear(self, pcm: Pcm) -> None:
        """Pass the caller's audio to the session: float32 at `heard_hz`."""
        if len(heard := self._resampler.feed(pcm)):
            self._to_session(AppendAudio(heard))

    def _press(self, key: str) -> None:
        """Add a key to the caller's input. The first one stops the response, as speech does."""
        if len(key) != 1 or key not in "0123456789ABCD*#" or len(self._keys) >= MAX_KEYS:
            return
        # The event has the form of OpenAI's telephone calls.
        self._tell(frame("input_audio_buffer.dtmf_event_received", event=key, received_at=int(time.time())))
        if not self._keys:
            if self.playback.is_responding:
                self._to_session(frame("response.cancel"))
            if not self.playback.is_idle:
                self._to_session(frame("output_audio_buffer.clear"))
        self._keys += key
        self._last_key_s = self._clock()

    def _finish_keys(self) -> None:
        """Pass the keys to the session as the user's input, if it is complete. It is called whenever
        audio arrives.
        """
        is_complete = self._keys.endswith("#") or self._clock() - self._last_key_s >= KEYS_PAUSE_S
        if not self._keys or not is_complete or self.playback.is_responding:
            return
        text, self._keys = f"(I pressed these keys on my telephone: {self._keys})", ""
        part = {"type": "input_text", "text": text}
        self._to_session(frame("conversation.item.create", item={"type": "message", "role": "user", "content": [part]}))
        self._to_session(frame("response.create"))


class CallerLeg(Leg):
    """The leg over a carrier's media stream.

    `socket`, `stream`: the carrier's WebSocket, and its messages from `started` on. The rest is as in `Leg`.
    `is_refused`: the carrier's messages violated the protocol.
    """

    def __init__(
        self,
        socket: LegSocket,
        stream: MediaStream,
        started: Started,
        *,
        greeting: str = "",
        max_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        rate_hz = started.codec.rate_hz
        super().__init__(started.call, rate_hz, greeting=greeting, max_s=max_s, clock=clock)
        self.is_refused = False
        self._socket, self._stream, self._rate_hz = socket, stream, rate_hz
        self._jitter = JitterBuffer[Pcm]()
        self.playback = CallPlayer(rate_hz, self._to_session)
        # When the carrier's buffer will be empty, by the clock.
        self._buffered_until_s = 0.0
        # The marks that were sent, oldest first, and the times at which each counts as reached.
        self._marks: deque[tuple[float, str]] = deque()
        self._num_bad = 0

    def _work(self) -> Sequence[Callable[[], Awaitable[None]]]:
        return self._read, self._play

    async def close(self, code: int, reason: str) -> None:
        await super().close(code, reason)
        await self._socket.close(code, reason)

    # --- from the carrier

    async def _read(self) -> None:
        while (data := await self._socket.receive()) is not None:
            try:
                if len(data) > MAX_MESSAGE_BYTES:
                    raise RemoteProtocolError("event_too_large", f"A message exceeds {MAX_MESSAGE_BYTES} bytes.")
                arrived = self._stream.read(data)
            except RemoteProtocolError as error:
                if error.code != "bad_audio":
                    log.warning("a call of %s is ended: %s", self.call.carrier, error.message)
                    self.is_refused = True
                    self.end(error.code)
                    return
                self._num_bad += 1
                if self._num_bad == 1:
                    log.warning("audio of a call of %s is dropped: %s", self.call.carrier, error.message)
                continue
            for item in arrived:
                self._take(item)
            self._finish_keys()
            # The carrier is not read while the session does not take what has arrived.
            await self._for_room()
        self.end("caller_hung_up")

    def _take(self, item: Arrived) -> None:
        match item:
            case CallerAudio(pcm, number):
                for packet in [pcm] if number is None else self._jitter.put(number, pcm):
                    self._hear(np.zeros(len(pcm), np.float32) if packet is None else packet)
            case Pressed(key):
                self._press(key)
            case MarkReturned(name):
                self.playback.reached(name)
            case Stopped():
                self.end("caller_hung_up")
            case Started():
                return

    # --- to the carrier

    async def _play(self) -> None:
        player = self.playback
        while not player.has_hung_up:
            while self._marks and self._marks[0][0] <= self._clock() + TIMER_S:
                player.reached(self._marks.popleft()[1])
            if player.must_clear:
                player.must_clear = False
                self._buffered_until_s = self._clock()
                await self._socket.send(self._stream.clear())
            elif not player.has_frame:
                with anyio.move_on_after(self._marks[0][0] - self._clock() if self._marks else math.inf):
                    await player.changed.wait()
            elif (early_s := self._buffered_until_s - self._clock() - LEAD_S) > TIMER_S:
                with anyio.move_on_after(early_s):
                    await player.changed.wait()
            else:
                await self._send_audio()
        self.end("hang_up")

    async def _send_audio(self) -> None:
        """Send the audio of one message, and a mark after it."""
        player, parts = self.playback, [np.zeros(0, np.int16)]
        for _ in range(self._stream.message_frames):
            if player.has_frame:
                parts.append(player.take())
        pcm = np.concatenate(parts)
        pcm = padded(pcm, -(-len(pcm) // player.frame_samples) * player.frame_samples)
        name = player.mark()
        self._buffered_until_s = max(self._clock(), self._buffered_until_s) + len(pcm) / self._rate_hz
        for data in self._stream.audio(pcm) if len(pcm) else ():
            await self._socket.send(data)
        await self._socket.send(self._stream.mark(name))
        self._marks.append((self._buffered_until_s + MARK_LATE_S, name))


def frame(type: str, **fields: object) -> str:
    """Return a frame of OpenAI's dialect."""
    return str(message(type=type, **fields).encode())


def function_output(call_id: str, output: str) -> str:
    """Return the frame with the output of a function call: JSON with the one field `result`."""
    result = msgspec.json.encode({"result": output}).decode()
    item = {"type": "function_call_output", "call_id": call_id, "output": result}
    return frame("conversation.item.create", item=item)
