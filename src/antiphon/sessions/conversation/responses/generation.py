"""The generation of a response: the request to the model, and the chunks that the model returns.

A response task reads from a `ResponseSource`, which is the answer to a request or a turn that a native model began by
itself.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

import anyio

from antiphon.contracts import (
    AudioPart,
    ConversationProfile,
    ConversationStream,
    Message,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    VoiceOptions,
)
from antiphon.errors import EngineError, ModelError, Refused, RemoteProtocolError
from antiphon.events.conversation import ContentPart, ConversationConfig, CreateResponse, Item, Response
from antiphon.events.words import Word
from antiphon.sessions.conversation.context import ConversationContext
from antiphon.sessions.conversation.history import ConversationHistory

# Chunks of a response that may wait for its reader. At the limit, the model waits.
MAX_WAITING_CHUNKS = 64
# What a model reads in place of the result of a call, if it is to word a filler or to say a given one.
FILLER_HINT = "The result is not known yet. Now say in a few words that you are looking, and nothing else."
FILLER_TEXT = "The result is not known yet. Now say exactly these words, and nothing else: {}"

FAILURES = (ModelError, EngineError, Refused, RemoteProtocolError)
# The arguments of `ConversationStream.respond`. Two equal requests share one response.
ResponseRequest = tuple[tuple[Message, ...], ReplyOptions, VoiceOptions | None]


def wants_audio(config: ConversationConfig, profile: ConversationProfile, command: CreateResponse) -> bool:
    """Return whether the response is to be spoken, which it is if the command asks for audio and the model has a voice.
    If the command does not specify this, the configuration does.
    """
    return (config.audio_output if command.audio_output is None else command.audio_output) and bool(profile.voices)


def request_for(
    config: ConversationConfig,
    history: ConversationHistory,
    profile: ConversationProfile,
    command: CreateResponse,
    voice: str | None,
    max_tokens: int | None,
    items: list[Item] | None = None,
) -> ResponseRequest:
    """Return the request to the model for one response. The configuration supplies the fields that `command` omits.

    The messages come from the command's items, else from `items`, else from the history. For `voice` see
    `voice_options`. Raises RemoteProtocolError if the command refers to an item that is not in the history.
    """
    if command.items is not None:
        items = [history.get(i) if isinstance(i, str) else i for i in command.items]
    instructions = config.instructions if command.instructions is None else command.instructions
    options = ReplyOptions(
        max_tokens=max_tokens,
        tools=config.tools if command.tools is None else command.tools,
        tool_choice=config.tool_choice if command.tool_choice is None else command.tool_choice,
        parallel_tool_calls=(
            config.parallel_tool_calls if command.parallel_tool_calls is None else command.parallel_tool_calls
        ),
        truncation=config.truncation,
    )
    spoken = voice_options(config, profile, voice) if wants_audio(config, profile, command) else None
    return history.messages(instructions, items), options, spoken


def voice_options(config: ConversationConfig, profile: ConversationProfile, voice: str | None) -> VoiceOptions:
    """Return how to speak. The case of `voice` does not matter, and an unknown name selects the default voice."""
    named = (v for v in profile.voices if voice and v.lower() == voice.lower())
    return VoiceOptions(next(named, profile.voices[0]), config.speed)


def spoken_item(own: Item | None, text: str = "", media: AudioPart | None = None) -> Item:
    """Return a user's item with what was said so far of a turn. `own`: the turn's item, if there is one."""
    return Item("", parts=[ContentPart("input_audio", text, media=media)], continues=own.continues if own else "")


def with_hint(items: Sequence[Item], calls: Sequence[Item], text: str) -> list[Item]:
    """Return items with a result for each of the calls that has the model say the filler `text`, or word one."""
    hint = FILLER_TEXT.format(text) if text else FILLER_HINT
    hinted: list[Item] = []
    for item in items:
        is_awaited = any(item is call for call in calls)
        if is_awaited and item.server:
            item = replace(item, status="completed", output=hint)
        hinted.append(item)
        if is_awaited and not item.server:
            hinted.append(Item("", "function_call_output", call_id=item.call_id, output=hint))
    return hinted


class ResponseSource(Protocol):
    """The source of a response's chunks: the answer to a request, or a turn that a native model began by itself.

    It has one reader, which calls `drop` at the end, even after an error.
    """

    def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the response's chunks in order, waiting for each. May be iterated once. Raises Refused, ModelError,
        EngineError and RemoteProtocolError, after the chunks that preceded the failure.
        """
        ...

    async def drop(self) -> None:
        """Stop reading, and end the response if it has not ended. May be called after the stream is exhausted. Some
        sources wait for the end of the response, others do not.
        """
        ...


def given(source: ResponseSource) -> Callable[[Response], Awaitable[ResponseSource]]:
    """Return a function that returns this source for any response."""

    async def give(_: Response) -> ResponseSource:
        return source

    return give


