"""One connection in the dialect of Google's Gemini Live API: docs/wire/gemini-live.md.

Clients do not report what they have played. The server's clock decides how much of a response was heard, and when a
turn of the model is complete.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    ConfigureConversation,
    ContentPart,
    ContentPartDone,
    ContentPosition,
    CreateItem,
    CreateResponse,
    Item,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
    UserTurnCommitted,
)
from antiphon.events.duplex import AppendFrames, BargeIn, EpochRaised, PlayoutEnded
from antiphon.events.transcription import AppendAudio, CommitAudio, SpeechStarted, TranscriptDelta
from antiphon.protocols.bridge import OUT_HZ, BridgeConnection, BridgeSession
from antiphon.protocols.connection import Command, Context, Dialect, Event, FirstFrame, Resume, WireSnapshot
from antiphon.protocols.fields import call_arguments
from antiphon.protocols.gemini.messages import (
    ClientContent,
    FunctionResponse,
    GeminiBlob,
    GeminiContent,
    GeminiSetup,
    RealtimeInput,
    read_message,
)
from antiphon.protocols.gemini.setup import config_of
from antiphon.protocols.opening import Opening
from antiphon.protocols.realtime.audio_buffer import AudioBuffer, appended, openai_audio
from antiphon.protocols.realtime.input_fields import AudioFormat
from antiphon.protocols.realtime.items import video_frames
from antiphon.protocols.resume import DrainNotice, Notice, SessionResume
from antiphon.protocols.wire import Frame, Received

PATHS = tuple(
    f"/ws/google.ai.generativelanguage.{version}.GenerativeService.{method}"
    for version in ("v1", "v1beta", "v1alpha")
    for method in ("BidiGenerateContent", "BidiGenerateContentConstrained")
)
# WebSocket close code for a message that is not valid.
CLOSE_INVALID = 1007
# Maximum length of the reason of a close frame, in bytes.
MAX_REASON_BYTES = 120
PCM_16K = AudioFormat("audio/pcm", 16_000)
# Sample rates of audio, in Hz.
MIN_HZ, MAX_HZ = 8000, 48_000
_AUDIO_TYPE = re.compile(r"audio/(?:pcm|l16)(?:\s*;\s*rate\s*=\s*(?P<rate>\d{4,5}))?\s*", re.IGNORECASE)
OUT_TYPE = f"audio/pcm;rate={OUT_HZ}"


class GeminiSnapshot(msgspec.Struct):
    """The stored form of a session. Never rename a field. `calls`: ids and names of the calls without a result."""

    setup: msgspec.Raw
    epoch: int
    calls: dict[str, str]


class GeminiDialect:
    """The messages of one session. Errors have no message: the connection is closed."""

    name = "gemini"

    def __init__(self, session: BridgeSession) -> None:
        self._session = session
        self._buffer = AudioBuffer(PCM_16K, openai_audio(session.context.max_append_bytes))
        self._setup = GeminiSetup()
        # The setup message as it was sent.
        self.raw = msgspec.Raw(b"{}")
        # The calls that the client has not answered yet: their names, by their ids.
        self.calls: dict[str, str] = {}
        self.token = session.context.resume_token
        # Whether the model's turn has begun and is not complete.
        self._in_turn = False
        # Whether the user's turn has begun and is not committed.
        self._user_speaks = False
        # Whether audio has come since the last commit of a client that ends turns itself.
        self._has_audio = False
        # The newest camera image, for models that get images in items.
        self._image = ""
        self._awaits_history = False
        # The token counts of the model's turn so far, as a field of a message.
        self._usage: Any = {}

    # --- from the client

    def opened(self) -> None:
        """Queue nothing: the client sends first."""

    def closed(self) -> None:
        """Queue nothing: a close frame ends the session."""

    def error(self, error: RemoteProtocolError) -> None:
        """Queue nothing: Google's API has no message for errors."""

    def read(self, data: str | bytes) -> list[Command]:
        """Return the commands in one frame. Raises RemoteProtocolError for an invalid frame."""
        message, unknown = read_message(data)
        self._session.context.log_ignored(unknown, self.name)
        if message.setup:
            return self.set_up(message.setup, data)
        if not self._session.begun:
            raise RemoteProtocolError("invalid_request", "setup must be the first message.", "setup")
        if message.realtime_input:
            return self._realtime(message.realtime_input)
        if message.client_content:
            return self._content(message.client_content)
        if message.tool_response:
            found = message.tool_response.function_responses
            return self._results(found if isinstance(found, list) else [found])
        return []

    def set_up(self, setup: GeminiSetup, data: str | bytes) -> list[Command]:
        """Begin the session, or apply the setup of a client that has resumed it."""
        context, models = self._session.context, self._session.context.conversation_models
        name = setup.model.removeprefix("models/")
        if models is None or (models.strict and name and not models.exact(name)):
            raise RemoteProtocolError("model_not_found", f"The model `{name or 'default'}` does not exist.", "model")
        if name and models.exact(name) is None:
            context.log_alias(name, models.loaded[0])
        command = ConfigureConversation(config_of(setup, context))
        self._setup, self.raw = setup, msgspec.Raw(data if isinstance(data, bytes) else data.encode())
        if not self._session.begun:
            history = setup.history_config
            self._awaits_history = bool(history and history.initial_history_in_client_content)
            self._session.begun = True
            self._session.add(setupComplete={"sessionId": self._session.id})
        self._add_handle()
        return [command]

    def _realtime(self, sent: RealtimeInput) -> list[Command]:
        commands: list[Command] = []
        if sent.activity_start is not None:
            commands.append(BargeIn("activity_start"))
        for blob in (*(sent.media_chunks or ()), sent.audio, sent.video):
            if blob:
                commands += self._image_of(blob) if blob.mime_type.startswith("image/") else self._audio(blob)
        if sent.text:
            item = self._item("user", [ContentPart("input_text", sent.text)])
            commands += [BargeIn("text"), CreateItem(item), CreateResponse(when_busy="cut")]
        if sent.activity_end is not None:
            commands += self._end_of_activity()
        elif sent.audio_stream_end and self._user_speaks:
            commands += [*appended(self._buffer.flush()), CommitAudio()]
        return commands

    def _audio(self, blob: GeminiBlob) -> list[Command]:
        found = _AUDIO_TYPE.fullmatch(blob.mime_type or "audio/pcm")
        rate_hz = int(found["rate"] or PCM_16K.rate_hz) if found else 0
        if not MIN_HZ <= rate_hz <= MAX_HZ:
            message = f"Unsupported audio: '{blob.mime_type[:64]}'. Expected audio/pcm;rate=16000."
            raise RemoteProtocolError("invalid_value", message, "realtimeInput.audio.mimeType")
        before = self._buffer.change_format(AudioFormat("audio/pcm", rate_hz))
        commands = [*appended(before), *appended(self._buffer.feed(blob.base64))]
        self._has_audio = self._has_audio or bool(commands)
        return [*self._seen(), *commands]

    def _image_of(self, blob: GeminiBlob) -> list[Command]:
        frames = video_frames([blob.base64])
        if self._session.context.unit_ms:
            return [AppendFrames(frames)]
        self._image = f"data:{blob.mime_type};base64,{b64encode(frames[0]).decode()}"
        return []

    def _seen(self) -> list[Command]:
        """Return the item with the newest image, if the user has begun to speak since it came."""
        if not (self._image and self._user_speaks):
            return []
        item, self._image = self._item("user", [ContentPart("input_image", image=self._image)]), ""
        return [CreateItem(item)]

    def _end_of_activity(self) -> list[Command]:
        commands: list[Command] = [*appended(self._buffer.flush())]
        if not (self._has_audio or commands):
            return []
        self._has_audio, self._user_speaks = False, True
        return [*commands, *self._seen(), CommitAudio(), CreateResponse(when_busy="cut")]

    def _content(self, sent: ClientContent) -> list[Command]:
        turns = sent.turns if isinstance(sent.turns, list) else [sent.turns] if sent.turns else []
        items: list[Command] = [CreateItem(item) for turn in turns for item in self._items(turn)]
        if not sent.turn_complete:
            return items
        if self._awaits_history:
            self._awaits_history = False
            return items
        return [BargeIn("client_content"), *items, CreateResponse(when_busy="cut")]

    def _items(self, content: GeminiContent) -> list[Item]:
        """Return the items of a content: its message, and its calls and their results."""
        by_model = content.role == "model"
        found, parts = list[Item](), list[ContentPart]()
        for part in content.parts or ():
            if part.function_call:
                call = part.function_call
                text = msgspec.json.encode(call.args or {}).decode()
                new = self._item("assistant", kind="function_call", call_id=call.id or call.name, name=call.name)
                new.arguments = text
                found.append(new)
            elif part.function_response:
                found.append(self._result(part.function_response))
            elif part.inline_data and not by_model and part.inline_data.mime_type.startswith("image/"):
                image = part.inline_data
                video_frames([image.base64])
                parts.append(ContentPart("input_image", image=f"data:{image.mime_type};base64,{image.base64}"))
            elif part.text:
                parts.append(ContentPart("output_text" if by_model else "input_text", part.text))
        message = [self._item("assistant" if by_model else "user", parts)] if parts else []
        return [*message, *found]

    def _item(self, role: Any, parts: list[ContentPart] | None = None, **fields: Any) -> Item:
        return Item(self._session.context.new_id("item_"), role=role, parts=parts or [], **fields)

    def _result(self, sent: FunctionResponse) -> Item:
        output = msgspec.json.encode(sent.response or {}).decode()
        return self._item("user", kind="function_call_output", call_id=sent.id or sent.name, output=output)

    def _results(self, sent: Sequence[FunctionResponse]) -> list[Command]:
        """Return the items of results, and the request for a response when no call is without a result."""
        commands = list[Command]()
        for result in sent:
            # Older clients name the function only.
            named = (call for call, name in self.calls.items() if name == result.name)
            result.id = result.id or next(named, result.name)
            # The call may have been cancelled meanwhile.
            if self.calls.pop(result.id, None) is not None:
                commands.append(CreateItem(self._result(result)))
        if commands and not self.calls and any(result.scheduling != "SILENT" for result in sent):
            interrupts = any(result.scheduling == "INTERRUPT" for result in sent)
            commands.append(CreateResponse(when_busy="cut" if interrupts else "wait"))
        return commands

    # --- to the client

    def write(self, event: Event) -> None:
        """Queue the frames of an event."""
        session, setup = self._session, self._setup
        match event:
            case ResponseCreated(response) if response.stored:
                self._in_turn = True
                # The user has gone on instead of waiting for the results.
                self._cancel_calls()
            case ResponseTextDelta(at, text, spoken) if not spoken:
                self._add_content(at, {"text": text})
            case ResponseTextDelta(at, text) if setup.output_audio_transcription is not None:
                session.add_media(at, serverContent={"outputTranscription": {"text": text}})
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio(at, session.resample(at.item_id, pcm, rate_hz))
            case ContentPartDone(at):
                self._add_audio(at, session.flush_audio(at.item_id))
            case ArgumentsDone(_, call_id, name, arguments, server) if not server:
                self.calls[call_id] = name
                call = {"id": call_id, "name": name, "args": call_arguments(arguments)}
                session.add(toolCall={"functionCalls": [call]})
            case ResponseDone(response) if response.stored:
                if response.status == "cancelled":
                    self._interrupted()
                    return
                if used := response.usage:
                    self._usage = {"usageMetadata": _usage(used.prompt_tokens, used.completion_tokens)}
                if not self.calls:
                    session.add(serverContent={"generationComplete": True})
            case PlayoutEnded() if self._in_turn and not self.calls:
                self._in_turn = False
                self._complete()
                self._add_handle()
            case EpochRaised():
                self._interrupted()
            case SpeechStarted():
                self._user_speaks = True
            case UserTurnCommitted():
                self._user_speaks = False
            case TranscriptDelta(_, text) if setup.input_audio_transcription is not None:
                session.add(serverContent={"inputTranscription": {"text": text}})
            case _:
                return

    def _interrupted(self) -> None:
        """Report the end of the model's turn by the user, once."""
        if not self._in_turn:
            return
        self._in_turn = False
        self._cancel_calls()
        self._session.add(serverContent={"interrupted": True})
        self._complete()

    def _complete(self) -> None:
        self._session.add(serverContent={"turnComplete": True}, **self._usage)
        self._usage = {}

    def _cancel_calls(self) -> None:
        if self.calls:
            self._session.add(toolCallCancellation={"ids": list(self.calls)})
            self.calls.clear()

    def _add_audio(self, at: ContentPosition, pcm: Pcm) -> None:
        if len(pcm):
            data = b64encode(to_pcm16(pcm)).decode()
            self._add_content(at, {"inlineData": {"mimeType": OUT_TYPE, "data": data}})

    def _add_content(self, at: ContentPosition, part: Any) -> None:
        self._session.add_media(at, serverContent={"modelTurn": {"role": "model", "parts": [part]}})

    def _add_handle(self) -> None:
        """Report the handle of the session, if the client has asked for handles."""
        if self.token and self._setup.session_resumption:
            handle = f"{self._session.id}.{self.token}"
            self._session.add(sessionResumptionUpdate={"newHandle": handle, "resumable": True})


