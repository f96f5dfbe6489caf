"""POST /v1/chat/completions: a conversation's next turn, streamed or whole.

The engine keeps the KV of a response, and the conversation's next request continues from it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from antiphon.contracts import LanguageModel, LanguageStream, Reply, ReplyOptions
from antiphon.errors import AntiphonError, RemoteProtocolError
from antiphon.protocols.rest import chat as openai_chat
from antiphon.protocols.rest.chat import ChatCompletion, ChatRequest
from antiphon.server.credentials import Caller
from antiphon.server.http.auth import identify
from antiphon.server.http.body import limited
from antiphon.server.http.disconnect import CLIENT_CLOSED_REQUEST, LiveEvents, unless_disconnected
from antiphon.server.live.open_wire import check_fits, check_tools
from antiphon.server.state import ServerState
from antiphon.shares.threads import GRAMMAR_THREADS, in_thread

log = logging.getLogger(__name__)
MAX_BODY_BYTES = 16 << 20


async def chat_completions(request: Request) -> Response:
    """Answer one request. It holds one of its caller's places until its response ends.

    If the request is invalid or gets no place, its error status is sent before anything is streamed. A later failure of
    the model ends the stream with an error chunk.
    """
    state: ServerState = request.app.state.antiphon
    model = _language_model(state)
    asked = openai_chat.parse(await limited(request, MAX_BODY_BYTES).body())
    if asked.model not in (model.profile.id, "default"):
        if state.settings.server.strict_models:
            raise RemoteProtocolError("model_not_found", f"The model `{asked.model}` does not exist.", "model")
        state.log_alias(asked.model, model.profile.id)
    if model.profile.keeps_to_schemas and (asked.options.tools or asked.options.schema is not None):
        checked = await unless_disconnected(request, partial(_checked, asked.options))
        if checked.status_code == CLIENT_CLOSED_REQUEST:
            return checked
    completion = ChatCompletion(
        f"chatcmpl-{secrets.token_hex(12)}", model.profile.id, int(time.time()), include_usage=asked.include_usage
    )
    replies = _replies(state, identify(request), model, asked)
    if not asked.stream:
        return await _whole(request, completion, replies)
    return LiveEvents(_events(completion, replies), _error_frame)


async def _checked(options: ReplyOptions) -> Response:
    """Return an empty response if the schemas can be enforced. Waits for a thread. Raises as `_check_schemas`."""
    await in_thread(_check_schemas, options, places=GRAMMAR_THREADS)
    return Response()


def _check_schemas(options: ReplyOptions) -> None:
    """Raise RemoteProtocolError that names the first schema that cannot be enforced. Blocks for up to seconds."""
    check_tools(options.tools, "tools", "function.parameters")
    if options.schema is not None:
        check_fits(options.schema, "response_format")


def _language_model(state: ServerState) -> LanguageModel:
    model = state.loaded().language_with(state.tool_servers)
    if model is None:
        raise RemoteProtocolError("model_not_found", "No language model is loaded.", "model")
    return model


async def _replies(
    state: ServerState, caller: Caller, model: LanguageModel, asked: ChatRequest
) -> AsyncGenerator[Reply, None]:
    with state.admission.admit(caller, "conversation"):
        started_s = time.monotonic()
        stream: LanguageStream = await model.open(caller.key)
        try:
            begun = False
            async with aclosing(stream.reply(asked.messages, asked.options)) as replies:
                async for reply in replies:
                    if not begun:
                        begun = True
                        state.metrics.measure("first_token", time.monotonic() - started_s)
                    yield reply
        finally:
            # The engine keeps the KV for the conversation's next request.
            stream.close(keep=True)


async def _events(completion: ChatCompletion, replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(replies):
        begun = False
        async for reply in replies:
            if not begun:
                begun = True
                yield completion.begin()
            for chunk in completion.feed(reply):
                yield chunk


def _error_frame(error: AntiphonError | HTTPException) -> bytes:
    """Return the last event of a stream that fails after its status was sent."""
    if isinstance(error, RemoteProtocolError):
        return openai_chat.error_chunk(error.message, error.code, "invalid_request_error", error.param)
    log.error("a completion failed while it was streamed: %s", error)
    return openai_chat.error_chunk("The model failed.", "processing_error")


async def _whole(request: Request, completion: ChatCompletion, replies: AsyncGenerator[Reply, None]) -> Response:
    async def read() -> Response:
        async with aclosing(replies):
            async for reply in replies:
                completion.feed(reply)
        return Response(completion.body(), media_type="application/json")

    return await unless_disconnected(request, read)
