"""What a live realtime session asks of the session that it carries, of whatever kind."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from antiphon.events.conversation import ConfigureConversation, ConversationCommand
from antiphon.events.transcription import ConfigureTranscription
from antiphon.protocols.connection import WireConnection
from antiphon.server.live.witness import Witness
from antiphon.server.state import Caller, ServerState
from antiphon.sessions.conversation.context import ConversationContext, EmitConversation
from antiphon.sessions.conversation.history import ConversationHistory
from antiphon.sessions.conversation.progress import ConversationProgress
from antiphon.sessions.conversation.session import ConversationSession
from antiphon.sessions.duplex.session import DuplexSession
from antiphon.sessions.inbox import Inbox
from antiphon.sessions.transcription.decoding import Measure
from antiphon.sessions.transcription.session import TranscriptionSession
from antiphon.transports.transport import AudioPlayer


class SessionProgress(Protocol):
    """How far a session has come."""

    @property
    def audio_s(self) -> float:
        """Seconds of audio that it has listened to so far, silence included. What waits in the inbox does not count."""
        ...

    @property
    def is_silent(self) -> bool:
        """Whether nothing is under way: nobody speaks, all that came was worked off, nothing that was said waits for
        its transcript or its answer, and no answer is still heard.
        """
        ...


class RealtimeSession(Protocol):
    """What a LiveRealtime asks of its session, of whatever kind. Commands reach it through the inbox."""

    @property
    def progress(self) -> SessionProgress: ...

    async def run(self) -> None:
        """Run until the inbox is closed and what was in it is worked off. Whatever it raises ends the live session with
        `server_error`, and no other session.
        """
        ...


class RealtimeConversation(RealtimeSession, Protocol):
    """What it asks besides of a session that holds a conversation.

    `history`: restored before `run` is called, and stored whenever an event says that it has changed.
    """

    @property
    def history(self) -> ConversationHistory: ...

    @property
    def progress(self) -> ConversationProgress: ...

    def leave_open_turn(self) -> None:
        """Let the end of the inbox end no turn: another host hears again what is open then."""
        ...

    async def interrupt(self, reason: str) -> None:
        """Cancel the response under way with `reason`, and cut it to what was heard."""
        ...

    async def handle(self, command: ConversationCommand) -> None:
        """Handle one command at once, before those that wait in the inbox. Waits until the events that it leads to are
        emitted; a command that cannot be carried out is answered, and raises nothing.
        """
        ...


def new_transcription(
    state: ServerState,
    wire: WireConnection,
    first: ConfigureTranscription,
    inbox: Inbox,
    emit: EmitConversation,
    measure: Measure,
) -> TranscriptionSession:
    """Return the session of a wire that transcribes, with the models of the server."""
    models = state.loaded()
    return TranscriptionSession(
        first.config,
        models.required_transcriber,
        models.required_vad,
        inbox,
        emit,
        min_commit_ms=wire.min_commit_ms,
        measure=measure,
        turn_detector=models.turn_detector,
    )


def new_conversation(
    state: ServerState,
    caller: Caller,
    wire: WireConnection,
    first: ConfigureConversation,
    inbox: Inbox,
    emit: EmitConversation,
    playback: AudioPlayer | None,
    witness: Witness,
) -> ConversationSession | DuplexSession:
    """Return the session of a wire that holds a conversation, with the models of the server, and an empty history."""
    models = state.loaded()
    assert models.conversation_model
    context = ConversationContext(
        transcriber=models.required_transcriber,
        detector=models.required_vad,
        model=models.conversation_model,
        new_id=wire.context.new_id,
        turn_detector=models.turn_detector,
        image_reader=models.image_reader,
        speaker_model=models.speaker_model,
        measure=witness.measure,
        count=witness.count,
        min_commit_ms=wire.min_commit_ms,
        owner=caller.key,
    )
    make = partial(ConversationSession, first.config, context, inbox)
    if first.config.duplex:
        return DuplexSession(first.config.duplex, make, emit, epoch=wire.epoch)
    return make(emit=emit, playback=playback)