class GeminiConnection(BridgeConnection):
    """One connection. An invalid message closes it, as Google's server does."""

    _dialect: GeminiDialect

    def __init__(self, opening: Opening, context: Context) -> None:
        super().__init__(opening, context, GeminiDialect, partial(Frame, numbered=False, binary=True))
        self._pending = list[Command]()

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame ends the session."""
        try:
            commands = [data] if isinstance(data, AppendAudio) else self._dialect.read(data)
        except RecursionError:
            self.finishing, commands = (CLOSE_INVALID, "The message is nested too deeply."), []
        except RemoteProtocolError as error:
            self.finishing = CLOSE_INVALID, _reason(error)
            commands = []
        pending, self._pending = self._pending, []
        return Received([*pending, *commands], self._session.take())

    def notice(self, notice: Notice) -> list[Frame]:
        """Return `goAway` at a drain. Other notices have no message."""
        if isinstance(notice, DrainNotice) and self._session.begun:
            self._session.add(goAway={"timeLeft": f"{notice.within_s:.0f}s"})
        return self._session.take()

    def snapshot(self) -> WireSnapshot | None:
        """Return the session's state to store, without the items; None before the setup."""
        if not self._session.begun:
            return None
        kept = GeminiSnapshot(self._dialect.raw, self.epoch, self._dialect.calls)
        return WireSnapshot(self.id, self.dialect, msgspec.Raw(msgspec.json.encode(kept)))

    def restore(self, kept: WireSnapshot) -> None:
        """Continue a session from its stored state. Call it after `open`."""
        found = _SNAPSHOTS.decode(kept.session)
        self._session.id, self._session.epoch, self._session.begun = kept.session_id, found.epoch + 1, True
        self._dialect.calls = found.calls
        message, _ = read_message(bytes(found.setup))
        assert message.setup
        self._pending += self._dialect.set_up(message.setup, bytes(found.setup))
        self._session.take()

    def resumed(self, token: str, **facts: Any) -> Frame:
        """Return `setupComplete`. The session then reads the client's setup, and answers with the new handle."""
        self._dialect.token = token
        return Frame({"setupComplete": {"sessionId": self.id}}, numbered=False, binary=True)


