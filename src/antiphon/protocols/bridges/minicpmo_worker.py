"""The bridge for the unmodified front end of the MiniCPM-o demo (`/ws/duplex`): docs/wire/bridges.md.

The client sends audio one second at a time, and gets one result for each second. Its player simply plays one result
after another. After a result shorter than a second, the player runs out of audio and clips the next result. Every
result is therefore exactly one second long; only the last result of a turn may be shorter. A result is silent while the
model listens. It is padded with leading silence if the response has less than a second of audio so far. Further audio
of the response is kept until the client's next message.
"""

from __future__ import annotations

import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.audio.wav import wav_header
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import BargeIn, EpochRaised
from antiphon.protocols.bridge import OUT_HZ, BridgeConnection, BridgeSession, f32_base64, read_bridge
from antiphon.protocols.connection import Command, Dialect, Event, Resume
from antiphon.protocols.realtime.audio_buffer import appended


class WorkerPrepare(msgspec.Struct, tag_field="type", tag="prepare"):
    """Begins the session. A prompt that is not a string counts as missing.

    The demo sends two recordings of the voice: for the language model, and for the speech decoder. Here, one is enough.
    Both are base64 of float32 at 16 kHz, and are checked when they are decoded.
    """

    system_prompt: object = None
    ref_audio_base64: object = None
    tts_ref_audio_base64: object = None


class WorkerChunk(msgspec.Struct, tag_field="type", tag="audio_chunk"):
    """One second of the user's audio, as base64 of float32 at 16 kHz. It is checked when it is decoded."""

    audio_base64: object = None
    force_listen: object = None


class WorkerPause(msgspec.Struct, tag_field="type", tag="pause"):
    """Pauses the session: the server ignores audio until `resume`."""


class WorkerResume(msgspec.Struct, tag_field="type", tag="resume"):
    """Resumes the session: the server uses audio again."""


class WorkerStop(msgspec.Struct, tag_field="type", tag="stop"):
    """Asks the server to end the session."""


class MinicpmoWorkerBridge:
    """The dialect for one session of the demo's front end, which begins with `prepare`."""

    name = "minicpmo"

    def __init__(self, session: BridgeSession) -> None:
        self._session = session
        self._paused = False
        self._num_results = 0
        self._kv_rows = 0
        self._text = ""
        self._pending_audio: list[Pcm] = []
        self._speaking = False
        # True if results of the response were sent, but not yet the result that ends the turn.
        self._end_is_due = False

    def opened(self) -> None:
        """Queue nothing: the client sends first."""

    def closed(self) -> None:
        """Queue `stopped`, the answer to the client's `stop`."""
        self._session.add(type="stopped")

    def error(self, error: RemoteProtocolError) -> None:
        """Queue an error. In this dialect, `error` is the message and `code` is the code, both at the top level."""
        self._session.add(type="error", error=error.message, code=error.code)

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame. Raises RemoteProtocolError for an invalid frame."""
        session = self._session
        kinds = WorkerPrepare | WorkerChunk | WorkerPause | WorkerResume | WorkerStop
        match read_bridge(data, kinds):
            case WorkerPrepare() as prepare:
                return [self._prepare(prepare)]
            case WorkerChunk() as chunk:
                session.require_begun()
                return self._chunk(chunk)
            case WorkerStop():
                session.closing = True
            case message:
                session.require_begun()
                self._paused = isinstance(message, WorkerPause)
                session.add(type="paused" if self._paused else "resumed")
        return []

    def _prepare(self, message: WorkerPrepare) -> Command:
        prompt = message.system_prompt if isinstance(message.system_prompt, str) else ""
        recording = message.ref_audio_base64 or message.tts_ref_audio_base64
        pcm = self._session.decode_f32(recording) if recording else np.zeros(0, np.float32)
        data = to_pcm16(pcm)
        file = wav_header(SAMPLE_RATE_HZ, len(data)) + data if data else b""
        begin = self._session.begin(prompt, reference=file)
        self._session.add(type="prepared", prompt_length=len(prompt))
        return begin

    def _chunk(self, message: WorkerChunk) -> list[Command]:
        received_s = self._session.context.steady_s()
        pcm = self._session.decode_f32(message.audio_base64)
        commands: list[Command] = []
        if message.force_listen is True:
            # Stop the response, and drop its audio that was not sent yet.
            self._pending_audio, self._text, self._speaking = [], "", False
            commands.append(BargeIn("client_force_listen"))
        self._add_result(received_s)
        return commands if self._paused else [*commands, *appended(pcm)]

    def write(self, event: Event) -> None:
        """Keep text and audio for the next result, because this dialect only answers messages of the client."""
        match event:
            case ResponseTextDelta(_, text):
                self._text += text
                self._speaking = True
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._pending_audio.append(self._session.resample(at.item_id, pcm, rate_hz))
                self._speaking = True
            case ContentPartDone(at):
                self._pending_audio.append(self._session.flush_audio(at.item_id))
            case ResponseDone(response):
                self._speaking = False
                if response.usage:
                    self._kv_rows = response.usage.prompt_tokens + response.usage.completion_tokens
            case EpochRaised():
                # The response was cut off: drop its unsent audio and text.
                self._pending_audio, self._text, self._speaking = [], "", False
                self._end_is_due = False
            case _:
                return

    def _add_result(self, received_s: float) -> None:
        """Queue one result: exactly one second of audio, or less at the end of the response.

        `received_s`: the time at which the client's message arrived. The result reports the processing time since then.
        """
        waiting = np.concatenate(self._pending_audio) if self._pending_audio else np.zeros(0, np.float32)
        audio, rest = waiting[:OUT_HZ], waiting[OUT_HZ:]
        self._pending_audio = [rest]
        is_over = not self._speaking and not len(rest)
        # Send text with the first second of its audio, or at once if there is no synthesizer.
        is_text_due = len(audio) or is_over or not self._session.context.voices
        text, self._text = (self._text, "") if is_text_due else ("", self._text)
        is_response = bool(len(audio) or text)
        end_of_turn = is_over and (is_response or self._end_is_due)
        self._end_is_due = not end_of_turn and (is_response or self._end_is_due)
        if not (end_of_turn and len(audio)):
            audio = np.pad(audio, (OUT_HZ - len(audio), 0))
        took_ms = round((self._session.context.steady_s() - received_s) * 1000, 1)
        self._session.add(
            type="result",
            is_listen=not (is_response or end_of_turn),
            text=text,
            audio_data=f32_base64(audio),
            end_of_turn=end_of_turn,
            current_time=self._num_results,
            wall_clock_ms=took_ms,
            kv_cache_length=self._kv_rows,
            cost_all_ms=took_ms,
        )
        self._num_results += 1


DIALECT = Dialect(
    name="minicpmo",
    matches=lambda opening: opening.path == "/ws/duplex",
    connect=lambda opening, context: BridgeConnection(opening, context, MinicpmoWorkerBridge),
    paths=("/ws/duplex",),
    resume=Resume.NEVER,
)
