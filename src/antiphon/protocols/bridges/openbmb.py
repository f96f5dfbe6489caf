"""The bridge for the openbmb-realtime SDK (`/v1/realtime?mode=audio|video`): docs/wire/bridges.md.

Audio is float32 in JSON, in deltas beside the text. `mode` makes no difference: a model that sees is given frames in
either.
"""

from __future__ import annotations

from typing import Any

from antiphon.audio import Pcm
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ContentPartDone,
    ContentPosition,
    ConversationEvent,
    ResponseAudioDelta,
    ResponseDone,
    ResponseTextDelta,
)
from antiphon.events.duplex import AppendFrames, BargeIn, ListenStepTaken
from antiphon.events.transcription import AppendAudio, SessionEnding, TranscriptDone, TranscriptionEvent
from antiphon.protocols.bridges.base import Bridge, f32_base64
from antiphon.protocols.duplex.session_fields import video_frames
from antiphon.protocols.wire import Frame

# The WebSocket subprotocol that the SDK asks for.
SUBPROTOCOL = "map.realtime"


class OpenbmbBridge(Bridge):
    """One connection. The server speaks first, to say that the client waits in no queue."""

    dialect = "openbmb"

    def open(self) -> None:
        """Queue `session.queue_done`. Raises RemoteProtocolError where no conversation model is loaded."""
        Bridge.open(self)
        self._add_frame(type="session.queue_done")

    def _handle_event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "session.init":
                payload = event.get("payload")
                given = payload if isinstance(payload, dict) else {}
                prompt = given.get("system_prompt")
                self._begin(prompt if isinstance(prompt, str) else "")
                self._add_frame(type="session.created", session_id=self.id)
            case "input.append":
                self._require_session()
                sent = event.get("input")
                if not isinstance(sent, dict):
                    raise RemoteProtocolError("bad_event", "input.append needs an input.", "input")
                pcm = self._decode_f32(sent.get("audio"))
                if sent.get("video_frames") is not None:
                    self._commands.append(AppendFrames(video_frames(sent["video_frames"])))
                if sent.get("force_listen") is True:
                    self._commands.append(BargeIn("client_force_listen"))
                if len(pcm):
                    self._commands.append(AppendAudio(pcm))
            case "session.close":
                self.closing = True
            case _:
                raise RemoteProtocolError("unknown_event", f"There is no event '{kind}'.", "type")

    def _send(self, output: TranscriptionEvent | ConversationEvent) -> None:
        """Queue the frames of an event: of a response its deltas and its end, of the user the transcript."""
        match output:
            case ResponseTextDelta(at, text):
                self._add_media(at, type="response.output_text.delta", text=text, kind="text", end_of_turn=False)
            case ResponseAudioDelta(at, pcm, rate_hz):
                self._add_audio(at, self._resample(at.item_id, pcm, rate_hz))
            case ContentPartDone(at):
                self._add_audio(at, self._flush_audio(at.item_id))
            case ResponseDone(response):
                used = response.usage
                counts = (used.prompt_tokens, used.completion_tokens) if used else (0, 0)
                usage = {"input_tokens": counts[0], "output_tokens": counts[1], "total_tokens": sum(counts)}
                self._add_frame(
                    type="response.done", response={"id": response.id, "status": response.status, "usage": usage}
                )
                self._add_frame(type="response.listen")
            case TranscriptDone(_, text) if text.strip():
                self._add_frame(type="conversation.item.input_audio_transcription.completed", transcript=text)
            case ListenStepTaken():
                self._add_frame(type="response.listen")
            case SessionEnding():
                self.closed()
            case _:
                return

    def closed(self) -> None:
        """Queue `session.closed`, which the client gets for its own close and for any other end of the session."""
        self._add_frame(type="session.closed", reason="closed", session_id=self.id)

    def _add_audio(self, at: ContentPosition, pcm: Pcm) -> None:
        if len(pcm):
            self._add_media(at, type="response.output_audio.delta", audio=f32_base64(pcm))

    def _add_media(self, at: ContentPosition, **fields: Any) -> None:
        epoch = self._epochs.get(at.response_id, self.epoch)
        if epoch == self.epoch:
            self._frames.append(Frame(fields, epoch))
