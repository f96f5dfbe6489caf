"""One recording sent at 1, 2, 5 and 15 times its speed: each word is transcribed exactly once."""

from __future__ import annotations

import asyncio
import re

import pytest

from antiphon.audio import Pcm
from tests.adapters import tiny_qwen3_asr
from tests.conftest import Process, Recording, Serve
from tests.server.clients import connect

SPEEDS = (1, 2, 5, 15)
CHUNK_S = 0.1


@pytest.fixture(scope="module")
def tiny(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Process:
    folder = tiny_qwen3_asr.write(tmp_path_factory.mktemp("tiny-asr-speeds"))
    return serve("--transcriber", str(folder), "--weights", "fp32")


async def said(server: Process, pcm: Pcm, speed: float) -> tuple[str, str, dict[str, int]]:
    """Send a recording at a speed in the vLLM dialect; return its joined deltas, its text and the usage."""
    loop = asyncio.get_running_loop()
    async with connect(server.ws) as wire:
        await wire.say("session.update", model="default", language="en")
        await wire.say("input_audio_buffer.commit")
        begun_s, step = loop.time(), int(CHUNK_S * 16000)
        for at in range(0, len(pcm), step):
            await wire.sound(pcm[at : at + step])
            # Catches up after a delay, so that the average speed is right on a busy machine.
            await asyncio.sleep(max(0.0, begun_s + (at + step) / 16000 / speed - loop.time()))
        await wire.say("input_audio_buffer.commit", final=True)
        done = await wire.until("transcription.done")
        return wire.joined(), done["text"], done["usage"]


def at_all_speeds(server: Process, pcm: Pcm) -> list[tuple[str, str, dict[str, int]]]:
    async def main() -> list[tuple[str, str, dict[str, int]]]:
        return await asyncio.gather(*(said(server, pcm, speed) for speed in SPEEDS))

    return asyncio.run(asyncio.wait_for(main(), 120))


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def test_when_a_recording_is_sent_at_any_speed_then_its_words_are_the_same(
    server: Process, recordings: dict[str, Recording]
) -> None:
    one = recordings["lj-LJ001-0008"]
    for joined, text, _ in at_all_speeds(server, one.pcm):
        assert joined == text
        assert words(text) == words(one.text)


def test_when_qwen3_asr_hears_a_recording_at_any_speed_then_its_deltas_are_its_text(
    tiny: Process, recordings: dict[str, Recording]
) -> None:
    for joined, text, usage in at_all_speeds(tiny, recordings["lj-LJ001-0004"].pcm):
        assert joined == text
        assert text
        assert not [t for t in (*tiny_qwen3_asr.SPECIAL, "language English") if t in text]
        assert usage["completion_tokens"] > 0
