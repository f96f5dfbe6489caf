"""`antiphon chat`: a written conversation with the language model in a terminal.

If standard input is not a terminal, all of it is one question.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

import anyio.to_thread

from antiphon.contracts import LanguageModel, LanguageStream, Message, ReplyDone, ReplyOptions, TextDelta
from antiphon.errors import SettingsError
from antiphon.loading.loader import load, store_of
from antiphon.loading.selection import LANGUAGE_ROLES
from antiphon.settings import Settings


async def chat(settings: Settings, system: str, max_tokens: int | None, temperature: float | None) -> None:
    """Converse until an empty line or the end of the input.

    `system`: the system prompt; "": none. `max_tokens`, `temperature`: None leaves them to the model. Raises
    SettingsError if the settings load no language model, StoreError, ModelError.
    """
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models), None, LANGUAGE_ROLES)
    if models.language_model is None:
        raise SettingsError("--language-model none: there is no language model to talk to")
    try:
        await _converse(models.language_model, system, ReplyOptions(max_tokens=max_tokens, temperature=temperature))
    finally:
        models.close()


async def _converse(model: LanguageModel, system: str, options: ReplyOptions) -> None:
    stream = await model.open()
    messages = [Message("system", system)] if system else []
    try:
        if sys.stdin.isatty():
            print(f"{model.profile.id} — an empty line or Ctrl-D ends the conversation", file=sys.stderr)
        async for question in _questions():
            messages.append(Message("user", question))
            messages.append(Message("assistant", await _print_answer(stream, messages, options)))
    finally:
        stream.close()


async def _questions() -> AsyncIterator[str]:
    if not sys.stdin.isatty():
        text = await anyio.to_thread.run_sync(sys.stdin.read)
        if text.strip():
            yield text.strip()
        return
    while line := (await anyio.to_thread.run_sync(_line)).strip():
        yield line


def _line() -> str:
    try:
        return input("> ")
    except EOFError:
        return ""


async def _print_answer(stream: LanguageStream, messages: list[Message], options: ReplyOptions) -> str:
    text = ""
    async with aclosing(stream.reply(messages, options)) as parts:
        async for part in parts:
            match part:
                case TextDelta(more):
                    text += more
                    print(more, end="", flush=True)
                case ReplyDone(reason="length"):
                    print(" […]", end="")
    print(flush=True)
    return text
