"""A transcriber on a real other server, in an environment of its own, behind a real antiphon: vLLM with Whisper.

`run.py` runs it (`make engines`). Each line is something that a client did and got.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
from bench.words import score

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.audio.containers import decode_all
from antiphon.client import Client
from antiphon.loading.loader import store_of
from antiphon.settings import load
from antiphon.store import MODELS
from tests.engines import whisper
from tests.engines.environments import free_port, with_vllm

HERE = Path(__file__).resolve().parent
NAMES = ("vllm-whisper",)
MODEL = "whisper-base"
START_S, ANSWER_S, PIECE_S = 600, 120, 0.1
FILE = HERE.parent / "data" / "audio" / "jfk.flac"
TEXT = "And so my fellow Americans, ask not what your country can do for you, ask what you can do for your country."
# The share of wrong words that the model may hear in it.
MAX_WRONG = 0.15


@dataclass(slots=True)
class Other:
    """A server that transcribes, which can be killed and started again on its port."""

    name: str
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """The front's flags."""
        none = ("--language-model", "none", "--synthesizer", "none", "--turn-detector", "none")
        return (*none, "--transcriber", f"http://127.0.0.1:{self.port}/v1#{MODEL}")

    def start(self) -> None:
        """Start the server, and wait until it is healthy."""
        python = with_vllm("vllm")
        folder = python.parents[1] / MODEL
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            whisper.made(store_of(load().models).require(MODELS[MODEL]), folder)
        flags = ["--model", str(folder), "--served-model-name", MODEL, "--dtype", "float32", "--max-num-seqs", "4"]
        where = ["--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.openai.api_server", *where, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"},
            # The engine is a process of its own.
            start_new_session=True,
        )
        until_s = time.monotonic() + START_S
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            assert self.process.poll() is None, f"{self.name} did not start"
            assert time.monotonic() < until_s, f"{self.name} did not start in time"
            time.sleep(0.5)

    def stop(self) -> None:
        """Kill the server."""
        if self.process:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            self.process = None


def right(heard: str) -> str:
    """Return what was heard. Raises AssertionError if too many words are wrong."""
    errors, words = score(TEXT, heard)
    assert errors <= MAX_WRONG * words, heard
    return repr(heard.strip())


async def a_file_is_transcribed(url: str, other: Other) -> str:
    async with Client(url) as client:
        return right(str(await client.transcribe(FILE)))


async def captions_come_while_it_is_said(url: str, other: Other) -> str:
    pcm = decode_all(str(FILE))
    pcm = np.concatenate((pcm, np.zeros(SAMPLE_RATE_HZ, np.float32)))
    step, before = int(PIECE_S * SAMPLE_RATE_HZ), ""
    async with Client(url) as client, client.captions() as captions:

        async def say() -> None:
            nonlocal before
            for at in range(0, len(pcm), step):
                await captions.send(pcm[at : at + step])
                await asyncio.sleep(PIECE_S)
            before = captions.text
            await captions.finish()

        said = asyncio.create_task(say())
        async with asyncio.timeout(ANSWER_S):
            async for _ in captions:
                continue
        await said
        assert before, "no word came before the end"
        return f"{right(captions.text)}; {len(before.split())} words before the end"


async def a_transcriber_that_was_killed_hears_when_it_is_back(url: str, other: Other) -> str:
    await asyncio.to_thread(other.stop)
    status = await _status(url)
    assert status >= 500, status
    await asyncio.to_thread(other.start)
    for number in range(1, 41):
        if await _status(url) == 200:
            return f"status {status}; then it hears at attempt {number}"
        # After failures in a row the server is left alone for a while.
        await asyncio.sleep(1)
    raise AssertionError("it does not hear again")


async def _status(url: str) -> int:
    async with httpx.AsyncClient(timeout=ANSWER_S) as client:
        file = {"file": ("a.flac", FILE.read_bytes())}
        return (await client.post(f"{url}/v1/audio/transcriptions", files=file, data={"model": "default"})).status_code


CHECKS: tuple[Callable[[str, Other], Awaitable[str]], ...] = (
    a_file_is_transcribed,
    captions_come_while_it_is_said,
    a_transcriber_that_was_killed_hears_when_it_is_back,
)
