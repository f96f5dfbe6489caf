"""One key's work at a server does not delay another key."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from antiphon.server.credentials import Caller
from antiphon.server.state import ServerState
from antiphon.settings import load
from antiphon.store.voices import StoredVoice, VoiceStore
from tests.server.live.test_enrolled_voices import ScriptedVoices
from tests.server.scripted import serving
from tests.store.sessions.test_contract import until


def test_when_a_keys_disk_hangs_then_another_key_finds_its_voices_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load({"home": str(tmp_path)})
    settings = replace(settings, server=replace(settings.server, api_keys=("alice", "bob")))
    gate, asked = threading.Event(), list[str]()
    of, read = ServerState.uploaded_voices, VoiceStore.list

    def counted(self: ServerState, caller: Caller) -> VoiceStore:
        asked.append(caller.key)
        return of(self, caller)

    def slow_for_alice(self: VoiceStore) -> list[StoredVoice]:
        if self.folder == VoiceStore(tmp_path, "alice", 1).folder:
            assert gate.wait(20)
        return read(self)

    monkeypatch.setattr(ServerState, "uploaded_voices", counted)
    monkeypatch.setattr(VoiceStore, "list", slow_for_alice)

    async def voices(client: httpx.AsyncClient, key: str) -> int:
        return (await client.get("/v1/audio/voices", headers={"Authorization": f"Bearer {key}"})).status_code

    async def main(url: str) -> None:
        async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=100)) as client:
            many = [asyncio.create_task(voices(client, "alice")) for _ in range(60)]
            await asyncio.to_thread(until, lambda: asked.count("alice") == 60)
            assert await voices(client, "bob") == 200
            assert not any(task.done() for task in many)
            gate.set()
            assert await asyncio.gather(*many) == [200] * 60

    with serving(settings, speaker_model=ScriptedVoices()) as (ws, _, _):
        asyncio.run(main(ws.replace("ws", "http", 1)))
