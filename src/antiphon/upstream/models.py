"""What a server says of the models that it has: `/models`, as OpenAI's API has it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

import httpx
import msgspec

from antiphon.errors import ModelError, RemoteError
from antiphon.upstream.answers import ask, decoded, optional
from antiphon.upstream.loop_client import LoopClients

PROBE_TIMEOUT_S = 5.0
# Bound: a name, which messages carry. A model with a longer one is passed over.
MAX_NAME_CHARS = 512


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of a list.

    - `context_tokens`: the most that it takes, 0 where the list does not say. `owner`: what serves it, as "vllm".
    - `has_parent`: it is an adapter of another model of the list.
    """

    id: str
    context_tokens: int = 0
    owner: str = ""
    has_parent: bool = False


_null = msgspec.Raw(b"null")


class _Entry(msgspec.Struct, gc=False):
    """Servers add fields, and give them types, as they like."""

    id: msgspec.Raw = _null
    max_model_len: msgspec.Raw = _null
    owned_by: msgspec.Raw = _null
    parent: msgspec.Raw = _null


class _List(msgspec.Struct):
    data: list[_Entry]


_list_decoder, _text_decoder = msgspec.json.Decoder(_List), msgspec.json.Decoder(str)
_tokens_decoder = msgspec.json.Decoder(Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)])


async def list_models(base_url: str, key: str) -> list[ListedModel]:
    """Ask a server for its models, within PROBE_TIMEOUT_S. `key`: "" for none.

    Raises ModelError where the key is not accepted. RemoteError: the server does not tell; an httpx.HTTPError is its
    cause where the server did not answer.
    """
    clients, url = LoopClients(), f"{base_url}/models"
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            client = await clients.client()
            status, data = await ask(client, "GET", url, {"Authorization": f"Bearer {key}"} if key else {})
    except TimeoutError:
        raise RemoteError(f"no answer within {PROBE_TIMEOUT_S:g} s") from httpx.ReadTimeout("")
    except httpx.HTTPError as error:
        raise RemoteError(str(error) or type(error).__name__) from error
    finally:
        await clients.close()
    if status in (401, 403):
        raise ModelError(f"{base_url} does not accept the key (ANTIPHON_REMOTE_KEY)")
    if status != 200:
        raise RemoteError(f"status {status}")
    return models_in(data)


def models_in(data: bytes) -> list[ListedModel]:
    """The models of a list, without those that have no proper name. Raises RemoteError for what is no such list."""
    found = []
    for entry in decoded(_list_decoder, data, "list of models").data:
        name = optional(_text_decoder, entry.id) if entry.id is not _null else None
        if name and len(name) <= MAX_NAME_CHARS:
            found.append(
                ListedModel(
                    name,
                    optional(_tokens_decoder, entry.max_model_len) or 0,
                    optional(_text_decoder, entry.owned_by) or "",
                    entry.parent != _null,
                )
            )
    return found
