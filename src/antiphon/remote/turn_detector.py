"""A turn detector on another server: one HTTP request for each pause.

The request is that of pipecat's client for Smart Turn servers: its body is the audio as a file of `numpy.save`
(float32 [num_samples], 16 kHz, the last INPUT_S seconds of the turn), and the answer is JSON with a `probability`.
"""

from __future__ import annotations

import io
from contextlib import aclosing
from functools import partial

import httpx
import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import Refused, RemoteError
from antiphon.remote.http import chunks, decoded
from antiphon.remote.pool import Endpoint, Pool

# Seconds of the turn that are sent, and the seconds in which the answer has to arrive. A later answer comes after most
# pauses are over.
INPUT_S, ANSWER_S = 8, 1.0
# Bound of an answer, in bytes.
MAX_ANSWER_BYTES = 1 << 16


class _Judgement(msgspec.Struct):
    probability: float


class RemoteTurnDetector:
    """A TurnDetector behind a URL, for all sessions of a process."""

    def __init__(self, url: str, key: str = "") -> None:
        """`key` is sent as a bearer token; "": none. Nothing is requested before the first pause."""
        # A request is not repeated, because the pause would be over.
        self.pool = Pool("turn", [Endpoint(url)], key, max_s=ANSWER_S, measures=False, attempts=1)
        self._decoder = msgspec.json.Decoder(_Judgement)

    async def complete(self, pcm: Pcm) -> float:
        """Return the server's probability that the turn is complete. `pcm`: float32 [num_samples], 16 kHz.

        Raises RemoteError if the server does not answer with a probability within ANSWER_S.
        """
        body = io.BytesIO()
        np.save(body, np.asarray(pcm[-INPUT_S * SAMPLE_RATE_HZ :], np.float32))
        try:
            return await self.pool.ask(partial(self._asked, body.getvalue()))
        except Refused as error:
            raise RemoteError(f"the turn detector's server gave no answer: {error}") from None

    async def _asked(self, body: bytes, endpoint: Endpoint) -> float:
        client, headers = await self.pool.client(), {"Content-Type": "application/octet-stream"} | self.pool.headers()
        try:
            async with client.stream("POST", endpoint.url, headers=headers, content=body) as answer:
                if answer.status_code != 200:
                    raise RemoteError(f"the turn detector's server answered with status {answer.status_code}")
                async with aclosing(chunks(answer, MAX_ANSWER_BYTES)) as found:
                    data = b"".join([chunk async for chunk in found])
        except httpx.HTTPError as error:
            raise RemoteError(f"the turn detector's server gave no answer ({type(error).__name__})") from None
        return decoded(self._decoder, data, "probability").probability
