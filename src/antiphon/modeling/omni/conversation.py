"""Conversations of Qwen2.5-Omni and Qwen3-Omni: the thinker's text on one engine, the talker's speech on another.

Both engines serve all conversations at once. The thinker is a ChatModel with a media encoder. The talker gets the
tokens of a reply while the thinker writes them, and speaks them a little later.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import anyio
import numpy as np
import torch
from transformers import AutoTokenizer

from antiphon.audio import Pcm
from antiphon.contracts import (
    ConversationProfile,
    Message,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
)
from antiphon.engine.api import Engine, EngineSettings, Session
from antiphon.engine.local.engine import LocalEngine
from antiphon.engine.local.runner import Runner
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError
from antiphon.events.tools import Tool
from antiphon.modeling.chat import ChatModel, ChatStream
from antiphon.modeling.chat_template import ChatTemplate
from antiphon.modeling.media_rows import (
    ChatRow,
    MediaPiece,
    MediaRows,
    Run,
    common_prefix,
    grows,
    media_of,
    runs,
)
from antiphon.modeling.omni.hidden_rows import HiddenRow, states
from antiphon.modeling.omni.media_encoder import OmniMediaEncoder
from antiphon.modeling.text_decoder import TextDecoder
from antiphon.modeling.tool_grammar import CALL_OPENING
from antiphon.pipelines.merge import PutChunk, side_by_side
from antiphon.signals import Signal
from antiphon.text.word_timing import WordPacer

# The files of a released checkpoint that may contain its chat template.
TEMPLATES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True, slots=True)
class ThinkerParts:
    """The language model on its device.

    `model`: a thinker of `transformers` (Qwen2_5Omni… or Qwen3OmniMoeThinkerForConditionalGeneration), which contains
    the encoders and the token embedding. `decoder`: its text model and head, which the engine steps. `tokenizer`: a
    tokenizer of `transformers` with a chat template.
    """

    model: Any
    decoder: TextDecoder
    tokenizer: Any


def tokenizer(folder: Path) -> Any:
    """Return the checkpoint's tokenizer with its chat template, which is a separate file in released checkpoints.

    Raises OSError if the folder has no tokenizer, and ValueError if it has no template.
    """
    made: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    for name in TEMPLATES if not made.chat_template else ():
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            made.chat_template = json.loads(text)["chat_template"] if name.endswith(".json") else text
    if not made.chat_template:
        raise ValueError(f"it lacks a chat template ({', '.join(TEMPLATES)})")
    return made


# Sample rate of a talker's audio.
RATE_HZ = 24_000
NO_AUDIO = np.zeros(0, np.float32)
# A reply must be a call of a tool if one of the last FORCED_ROWS rows of its prompt begins a call.
FORCED_ROWS = 4


class SpokenTokens:
    """The tokens of one reply that must be spoken: the tokens before its end and before the first call of a tool.

    The chat stream calls `feed`. The talker reads `tokens` or `rows` once, in the same event loop. `chat`: the chat
    stream, whose `rows` are read when the reply begins. `stop`: the tokens that end a reply. `call_opening`: the token
    that begins a call; None: the model has no such token.
    """

    def __init__(self, chat: ChatStream, stop: frozenset[int], call_opening: int | None) -> None:
        self._chat, self._stop, self._call_opening = chat, stop, call_opening
        self._prompt: list[ChatRow] = []
        # The thinker's states of the prompt's rows, if the chat keeps them. Set when the first token arrives.
        self.prompt_states: list[HiddenRow] = []
        # The thinker's states of the reply's tokens, in order. Bound: the length of the reply.
        self._states: list[HiddenRow] = []
        # Tokens that are not spoken yet. Bound: a reply ends after `max_tokens`, or when its context is full.
        self._waiting: deque[int] = deque()
        self._changed = Signal()
        self._began = anyio.Event()
        self._ended = False

    def feed(self, token: int) -> None:
        """Take the next token of the reply, which is already the last of the chat's rows.

        The callback for ChatStream.on_token.
        """
        hidden = self._chat.hidden
        if self._began.is_set():
            if hidden:
                self._states.append(hidden.newest)
        else:
            self._prompt = self._chat.rows[:-1]
            if hidden:
                self.prompt_states = hidden.snapshot()
            self._began.set()
            if self._call_opening in self._prompt[-FORCED_ROWS:]:
                # The reply must be a call, so nothing of it is spoken.
                self.end()
        if token in self._stop or token == self._call_opening:
            self.end()
        elif not self._ended:
            self._waiting.append(token)
            self._changed.notify()

    def end(self) -> None:
        """End the speech: later tokens are dropped, and `prompt` and `tokens` stop waiting."""
        self._ended = True
        self._changed.notify()
        self._began.set()

    async def prompt(self) -> list[ChatRow]:
        """Return the conversation's rows before the reply.

        Waits for the reply's first token; empty if it has no tokens.
        """
        await self._began.wait()
        return self._prompt

    async def tokens(self) -> AsyncIterator[int]:
        """Yield the tokens in order, as they arrive, until the speech ends."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                return
            await self._changed.wait()

    async def rows(self, like: torch.Tensor) -> AsyncIterator[tuple[int, torch.Tensor]]:
        """Yield the tokens in order, each with its hidden state in the thinker, [width].

        The chat must have `hidden` set. The state of a token arrives with the next token. So a reply's last token,
        usually its stop token, is not spoken. `like`: see `states`.
        """
        spoken, waiting = 0, list[int]()
        async for token in self.tokens():
            if waiting:
                yield waiting.pop(), states(self._states[spoken : spoken + 1], like)[0]
                spoken += 1
            waiting = [token]
        if waiting and spoken < len(self._states):
            yield waiting.pop(), states(self._states[spoken : spoken + 1], like)[0]


