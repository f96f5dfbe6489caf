"""Uploaded voices as the catalog for requests finds them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from antiphon.server.credentials import Caller
from antiphon.server.live.speech_catalog import speech_catalog
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import load
from antiphon.store.voices import StoredVoice


def test_when_a_voice_is_used_again_then_its_sample_is_read_once_until_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = SimpleNamespace(id="tts", voices=("one",), languages=(), clones_voices=True, tasks=(), parameters={})
    models = SimpleNamespace(required_synthesizer=SimpleNamespace(profile=profile))
    state = ServerState(load({"home": str(tmp_path)}), Metrics(), cast(Any, models))
    store = state.uploaded_voices(Caller("alice"))
    voice = StoredVoice("Nan", "yes", 0, "", "", "audio/wav", 3)
    read: list[Path] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (read.append(path), read_bytes(path))[1])

    async def main() -> None:
        catalog = speech_catalog(state, Caller("alice"))
        for sample in (b"one", b"two"):
            store.add(voice, sample)
            path = store.sample("Nan")
            assert path
            # Two uploads may have the same mtime if the file system's clock is coarse.
            os.utime(path, ns=(0, sample[0]))
            for _ in range(3):
                found = await anyio.to_thread.run_sync(catalog.uploaded, "nan")
                assert found is not None
                assert found.audio == sample
        assert [path.name for path in read].count("sample") == 2
        assert speech_catalog(state, Caller("bob")).uploaded("nan") is None

    anyio.run(main)
