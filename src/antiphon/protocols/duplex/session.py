"""The state of a full-duplex session: the fields that clients set and see, and that snapshots store."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.events.conversation import ConfigureConversation
from antiphon.protocols.connection import Context
from antiphon.protocols.duplex.session_fields import (
    DuplexFields,
    DuplexUpdateFields,
    ShownSession,
    apply_duplex,
    audio_json,
    capabilities,
    conversation_changes,
    duplex_config,
    input_format,
    output_format,
)
from antiphon.protocols.fields import Unread
from antiphon.protocols.realtime.input_fields import (
    AudioFormat,
    AudioInput,
    InputFields,
    SessionVoices,
    apply_input,
    session_voices,
)
from antiphon.protocols.realtime.items import VoiceId
from antiphon.protocols.realtime.session_fields import (
    SessionFields,
    SessionOutput,
    apply_output,
    apply_own,
    conversation_config,
)
from antiphon.protocols.realtime.turn_fields import TurnDetection
from antiphon.turns.end_of_turn import semantic_vad


class DuplexSnapshot(msgspec.Struct):
    """The stored form of the session's configuration and epoch.

    Never rename a field. A new field needs a default, because older snapshots do not have it.
    """

    # The model's name as the client spells it.
    model: str
    # The settings of the client's audio.
    audio: AudioInput
    # The fields that an OpenAI conversation has too.
    fields: SessionFields
    # Whether audio was sent to the client. The voice can then no longer change.
    spoken: bool
    # The fields that only a full-duplex session has, without `ref_audio`.
    own: DuplexFields
    # The session's last epoch.
    epoch: int


class DuplexSessionState:
    """The state of a full-duplex session.

    `id`: the id that the client knows. `model`: the model's name as the client spells it. `epoch`: the current epoch.
    Audio and text of older epochs are not sent. `has_spoken`: audio was sent to the client, so the voice can no longer
    change. `resume_token`: the token with which a client resumes the session; None if it cannot be resumed.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.id = context.new_id("sess-")
        self.model = ""
        self.epoch = 0
        self.has_spoken = False
        self.resume_token = context.resume_token
        self._expires_at = context.expires_at
        voices = context.voices
        self._audio = AudioInput(AudioFormat("pcm16", SAMPLE_RATE_HZ))
        self._voices = SessionVoices()
        self._fields = SessionFields(
            ["audio"] if voices else ["text"],
            output=SessionOutput(AudioFormat("pcm16", 24000), voices[0] if voices else ""),
        )
        self.own = DuplexFields()

    @property
    def input_format(self) -> AudioFormat:
        """The format of the client's audio."""
        return self._audio.format

    @property
    def output(self) -> SessionOutput:
        """The format, voice and speed of the audio for the client."""
        return self._fields.output

    @property
    def responds(self) -> bool:
        """Whether the model responds to a turn without a request from the client."""
        vad = self._audio.turn_detection or TurnDetection()
        extra = self.own.extra
        answers = extra.full_duplex if extra.auto_response is None else extra.auto_response
        return answers is not False and vad.responds

    def set_input_format(self, form: AudioFormat) -> None:
        """Set the format of the client's audio from now on."""
        self._audio = msgspec.structs.replace(self._audio, format=form)

    def update(self, given: DuplexUpdateFields) -> None:
        """Check a whole update, then apply it. Raises RemoteProtocolError, without any change, for an invalid field."""
        context, changes = self._context, conversation_changes(given)
        own = apply_duplex(self.own, given)
        audio = apply_input(self._audio, changes.input, context, "session.")
        voices = session_voices(self._voices, changes.input, audio, context)
        fields = apply_own(self._fields, changes.own, context)
        audio.format = input_format(given, audio.format)
        out_form = output_format(given, fields.output.format)
        output = apply_output(fields.output, changes.output, context, has_spoken=self.has_spoken)
        fields.output = msgspec.structs.replace(output, format=out_form)
        if given.ref_audio is not None and not context.unit_ms:
            context.log_alias("a voice cloned from ref_audio", output.voice_name or "no voice")
        self._audio, self._voices, self._fields, self.own = audio, voices, fields, own
        if isinstance(given.model, str) and given.model:
            self.model = given.model

    def configured(self) -> ConfigureConversation:
        """Return the command that begins the session or changes its configuration."""
        voice = self.loaded_voice(self.output.voice)
        config = conversation_config(self._fields, self._audio, voice, self._voices)
        vad, transcription = self._audio.turn_detection, config.transcription
        if vad is None:
            # With null, the server chooses: a native model decides by itself, and a cascade uses a turn detector.
            transcription = replace(transcription, vad=semantic_vad())
        policy = self.own.overlap_policy
        return ConfigureConversation(
            replace(
                config,
                transcription=replace(transcription, partials=True),
                create_response=self.responds,
                interrupt_response=(vad or TurnDetection()).interrupts and policy != "listen_only",
                # A native model hears the user during its responses. The client may set turn detection instead.
                native_decides_interruptions=vad is None,
                reports_transcripts=True,
                allows_backchannels=policy == "auto",
                duplex=duplex_config(self.own),
            )
        )

    @property
    def unspoken(self) -> list[Unread]:
        """Return a warning for the client if no loaded voice speaks the session's language."""
        language = self._audio.transcription.language if self._audio.transcription else None
        return self._context.unspoken(language or None, "session.input_audio_transcription.language")

    def loaded_voice(self, asked: VoiceId | str) -> str | None:
        """Return the loaded voice with this name; None stands for the default voice."""
        return self._context.loaded_voice(asked.id if isinstance(asked, VoiceId) else asked)

    def shown(self) -> ShownSession:
        """Return the session as it is shown to a client."""
        f, form, out, own = self._fields, self._audio.format, self.output, self.own
        return ShownSession(
            id=self.id,
            session_id=self.id,
            model=self.model,
            expires_at=self._expires_at,
            modalities=["audio", "text"] if f.speaks else ["text"],
            instructions=f.instructions,
            voice=out.voice,
            input_audio_format=form.type,
            output_audio_format=out.format.type,
            sample_rate_hz=form.rate_hz,
            audio=audio_json(self._audio, out),
            turn_detection=self._audio.turn_detection,
            input_audio_transcription=self._audio.transcription,
            tools=f.tools,
            tool_choice=f.tool_choice,
            max_response_output_tokens=f.max_output_tokens,
            **{name: getattr(own, name) for name in own.__struct_fields__ if name != "ref_audio"},
            epoch=self.epoch,
            capabilities=capabilities(
                unit_ms=self._context.unit_ms,
                speaks=bool(self._context.voices),
                resumes=self.resume_token is not None,
            ),
        )

    def snapshot(self) -> DuplexSnapshot:
        """Return the session's state to store, without `ref_audio`."""
        own = msgspec.structs.replace(self.own, ref_audio=None)
        return DuplexSnapshot(self.model, self._audio, self._fields, self.has_spoken, own, self.epoch)

    def restore(self, session_id: str, kept: DuplexSnapshot) -> None:
        """Take over the id and configuration of a stored session.

        Increases the epoch, so that nothing from an earlier response is sent. Raises RemoteProtocolError if the
        session's enrolled voice no longer exists.
        """
        self._voices = session_voices(SessionVoices(), InputFields(), kept.audio, self._context)
        self.id, self.model, self.epoch = session_id, kept.model, kept.epoch + 1
        self._audio, self._fields, self.own, self.has_spoken = kept.audio, kept.fields, kept.own, kept.spoken
