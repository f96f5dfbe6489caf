"""Whole servers whose transcriber is on other servers: sessions outlive them, and lose no word."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from antiphon.audio import Pcm
from antiphon.audio.pcm import to_pcm16
from antiphon.remote.transcriber.transcriber import RemoteTranscriber
from antiphon.server.state import ServerState
from tests.contracts.transcribers import remote
from tests.remote.transcriber.faults import FaultProxy, on_a_port
from tests.scripted import FRAME, speech, text
from tests.server.scripted import Echo, scripted_models, serving

LIMIT_S = 60
RATE_HZ = 16_000
ITEM = "conversation.item.input_audio_transcription"
VAD = {"type": "server_vad", "silence_duration_ms": 300}
SILENCE = np.zeros(40 * FRAME, np.float32)


@contextmanager
def front(transcriber: RemoteTranscriber) -> Iterator[tuple[str, ServerState]]:
    """Run a server in front of a transcriber's servers. Yields the URL of its transcription sessions."""
    models = replace(scripted_models(Echo()), transcriber=transcriber, pools=(transcriber.pool,))  # type: ignore[arg-type]
    with serving(models=models) as (url, state, _):
        state.metrics.watch((), lambda: 0.0, pools=models.pools)
        yield f"{url}/v1/realtime?intent=transcription", state


async def say(wire: ClientConnection, pcm: Pcm) -> None:
    """Send audio in chunks of 0.1 s, so that partials are decoded in between."""
    for at in range(0, len(pcm), RATE_HZ // 10):
        audio = base64.b64encode(to_pcm16(pcm[at : at + RATE_HZ // 10])).decode()
        await wire.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        await asyncio.sleep(0.01)


async def until(wire: ClientConnection, *kinds: str) -> tuple[dict[str, Any], str]:
    """Return the next event of these kinds, and the deltas before it."""
    said = ""
    while True:
        event = json.loads(await wire.recv())
        if event["type"] == f"{ITEM}.delta":
            said += event["delta"]
        if event["type"] in kinds:
            return event, said


async def opened(wire: ClientConnection) -> None:
    audio = {"format": {"type": "audio/pcm", "rate": RATE_HZ}, "turn_detection": VAD}
    session = {"type": "transcription", "audio": {"input": audio}}
    await wire.send(json.dumps({"type": "session.update", "session": session}))
    await until(wire, "session.updated")


def test_a_server_that_is_killed_in_the_middle_of_a_turn_takes_no_word_with_it() -> None:
    async def main(url: str, proxy: FaultProxy) -> None:
        async with connect(url) as wire:
            await opened(wire)
            await say(wire, speech(1, 6))
            await until(wire, f"{ITEM}.delta")
            proxy.set("killed")
            await say(wire, np.concatenate((speech(7, 6), SILENCE)))
            done, _ = await until(wire, f"{ITEM}.completed", f"{ITEM}.failed")
            assert done.get("transcript") == text(1, 12)
            await say(wire, np.concatenate((speech(20, 3), SILENCE)))
            done, said = await until(wire, f"{ITEM}.completed", f"{ITEM}.failed")
            assert done.get("transcript") == text(20, 3)
            assert said.strip() == text(20, 3)

    with serving() as (back, _, _), serving() as (second, _, _):
        proxy = FaultProxy(int(back.rpartition(":")[2]))
        with on_a_port(proxy.serve) as port:
            transcriber = remote(f"http://127.0.0.1:{port}/v1", f"{second.replace('ws', 'http', 1)}/v1")
            with front(transcriber) as (url, state):
                asyncio.run(asyncio.wait_for(main(url, proxy), LIMIT_S))
                figures = state.metrics.text().decode()
    assert f'antiphon_remote_away{{role="transcriber",server="127.0.0.1:{port}"}} 1.0' in figures
    first, other = transcriber.pool.all
    assert f'antiphon_remote_requests_total{{role="transcriber",server="{other.host}"}} {other.requests}.0' in figures
    assert first.failures > 0


def test_a_server_starts_while_those_of_its_transcriber_are_away() -> None:
    with on_a_port(FaultProxy(1).serve) as port:
        pass
    transcriber = remote(f"tcp://127.0.0.1:{port}", model="m")
    models = replace(scripted_models(Echo()), transcriber=transcriber, pools=(transcriber.pool,))
    asyncio.run(models.warm())
    assert models.degraded() == {"transcriber": "its server did not answer the last request"}


def test_without_another_server_the_turn_fails_and_the_session_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.remote.transcriber.transcriber.RETRY_S", 0.01)
    monkeypatch.setattr("antiphon.remote.transcriber.transcriber.NEWS_S", 0.05)
    monkeypatch.setattr("antiphon.remote.breaker.Breaker.open", lambda *_: 0.0)

    async def main(url: str, proxy: FaultProxy) -> None:
        async with connect(url) as wire:
            await opened(wire)
            await say(wire, speech(1, 3))
            proxy.set("killed")
            await say(wire, SILENCE)
            failed, _ = await until(wire, f"{ITEM}.completed", f"{ITEM}.failed")
            assert failed["type"] == f"{ITEM}.failed"
            proxy.set("none")
            await say(wire, np.concatenate((speech(5, 3), SILENCE)))
            done, _ = await until(wire, f"{ITEM}.completed", f"{ITEM}.failed")
            assert done.get("transcript") == text(5, 3)

    with serving() as (back, _, _):
        proxy = FaultProxy(int(back.rpartition(":")[2]))
        with on_a_port(proxy.serve) as port, front(remote(f"http://127.0.0.1:{port}/v1")) as (url, _):
            asyncio.run(asyncio.wait_for(main(url, proxy), LIMIT_S))
