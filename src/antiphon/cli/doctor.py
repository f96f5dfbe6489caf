"""`antiphon doctor`: shows the installed packages, the devices, the models, and how fast the models are."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import anyio.to_thread
import ctranslate2
import numpy as np

from antiphon.audio import SAMPLE_RATE_HZ
from antiphon.cli.commit import shown_version
from antiphon.cli.preparation import pull_command
from antiphon.contracts import (
    LanguageModel,
    Message,
    ReplyDone,
    ReplyOptions,
    Synthesizer,
    Urgency,
    VoiceOptions,
    Window,
)
from antiphon.errors import AntiphonError
from antiphon.extras import install_command
from antiphon.loading.inspection import inspect
from antiphon.loading.loader import load, num_workers, store_of
from antiphon.loading.machine import free_gb
from antiphon.loading.recommendation import SIZES, Speed, recommended
from antiphon.loading.selection import LocalModel, local_models
from antiphon.remote.pool import Pool
from antiphon.roles import shown_role
from antiphon.settings import Settings

# Packages, each with the extra that it belongs to; "": the base package.
PACKAGES = {
    "ctranslate2": "",
    "faster-whisper": "",
    "onnxruntime": "",
    "av": "",
    "soxr": "",
    "starlette": "",
    "uvicorn": "",
    "websockets": "",
    "numpy": "",
    "hibari-tts": "speech",
    "onnx": "speech",
    "torch": "talk",
    "transformers": "talk",
    "llguidance": "talk",
    "rapidocr": "video",
    "aiortc": "webrtc",
}
# Each printed time is the median of this number of trials.
TRIALS = 5
SENTENCE = "The weather will be mild tomorrow, with some rain late in the evening."


async def report(settings: Settings) -> int:
    """Print the report. Loads all models, which takes up to a minute.

    Returns the exit status: 1 if a package or model is missing, or a model cannot be loaded.
    """
    print(f"{shown_version()}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    package_missing = False
    for package, extra in PACKAGES.items():
        try:
            print(f"  {package:16} {version(package)}")
        except PackageNotFoundError:
            package_missing = package_missing or not extra
            print(
                f"  {package:16} " + (f"- ({install_command(extra)})" if extra else f"MISSING: pip install {package}")
            )
    _print_devices(settings)
    store = store_of(settings.models)
    print(f"models in {store.home}, profile {settings.models.profile}")
    model_missing = False
    for model in local_models(settings):
        gaps = () if isinstance(model, LocalModel) else store.missing(model)
        model_missing = model_missing or bool(gaps)
        state = "missing: " + ", ".join(f.name for f in gaps) if gaps else "here, verified"
        if isinstance(model, LocalModel):
            state = f"{inspect(model.path).title}: antiphon inspect {model.path}"
        print(f"  {model.id:28} {state}")
    if model_missing:
        print(f"  fix: {pull_command(settings)}")
        return 1
    try:
        await _print_speeds(settings)
    except AntiphonError as error:
        print(f"  {error}", file=sys.stderr)
        return 1
    return int(package_missing)


def _print_devices(settings: Settings) -> None:
    name = platform.processor() or "?"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    print(f"  cpu              {name}, {os.cpu_count()} cores, {num_workers(settings.models)} used")
    print(f"  cpu types        {', '.join(sorted(ctranslate2.get_supported_compute_types('cpu')))}")
    print(f"  cuda devices     {ctranslate2.get_cuda_device_count()}")


async def _print_speeds(settings: Settings) -> None:
    started = time.perf_counter()
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models))
    print(f"  loaded in        {time.perf_counter() - started:.1f} s")
    await print_servers(models.pools)
    try:
        transcription = models.required_transcriber.open()
        noise = np.random.default_rng(0).normal(0, 0.05, 5 * SAMPLE_RATE_HZ).astype(np.float32)
        for label, final in (("partial, 5 s", False), ("final, 5 s", True)):
            times = []
            for _ in range(TRIALS):
                started = time.perf_counter()
                await transcription.decode(Window(noise, language="en", final=final))
                times.append(time.perf_counter() - started)
            print(f"  {label:16} {sorted(times)[TRIALS // 2] * 1000:.0f} ms (median of {TRIALS})")
        stream = models.required_vad.open()
        started = time.perf_counter()
        frames = await stream.feed(noise)
        print(f"  speech detection {(time.perf_counter() - started) / len(frames) * 1e6:.0f} µs a frame of 32 ms")
        if models.language_model:
            speed = await _print_answer_speed(models.language_model)
            profile = settings.models.profile
            if speed and profile in SIZES and not settings.engine.language_model:
                name, why = recommended(profile, speed, free_gb())
                print(f"  recommended      --profile {name}: {why}")
        if models.synthesizer:
            await _print_speech_speed(models.synthesizer)
    finally:
        models.close()


async def print_servers(pools: Sequence[Pool[Any]]) -> None:
    """Ask each server of models elsewhere once, and print what it is, or what is wrong with it."""
    for pool in pools:
        for endpoint, found, works in await pool.report():
            print(f"  {shown_role(pool.role):16} {endpoint.url}: {found if works else f'FAILS: {found}'}")


async def _print_speech_speed(synthesizer: Synthesizer) -> None:
    """Print the time to a sentence's first audio, and how much faster than real time the audio is generated."""
    options = VoiceOptions(synthesizer.profile.voices[0])
    firsts, ratios = [], []
    for _ in range(TRIALS):
        started, first, samples = time.perf_counter(), 0.0, 0
        async for chunk in synthesizer.speak(SENTENCE, options, lambda: Urgency.FINAL):
            first = first or time.perf_counter() - started
            samples += len(chunk.pcm)
        ratios.append((time.perf_counter() - started) * synthesizer.profile.sample_rate_hz / samples)
        firsts.append(first)
    print(
        f"  speech           first sound in {sorted(firsts)[TRIALS // 2] * 1000:.0f} ms, "
        f"{1 / sorted(ratios)[TRIALS // 2]:.0f} times as fast as real time (median of {TRIALS})"
    )


async def _print_answer_speed(model: LanguageModel) -> Speed | None:
    """Print the warm language model's time to first token and rate of tokens for a short question, and return them."""
    found: Speed | None = None
    question = [Message("user", "Count from one to thirty.")]
    for warm in (False, True):
        stream = await model.open()
        started = time.perf_counter()
        first, done = 0.0, None
        async for part in stream.reply(question, ReplyOptions(max_tokens=24, temperature=0.0)):
            first = first or time.perf_counter()
            done = part if isinstance(part, ReplyDone) else done
        ended = time.perf_counter()
        stream.close()
        if warm and done and done.completion_tokens > 1:
            found = Speed(first - started, (done.completion_tokens - 1) / (ended - first))
            took, rate = f"{found.first_s * 1000:.0f} ms", f"{found.tokens_a_s:.0f} tokens a second"
            print(f"  answer           first token in {took}, then {rate}")
    return found
