"""A LanguageModel on another server: any that speaks OpenAI's Chat Completions or Responses.

A conversation is sent whole each time, as it was heard; the server's own prefix cache finds what it knows of it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace

import httpx

from antiphon.contracts import LanguageLoad, LanguageProfile, Message, Reply, ReplyDone, ReplyOptions, TextDelta
from antiphon.errors import RemoteError, RemoteProtocolError
from antiphon.events.tools import Tool
from antiphon.remote.chat import chat_completions, responses
from antiphon.remote.chat.address import ServerAddress
from antiphon.remote.chat.chat_completions import ChatReader
from antiphon.remote.chat.client import Counts, ModelServerClient, Timeouts
from antiphon.remote.chat.messages import estimated_tokens, newest, refuse_if_cut, with_results, without_media
from antiphon.remote.chat.responses import ResponsesReader
from antiphon.remote.chat.written_calls import WrittenCalls
from antiphon.remote.http import ListedModel, list_models, salt_of
from antiphon.settings import RemoteSettings
from antiphon.shares.threads import in_thread

log = logging.getLogger(__name__)

# What a server that does not say is taken to hold, in tokens.
DEFAULT_CONTEXT_TOKENS = 8192
# The share of the context that a conversation is cut back to, so that the next replies find the server's prefix cache.
KEPT_SHARE = 0.6
# So much of a text is searched for calls before the event loop gets a turn.
SLICE_CHARS = 1 << 13
# The name of the most tokens of a reply: of nearly all servers, and of OpenAI's models since o1.
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")


class RemoteLanguageModel:
    """A model that another server runs. A LanguageModel.

    `key`: the server's, "" for none. `context_tokens`: what the user says that the model holds; 0: what the server
    says, else DEFAULT_CONTEXT_TOKENS. It asks the server for its models, and waits a few seconds for that; a server
    that is not there yet is logged and no error. Raises ModelError where the key is not accepted.
    """

    def __init__(self, address: ServerAddress, key: str, settings: RemoteSettings, context_tokens: int = 0) -> None:
        found, is_there = _probe(address, key)
        context_tokens = context_tokens or found.context_tokens or DEFAULT_CONTEXT_TOKENS
        self.profile = LanguageProfile(
            address.model,
            context_tokens,
            accepts_media=settings.remote_media,
            remote=True,
            max_preemptive=settings.remote_preemptive,
        )
        self.address = address
        self.limit_field = LIMIT_FIELDS[0]
        # vLLM keeps the prefix caches of two salts apart; other servers may refuse the field.
        self._secret = secrets.token_bytes(32) if found.owner == "vllm" else b""
        self.client = ModelServerClient(
            address.url,
            key,
            Timeouts(settings.remote_first_token_s, settings.remote_token_s),
            ResponsesReader if address.api == "responses" else ChatReader,
        )
        self.client.is_away = not is_there
        self.num_open = 0

    @property
    def counts(self) -> Counts:
        """What was asked of the server so far."""
        return self.client.counts

    async def open(self, owner: Hashable | None = None) -> RemoteLanguageStream:
        """Open a conversation, which costs nothing. Where the server is vLLM, it tells no owner's prefixes to
        another.
        """
        self.num_open += 1
        return RemoteLanguageStream(self, owner, salt_of(self._secret, owner) if self._secret else "")

    def load(self) -> LanguageLoad:
        """How many conversations are open and being answered. Their KV is the server's."""
        return LanguageLoad(self.num_open, self.counts.answering, 0, 0, 0, 0, is_away=self.client.is_away)

    def close(self) -> None:
        """Nothing is left to close: connections end with their event loop."""


