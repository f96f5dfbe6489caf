"""Releases in full size with random values: each is loaded as by `antiphon serve`, and its first output comes."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from antiphon.contracts import Message, ReplyDone, ReplyOptions, Urgency, VideoFrame, VideoQuestion, VoiceOptions
from antiphon.contracts.transcription import FileInfo, FileOptions, one_slab
from antiphon.loading.inspection import check
from antiphon.loading.loaded import LoadedModels
from antiphon.loading.loader import load, store_of
from antiphon.released import releases
from antiphon.settings import load as load_settings
from antiphon.vision.images import EncodedImage
from tests.released.making import write_release

pytestmark = pytest.mark.heavy
MAX_TOKENS = 2
SOUND = (0.1 * np.sin(np.arange(16_000) / 8)).astype(np.float32)


async def heard(models: LoadedModels) -> None:
    assert models.transcriber is not None
    parts = [part async for part in models.transcriber.transcribe(one_slab(SOUND), FileOptions("en"))]
    assert isinstance(parts[-1], FileInfo)
    assert parts[-1].duration_s == pytest.approx(1.0)


async def spoken(models: LoadedModels) -> None:
    voice = models.synthesizer
    assert voice is not None
    options = VoiceOptions(voice.profile.voices[0], language="en", max_frames=2)
    parts = [part.pcm async for part in voice.speak("Hello.", options, lambda: Urgency.FINAL)]
    pcm = np.concatenate(parts)
    assert len(pcm)
    assert np.isfinite(pcm).all()


async def answered(models: LoadedModels) -> None:
    assert models.language_model is not None
    chat = await models.language_model.open()
    parts = [part async for part in chat.reply([Message("user", "Hello.")], ReplyOptions(max_tokens=MAX_TOKENS))]
    assert isinstance(parts[-1], ReplyDone)
    assert parts[-1].completion_tokens
    chat.close()


async def seen(models: LoadedModels) -> None:
    assert models.video_model is not None
    stream = await models.video_model.open("")
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (240, 320, 3)).astype(np.uint8)).save(file, "PNG")
    await stream.append_frame(VideoFrame(0, 0.0, EncodedImage(file.getvalue())))
    stream.select_frames((0,))
    question = VideoQuestion("What is it?", 1.0, (0,))
    parts = [part async for part in stream.answer(question, ReplyOptions(max_tokens=MAX_TOKENS), None)]
    assert isinstance(parts[-1], ReplyDone)
    assert parts[-1].completion_tokens


@pytest.mark.parametrize(
    ("name", "role", "setting", "act"),
    [
        ("qwen3-asr-0.6b", "transcriber", "transcriber", heard),
        ("qwen3-tts-0.6b-customvoice", "synthesizer", "synthesizer", spoken),
        ("qwen3-0.6b", "language", "language_model", answered),
        ("smolvlm2-256m-video-instruct", "video_model", "video_model", seen),
        ("smolvlm2-500m-video-instruct", "video_model", "video_model", seen),
    ],
)
def test_a_release_in_full_size_is_loaded_and_gives_its_first_output(
    name: str, role: Any, setting: str, act: Callable[[LoadedModels], Awaitable[None]], tmp_path: Path
) -> None:
    folder = write_release(tmp_path / name, releases()[name], values=True)
    assert check(folder, role) == ()
    settings = load_settings({setting: str(folder), "home": str(tmp_path / "home"), "weights": "bf16", "kv_mb": 256})
    models = load(settings, store_of(settings.models), roles=(role,))
    try:
        asyncio.run(act(models))
    finally:
        models.close()
        for file in folder.rglob("*.safetensors"):
            file.unlink()
