"""Videos with sound, in the format of the Omni models' published processors, and in that of a session."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from antiphon.audio import Pcm
from antiphon.contracts import ImagePart, VideoPart
from antiphon.pipelines.video_sound import VideoSound
from antiphon.vision.images import EncodedImage


def frame(number: int = 0) -> ImagePart:
    """Return a frame of 128 rows, which processors do not scale."""
    file = io.BytesIO()
    pixels = np.random.default_rng(100 + number).integers(0, 255, (128, 256, 3))
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return ImagePart(EncodedImage(file.getvalue()), in_video=True)


def sound(seconds: float, number: int = 0) -> Pcm:
    """Return tones in noise. The first second has the loudest tones, so that no window is louder than earlier ones."""
    rng = np.random.default_rng(number)
    at = np.arange(int(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * f * at) for f in rng.uniform(100, 3000, 4))
    pcm = 0.05 * tones * (1 + np.sin(2 * np.pi * 0.7 * at)) + rng.normal(0, 0.02, len(at))
    return (pcm * np.where(at < 1, 2.0, 1.0)).astype(np.float32)


def windows(pcm: Pcm, window_s: float) -> VideoSound:
    """Return windows of sound that arrives in pieces of 0.13 s."""
    made = VideoSound(window_s)
    for i in range(0, len(pcm), 2080):
        made.append(pcm[i : i + 2080], i / 16_000)
    return made


def video(frames: Sequence[ImagePart], step_s: float, pcm: Pcm | None, window_s: float) -> VideoPart:
    """Return a video with a frame every `step_s` seconds."""
    times = tuple((i * step_s, f) for i, f in enumerate(frames))
    return VideoPart(times, windows(pcm, window_s).all() if pcm is not None else ())


def joined(part: VideoPart) -> Pcm:
    """Return the whole sound of a video, from its windows."""
    return np.concatenate([w.pcm[w.num_before : len(w.pcm) - w.num_after] for w in part.sound])


@dataclass
class PublishedVideo:
    """A processor of `transformers` without its video processor, which needs torchvision.

    The pixels are those of its image processor, which repeats an image. So each frame of the video is shown twice.
    """

    processor: Any
    tokens: dict[str, str]
    positions_per_s: float
    process: Any

    def inputs(self, part: VideoPart, num_sound_rows: int) -> tuple[str, dict[str, Any]]:
        """Return the video's tokens, and the model's inputs for its frames."""
        opened = [Image.open(io.BytesIO(f.image.data)).convert("RGB") for _, f in part.frames]
        size = {"shortest_edge": 128 * 256, "longest_edge": 768 * 256}
        made = self.process(opened, return_tensors="pt", size=size)
        _, height, width = made["image_grid_thw"][0].tolist()
        grid = torch.tensor([[len(opened), height, width]])
        step_s = part.frames[1][0] - part.frames[0][0] if len(opened) > 1 else 1.0
        given = {
            "pixel_values_videos": made["pixel_values"],
            "video_grid_thw": grid,
            "video_second_per_grid": torch.tensor([step_s]),
        }
        if not part.sound:
            return self.tokens["video_token"] * int(grid.prod() // 4), given
        own = SimpleNamespace(
            video_processor=SimpleNamespace(merge_size=2),
            get_chunked_index=partial(self.processor.get_chunked_index, None),
            **self.tokens,
        )
        written = self.processor.replace_video_with_audio_token(
            own,
            {"video_grid_thw": grid.numpy(), "video_second_per_grid": [step_s]},
            0,
            {"num_audio_tokens": [num_sound_rows]},
            0,
            position_id_per_seconds=self.positions_per_s,
            seconds_per_chunk=2.0,
        )
        return written, given | {"use_audio_in_video": True}