class RemoteLanguageStream:
    """One conversation with a model on another server. A LanguageStream, used from one event loop."""

    def __init__(self, model: RemoteLanguageModel, owner: Hashable | None, salt: str) -> None:
        self._model = model
        self._owner, self._salt = owner, salt
        # How many messages behind the system's were left out, and the first of these: as in ChatStream.
        self._left_out: tuple[int, Message | None] = (0, None)
        self._open = True

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Do nothing: a request that nobody waits for would cost as much as one that is."""

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Yield the reply: prose and calls as they come, then one ReplyDone. Closing the generator ends it there too.

        Of a conversation that has outgrown the context, the oldest messages are left out. Raises
        RemoteProtocolError, Refused and ModelError.
        """
        model = self._model
        limit = model.profile.context_tokens - (options.max_tokens or 0)
        if not model.profile.accepts_media:
            messages = [without_media(m) for m in messages]
        kept = self._fitting(messages, options, limit)
        void: ReplyDone | None = None
        for attempt in range(4):
            body = await self._body(kept, options)
            begun = False
            try:
                written = _written_calls(options, makes=void is None)
                async with aclosing(model.client.replies(body, self._owner)) as replies:
                    async for reply in replies:
                        begun = True
                        if void and isinstance(reply, ReplyDone):
                            reply = replace(
                                reply,
                                prompt_tokens=reply.prompt_tokens + void.prompt_tokens,
                                completion_tokens=reply.completion_tokens + void.completion_tokens,
                            )
                        if written is None:
                            yield reply
                            continue
                        for piece in _slices(reply):
                            for part in written.feed(piece):
                                yield part
                            await asyncio.sleep(0)
                if not (written and written.void):
                    return
                log.warning("the model called what is no tool; it is asked again without tools")
                void = written.void
                left = options.max_tokens and max(1, options.max_tokens - void.completion_tokens)
                options = replace(options, tool_choice="none", max_tokens=left)
            except RemoteProtocolError as error:
                if begun or attempt >= 2 or not (changed := self._mended(error, kept, options)):
                    raise
                kept = changed

    def close(self, *, keep: bool = False) -> None:
        """End the conversation. The server keeps what it likes."""
        if self._open:
            self._open = False
            self._model.num_open -= 1

    def _fitting(self, messages: Sequence[Message], options: ReplyOptions, limit: int) -> list[Message]:
        """The messages that fit. What was left out before stays so, that the server finds what it knows."""
        count, first = self._left_out
        system = [m for m in messages[:1] if m.role == "system"]
        rest = list(messages[len(system) :])
        if options.truncation != "disabled" and count and count < len(rest) and rest[0] == first:
            rest = rest[count:]
        kept = system + rest
        if estimated_tokens(kept, options.tools) > limit:
            share = options.truncation if isinstance(options.truncation, float) else KEPT_SHARE
            kept = newest(kept, options.tools, int(limit * share))
            if options.truncation == "disabled":
                refuse_if_cut(messages, kept, self._model.profile.context_tokens)
        self._note(messages, kept)
        return kept

    def _note(self, messages: Sequence[Message], kept: Sequence[Message]) -> None:
        dropped = len(messages) - len(kept)
        first = next((m for m in messages if m.role != "system"), None)
        self._left_out = (dropped, first) if dropped else (0, None)

    def _mended(self, error: RemoteProtocolError, kept: list[Message], options: ReplyOptions) -> list[Message] | None:
        """The messages to send again after a server refused them; None where that would not help."""
        if error.code == "context_length_exceeded" and options.truncation != "disabled":
            half = newest(kept, options.tools, estimated_tokens(kept, options.tools) // 2)
            return half if len(half) < len(kept) else None
        model = self._model
        if LIMIT_FIELDS[1] in error.message and model.limit_field != LIMIT_FIELDS[1]:
            model.limit_field = LIMIT_FIELDS[1]
            return kept
        return None

    async def _body(self, messages: list[Message], options: ReplyOptions) -> bytes:
        model = self._model
        messages = with_results(messages)

        def make() -> bytes:
            if model.address.api == "responses":
                return responses.body(model.address.model, messages, options)
            return chat_completions.body(
                model.address.model, messages, options, limit_field=model.limit_field, salt=self._salt
            )

        # Media are encoded in a thread.
        return await in_thread(make) if any(m.parts for m in messages) else make()


def _probe(address: ServerAddress, key: str) -> tuple[ListedModel, bool]:
    """What the server says of the model, nothing where it does not, and whether it answers. Raises ModelError where the
    key is not accepted.
    """
    try:
        models = {model.id: model for model in asyncio.run(list_models(address.base_url, key))}
    except RemoteError as error:
        log.warning("%s does not tell its models: %s", address.base_url, error)
        return ListedModel(address.model), not isinstance(error.__cause__, httpx.HTTPError)
    if models and address.model not in models:
        log.warning("%s has no model %s; it has %s", address.base_url, address.model, ", ".join(sorted(models)[:20]))
    return models.get(address.model) or ListedModel(address.model), True


def _slices(reply: Reply) -> Iterator[Reply]:
    """A part of a reply, cut where its text is long."""
    if not isinstance(reply, TextDelta):
        yield reply
        return
    for at in range(0, len(reply.text), SLICE_CHARS):
        yield TextDelta(reply.text[at : at + SLICE_CHARS])


def _written_calls(options: ReplyOptions, *, makes: bool) -> WrittenCalls | None:
    """What makes calls of JSON in the prose of a reply that may call tools; None for one that may not. `makes` false:
    what drops such JSON.
    """
    if not options.tools or (makes and options.tool_choice == "none") or options.schema is not None:
        return None
    return WrittenCalls([tool.name for tool in options.tools], parallel=options.parallel_tool_calls, makes=makes)
