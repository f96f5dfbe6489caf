"""A real session recorded by a real server, and replayed against the models."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from antiphon.recording.tape import Tape
from tests.conftest import SMALL, VOICE, Recording, Serve
from tests.server.conversations import talk


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
            # The client names an id that the server chose, which is another one in the replay.
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
    # On a machine that is busier than at the recording, a client's event may now come before the event it followed.
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