# Made once: msgspec's description of a type must not be built by two threads at the same time.
_SNAPSHOTS = msgspec.json.Decoder(GeminiSnapshot)


def _usage(prompt: int, completion: int) -> dict[str, int]:
    return {"promptTokenCount": prompt, "responseTokenCount": completion, "totalTokenCount": prompt + completion}


def _reason(error: RemoteProtocolError) -> str:
    return error.message.encode()[:MAX_REASON_BYTES].decode(errors="ignore")


def _first_frame(data: str | bytes) -> FirstFrame:
    """Return what a setup asks for. Any other first frame, or an invalid one, is left for the connection to refuse."""
    try:
        setup = read_message(data)[0].setup
    except RemoteProtocolError:
        setup = None
    asked = setup.session_resumption if setup else None
    if not asked or not asked.handle:
        return FirstFrame(resumable=asked is not None)
    session_id, _, token = asked.handle.partition(".")
    return FirstFrame(SessionResume(session_id, token), is_read=True)


def _refusal(error: RemoteProtocolError, code: int) -> tuple[list[Frame], tuple[int, str]]:
    return [], (code, _reason(error))


DIALECT = Dialect(
    name="gemini",
    matches=lambda opening: opening.path in PATHS,
    connect=GeminiConnection,
    paths=PATHS,
    parameters=frozenset(),
    resume=Resume.ALWAYS,
    client_first=True,
    first_frame=_first_frame,
    refusal=_refusal,
    opens_secret=lambda opening: not opening.is_transcription,
)
