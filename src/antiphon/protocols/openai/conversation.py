"""OpenAI's Realtime conversation, with GA (general availability) or beta names: docs/wire/openai-realtime.md."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET

from antiphon.audio import Pcm
from antiphon.events.conversation import (
    ConfigureConversation,
    ContentPartDone,
    ConversationConfig,
    Response,
    ResponseAudioDelta,
    ResponseCreated,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.tools import NamedServer
from antiphon.events.transcription import ClearAudio, CommitAudio
from antiphon.protocols.connection import Command, Context, Event
from antiphon.protocols.fields import Reader
from antiphon.protocols.openai.transcription import MIN_COMMIT_MS
from antiphon.protocols.realtime.audio_buffer import AudioBuffer, appended, openai_audio
from antiphon.protocols.realtime.beta_session import BetaSession, beta_session, read_beta_update
from antiphon.protocols.realtime.commands import FrameReader, command_of
from antiphon.protocols.realtime.conversation_events import ConversationEvents, OutputAudio, RunningOutputs
from antiphon.protocols.realtime.input_fields import (
    PCM_24K,
    AudioInput,
    InputFields,
    SessionVoices,
    apply_input,
    session_voices,
)
from antiphon.protocols.realtime.items import ItemContext, VoiceId
from antiphon.protocols.realtime.messages import (
    ConversationMessage,
    InputAudioBufferAppend,
    InputAudioBufferClear,
    InputAudioBufferCommit,
    ItemMessage,
    ResponseCancel,
    ResponseCreate,
    SessionUpdate,
    read_message,
)
from antiphon.protocols.realtime.session_fields import (
    GaSession,
    SessionFields,
    SessionOutput,
    apply_output,
    apply_own,
    conversation_config,
    ga_session,
    read_ga_update,
    uses_beta_names,
    uses_ga_names,
)
from antiphon.protocols.realtime.shown_items import ShownOutput, ShownResponse, response_json
from antiphon.protocols.realtime.tool_servers import headers_of
from antiphon.protocols.realtime.transcript_events import TranscriptEvents
from antiphon.protocols.realtime.turn_fields import CONVERSATION_VAD
from antiphon.protocols.realtime.writer import EventWriter, beta_paths
from antiphon.protocols.wire import Frame

_InputMessage = SessionUpdate | InputAudioBufferAppend | InputAudioBufferCommit | InputAudioBufferClear
# The messages of a client, without and with those that need a server which plays the responses itself.
_Message = _InputMessage | ItemMessage | ResponseCreate | ResponseCancel
ConversationInput = _InputMessage | ConversationMessage
INPUT: Reader[_Message] = Reader(_Message)
_ANY_INPUT: Reader[ConversationInput] = Reader(ConversationInput)


class ConversationSnapshot(msgspec.Struct):
    """The stored form of the configuration. Never rename a field. `spoken`: audio was sent to the client."""

    model: str
    audio: AudioInput
    fields: SessionFields
    beta: bool
    spoken: bool


class OpenAIConversation(FrameReader[ConversationInput]):
    """The dialect of one connection, after its `session.created` was sent (negotiation.py).

    `model`: the name in the URL, shown as the client spells it. `beta`: events and sessions have beta names.
    `server_plays`: the server plays the audio of responses on a WebRTC track, so events carry no audio. A whole update
    is checked before any of it is applied.
    """

    name = "realtime"
    min_commit_ms = MIN_COMMIT_MS

    def __init__(
        self, context: Context, session_id: str, expires_at: int, model: str, *, beta: bool, server_plays: bool = False
    ) -> None:
        self._context = context
        self._session_id = session_id
        self._expires_at = expires_at
        self._model = model
        self._server_plays = server_plays
        voices = context.voices
        self._audio = AudioInput(turn_detection=CONVERSATION_VAD)
        self._voices = SessionVoices()
        # The headers for the tool servers that the session names, by their labels. They are neither shown nor stored.
        self._headers: Mapping[str, Mapping[str, str]] = {}
        self._fields = SessionFields(
            ["audio"] if voices else ["text"], output=SessionOutput(voice=voices[0] if voices else "")
        )
        self._buffer = AudioBuffer(PCM_24K, openai_audio(context.max_append_bytes))
        self._items = ItemContext(
            context.new_id,
            self._buffer.whole,
            self._loaded_voice,
            lambda: self._fields.output.format,
            context.check_tools,
            None if beta else self._check_server,
        )
        super().__init__(EventWriter(context.new_id))
        self._writer.beta = beta
        self._transcripts = TranscriptEvents(self._writer, context.new_id)
        self._events = ConversationEvents(self._writer, self._transcripts, knows_server_calls=True)
        self._output = OutputAudio(self._writer, self._events, by_events=not server_plays)
        self._running = RunningOutputs(lambda: ShownOutput(self._fields.output.format, self._fields.output.voice))
        # True if an update had a name that exists only in the GA API. The session then keeps GA names.
        self._is_ga = False
        # True if audio was sent to the client. The voice can then no longer change.
        self._has_spoken = False

    # --- the session

    def preset(self, session: msgspec.Raw) -> None:
        """Apply the session of a client secret or a call, before the session begins. Sends nothing to the client.

        Raises RemoteProtocolError for an invalid field, and then changes nothing.
        """
        self._apply(session)

    def configured(self) -> ConfigureConversation:
        """Return the command that begins the session or changes its configuration."""
        return ConfigureConversation(self._config())

    def session(self) -> GaSession | BetaSession:
        """Return the session as the client sees it, with the names in use: beta or GA."""
        show = beta_session if self._writer.beta else ga_session
        return show((self._session_id, self._expires_at, self._model), self._fields, self._audio)

    def snapshot(self) -> ConversationSnapshot:
        """Return the session's configuration, to be stored for `restore`."""
        return ConversationSnapshot(self._model, self._audio, self._fields, self._writer.beta, self._has_spoken)

    def restore(self, session_id: str, kept: ConversationSnapshot) -> None:
        """Take over the id and configuration of a stored session.

        Raises RemoteProtocolError if the session's enrolled voice no longer exists.
        """
        self._voices = session_voices(SessionVoices(), InputFields(), kept.audio, self._context)
        self._session_id, self._model = session_id, kept.model
        self._audio, self._fields = kept.audio, kept.fields
        self._writer.beta, self._is_ga, self._has_spoken = kept.beta, not kept.beta, kept.spoken
        self._buffer.set_format(kept.audio.format)
        self._transcripts.include = kept.fields.included

    def _config(self) -> ConversationConfig:
        voice = self._loaded_voice(self._fields.output.voice)
        return conversation_config(self._fields, self._audio, voice, self._voices, self._headers)

    def _loaded_voice(self, asked: VoiceId | str) -> str | None:
        return self._context.loaded_voice(asked.id if isinstance(asked, VoiceId) else asked)

    def _check_server(self, server: NamedServer, param: str) -> None:
        """Check a tool server that a response names, which has to be one of the operator's or of the session's."""
        if server.label not in self._headers:
            self._context.check_server(server, param)

    # --- from the client

    def _read(self, data: str | bytes) -> ConversationInput:
        # Errors list only the messages that every client may send.
        if self._server_plays:
            return read_message(data, _ANY_INPUT, INPUT.tags)
        return read_message(data, INPUT, INPUT.tags)

    def _commands(self, message: ConversationInput, data: str | bytes | msgspec.Raw) -> list[Command]:
        match message:
            case InputAudioBufferAppend(audio=audio):
                return [*appended(self._buffer.feed(audio))]
            case InputAudioBufferCommit():
                return [*appended(self._buffer.flush()), CommitAudio(event_id=message.own_id)]
            case InputAudioBufferClear():
                self._buffer.flush()
                return [ClearAudio()]
            case SessionUpdate(session=session):
                held_back = self._apply(session)
                language = self._audio.transcription.language if self._audio.transcription else None
                warnings = self._context.unspoken(language or None, "session.audio.input.transcription.language")
                extra = {"warnings": warnings} if warnings else {}
                self._writer.event("session.updated", session=self.session(), **extra)
                return [*appended(held_back), self.configured()]
            case _:
                return [command_of(message, self._items)]

    def _apply(self, session: msgspec.Raw) -> Pcm:
        """Check a whole update, then apply it. If one field is invalid, the whole update is refused.

        Returns the audio that was held back in the previous format.
        """
        beta = self._writer.beta or (not self._is_ga and uses_beta_names(session))
        given = read_beta_update(session) if beta else read_ga_update(session)
        with beta_paths(beta):
            audio = apply_input(self._audio, given.input, self._context, "session.audio.input.")
            voices = session_voices(self._voices, given.input, audio, self._context)
            fields = apply_own(self._fields, given.own, self._context, knows_servers=not beta)
            fields.output = apply_output(self._fields.output, given.output, self._context, has_spoken=self._has_spoken)
        if given.own.tools is not UNSET:
            self._headers = headers_of(given.own.tools or (), "session.tools")
        self._audio, self._voices, self._fields, self._writer.beta = audio, voices, fields, beta
        self._is_ga = self._is_ga or (not beta and uses_ga_names(session))
        self._transcripts.include = fields.included
        return self._buffer.change_format(audio.format)

    # --- to the client

    def send(self, event: Event) -> list[Frame]:
        """Return the frames of an event. Some events have no frames, and some GA events do not exist in the beta API.

        Raises LocalProtocolError for an event that cannot occur in a conversation.
        """
        match event:
            case ResponseCreated(response):
                output = self._running.of(response.id)
                self._writer.event("response.created", response=self._response_json(response, output))
            case ResponseDone(response):
                output = self._running.ended(response.id)
                self._writer.event("response.done", response=self._response_json(response, output))
                self._writer.event("rate_limits.updated", rate_limits=[])
            case ResponseTextDelta() | ResponseAudioDelta() | ContentPartDone():
                self._has_spoken = self._has_spoken or isinstance(event, ResponseAudioDelta)
                self._output.write(event, self._running.of(event.at.response_id).format)
            case _:
                self._events.write(event)
        return self._writer.take()

    def _response_json(self, response: Response, output: ShownOutput) -> ShownResponse:
        beta, shows = self._writer.beta, self._events.shows_server_calls
        return response_json(response, self._session_id, output, beta=beta, shows_server_calls=shows)
