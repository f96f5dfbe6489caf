"""Asks a voice's server for its voices and models: `GET /v1/audio/voices` and `GET /v1/models`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from antiphon.errors import ModelError, RemoteError
from antiphon.remote.http import MAX_NAME_CHARS, PROBE_TIMEOUT_S, LoopClients, ask_document, decoded, models_in

# Bounds: the voices of a server that are used, and the languages of all of them.
MAX_VOICES, MAX_LANGUAGES = 1024, 128


@dataclass(frozen=True, slots=True)
class ServerVoices:
    """What a voice's server lists. `voices`, `languages`, `models`: empty if it does not list them."""

    voices: tuple[str, ...] = ()
    # ISO-639-1 codes, in the order of the voices.
    languages: tuple[str, ...] = ()
    models: tuple[str, ...] = ()


class _Voices(msgspec.Struct):
    # Names, or objects with a name: servers differ.
    voices: list[Any]


_decoder = msgspec.json.Decoder(_Voices | list[Any])


async def ask_voices(base_url: str, key: str) -> ServerVoices:
    """Ask a server for its voices and models, each within PROBE_TIMEOUT_S. `key`: "" for none.

    A server that lists neither is not an error. Raises ModelError if the server does not accept the key, and
    RemoteError if it does not answer.
    """
    clients = LoopClients()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        client = await clients.client()
        answers = []
        for path in ("/audio/voices", "/models"):
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                answers.append(await ask_document(client, "GET", base_url + path, headers))
    except TimeoutError:
        raise RemoteError(f"no answer within {PROBE_TIMEOUT_S:g} s") from None
    except httpx.HTTPError as error:
        raise RemoteError(str(error) or type(error).__name__) from error
    finally:
        await clients.close()
    if any(status in (401, 403) for status, _ in answers):
        raise ModelError(f"{base_url} does not accept the key (ANTIPHON_SYNTHESIZER_KEY)")
    (voices_status, voices), (models_status, models) = answers
    names, languages = _voices_in(voices) if voices_status == 200 else ((), ())
    return ServerVoices(names, languages, _models_in(models) if models_status == 200 else ())


def _models_in(data: bytes) -> tuple[str, ...]:
    try:
        return tuple(model.id for model in models_in(data))
    except RemoteError:
        return ()


def _voices_in(data: bytes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the voices in a list, and their languages. A list of another form has no voices."""
    try:
        found = decoded(_decoder, data, "list of voices")
    except RemoteError:
        return (), ()
    names, languages = list[str](), list[str]()
    for entry in (found.voices if isinstance(found, _Voices) else found)[:MAX_VOICES]:
        fields = entry if isinstance(entry, dict) else {"id": entry}
        name = fields.get("id") or fields.get("voice_id") or fields.get("name")
        if isinstance(name, str) and 0 < len(name) <= MAX_NAME_CHARS:
            names.append(name)
            own = fields.get("languages")
            languages += [code for code in own if _is_code(code)] if isinstance(own, list) else []
    return tuple(dict.fromkeys(names)), tuple(dict.fromkeys(languages))[:MAX_LANGUAGES]


def _is_code(code: object) -> bool:
    return isinstance(code, str) and len(code) == 2 and code.isascii() and code.islower()


def ordered_voices(named: tuple[str, ...], listed: tuple[str, ...]) -> tuple[str, ...]:
    """Return the named voices, then the other voices of the list. Raises ModelError if a named voice is not listed."""
    if missing := [name for name in named if listed and name not in listed]:
        known = ", ".join(listed[:20]) + (" …" if len(listed) > 20 else "")
        raise ModelError(f"--voice: the voice's server has no {missing[0]}; it has {known}")
    return tuple(dict.fromkeys((*named, *listed)))
