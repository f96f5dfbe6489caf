"""A LanguageModel on another server: any that offers OpenAI's Chat Completions or Responses.

Each request carries the whole conversation as it was heard. The server's own prefix cache finds what it already
computed.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Literal

import httpx

from antiphon.contracts import LanguageLoad, LanguageProfile, Message, Reply, ReplyDone, ReplyOptions, TextDelta
from antiphon.errors import RemoteError, RemoteProtocolError, SettingsError
from antiphon.events.tools import Tool
from antiphon.remote.address import ServerAddress, split_api
from antiphon.remote.chat import chat_completions, responses
from antiphon.remote.chat.chat_completions import ChatReader
from antiphon.remote.chat.client import Counts, ModelServerClient
from antiphon.remote.chat.messages import estimated_tokens, newest, refuse_if_cut, with_results, without_media
from antiphon.remote.chat.responses import ResponsesReader
from antiphon.remote.chat.written_calls import WrittenCalls
from antiphon.remote.http import ListedModel, list_models, salt_of
from antiphon.remote.pool import Endpoint, Pool
from antiphon.settings import RemoteSettings
from antiphon.shares.threads import in_thread

log = logging.getLogger(__name__)

Api = Literal["chat_completions", "responses"]
CHAT, RESPONSES = "/chat/completions", "/responses"
# The assumed context of a server that does not report it, in tokens.
DEFAULT_CONTEXT_TOKENS = 8192
# A full conversation is cut to this share of the context, so that the next replies find the server's prefix cache.
KEPT_SHARE = 0.6
# The number of characters that are searched for calls before the event loop can run other tasks.
SLICE_CHARS = 1 << 13
# Names of the field that limits a reply's tokens: for nearly all servers, and for OpenAI's models since o1.
LIMIT_FIELDS = ("max_tokens", "max_completion_tokens")


class RemoteLanguageModel:
    """A LanguageModel that another server runs.

    The constructor asks the server for its models, which takes up to some seconds. A server that does not answer yet is
    logged and is not an error. Raises ModelError if the key is not accepted.

    - `key`: the server's; "" for none.
    - `context_tokens`: the context size that the user configured; 0: the server's, else DEFAULT_CONTEXT_TOKENS.
    """

    def __init__(self, address: ServerAddress, key: str, settings: RemoteSettings, context_tokens: int = 0) -> None:
        chosen = [split_api(url, (RESPONSES, CHAT)) for url in address.urls]
        self.api: Api = "responses" if chosen[0][1] == RESPONSES else "chat_completions"
        if len({path == RESPONSES for _, path in chosen}) > 1:
            raise SettingsError("--language-model: all URLs must have the same API, /responses or /chat/completions")
        endpoints = [Endpoint(base) for base, _ in chosen]
        found = _probe(endpoints, address.model, key)
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
        # vLLM separates the prefix caches of two salts. Other servers may refuse the field.
        self._secret = secrets.token_bytes(32) if found.owner == "vllm" else b""
        self.pool = Pool(
            "language", endpoints, key, max_s=settings.remote_first_token_s, measures=False, look=self._look
        )
        self.client = ModelServerClient(
            self.pool,
            RESPONSES if self.api == "responses" else CHAT,
            settings.remote_token_s,
            ResponsesReader if self.api == "responses" else ChatReader,
        )
        self.num_open = 0

    @property
    def counts(self) -> Counts:
        """Counts of the requests to the server so far."""
        return self.client.counts

    async def _look(self, endpoint: Endpoint) -> str:
        """Return what a server is, in words. Raises ModelError if it does not work."""
        models = [listed.id for listed in await list_models(endpoint.url, self.pool.key)]
        if models and self.address.model not in models:
            raise RemoteError(f"has no model {self.address.model}; it has {', '.join(sorted(models)[:20])}")
        return f"serves {self.address.model}"

    async def open(self, owner: Hashable | None = None) -> RemoteLanguageStream:
        """Open a conversation, which sends no request. If the server is vLLM, owners do not share cached prefixes."""
        self.num_open += 1
        return RemoteLanguageStream(self, owner, salt_of(self._secret, owner) if self._secret else "")

    def load(self) -> LanguageLoad:
        """Return the numbers of conversations that are open and being answered. The server holds their KV."""
        return LanguageLoad(self.num_open, self.counts.answering, 0, 0, 0, 0, is_away=self.pool.is_away)

    def close(self) -> None:
        """Do nothing: connections are closed with their event loop."""


class RemoteLanguageStream:
    """One conversation with a model on another server. A LanguageStream, used from one event loop."""

    def __init__(self, model: RemoteLanguageModel, owner: Hashable | None, salt: str) -> None:
        self._model = model
        self._owner, self._salt = owner, salt
        # The number of messages that were left out after the system message, and the first of them; same as in
        # ChatStream.
        self._left_out: tuple[int, Message | None] = (0, None)
        self._open = True

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        """Do nothing: a speculative request would cost as much as a real one."""

    async def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        """Yield the reply: text and calls as they arrive, then one ReplyDone. Closing the generator ends the request.

        If the conversation has outgrown the context, its oldest messages are left out. Raises RemoteProtocolError,
        Refused or ModelError.
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
                log.warning("the model called an unknown tool; the request is repeated without tools")
                void = written.void
                left = options.max_tokens and max(1, options.max_tokens - void.completion_tokens)
                options = replace(options, tool_choice="none", max_tokens=left)
            except RemoteProtocolError as error:
                if begun or attempt >= 2 or not (changed := self._mended(error, kept, options)):
                    raise
                kept = changed

    def close(self, *, keep: bool = False) -> None:
        """End the conversation. The server decides what it keeps in its cache."""
        if self._open:
            self._open = False
            self._model.num_open -= 1

    def _fitting(self, messages: Sequence[Message], options: ReplyOptions, limit: int) -> list[Message]:
        """Return the messages that fit. Messages that were left out stay left out, to match the server's cache."""
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
        """Return the messages for a retry after the server refused a request; None if a retry would not help."""
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
            if model.api == "responses":
                return responses.body(model.address.model, messages, options)
            return chat_completions.body(
                model.address.model, messages, options, limit_field=model.limit_field, salt=self._salt
            )

        # Media are encoded in a thread, so that the event loop does not wait.
        return await in_thread(make) if any(m.parts for m in messages) else make()


