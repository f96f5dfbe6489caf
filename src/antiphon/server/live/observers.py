"""Observes a live session: records it if the server records, and traces its turns."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import msgspec

from antiphon.errors import StoreError
from antiphon.events.conversation import ResponseAudioDelta
from antiphon.events.transcription import AppendAudio
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.dialects import field_names
from antiphon.protocols.wire import Frame
from antiphon.recording.disk import Keep
from antiphon.recording.recorder import Recorder
from antiphon.recording.redaction import Redaction, Redactor
from antiphon.recording.tape import SessionFacts
from antiphon.recording.tracing.turns import TurnTracer
from antiphon.remote.trace_context import follow_session
from antiphon.server.access_log import current_request
from antiphon.server.state import ServerState
from antiphon.sessions.conversation.native_units import UnitDone
from antiphon.transports.transport import ClientData

log = logging.getLogger(__name__)
# The counters of a conversation that stand for decisions about the current turn, with their names in traces.
DECISIONS = {
    "preemptive_begun": "begun_ahead",
    "preemptive_used": "used",
    "preemptive_dropped": "dropped",
    "ducks": "ducked",
    "ducks_without_interruption": "unducked",
    "false_starts": "false_start",
}


class SessionObservers:
    """Observes one session. Never waits. Changes nothing, except that a recorded session gets 16-bit audio."""

    def __init__(self, state: ServerState, wire: WireConnection, measure: Callable[[str, float], None]) -> None:
        self._state, self._wire, self._measure = state, wire, measure
        self._recorder = _open_recorder(state, wire)
        self._turns = TurnTracer()
        # The units of a native model that are done, late, silent and early: see `UnitDone.counts`.
        self._units = Counter[str]()
        self._client = current_request().traceparent
        # Read by code that calls other servers for this session.
        self._current = follow_session()

    def came(self, data: ClientData, commands: Sequence[Command]) -> Sequence[Command]:
        """Observe a message of the client, and return its commands as the session has to handle them."""
        if recorder := self._recorder:
            # The session gets the recorder's rounded audio, so that a replay gets the same input.
            commands = [AppendAudio(recorder.audio_in(c.pcm)) if isinstance(c, AppendAudio) else c for c in commands]
            if not isinstance(data, AppendAudio):
                recorder.event_in(data)
        now_s = time.monotonic()
        for command in commands:
            if isinstance(command, AppendAudio):
                self._turns.sound(len(command.pcm), now_s)
        return commands

    def sent_event(self, event: Event) -> None:
        """Observe an event of the session as it is sent to the client."""
        if self._recorder and isinstance(event, ResponseAudioDelta):
            self._recorder.audio_out(event.at.item_id, event.pcm, event.rate_hz)
        for trace in self._turns.follow(event, time.monotonic()):
            self._state.turns.ended(trace, session=self._wire.id, dialect=self._wire.dialect, client=self._client)
        self._current.traceparent = self._turns.traceparent

    def measure(self, kind: str, seconds: float) -> None:
        """Observe a latency that the session measured, and pass it on."""
        self._measure(kind, seconds)
        if kind == "final":
            self._turns.final(time.monotonic())

    def count(self, what: str, number: int) -> None:
        """Observe a count that the session reports, and add it to the server's metrics."""
        self._state.metrics.count(what, number)
        if name := DECISIONS.get(what):
            self._turns.decided(name, time.monotonic())

    def unit(self, unit: UnitDone) -> None:
        """Observe a unit of a native model: for the metrics, for admission, and for the session's last log line."""
        self._measure("unit", unit.delay_s)
        self._state.metrics.unit(unit)
        if self._units:
            # The first unit also computes the prompt.
            self._state.admission.headroom.units.add(self._wire.id, unit.delay_s / unit.unit_s, time.monotonic())
        self._units.update(unit.counts)

    @property
    def units(self) -> dict[str, int]:
        """The numbers of units for the session's last log line; empty without a native model."""
        if not self._units:
            return {}
        counts = {f"{name}_units": self._units[name] for name in ("late", "silent", "early")}
        return {"units": self._units["done"]} | counts

    def sent(self, frame: Frame) -> Frame:
        """Observe a frame that is sent to the client, and return it."""
        if self._recorder and not isinstance(frame.payload, bytes):
            data = frame.encode()
            self._recorder.event_out(data if isinstance(data, str) else data.decode())
        return frame

    def close(self) -> None:
        """Close the recording when the session is over."""
        if self._recorder:
            self._recorder.close()


def _open_recorder(state: ServerState, wire: WireConnection) -> Recorder | None:
    """Return a recorder that writes a wire's session to the folder of `--record`.

    Returns None if `--record` is not given, if a required consent is missing, or if the folder is not writable. A
    session that cannot be recorded is still served.
    """
    server = state.settings.server
    if not server.record or (server.record_consent and not wire.opening.consents):
        return None
    folder, redaction = server.record, cast(Redaction, server.record_redact)
    models = state.loaded()
    facts = SessionFacts(
        id=wire.id,
        began=int(time.time()),
        opening=msgspec.Raw(msgspec.json.encode(wire.opening)),
        models=tuple(models.names),
        redaction=redaction,
    )
    spoken = [part.profile for part in (models.synthesizer, models.for_conversations) if part]
    profiles = [models.required_transcriber.profile, *spoken]
    names = {*models.names, *(p.id for p in profiles), *(voice for p in spoken for voice in p.voices)}
    redactor = Redactor(redaction, field_names(), names)
    keep = Keep(server.record_mb << 20, server.record_hours)
    try:
        return Recorder(Path(folder).expanduser(), facts, keep=keep, redactor=redactor)
    except StoreError as error:
        log.error("session %s is not recorded: %s", wire.id, error)
        return None
