"""A caller's leg of a telephone call as a transport, whatever carries its audio. See docs/design/telephone.md.

The session behind it is a conversation of OpenAI's dialect whose responses the server plays, as on WebRTC. The leg is
its client: it sends the caller's audio, and frames for keys and for the greeting.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import anyio
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.line.answering import AnsweringMachine
from antiphon.audio.line.telephone import tones
from antiphon.audio.pcm import Doubler, Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import ContentPosition, ConversationEvent, ResponseCreated, ResponseDone
from antiphon.events.transcription import AppendAudio, TranscriptionEvent
from antiphon.protocols.telephony.stream import Call
from antiphon.protocols.wire import message
from antiphon.signals import Signal
from antiphon.transports.player import ResponsePlayer
from antiphon.transports.transport import TransportClosed

log = logging.getLogger(__name__)
# Seconds after a key in which another key belongs to the same input. The key `#` ends the input at once.
KEYS_PAUSE_S = 1.5
# Most keys of one input, and most items that wait for the session.
MAX_KEYS, MAX_ARRIVED_ITEMS = 64, 1000
# The caller's audio is passed to the session in pieces of this length, in seconds. A step of a session costs the same
# for 20 ms, which is what telephones send.
PIECE_S = 0.06
# What is due within this time is due now, because timers are not more exact.
TIMER_S = 0.001
# What the model gets to know when an answering machine has answered.
MACHINE = (
    "An answering machine has answered, not a person. After its beep, leave a short message: who calls, and why. Then "
    "hang up."
)
# What is done when an answering machine answers.
Voicemail = Literal["message", "hang_up", "ignore"]


@dataclass(frozen=True, slots=True)
class LegOptions:
    """How a call is held.

    - `greeting`: what the model is to say first; "" if the caller speaks first.
    - `max_s`: the longest call, in seconds; 0 for no limit.
    - `transfers`: the numbers or SIP URIs that the model may transfer the call to, by name.
    - `voicemail`: what is done when an answering machine answers.
    """

    greeting: str = ""
    max_s: float = 0.0
    transfers: Mapping[str, str] = field(default_factory=dict)
    voicemail: Voicemail = "ignore"


class LegSocket(Protocol):
    """The socket of a carrier or a switch, as a leg uses it: `transports/websocket.py`, …"""

    async def receive(self) -> str | bytes | None: ...
    async def send(self, data: str | bytes) -> None: ...
    async def close(self, code: int, reason: str) -> None: ...


class CallPlayer(ResponsePlayer):
    """The player of a caller's leg. `by_marks` is that of ResponsePlayer."""

    def __init__(self, rate_hz: int, *, by_marks: bool) -> None:
        super().__init__(rate_hz, by_marks=by_marks)
        # Whether the carrier's buffer has to be emptied.
        self.must_clear = False
        # How often the caller has interrupted.
        self.num_cuts = 0
        # The ids of the responses under way.
        self._responding: set[str] = set()

    @property
    def is_responding(self) -> bool:
        """Whether a response is being generated."""
        return bool(self._responding)

    async def last_words(self) -> bool:
        """Wait until the responses are generated, and all their audio was heard. Returns False if it is interrupted."""
        num_cuts = self.num_cuts
        while self.num_cuts == num_cuts and (self.is_responding or not self.is_idle):
            await self.changed.wait()
        return self.num_cuts == num_cuts

    def send(self, event: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the event's audio, and follow which responses are generated."""
        super().send(event)
        match event:
            case ResponseCreated(response):
                self._responding.add(response.id)
            case ResponseDone(response):
                self._responding.discard(response.id)
                self.changed.notify()
            case _:
                return

    def silence(self) -> list[tuple[ContentPosition, int]]:
        """Drop the audio that was not heard."""
        self.must_clear = self.must_clear or self.awaits_marks
        cut = super().silence()
        self.num_cuts += bool(cut)
        return cut


class Leg:
    """One leg. Call `run` beside the session that it is the transport of. Its classes carry the audio (`_work`).

    - `call`: the facts of the call.
    - `heard_hz`: the rate of the caller's audio.
    - `transfer`: connects the caller with a number or SIP URI; None if that cannot be done. Raises RemoteProtocolError.
    - `clock`: returns monotonic seconds.

    `beside` is called with each event of the call for the programs beside it, such as a pressed key.
    `ended_by` says why the call has ended: `caller_hung_up`, `hang_up` (the model's function), `transfer`, `voicemail`,
    `time_limit`, the code of a violation of the protocol, or the reason with which the session was closed; "" until
    then. `playback` is the player of its responses.
    """

    playback: CallPlayer

    def __init__(
        self,
        call: Call,
        heard_hz: int,
        options: LegOptions,
        *,
        transfer: Callable[[str], Awaitable[None]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.call = call
        self.beside: Callable[[str], None] = lambda _: None
        self.ended_by = ""
        self._clock, self._begun_s = clock, clock()
        self._options, self._transfer = options, transfer
        self._machine = None if options.voicemail == "ignore" else AnsweringMachine()
        # Whether an answering machine was noticed.
        self._is_machine = False
        is_narrow = 2 * heard_hz == SAMPLE_RATE_HZ
        self._resampler = Doubler() if is_narrow else Resampler(heard_hz, SAMPLE_RATE_HZ)
        # What was heard and not yet passed on.
        self._heard: list[Pcm] = []
        self._arrived: deque[str | bytes | AppendAudio] = deque()
        # Notified when something has arrived or was received by the session, and at the end.
        self._changed = Signal()
        self._keys = ""
        self._last_key_s = 0.0

    def _work(self) -> Sequence[Callable[[], Awaitable[None]]]:
        """Return what carries the audio: functions that run at the same time, until the call ends."""
        raise NotImplementedError

    # --- the session's transport

    async def receive(self) -> str | bytes | AppendAudio | None:
        """Wait for the caller's next audio, or the next frame of the leg.

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
        """Drop a frame of the session: a telephone shows none."""

    async def close(self, code: int, reason: str) -> None:
        """End the call with a WebSocket close code. Raises TransportClosed if the other side ended it first."""
        self.end(reason)

    # --- the call

    def end(self, reason: str) -> None:
        """End the call. Only the first reason counts. Does not wait."""
        if not self.ended_by:
            self.ended_by = reason
            self._changed.notify()

    async def run(self) -> None:
        """Carry audio in both directions until the call ends. Does not raise."""
        if greeting := self._options.greeting:
            wanted = f"The call has just begun. Greet the caller with these words: {greeting}"
            self.arrive(frame("response.create", response={"instructions": wanted}))
        async with anyio.create_task_group() as group:
            for work in (*self._work(), *([self._limit] if self._options.max_s else [])):
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
        await anyio.sleep(self._options.max_s)
        self.end("time_limit")

    def arrive(self, item: str | bytes | AppendAudio) -> None:
        """Queue audio, or a frame, for `receive`. Does not wait."""
        self._arrived.append(item)
        self._changed.notify()

    async def _for_room(self) -> None:
        while len(self._arrived) >= MAX_ARRIVED_ITEMS:
            await self._changed.wait()

    # --- the functions of the model, and of applications

    @property
    def lasts_s(self) -> float:
        """How long the call lasts so far, in seconds."""
        return self._clock() - self._begun_s

    @property
    def can_transfer(self) -> bool:
        """Whether the call can be transferred."""
        return self._transfer is not None

    @property
    def transfers(self) -> Mapping[str, str]:
        """The numbers or SIP URIs that the model may transfer the call to, by name."""
        return self._options.transfers if self.can_transfer else {}

    async def hang_up(self) -> None:
        """End the call when its last words were heard. Returns only if the caller interrupts them."""
        if await self._last_words():
            self.end("hang_up")
            # The session ends, and cancels its function calls.
            await anyio.sleep_forever()

    async def _last_words(self) -> bool:
        """Wait until all that was said was heard. Returns False if it is interrupted."""
        return await self.playback.last_words()

    async def send_digits(self, digits: str) -> None:
        """Play the tones of these keys, after the words before them."""
        self.playback.play(tones(digits, self.playback.rate_hz))

    async def transfer_after_words(self, target: str) -> bool:
        """Transfer the call when the last words were heard. Returns False if the caller interrupts them.

        Raises RemoteProtocolError as `transfer`.
        """
        if not await self._last_words():
            return False
        await self.transfer(target)
        return True

    async def transfer(self, target: str) -> None:
        """Connect the caller with a number or a SIP URI, and end the call here.

        Raises RemoteProtocolError (`unsupported_parameter`) if this call cannot be transferred, and other codes if the
        carrier refuses.
        """
        if self._transfer is None:
            raise RemoteProtocolError("unsupported_parameter", "This call cannot be transferred.", "target_uri")
        await self._transfer(target)
        self.end("transfer")

    # --- what the caller says and presses

    def _hear(self, pcm: Pcm) -> None:
        """Pass the caller's audio to the session: float32 at `heard_hz`."""
        self._heard.append(self._resampler.feed(pcm))
        if sum(map(len, self._heard)) < PIECE_S * SAMPLE_RATE_HZ:
            return
        heard = np.concatenate(self._heard)
        self._heard.clear()
        self.arrive(AppendAudio(heard))
        self._notice_machine(heard)

    def _notice_machine(self, heard: Pcm) -> None:
        """Look for an answering machine in the first minute of the call. See `AnsweringMachine`."""
        if self._machine is None or not (sign := self._machine.feed(heard)):
            return
        log.info("an answering machine has answered a call: %s", sign)
        self.beside(frame("telephone.voicemail_detected", by=sign))
        if self._options.voicemail == "hang_up":
            self.end("voicemail")
            return
        if not self._is_machine:
            self._is_machine = True
            part = {"type": "input_text", "text": MACHINE}
            item = {"type": "message", "role": "system", "content": [part]}
            self.arrive(frame("conversation.item.create", item=item))
        if sign == "beep":
            # The machine records from now on. What was said over its words is not on it.
            self._interrupt()
            self.arrive(frame("response.create"))

    def _interrupt(self) -> None:
        if self.playback.is_responding:
            self.arrive(frame("response.cancel"))
        if not self.playback.is_idle:
            self.arrive(frame("output_audio_buffer.clear"))

    def _press(self, key: str) -> None:
        """Add a key to the caller's input. The first one stops the response, as speech does."""
        if len(key) != 1 or key not in "0123456789ABCD*#" or len(self._keys) >= MAX_KEYS:
            return
        # The event has the form of OpenAI's telephone calls.
        self.beside(frame("input_audio_buffer.dtmf_event_received", event=key, received_at=int(time.time())))
        if not self._keys:
            self._interrupt()
        self._keys += key
        self._last_key_s = self._clock()

    def _finish_keys(self) -> None:
        """Pass the keys to the session as the user's input, if it is complete. It is called whenever audio arrives."""
        is_complete = self._keys.endswith("#") or self._clock() - self._last_key_s >= KEYS_PAUSE_S
        if not self._keys or not is_complete or self.playback.is_responding:
            return
        text, self._keys = f"(I pressed these keys on my telephone: {self._keys})", ""
        part = {"type": "input_text", "text": text}
        self.arrive(frame("conversation.item.create", item={"type": "message", "role": "user", "content": [part]}))
        self.arrive(frame("response.create"))


def frame(type: str, **fields: object) -> str:
    """Return a frame of OpenAI's dialect."""
    return str(message(type=type, **fields).encode())
