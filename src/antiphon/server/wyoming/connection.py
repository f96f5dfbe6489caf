"""One Wyoming connection: reads events, and runs the jobs that they ask for, one after another."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Protocol

import anyio
import anyio.abc
import msgspec

from antiphon import __version__
from antiphon.admission.certificate import Kind
from antiphon.errors import ModelError, Refused, RemoteProtocolError
from antiphon.protocols.wyoming.info import Info, info
from antiphon.protocols.wyoming.messages import Failure, Ping
from antiphon.server.credentials import Caller
from antiphon.server.state import ServerState
from antiphon.server.wyoming.handling import HandleJob, Histories
from antiphon.server.wyoming.speaking import SpeakJob
from antiphon.server.wyoming.transcribing import TranscribeJob
from antiphon.shares.places import current_owner
from antiphon.transports.http import LineLimit
from antiphon.transports.transport import STALL_S
from antiphon.wyoming import WyomingDecoder, WyomingEvent, encode

log = logging.getLogger(__name__)
LABEL = "wyoming"
# Bytes that are read at a time.
READ_BYTES = 1 << 16
# Seconds in which an event has to arrive completely after its first byte.
EVENT_S = 30.0
# Seconds without an event after which a connection is closed: without a job, and with a job that awaits more input.
IDLE_S, INPUT_S = 60.0, 300.0
# Log lines about invalid input, which anyone who reaches the port can cause.
_invalid = LineLimit(time.monotonic)


class Job(Protocol):
    """One request of a client: a transcription, a synthesis, or an answer.

    `kind` is the kind of place that it holds. `has_input` is true when all of its input has arrived. `done` is set by
    the connection when the job has ended.
    """

    kind: Kind
    has_input: bool
    done: anyio.Event

    async def run(self) -> None:
        """Do the job and send its result. Raises RemoteProtocolError, Refused and ModelError."""
        ...

    def takes(self, event: WyomingEvent) -> bool:
        """Return whether an event belongs to this job. If not, it begins another job."""
        ...

    async def feed(self, event: WyomingEvent) -> None:
        """Take an event. Waits while the job is behind. Raises ValueError and RemoteProtocolError."""
        ...


JOBS: dict[str, type[TranscribeJob] | type[SpeakJob] | type[HandleJob]] = {
    **dict.fromkeys(("transcribe", "audio-start", "audio-chunk", "audio-stop"), TranscribeJob),
    **dict.fromkeys(("synthesize", "synthesize-start", "synthesize-chunk", "synthesize-stop"), SpeakJob),
    **dict.fromkeys(("transcript", "recognize"), HandleJob),
}


class WyomingJobs:
    """Serves one connection. `histories` are the conversations of all connections."""

    def __init__(
        self,
        state: ServerState,
        histories: Histories,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        address: str,
    ) -> None:
        self.state, self.histories = state, histories
        # The protocol has no key.
        self.caller = Caller(address=address)
        self._reader, self._writer = reader, writer
        self._group: anyio.abc.TaskGroup
        self._scope, self._job_scope = anyio.CancelScope(), anyio.CancelScope()
        self._job: Job | None = None
        self._is_draining = False

    # --- StreamConnection ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        current_owner.set(self.caller.key)
        try:
            with self._scope:
                async with anyio.create_task_group() as self._group:
                    await self._read()
                    self.close()
        except* (OSError, TimeoutError):
            # The client is gone, or has read nothing for STALL_S.
            pass

    def drain(self) -> None:
        self._is_draining = True
        if not self._is_busy:
            self.close()

    def cut(self) -> None:
        if self._is_busy and not self._writer.is_closing():
            self._writer.write(encode("error", Failure("The server is shutting down.", "server_shutting_down")))
        self.close()

    def close(self) -> None:
        """Close the connection, and end its job. The bytes that were written are still sent. Returns at once."""
        self._writer.close()
        self._scope.cancel()

    # --- called by jobs -----------------------------------------------------------------------------------------------

    async def send(self, kind: str, data: msgspec.Struct | None = None, payload: bytes = b"") -> None:
        """Send one event. Waits while the client does not read. Raises OSError or TimeoutError if it is gone."""
        self._writer.write(encode(kind, data, payload))
        with anyio.fail_after(STALL_S):
            await self._writer.drain()

    # --- reading ------------------------------------------------------------------------------------------------------

    @property
    def _is_busy(self) -> bool:
        return self._job is not None and not self._job.done.is_set()

    async def _read(self) -> None:
        """Read events until the client leaves, or sends something that is not valid, or is silent for too long."""
        decoder, clock = WyomingDecoder(), time.monotonic
        # When the incomplete event began; None between events.
        began_s: float | None = clock()
        limit_s = self.state.settings.server.head_timeout_s
        while True:
            silence_s = INPUT_S if self._is_busy else IDLE_S
            wait_s = silence_s if began_s is None else began_s + limit_s - clock()
            with anyio.move_on_after(wait_s) as waiting:
                data = await self._reader.read(READ_BYTES)
            if waiting.cancelled_caught:
                if began_s is None and self._is_busy and self._job and self._job.has_input:
                    continue
                if self._is_busy:
                    await self._fail("timeout", "Nothing came for too long.")
                return
            if not data:
                return
            if began_s is None:
                began_s = clock()
            limit_s = EVENT_S
            try:
                for event in decoder.feed(data):
                    await self._take(event)
                    began_s = clock()
            except ValueError as error:
                await self._refuse(str(error))
                return
            except RemoteProtocolError as error:
                await self._fail(error.code, error.message)
                return
            except Refused as refusal:
                await self._fail("no_room", f"{refusal}.")
                return
            if not decoder.is_within_event:
                began_s = None

    async def _refuse(self, reason: str) -> None:
        unlogged = _invalid.admit()
        if unlogged is not None:
            log.warning("invalid input over Wyoming: %s unlogged=%d", reason[:200], unlogged)
        await self._fail("invalid_event", f"Invalid event: {reason}.")

    async def _fail(self, code: str, message: str) -> None:
        """Report an error in place of a result, and close the connection, which older clients take for the error."""
        await self.send("error", Failure(message, code))
        self.close()

    async def _take(self, event: WyomingEvent) -> None:
        if event.kind == "describe":
            await self.send("info", current_info(self.state))
        elif event.kind == "ping":
            await self.send("pong", event.read(Ping))
        elif make := JOBS.get(event.kind):
            if not (self._job and self._job.takes(event)):
                if self._job and not self._job.has_input:
                    # The client has begun something else without ending this.
                    self._job_scope.cancel()
                if self._job:
                    await self._job.done.wait()
                self._begin(make(self))
            assert self._job
            await self._job.feed(event)
        # Other events are not for a server: those of satellites, wake words and timers.

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def _begin(self, job: Job) -> None:
        self._job, self._job_scope = job, anyio.CancelScope()
        self._group.start_soon(self._run_job, job, self._job_scope)

    async def _run_job(self, job: Job, scope: anyio.CancelScope) -> None:
        sessions = self.state.metrics.sessions.labels(LABEL)
        try:
            with scope, self.state.admission.admit(self.caller, job.kind):
                sessions.inc()
                self.state.metrics.sessions_started.labels(LABEL).inc()
                try:
                    await job.run()
                finally:
                    sessions.dec()
        except Exception as error:
            await self._report(error)
        finally:
            job.done.set()
        if self._is_draining:
            self.close()

    async def _report(self, error: Exception) -> None:
        """Report the failure of a job, and close the connection. It is the boundary of a job: nothing else ends."""
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        match error:
            case OSError():
                # The client is gone, or has read nothing for STALL_S.
                self.close()
            case RemoteProtocolError(code=code, message=message):
                await self._fail(code, message)
            case Refused():
                self.state.metrics.refused.labels("no_room").inc()
                await self._fail("no_room", f"The server is full: {error}.")
            case ModelError():
                log.error("a job over Wyoming failed: %s", error)
                await self._fail("model_failed", "The model failed.")
            case _:
                log.error("a job over Wyoming failed", exc_info=error)
                await self._fail("server_error", "The server failed.")


def current_info(state: ServerState) -> Info:
    """Return the `info` of the loaded models. Raises Refused while the server drains."""
    models = state.loaded()
    return info(
        models.transcriber.profile if models.transcriber else None,
        models.synthesizer.profile if models.synthesizer else None,
        models.language_model.profile if models.language_model else None,
        __version__,
        finds_end=state.settings.wyoming.wyoming_endpointing == "server",
    )