def _probe(endpoints: Sequence[Endpoint], model: str, key: str) -> ListedModel:
    """Return the first report of a server about the model, empty if there is none. Notes which servers are away.

    Raises ModelError if the key is not accepted.
    """
    reports = list[ListedModel]()
    for endpoint in endpoints:
        try:
            models = {listed.id: listed for listed in asyncio.run(list_models(endpoint.url, key))}
        except RemoteError as error:
            log.warning("%s does not list its models: %s", endpoint.url, error)
            endpoint.is_away = isinstance(error.__cause__, httpx.HTTPError)
            continue
        if models and model not in models:
            log.warning("%s has no model %s; it has %s", endpoint.url, model, ", ".join(sorted(models)[:20]))
        reports += [models[model]] if model in models else []
    return next(iter(reports), ListedModel(model))


def _slices(reply: Reply) -> Iterator[Reply]:
    """Yield a part of a reply, with long text split into slices."""
    if not isinstance(reply, TextDelta):
        yield reply
        return
    for at in range(0, len(reply.text), SLICE_CHARS):
        yield TextDelta(reply.text[at : at + SLICE_CHARS])


def _written_calls(options: ReplyOptions, *, makes: bool) -> WrittenCalls | None:
    """Return a converter of JSON in a reply's text into calls; None if the reply may not contain calls.

    If `makes` is False, it drops such JSON instead.
    """
    if not options.tools or (makes and options.tool_choice == "none") or options.schema is not None:
        return None
    return WrittenCalls([tool.name for tool in options.tools], parallel=options.parallel_tool_calls, makes=makes)