class ModelStream:
    """The stream of a conversation's model. It may be closed, which frees its KV, and is opened again when needed."""

    def __init__(self, context: ConversationContext) -> None:
        self._context = context
        self._stream: ConversationStream | None = None

    async def open(self) -> ConversationStream:
        """Return the stream. Raises Refused if the model has no room for it."""
        if self._stream is None:
            self._stream = await self._context.model.open(self._context.owner)
        return self._stream

    def is_this(self, stream: ConversationStream) -> bool:
        """Whether a stream is the one that `open` returns."""
        return stream is self._stream

    def close(self) -> bool:
        """Close the stream. Returns whether it was open."""
        stream, self._stream = self._stream, None
        if stream:
            stream.close()
        return stream is not None


class ResponseGeneration:
    """The generation of one response by a conversation model, in its own task: run `run` in a task group.

    It may begin before the response is requested. `request` consists of `messages`, `options` and `voice`, the
    arguments of `ConversationStream.respond`, and is compared with a later request. The model waits while 64 chunks are
    unread.
    """

    def __init__(
        self,
        model_stream: ConversationStream,
        messages: tuple[Message, ...],
        options: ReplyOptions,
        voice: VoiceOptions | None,
    ) -> None:
        self.model_stream = model_stream
        self.request = (messages, options, voice)
        self._send, self._receive = anyio.create_memory_object_stream[ResponseChunk](MAX_WAITING_CHUNKS)
        self._scope = anyio.CancelScope()
        self._failure: Exception | None = None
        self._ended = anyio.Event()
        # Set when a held generation may go on; None if it is not held.
        self._go_on: anyio.Event | None = None
        # Number of tokens so far: one for each piece of text, replaced by the model's own count when it has finished.
        self.num_tokens = 0

    async def run(self) -> None:
        """Generate until the model has finished, or until `cancel` is called. A failure of the model is kept and raised
        by `stream`, so that it does not end the session's task group.
        """
        try:
            with self._scope:
                async with aclosing(self.model_stream.respond(*self.request)) as chunks:
                    async for chunk in chunks:
                        if isinstance(chunk, ReplyDone):
                            self.num_tokens = chunk.completion_tokens or self.num_tokens
                        else:
                            self.num_tokens += isinstance(chunk, TextDelta)
                        if self._go_on:
                            await self._go_on.wait()
                        await self._send.send(chunk)
        except FAILURES as error:
            self._failure = error
        finally:
            self._send.close()
            self._ended.set()

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the model's chunks in order, waiting for each. For one reader at a time. Raises the model's error
        (Refused, ModelError, EngineError or RemoteProtocolError) after its last chunk. Ends without an error if
        cancelled.
        """
        async for chunk in self._receive:
            yield chunk
        if self._failure:
            raise self._failure

    async def drop(self) -> None:
        """Cancel the generation and wait for its end, even if the caller is cancelled. After that, the model's stream
        is free for another response. `run` must have been started.
        """
        self.cancel()
        with anyio.CancelScope(shield=True):
            await self._ended.wait()
        self._receive.close()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` or `drop` was called, so that the generation may be incomplete. True even if the generation
        had finished before the call.
        """
        return self._scope.cancel_called

    def cancel(self) -> None:
        """End the generation within one step of the model. Returns at once. Waiting chunks can still be read; the
        reader gets no error.
        """
        self._scope.cancel()

    def hold(self, held: bool) -> None:
        """Have the model wait after its next chunk (`held`), or go on. Repeating the current state is a no-op."""
        if held and self._go_on is None:
            self._go_on = anyio.Event()
        elif not held and self._go_on:
            self._go_on.set()
            self._go_on = None


class RestOfResponse:
    """Says the rest of a response that was ended: first what was sent and not heard, then what is generated.

    - `text`, `sent`: the text and the audio that were sent and not heard.
    - `cut_s`: the second of the first response's audio at which this one begins.
    - `source`: generates what follows. None if nothing does.

    If this response is ended too, its stream can be read on by another reader.
    """

    def __init__(
        self, text: str, sent: ResponseAudio, cut_s: float, source: ResponseGeneration | RestOfResponse | None
    ) -> None:
        self._sent: list[ResponseChunk] = [TextDelta(text)] if text else []
        self._sent += [sent] if len(sent.pcm) else []
        self._cut_s, self._source = cut_s, source

    async def stream(self) -> AsyncGenerator[ResponseChunk, None]:
        """Yield the chunks of the rest, waiting for each. Raises the errors of a generation."""
        while self._sent:
            yield self._sent.pop(0)
        if self._source is None:
            return
        self._source.hold(False)
        async for chunk in self._source.stream():
            if isinstance(chunk, ResponseAudio):
                yield replace(chunk, words=tuple(earlier(word, self._cut_s) for word in chunk.words))
            else:
                yield chunk

    def hold(self, held: bool) -> None:
        """Have the model wait, or go on."""
        if self._source:
            self._source.hold(held)

    def cancel(self) -> None:
        """End the generation within one step of the model. Returns at once."""
        if self._source:
            self._source.cancel()

    async def drop(self) -> None:
        """Cancel the generation and wait for its end."""
        if self._source:
            await self._source.drop()


def earlier(word: Word, by_s: float) -> Word:
    """Return the word with times that are this number of seconds earlier, and not before 0."""
    return replace(word, start_s=max(0.0, word.start_s - by_s), end_s=max(0.0, word.end_s - by_s))
