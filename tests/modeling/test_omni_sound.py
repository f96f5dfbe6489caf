"""Sound of many sessions in one pass of Qwen-Omni's encoders: each window has the rows that it has alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from antiphon.contracts import AudioPart, SoundTrack
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.media_rows import AudioWindow
from antiphon.modeling.omni.sound import SoundFeatures
from antiphon.modeling.omni.sound_encoder import MAX_WAITING_GPU, SoundEncoder, SoundFrames
from antiphon.shares.places import current_owner
from tests.adapters import published_qwen2_5_omni, published_qwen3_omni, tiny_qwen2_5_omni, tiny_qwen3_omni

# A window of Qwen2.5-Omni has at most 200 frames, one of Qwen3-Omni at most 800.
LENGTHS = (1, 37, 99, 100, 101, 163, 199, 200, 430, 799, 800)
FRAMES = np.random.default_rng(8).standard_normal((16, 1000)).astype(np.float32)


@pytest.fixture(scope="module", params=["qwen2_5", "qwen3"])
def thinker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3":
        return published_qwen3_omni.Whole(tiny_qwen3_omni.write(folder)).model.thinker
    return published_qwen2_5_omni.Whole(tiny_qwen2_5_omni.write(folder)).model


class Gathered:
    """An encoder as on a GPU, whose thread does not serve requests before `release`."""

    def __init__(self, thinker: Any) -> None:
        self.thread = ModelThread("test")
        self.encoder = SoundEncoder(thinker, self.thread, together=True)
        if self.encoder.windows:
            self.encoder.windows.together = True
        self._held = threading.Event()
        self.thread.post(lambda: self._held.wait(30) and None)

    def release(self) -> None:
        self._held.set()


@torch.inference_mode()
def published(thinker: Any, window: SoundFrames) -> torch.Tensor:
    """Return the rows of one window by the model's own encoder."""
    given, count = torch.from_numpy(np.ascontiguousarray(window.frames))[None], window.frames.shape[1]
    more, chunk = {}, 2 * thinker.config.audio_config.n_window
    if window.padded and count < chunk:
        more["padded_feature"] = torch.nn.functional.pad(given, (0, chunk - count))
        more["chunk_lengths"] = torch.tensor([count])
    found: torch.Tensor = thinker.get_audio_features(given, torch.ones(1, count).long(), **more).last_hidden_state
    return found


def windows(most: int) -> list[SoundFrames]:
    lengths = [length for length in LENGTHS if 3 < length <= most]
    return [SoundFrames(FRAMES[:, i : i + n], padded) for i, n in enumerate(lengths) for padded in (True, False)]


def test_windows_of_many_sessions_have_the_rows_of_each_alone(thinker: Any) -> None:
    async def run() -> None:
        gathered = Gathered(thinker)
        given = windows(gathered.encoder.window_frames)
        asked = [asyncio.ensure_future(gathered.encoder.encode([one])) for one in given[1:]]
        both = asyncio.ensure_future(gathered.encoder.encode(given[:2]))
        await asyncio.sleep(0)
        gathered.release()
        for one, (rows,) in zip(given[1:], await asyncio.gather(*asked), strict=True):
            torch.testing.assert_close(rows, published(thinker, one), rtol=1e-4, atol=1e-5)
            # A conversation keeps the rows, so they must not be a part of a larger tensor.
            assert rows.untyped_storage().nbytes() == rows.nbytes
        torch.testing.assert_close((await both)[1], published(thinker, given[1]), rtol=1e-4, atol=1e-5)
        gathered.thread.close()

    asyncio.run(run())


def test_when_a_window_is_broken_then_only_its_caller_gets_an_error(thinker: Any) -> None:
    async def run() -> None:
        gathered = Gathered(thinker)
        good, broken = SoundFrames(FRAMES[:, :150], padded=True), SoundFrames(FRAMES[:6, :150], padded=True)
        asked = [gathered.encoder.encode(given) for given in ([good], [broken], [good, broken], [good])]
        waiting = asyncio.ensure_future(asyncio.gather(*asked, return_exceptions=True))
        await asyncio.sleep(0)
        gathered.release()
        found = await waiting
        assert [type(f) for f in found] == [list, ModelError, ModelError, list]
        for made in (found[0], found[3]):
            torch.testing.assert_close(made[0], published(thinker, good), rtol=1e-4, atol=1e-5)
        gathered.thread.close()

    asyncio.run(run())