class TalkerSide(Protocol):
    """A talker's side of one conversation. It owns a session of the talker's engine. One reply is spoken at a time."""

    async def prefill(
        self, prompt: Sequence[ChatRow], hidden: Sequence[HiddenRow], media: Mapping[MediaPiece, MediaRows]
    ) -> None:
        """Compute the rows of a prompt that continues, and wait for their KV. No reply is being spoken.

        The thinker has computed the rows of `prompt`. `hidden`: its states of these rows, if the chat keeps them.
        `media`: see `speak`. Raises ModelError and Refused.
        """
        ...

    def speak(
        self, spoken: SpokenTokens, media: Mapping[MediaPiece, MediaRows], voice: str, seed: int | None
    ) -> AsyncGenerator[Pcm, None]:
        """Yield the audio of a reply while its tokens arrive: float32 [num_samples] at RATE_HZ.

        `media`: the rows of the audio and images in the prompt. A reply without tokens to speak has no audio. Closing
        the generator ends the audio within one step. Raises ModelError and Refused.
        """
        ...

    def close(self) -> None:
        """Close the session and free its KV. A reply that is being spoken fails."""
        ...


class TalkerModel(Protocol):
    """A loaded talker on its own engine. `voices`: the names of its voices; the first is the default."""

    @property
    def voices(self) -> tuple[str, ...]: ...

    @property
    def engine(self) -> Engine: ...

    async def open(self) -> TalkerSide:
        """Return the talker's side of a new conversation. The caller must close it.

        Raises Refused if the engine is full.
        """
        ...


Talker = TypeVar("Talker", bound=TalkerModel)


