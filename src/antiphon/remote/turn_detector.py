"""A turn detector on another server: one HTTP request for each pause.

The request is that of pipecat's client for Smart Turn servers: its body is the audio as a file of `numpy.save`
(float32 [num_samples], 16 kHz, the last INPUT_S seconds of the turn), and the answer is JSON with a `probability`.
"""

from __future__ import annotations

import asyncio
import io

import httpx
import msgspec
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ, Pcm
from antiphon.errors import RemoteError
from antiphon.remote.http import LoopClients, decoded

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
        self._url = url
        self._headers = {"Content-Type": "application/octet-stream"} | (
            {"Authorization": f"Bearer {key}"} if key else {}
        )
        self._clients = LoopClients()
        self._decoder = msgspec.json.Decoder(_Judgement)

    async def complete(self, pcm: Pcm) -> float:
        """Return the server's probability that the turn is complete. `pcm`: float32 [num_samples], 16 kHz.

        Raises RemoteError if the server does not answer with a probability within ANSWER_S.
        """
        body = io.BytesIO()
        np.save(body, np.asarray(pcm[-INPUT_S * SAMPLE_RATE_HZ :], np.float32))
        client = await self._clients.client()
        try:
            async with asyncio.timeout(ANSWER_S):
                async with client.stream("POST", self._url, headers=self._headers, content=body.getvalue()) as answer:
                    data = bytearray()
                    async for chunk in answer.aiter_raw():
                        data += chunk
                        if len(data) > MAX_ANSWER_BYTES:
                            raise RemoteError("the turn detector's server sent too long an answer")
                    if answer.status_code != 200:
                        raise RemoteError(f"the turn detector's server answered with status {answer.status_code}")
        except (httpx.HTTPError, TimeoutError) as error:
            what = type(error).__name__
            raise RemoteError(f"the turn detector's server gave no answer within {ANSWER_S:g} s ({what})") from None
        return decoded(self._decoder, bytes(data), "probability").probability