def test_a_batch_has_a_limit_and_keys_take_turns_for_its_places(thinker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order, batches = list[int](), list[int]()

    async def run() -> None:
        gathered = Gathered(thinker)
        name = "_encode_windows" if gathered.encoder.windows else "_encode_chunks"
        encode = getattr(gathered.encoder, name)

        def noted(requests: Sequence[SoundFrames]) -> list[torch.Tensor]:
            batches.append(len(requests))
            made: list[torch.Tensor] = encode(requests)
            return made

        monkeypatch.setattr(gathered.encoder, name, noted)

        async def ask(owner: str, count: int) -> None:
            current_owner.set(owner)
            await gathered.encoder.encode([SoundFrames(FRAMES[:, :100], padded=True)] * count)
            order.append(len(batches))

        many = asyncio.ensure_future(ask("many", 40))
        await asyncio.sleep(0)
        few = asyncio.ensure_future(ask("few", 1))
        for _ in range(3):
            await asyncio.sleep(0)
        gathered.release()
        await asyncio.gather(many, few)
        gathered.thread.close()

    asyncio.run(run())
    assert sum(batches) == 41
    assert max(batches) == batches[0] == MAX_WAITING_GPU
    # The second owner had to wait for the batch that was full, and no longer.
    assert order[0] == 2 < order[1]


def extracted(folder: Path, pcm: np.ndarray, *, zero_padded: bool) -> np.ndarray:
    """Return the frames of a whole clip by the published extractor, as its processor calls it."""
    extract: Any = WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
    size = max(len(pcm), 1_600)
    given = np.pad(pcm, (0, size - len(pcm) + (400 if zero_padded else 0)))
    made = extract(given, sampling_rate=16_000, truncation=False, padding=True, return_tensors="np")
    found: np.ndarray = made["input_features"][0][:, : -(-size // 160) if zero_padded else size // 160]
    return found


@pytest.mark.parametrize("zero_padded", [False, True])
def test_the_frames_of_a_clip_that_grows_are_those_of_the_whole(tmp_path: Path, zero_padded: bool) -> None:
    tiny_qwen3_omni.write(tmp_path)
    sound = SoundFeatures(tmp_path, zero_padded=zero_padded, chunk_frames=20, window_frames=60)
    drawn = np.random.default_rng(3)
    # Sound that becomes louder twice, after silence.
    pcm = (drawn.standard_normal(64_000) * np.repeat([0.0, 1e-3, 1e-3, 0.1], 16_000)).astype(np.float32)
    turn, windows = SoundTrack(), list[list[AudioWindow]]()
    for end, grows in ((700, True), (12_345, True), (30_000, True), (40_000, True), (39_001, True), (64_000, False)):
        clip = sound.clip(AudioPart(pcm[:end], turn, grows))
        expected, own = extracted(tmp_path, pcm[:end], zero_padded=zero_padded), len(clip.windows)
        # The last window of a clip that grows is not finished.
        assert own == (max(0, expected.shape[1] - 2) // 60 if grows else -(-expected.shape[1] // 60))
        for number in range(own):
            frames = expected[:, 60 * number : 60 * (number + 1)]
            np.testing.assert_allclose(clip.frames(number), frames, rtol=0, atol=2e-6)
        windows.append(list(clip.windows))
    assert windows[3][:3] == windows[2][:3]
    assert windows[4] == windows[3][: len(windows[4])]
    # Louder sound changes the windows of silence, and no others.
    assert windows[5][0] != windows[4][0]
    assert windows[5][2:4] == windows[4][2:4]
    # An independent clip with the same frames has other windows, because its rows belong to it.
    alone = sound.clip(AudioPart(pcm))
    assert [window.number for window in alone.windows] == list(range(len(windows[5])))
    assert not set(alone.windows) & set(windows[5])