class TalkerRows:
    """The rows of a conversation that a talker's session holds between replies, with their KV.

    `joined`: see MediaEncoder.
    """

    def __init__(self, session: Session, thread: ModelThread, joined: Collection[tuple[int, int]] = ()) -> None:
        self._session, self._thread, self._joined = session, thread, joined
        self._rows: list[ChatRow] = []
        # The number of the first row of each run of media rows, its piece, and the `MediaRows.hidden` that it was made
        # from.
        self._media: list[tuple[int, MediaPiece, Any]] = []

    async def hold(
        self,
        wanted: Sequence[ChatRow],
        media: Mapping[MediaPiece, MediaRows],
        make: Callable[[Run, int], torch.Tensor],
    ) -> None:
        """Make the session hold exactly the rows `wanted`. Rows that it already holds at the start stay.

        Rows of media are made again if the thinker has computed them again. Calls must not overlap.

        `make`: a function that returns a run of rows as the talker's input rows, [n, width]. It is called in the
        model's thread with the run and the number of rows before it.
        """
        changed = (at for at, piece, hidden in self._media if piece not in media or media[piece].hidden is not hidden)
        held = min(common_prefix(self._rows, wanted), next(changed, len(wanted)))
        try:
            self._session.rollback(held)
        except EngineError:
            # These rows have left the context, so all rows are computed again.
            self._session.rollback(0)
            held = 0
        self._rows = list(wanted[:held])
        self._media = [each for each in self._media if each[0] < held]
        for run in runs(wanted, held, media, self._joined):
            made = await self._thread.call_model(partial(make, run, held))
            self._session.append_embeddings(made, run.positions)
            if run.part is not None:
                self._media.append((held, run.part, media[run.part].hidden))
            held += len(made)
            self._rows = list(wanted[:held])


class OmniModel(Generic[Talker]):
    """The common part of both conversation models: they hear, see, write and speak. The server decides when they speak.

    `thinker`: the language model, which can also be used alone for text. `talker`: the voice, set by the adapter; None
    if the checkpoint does not contain it. `call_opening`: the token that begins a call of a tool. `taps_media`: hidden
    states of media rows are kept, for a talker that reads those of a middle layer.
    """

    native = None
    taps_media = False
    profile: ConversationProfile

    def __init__(self, folder: Path, model_id: str, parts: ThinkerParts, engine: LocalEngine) -> None:
        """Build the thinker from its parts. If that fails, closes `engine`, which steps the decoder.

        Raises OSError or ValueError if the folder lacks the processors' settings.
        """
        words = parts.tokenizer
        try:
            self.thinker = ChatModel(folder, model_id, engine, words)
            self.thinker.template = ChatTemplate(words, takes_media=True)
            has_tap = self.taps_media and parts.decoder.has_tap
            encoder = OmniMediaEncoder(folder, parts.model, words, engine.thread, has_tap=has_tap)
            if "encoder" in engine.settings.graphs:
                encoder.sound_encoder.capture()
        except BaseException:
            engine.close()
            raise
        self.thinker.media_encoder = self.media_encoder = encoder
        self.talker: Talker | None = None
        self.call_opening: int | None = words.convert_tokens_to_ids(CALL_OPENING)

    def with_media(self, profile: ConversationProfile) -> ConversationProfile:
        """Return a profile with the thinker's abilities added: it takes media, and follows schemas."""
        return replace(
            profile,
            accepts_media=True,
            keeps_to_schemas=True,
            video_window_s=self.media_encoder.window_s,
            audio_window_ms=10 * self.media_encoder.window_frames,
        )

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of the thinker and the talker, for the watchdogs of their threads."""
        return (self.thinker.engine, *((self.talker.engine,) if self.talker else ()))

    def close(self) -> None:
        """Stop the engines' threads. Conversations that are still open fail."""
        for engine in self.engines:
            engine.close()


def share_kv(settings: EngineSettings) -> tuple[EngineSettings, EngineSettings]:
    """Return the settings of the thinker, with three quarters of the KV memory, and of the talker, with the rest.

    A row of the talker takes a fifth of the memory of a thinker's row.
    """
    quarter = settings.kv_bytes // 4
    return replace(settings, kv_bytes=quarter * 3), replace(settings, kv_bytes=quarter, context_rows=0)


def start_engine(
    decoder: TextDecoder,
    device: str,
    compute: torch.dtype,
    dtype: torch.dtype,
    settings: EngineSettings,
    observe: Callable[[int, int, float], None] | None,
    tokenizer: Any = None,
) -> LocalEngine:
    """Return an engine that steps a decoder whose positions have three axes. Raises the errors of LocalEngine."""
    runner = Runner(decoder, torch.device(device), compute, dtype, position_axes=3, input_width=decoder.input_width)
    return LocalEngine(runner, settings, tokenizer=tokenizer, observe=observe)


