"""A session recorded by a real server, and replayed against the models."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.recording.tape import Tape
from antiphon.settings import Settings
from tests.conftest import SMALL, VOICE, Recording, Serve
from tests.server.clients import connect
from tests.server.conversations import talk
from tests.server.scripted import serving
from tests.store.sessions.test_contract import until


@pytest.mark.heavy
def test_when_a_conversation_was_recorded_then_its_replay_has_the_same_turns(
    serve: Serve, recordings: dict[str, Recording], tmp_path: Path
) -> None:
    flags = ["--language-model", SMALL, "--synthesizer", VOICE]
    server = serve(*flags, "--record", str(tmp_path), "--api-key", "sk-hidden")

    async def main() -> None:
        session = {"max_output_tokens": 8, "audio": {"input": {"transcription": {"model": "default"}}}}
        headers = {"Authorization": "Bearer sk-hidden"}
        async with talk(server, headers=headers, **session) as wire:
            await wire.sound(recordings["lj-LJ001-0008"].pcm, silence_s=1.5)
            done = await wire.until("response.done")
            # The client sends an id that the server chose. The replay has another id.
            await wire.say("conversation.item.delete", item_id=done["response"]["output"][0]["id"])
            await wire.until("conversation.item.deleted")

    asyncio.run(main())
    (folder,) = tmp_path.iterdir()
    tape = Tape.read(folder)
    assert len(tape.input_pcm) > 16_000
    assert len(tape.output_pcm) > 2_000
    assert all("sk-hidden" not in f.read_text(errors="ignore") for f in folder.iterdir())
    run = subprocess.run(
        [sys.executable, "-m", "antiphon", "replay", str(folder), *flags],
        capture_output=True,
        text=True,
        timeout=180,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        check=False,
    )
    # On a machine that is busier than during the recording, a client's event may precede the event that it followed.
    found = [
        line for line in run.stdout.splitlines() if line.startswith(("turns:", "turn 1 transcript", "turn 1 status"))
    ]
    assert not found, run.stdout + run.stderr
    assert "first sound" in run.stdout
    assert run.returncode in (0, 1), run.stderr
    drawn = subprocess.run(
        [sys.executable, "-m", "antiphon", "timeline", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert drawn.returncode == 0, drawn.stderr
    assert "surpassed" in (folder / "timeline.html").read_text()


SAID = "5550123"
# Events of a client that chooses its own ids for events, items, calls and customers. Each id contains SAID.
EVENTS: list[dict[str, Any]] = [
    {"type": "session.update", "event_id": f"ev-{SAID}", "session": {"type": "realtime", "voice": f"jane-{SAID}"}},
    {
        "type": "session.update",
        "session": {
            "type": "realtime",
            "output_modalities": ["text"],
            "tools": [
                {
                    "type": "function",
                    "name": f"call_{SAID}",
                    "parameters": {"type": "object", "properties": {f"to_{SAID}": {"enum": [SAID, 5550123]}}},
                }
            ],
        },
    },
    {
        "type": "conversation.item.create",
        "item": {
            "id": f"item_{SAID}",
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": f"Call {SAID}."}],
        },
        "customer": {"id": 5550123, "state": SAID},
        f"phone_{SAID}": True,
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call", "call_id": f"call_{SAID}", "name": f"call_{SAID}", "arguments": "{}"},
    },
    {
        "type": "conversation.item.create",
        "item": {"type": "function_call_output", "call_id": f"call_{SAID}", "output": SAID},
    },
    {"type": "conversation.item.retrieve", "item_id": f"item_{SAID}"},
    {"type": "conversation.item.delete", "item_id": f"gone_{SAID}"},
    {"type": f"custom.{SAID}", "event_id": SAID},
    {"type": "response.create", "event_id": f"r-{SAID}", "response": {"metadata": {"phone": SAID}}},
]


@pytest.mark.parametrize("query", ["?model=echo", "?model=echo&events=beta", "?duplex=1&model=echo"])
@pytest.mark.parametrize("redaction", ["mask", "drop"])
def test_when_a_recording_is_redacted_then_nothing_that_the_client_chose_is_in_it(
    tmp_path: Path, query: str, redaction: str
) -> None:
    settings = Settings()
    settings = replace(settings, server=replace(settings.server, record=str(tmp_path), record_redact=redaction))

    async def main(ws: str) -> int:
        async with connect(ws, query) as wire:
            for event in EVENTS:
                await wire.socket.send(json.dumps(event))
            await wire.until("response.done")
            return sum(SAID in json.dumps(frame) for frame in wire.seen)

    with serving(settings) as (ws, _, _):
        # The client itself receives the unredacted text.
        assert asyncio.run(main(ws)) > 5
    (folder,) = tmp_path.iterdir()
    until(lambda: "response.done" in (folder / "events.jsonl").read_text())
    written = "".join((folder / name).read_text() for name in ("session.json", "events.jsonl"))
    assert SAID not in re.sub("sha256:[0-9a-f]{16}", "", written)
    assert '"path":"/v1/realtime"' in written
    assert '"model":"echo"' in written
