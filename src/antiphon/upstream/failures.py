"""What a model's server says where it does not do what it was asked, without the key that it was asked with."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import httpx
import msgspec

from antiphon.errors import AntiphonError, ModelError, Refused, RemoteError
from antiphon.upstream.answers import chunks, decoded
from antiphon.upstream.breaker import retry_after_s

# Bound: the body of an error that is read, and the sentence of it that is passed on.
MAX_ERROR_BYTES, MAX_SENTENCE_CHARS = 1 << 16, 300
_decoder = msgspec.json.Decoder()


# The body of an error is whatever a server of others sends.
def error_text(error: Any) -> str:
    """The sentence in an error's body, in at most MAX_SENTENCE_CHARS characters."""
    if isinstance(error, dict):
        error = error.get("error", error)
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return str(error)[:MAX_SENTENCE_CHARS]


def without_key(data: bytes, key: str) -> bytes:
    """What a server sent, with the key struck out of it; `key`: "" for none."""
    return data.replace(key.encode(), b"***") if key else data


async def read_failure(server: str, answer: httpx.Response, key: str) -> AntiphonError | str:
    """What an answer with another status than 200 means, for whoever asked `server`, as messages name it.

    An error to raise; or, where the request itself was not accepted, the server's own words for it, which the caller
    makes an error of. ModelError: the key is not accepted. Refused: there is no room. RemoteError: it failed.
    """
    status = answer.status_code
    if status in (401, 403):
        return ModelError(f"{server} does not accept the key (status {status})")
    if status in (429, 503):
        return Refused("The model's server has no room.", retry_after_s(answer.headers.get("retry-after", "")))
    if status >= 500 or status < 400:
        return RemoteError(f"{server} failed with status {status}")
    data = bytearray()
    async with aclosing(chunks(answer)) as found:
        async for chunk in found:
            data += chunk
            if len(data) > MAX_ERROR_BYTES:
                break
    said = without_key(bytes(data), key)
    try:
        return error_text(decoded(_decoder, said, "JSON"))
    except RemoteError:
        return error_text(said.decode(errors="replace").strip())
