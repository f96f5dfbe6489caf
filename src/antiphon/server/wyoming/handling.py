"""The conversation agent over Wyoming: a text in, an answer of the language model out. The history is kept here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from itertools import starmap
from typing import TYPE_CHECKING

import anyio

from antiphon.admission.certificate import Kind
from antiphon.contracts import Message, MessageRole, ReplyOptions, TextDelta
from antiphon.errors import ModelError, RemoteProtocolError
from antiphon.protocols.wyoming.messages import Asked, Handled, HandledStart, Text
from antiphon.text.markup import plain
from antiphon.wyoming import WyomingEvent

if TYPE_CHECKING:
    from antiphon.server.wyoming.connection import WyomingJobs

# A question and its answer.
Exchange = tuple[str, str]
# Conversations that are remembered, the exchanges and characters of each, and the seconds since its last answer after
# which it is forgotten. Home Assistant itself forgets a conversation after five minutes.
MAX_CONVERSATIONS, MAX_EXCHANGES, MAX_CHARS, KEPT_S = 256, 20, 16_000, 300.0
# Maximum length of one request, in characters, and of one answer, in tokens.
MAX_TEXT_CHARS, MAX_ANSWER_TOKENS = 8_000, 400


class Histories:
    """The exchanges of recent conversations, by the client's address and the conversation's id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # With the time of the last answer, oldest first.
        self._kept: OrderedDict[tuple[str, str], tuple[float, tuple[Exchange, ...]]] = OrderedDict()

    def get(self, address: str, conversation_id: str) -> tuple[Exchange, ...]:
        """Return the exchanges of a conversation; () for one that is unknown, forgotten, or without an id."""
        self._forget()
        return self._kept.get((address, conversation_id), (0.0, ()))[1]

    def put(self, address: str, conversation_id: str, exchanges: tuple[Exchange, ...]) -> None:
        """Remember a conversation. Its oldest exchanges are dropped beyond the limits. Does nothing without an id."""
        if not conversation_id:
            return
        while len(exchanges) > MAX_EXCHANGES or sum(len(q) + len(a) for q, a in exchanges) > MAX_CHARS:
            exchanges = exchanges[1:]
        self._kept[address, conversation_id] = self._clock(), exchanges
        self._kept.move_to_end((address, conversation_id))
        self._forget()

    def _forget(self) -> None:
        while self._kept:
            first, (at_s, _) = next(iter(self._kept.items()))
            if len(self._kept) <= MAX_CONVERSATIONS and at_s + KEPT_S > self._clock():
                return
            del self._kept[first]


class HandleJob:
    """One answer: to a `transcript`, or to a `recognize`, which asks for an intent and is left to Home Assistant."""

    kind: Kind = "conversation"

    def __init__(self, connection: WyomingJobs) -> None:
        self._connection, self._state = connection, connection.state
        self.has_input, self.done = False, anyio.Event()
        self._begins = anyio.Event()
        self._asked: Asked | None = None
        self._wants_intent = False

    def takes(self, event: WyomingEvent) -> bool:
        return False

    async def feed(self, event: WyomingEvent) -> None:
        self._asked, self._wants_intent = event.read(Asked), event.kind == "recognize"
        _ = self._asked.conversation_id
        if len(self._asked.text) > MAX_TEXT_CHARS:
            raise RemoteProtocolError("text_too_long", f"A text has at most {MAX_TEXT_CHARS} characters.", "text")
        self.has_input = True
        self._begins.set()

    async def run(self) -> None:
        await self._begins.wait()
        asked, send = self._asked, self._connection.send
        assert asked
        if self._wants_intent:
            await send("not-recognized", Handled("This server has no intents.", asked.context))
            return
        await send("handled-start", HandledStart(asked.context))
        try:
            answer = await self._answer(asked)
        except ModelError:
            await send("handled-stop")
            await send("not-handled", Handled("The model failed.", asked.context))
            return
        await send("handled-stop")
        await send("handled", Handled(answer, asked.context))

    async def _answer(self, asked: Asked) -> str:
        """Stream the answer, remember the exchange, and return the whole answer. Raises Refused and ModelError."""
        model = self._state.loaded().language_with(self._state.tool_servers)
        if model is None:
            raise RemoteProtocolError("model_not_found", "No language model is loaded.")
        address, histories = self._connection.caller.address, self._connection.histories
        history = histories.get(address, asked.conversation_id)
        instructions = self._state.settings.wyoming.wyoming_instructions
        said: list[tuple[MessageRole, str]] = [("system", instructions)] if instructions else []
        for question, answer in history:
            said += (("user", question), ("assistant", answer))
        said.append(("user", asked.text))
        messages = list(starmap(Message, said))
        text, began_s = "", time.monotonic()
        stream = await model.open(self._connection.caller.key)
        try:
            options = ReplyOptions(max_tokens=MAX_ANSWER_TOKENS)
            async with aclosing(stream.reply(messages, options)) as replies:
                async for reply in replies:
                    if isinstance(reply, TextDelta):
                        if not text:
                            self._state.metrics.measure("first_token", time.monotonic() - began_s)
                        text += reply.text
                        await self._connection.send("handled-chunk", Text(reply.text))
        finally:
            # The engine keeps the KV for the conversation's next request.
            stream.close(keep=True)
        histories.put(address, asked.conversation_id, (*history, (asked.text, text)))
        return plain(text).strip()