class OmniStream:
    """A ConversationStream: the thinker's conversation and, from the first spoken response on, the talker's.

    `chat` is the thinker's side, and `talker` the talker's. The stream owns both, and `close` closes them.
    """

    def __init__(self, model: OmniModel[Any], chat: ChatStream) -> None:
        self.chat = chat
        self.talker: TalkerSide | None = None
        self._model = model
        # Whether the talker gets audio that grows: unless the last response was text only.
        self._aloud = True
        # The number of the newest request. A prefill of the talker does nothing more after another request has begun.
        self._request = 0
        self._prefilling = anyio.Lock()

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Let the thinker compute these messages in advance, and the talker if audio among them still grows.

        Waits for the encoders of new audio and images. With audio that grows, also waits until the thinker has
        computed the rows, which the talker reads. Raises RemoteProtocolError, ModelError.
        """
        self._request = request = self._request + 1
        await self.chat.prefill(messages, tools)
        if not (self._aloud and self._model.talker and any(map(grows, media_of(messages)))):
            return
        rows, hidden = list(self.chat.rows), self.chat.hidden.snapshot() if self.chat.hidden else []
        await self.chat.session.settle(include_newest=True)
        async with self._prefilling:
            if self._request == request:
                self.talker = self.talker or await self._model.talker.open()
                await self.talker.prefill(rows, hidden, self.chat.media_rows)

    async def respond(
        self, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions | None
    ) -> AsyncGenerator[ResponseChunk, None]:
        """Respond to the last message: yields text while the thinker writes it, and audio while the talker speaks it.

        With `voice` None, or without a talker, there is no audio. Calls of tools are not spoken. The times of the
        audio's words are estimates. Closing the generator stops both decoders within one step. Raises Refused,
        ModelError and RemoteProtocolError.
        """
        chunks: AsyncGenerator[ResponseChunk, None]
        self._request, self._aloud = self._request + 1, voice is not None
        if voice is None or self._model.talker is None:
            chunks = self.chat.reply(messages, options)
        else:
            if self.talker is None:
                async with self._prefilling:
                    self.talker = self.talker or await self._model.talker.open()
            chunks = self._respond_aloud(self.talker, messages, options, voice)
        async with aclosing(chunks):
            async for chunk in chunks:
                yield chunk

    async def _respond_aloud(
        self, talker: TalkerSide, messages: Sequence[Message], options: ReplyOptions, voice: VoiceOptions
    ) -> AsyncGenerator[ResponseChunk, None]:
        spoken = SpokenTokens(self.chat, self._model.thinker.stop_tokens, self._model.call_opening)
        pacer = WordPacer()

        async def write(put: PutChunk) -> None:
            self.chat.on_token = spoken.feed
            try:
                async with aclosing(self.chat.reply(messages, options)) as replies:
                    async for reply in replies:
                        if isinstance(reply, TextDelta):
                            pacer.feed(reply.text)
                        await put(reply)
            finally:
                self.chat.on_token = None
                spoken.end()

        async def speak(put: PutChunk) -> None:
            seed = options.seed if voice.seed is None else voice.seed
            async with self._prefilling:
                # A prefill that has begun ends first. Later ones do nothing.
                pass
            async with aclosing(talker.speak(spoken, self.chat.media_rows, voice.voice, seed)) as audio:
                async for pcm in audio:
                    await put(ResponseAudio(pcm, pacer.advance(len(pcm) / RATE_HZ)))
            if words := pacer.finish():
                await put(ResponseAudio(NO_AUDIO, words))

        async with aclosing(side_by_side(write, speak)) as chunks:
            async for chunk in chunks:
                yield chunk

    def close(self) -> None:
        """Close both sessions. The thinker's KV is kept for a later conversation that begins with the same rows.

        The KV of rows that were appended as embeddings is not kept, because conversations cannot share it.
        """
        self.chat.close(keep=self.chat.hidden is None)
        if self.talker:
            self.talker.close()
