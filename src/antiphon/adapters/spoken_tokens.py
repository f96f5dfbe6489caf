"""Hands a reply from the thinker, which writes it, to the talker, which speaks it a little later."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Protocol

import anyio

from antiphon.contracts import Message, ReplyOptions, TextDelta
from antiphon.modeling.chat import ChatStream
from antiphon.modeling.media_rows import ChatRow
from antiphon.pipelines.merge import PutChunk
from antiphon.signals import Signal
from antiphon.text.word_timing import WordPacer

# A reply that must be a call of a tool begins with at most so many tokens of the call.
FORCED_ROWS = 4


class SpokenTokens:
    """The tokens of one reply that are to be spoken: those before its end, and before the first call of a tool.

    Written by `feed`, from the chat stream, and read once by `tokens`, in the same event loop. `chat`: whose `rows` are
    read when the reply begins. `stop`: tokens that end a reply. `call_opening`: the token that begins a call; None
    where the model has none.
    """

    def __init__(self, chat: ChatStream, stop: frozenset[int], call_opening: int | None) -> None:
        self._chat, self._stop, self._call_opening = chat, stop, call_opening
        self._prompt: list[ChatRow] = []
        # Tokens that are not spoken yet. Bound: a reply ends after `max_tokens`, or where its context is full.
        self._waiting: deque[int] = deque()
        self._changed = Signal()
        self._began = anyio.Event()
        self._ended = False

    def feed(self, token: int) -> None:
        """Take the next token of the reply, which is the last of the chat's rows already; for ChatStream.on_token."""
        if not self._began.is_set():
            self._prompt = self._chat.rows[:-1]
            self._began.set()
            if self._call_opening in self._prompt[-FORCED_ROWS:]:
                # The reply must be a call: nothing of it is spoken.
                self.end()
        if token in self._stop or token == self._call_opening:
            self.end()
        elif not self._ended:
            self._waiting.append(token)
            self._changed.notify()

    def end(self) -> None:
        """End the speech: tokens that come later are dropped, and `prompt` and `tokens` wait no longer."""
        self._ended = True
        self._changed.notify()
        self._began.set()

    async def prompt(self) -> list[ChatRow]:
        """Return the conversation's rows before the reply. Waits for its first token; empty where there is none."""
        await self._began.wait()
        return self._prompt

    async def tokens(self) -> AsyncIterator[int]:
        """Yield the tokens in order, as they come, until the speech ends."""
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            if self._ended:
                return
            await self._changed.wait()


class Spoken(Protocol):
    """What the tokens of a reply are given to, so that they are spoken: SpokenTokens, or what has more of them."""

    def feed(self, token: int) -> None: ...

    def end(self) -> None: ...


async def write_spoken(
    chat: ChatStream,
    messages: Sequence[Message],
    options: ReplyOptions,
    spoken: Spoken,
    pacer: WordPacer,
    put: PutChunk,
) -> None:
    """Have the thinker write a reply to its end: its tokens go to `spoken`, its words to `pacer`, all of it to `put`.

    Raises what `chat.reply` raises; `spoken` is ended in any case.
    """
    chat.on_token = spoken.feed
    try:
        async with aclosing(chat.reply(messages, options)) as replies:
            async for reply in replies:
                if isinstance(reply, TextDelta):
                    pacer.feed(reply.text)
                await put(reply)
    finally:
        chat.on_token = None
        spoken.end()
