"""The common part of the voice agents of hosted services: a conversation over a cascade, in a dialect of its own.

The client plays what it receives, and drops it when the user interrupts. It reports no position, so the clock decides
how much of an answer was heard: audio that was sent is played in real time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from antiphon.audio import Pcm
from antiphon.audio.incoming import IncomingAudio
from antiphon.audio.pcm import Resampler
from antiphon.errors import RemoteProtocolError
from antiphon.events.conversation import (
    ArgumentsDone,
    ConfigureConversation,
    ContentPart,
    ContentPosition,
    ConversationConfig,
    CreateItem,
    CreateResponse,
    Item,
    ItemRole,
    ResponseCreated,
    ResponseDone,
)
from antiphon.events.duplex import DuplexConfig, EpochRaised
from antiphon.events.languages import language_code
from antiphon.events.transcription import AppendAudio, TranscriptionConfig
from antiphon.protocols.connection import Command, Context, Event, NeverResumed
from antiphon.protocols.opening import Opening
from antiphon.protocols.wire import Frame, Received
from antiphon.turns.end_of_turn import semantic_vad


class VoiceAgent(NeverResumed):
    """One conversation. A dialect implements `read`, `refuse` and `send`, and sets `finishing` at the end.

    `id_prefix`: the beginning of the conversation's id. `config` is the configuration with which it goes on, and
    `begun` says whether the session has got it.
    """

    # The name in metrics.
    dialect, id_prefix = "", ""
    closing, min_commit_ms = False, 1
    # Seconds without a frame after which the conversation ends.
    idle_s: float | None = 60.0

    def __init__(self, opening: Opening, context: Context) -> None:
        self.opening = opening
        self.context = context
        self.id = context.new_id(self.id_prefix)
        self.epoch = 0
        # The close code and reason, as soon as the session is to end.
        self.finishing: tuple[int, str] | None = None
        self.begun = False
        self.config = ConversationConfig(
            TranscriptionConfig(vad=semantic_vad(), preflight=True),
            audio_output=bool(context.voices),
            reports_transcripts=True,
            duplex=DuplexConfig(policy="auto"),
        )
        # The client's audio, and the sample rate in Hz of the audio for the client.
        self.audio, self.output_hz = IncomingAudio("s16"), 16_000
        self._resampler: Resampler | None = None
        # The epoch of each response in progress, the response whose audio is sent, and the response of each call that
        # has no result yet.
        self._epochs: dict[str, int] = {}
        self.speaking = ""
        self._calls: dict[str, str] = {}

    # --- what a dialect implements

    def read(self, data: str | bytes) -> Received[Command]:
        """Read one frame. Raises RemoteProtocolError, which `refuse` then reports."""
        raise NotImplementedError

    def refuse(self, error: RemoteProtocolError, event_id: str | None) -> list[Frame]:
        """Return an error for the client."""
        raise NotImplementedError

    # --- for what the client sends

    def check_model(self) -> None:
        """Raise RemoteProtocolError (`model_not_found`) if no conversation model is loaded, or a native one."""
        if self.context.conversation_models is None or self.context.unit_ms:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")

    def feed(self, data: str | bytes | AppendAudio) -> Received[Command]:
        """Read one frame from the client. An invalid frame changes nothing, and is answered with an error."""
        if isinstance(data, AppendAudio):
            return Received([data])
        before = self.config
        try:
            return self.read(data)
        except RemoteProtocolError as error:
            self.config = before
            return Received([], self.refuse(error, None))

    def begin(self, first_words: str | None, history: list[Item]) -> list[Command]:
        """Return the commands that begin the conversation: its configuration, what was said before, and a greeting."""
        self.begun = True
        greeting = [say(first_words)] if first_words else []
        return [ConfigureConversation(self.config), *map(CreateItem, history), *greeting]

    def hear(self, data: bytes) -> list[Command]:
        """Return the command that appends audio; [] if it completes no sample. Raises MediaError."""
        pcm = self.audio.feed(data)
        return [AppendAudio(pcm)] if len(pcm) else []

    def written(self, role: ItemRole, text: str) -> Item:
        """Return a new item with a text."""
        part = ContentPart("output_text" if role == "assistant" else "input_text", text)
        return Item(self.context.new_id("item_"), role=role, parts=[part])

    def answered(self, call_id: str, result: str, unknown: str) -> list[Command]:
        """Return the commands for the result of a call. When all calls of its response have one, the model answers.

        Raises RemoteProtocolError with the code `unknown` if there is no such call without a result.
        """
        response_id = self._calls.pop(call_id, None)
        if response_id is None:
            raise RemoteProtocolError(unknown, "There is no such function call.", "id")
        item = Item(self.context.new_id("item_"), "function_call_output", call_id=call_id, output=result)
        is_last = response_id not in self._calls.values()
        return [CreateItem(item), *([CreateResponse(when_busy="wait")] if is_last else [])]

    # --- for the configuration

    def set_language(self, name: str) -> None:
        """Set the language of the user by its code, or its name. A language that is not known is detected."""
        code = language_code(name)
        known = code if name != "multi" and self.context.knows_language(code) else None
        self.config = replace(self.config, transcription=replace(self.config.transcription, language=known))

    def set_model(self, name: str | None, refused: str) -> None:
        """Accept any name of a model for the loaded one. With strict names, another one raises RemoteProtocolError with
        the code `refused`.
        """
        models = self.context.conversation_models
        if not models or not name or models.exact(name) is not None:
            return
        if models.strict:
            raise RemoteProtocolError(refused, f"The model '{name[:80]}' does not exist.", "model")
        self.context.log_alias(name, models.loaded[0])

    def set_voice(self, name: str | None) -> None:
        """Set the voice. A name that is not loaded stands for the default voice."""
        voice = self.context.loaded_voice(name)
        if name and not voice and self.context.voices:
            self.context.log_alias(f"voice {name}", self.context.voices[0])
        self.config = replace(self.config, voice=voice)

    # --- for what the client gets

    def follow(self, event: Event) -> None:
        """Follow the epochs, and the calls of the client's functions. Call it for each event, before its frames."""
        match event:
            case EpochRaised(epoch):
                self.epoch, self.speaking, self._resampler = epoch, "", None
            case ResponseCreated(response):
                self._epochs[response.id] = self.epoch
            case ArgumentsDone(at, call_id, server=server) if not server and self.is_current(at):
                self._calls[call_id] = at.response_id
            case _:
                pass

    def is_current(self, at: ContentPosition) -> bool:
        """Whether a response is in progress, and the user has not interrupted it."""
        return self._epochs.get(at.response_id, -1) == self.epoch

    def sound(self, at: ContentPosition, pcm: Pcm, rate_hz: int) -> Pcm:
        """Return a response's audio at `output_hz`. Sets `speaking` to the response."""
        if self.speaking != at.response_id or self._resampler is None:
            self.speaking, self._resampler = at.response_id, Resampler(rate_hz, self.output_hz)
        return self._resampler.feed(pcm)

    def ended(self, event: ResponseDone) -> Pcm | None:
        """Forget a response. Returns the rest of its audio, which may be empty; None if its end was not spoken."""
        response_id = event.response.id
        is_whole = self._epochs.pop(response_id, -1) == self.epoch and self.speaking == response_id
        if not is_whole:
            return None
        rest = self._resampler.flush() if self._resampler else np.zeros(0, np.float32)
        self.speaking, self._resampler = "", None
        return rest

    def close(self) -> list[Frame]:
        """Return no frames: an error has said it."""
        return []


def say(text: str) -> CreateResponse:
    """Return the command for an answer with a given text. The model says it, so it may differ a little."""
    instructions = f"Say exactly the following, and nothing else:\n{text}"
    return CreateResponse(instructions=instructions, tool_choice="none", when_busy="wait")
