"""Replies in which tool servers carry out calls, for sessions that show no calls to their clients.

A call and its result stay within one reply: the model is asked again with the results, until it answers in words. In
conversations, calls run while the user speaks, and are items of the history (sessions/conversation/responses/).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar, cast

import anyio

from antiphon.contracts import (
    LanguageLoad,
    LanguageModel,
    LanguageStream,
    Message,
    Reply,
    ReplyDone,
    ReplyOptions,
    ResponseAudio,
    ResponseChunk,
    TextDelta,
    ToolCallDelta,
    ToolCallStarted,
)
from antiphon.contracts.language import ToolServers
from antiphon.events.tools import Tool, ToolCall, offered

# Maximum number of times that a model may call tools in one reply. It then has to answer without any.
MAX_ROUNDS = 8
PLAIN = ReplyOptions()
# A chunk of a language model's or a conversation model's reply.
Chunk = TypeVar("Chunk", bound=ResponseChunk)


def server_tools(servers: ToolServers | None, options: ReplyOptions = PLAIN) -> tuple[Tool, ...]:
    """Return the tools of the servers that a reply with these options may use.

    There are none if the reply has to match a schema, or if the client has decided which of its functions is called.
    Nobody can approve a call here, so tools that need an approval are left out.
    """
    if servers is None or options.schema is not None or options.tool_choice != "auto":
        return ()
    return tuple(tool for tool in servers.tools if not tool.needs_approval)


class LanguageModelWithTools:
    """A LanguageModel whose replies use the tools of servers. The caller owns `model` and closes it."""

    def __init__(self, model: LanguageModel, servers: ToolServers) -> None:
        self._model, self._servers = model, servers
        self.profile = model.profile

    async def open(self, owner: Hashable | None = None) -> LanguageStream:
        """Open a conversation, as the model does."""
        return _StreamWithTools(await self._model.open(owner), self._servers)

    def load(self) -> LanguageLoad:
        """Return the load of the model."""
        return self._model.load()

    def close(self) -> None:
        """Do nothing: the caller that loaded the model closes it."""


class _StreamWithTools:
    def __init__(self, stream: LanguageStream, servers: ToolServers) -> None:
        self._stream, self._servers = stream, servers

    async def prefill(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> None:
        await self._stream.prefill(messages, offered(tuple(tools), server_tools(self._servers)))

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> AsyncGenerator[Reply, None]:
        return reply_with_tools(self._stream.reply, messages, options, self._servers)

    def close(self, *, keep: bool = False) -> None:
        self._stream.close(keep=keep)


async def reply_with_tools(
    respond: Callable[[tuple[Message, ...], ReplyOptions], AsyncGenerator[Chunk, None]],
    messages: Sequence[Message],
    options: ReplyOptions,
    servers: ToolServers | None,
    on_result: Callable[[str], None] = lambda _: None,
) -> AsyncGenerator[Chunk, None]:
    """Reply to the last message, and carry out the calls of the servers' tools, which are not among the chunks.

    If the model also calls functions of the client, those end the reply, and no server is called. Closing the generator
    cancels the calls. Raises what `respond` raises.

    Args:
        respond: Returns the model's reply to messages.
        messages: The conversation so far.
        options: How to reply. `tools` are the client's functions.
        servers: Carry out the calls. Without them, this is the model's reply.
        on_result: Called with each result.

    Returns:
        The chunks of the reply. ReplyDone is the last one. It has the tokens of all rounds.
    """
    messages, usage = tuple(messages), ReplyDone("stop", 0, 0, 0)
    of_servers = server_tools(servers, options)
    for number in range(MAX_ROUNDS + 1):
        tools = offered(options.tools, of_servers) if number < MAX_ROUNDS else options.tools
        names = {tool.name: tool.server for tool in tools if tool.server}
        calls: list[ToolCall] = []
        text, is_server, calls_client = "", False, False
        done = ReplyDone("stop", 0, 0, 0)
        async with aclosing(respond(messages, replace(options, tools=tools))) as chunks:
            async for chunk in chunks:
                match chunk:
                    case ToolCallStarted(call_id, name):
                        is_server = name in names
                        calls_client |= not is_server
                        if is_server:
                            calls.append(ToolCall(call_id, name, ""))
                    case ToolCallDelta(arguments) if is_server:
                        calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + arguments)
                    case ReplyDone():
                        done = chunk
                    case TextDelta():
                        text += chunk.text
                is_shown = isinstance(chunk, TextDelta | ResponseAudio) or not is_server
                if is_shown and not isinstance(chunk, ReplyDone):
                    yield chunk
        usage = ReplyDone(
            done.reason,
            usage.prompt_tokens + done.prompt_tokens,
            usage.cached_tokens + done.cached_tokens,
            usage.completion_tokens + done.completion_tokens,
        )
        if calls_client or not calls or servers is None:
            break
        results = await _carried_out(calls, names, servers)
        for result in results:
            on_result(result.text)
        messages = (*messages, Message("assistant", text.strip(), tool_calls=tuple(calls)), *results)
    yield cast(Chunk, usage)


async def _carried_out(calls: Sequence[ToolCall], names: dict[str, str], servers: ToolServers) -> list[Message]:
    """Carry out calls at the same time. Return the messages with their results, in the order of the calls."""
    results: dict[str, Message] = {}

    async def carry_out(call: ToolCall) -> None:
        result = await servers.call(names[call.name], call.name, call.arguments)
        results[call.id] = Message("tool", result.for_model, tool_call_id=call.id, name=call.name)

    async with anyio.create_task_group() as group:
        for call in calls:
            group.start_soon(carry_out, call)
    return [results[call.id] for call in calls]
