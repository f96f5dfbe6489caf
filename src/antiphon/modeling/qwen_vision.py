"""Pictures of any shape as Qwen's vision encoders take them: patches in, rows placed by (time, height, width) out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.modeling.media_rows import PictureRows
from antiphon.vision.images import Pixels

# Rows of a picture at most: what the models' makers give a frame of video.
MAX_ROWS = 768
# The encoder takes no picture longer than this many times its width.
MAX_ASPECT = 200


class QwenVisionEncoder:
    """`model` has get_image_features; `vision`: its vision encoder's config."""

    def __init__(self, folder: Path, model: Any, vision: Any) -> None:
        """Raises OSError, ValueError."""
        self._model = model
        self._merge = int(vision.spatial_merge_size)
        process = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        factor = int(vision.patch_size) * self._merge
        process.size = {
            "shortest_edge": process.size["shortest_edge"],
            "longest_edge": min(process.size["longest_edge"], MAX_ROWS * factor**2),
        }
        self._process: Any = process

    def prepare(self, pixels: Pixels) -> Any:
        """See Family: patches float32 [n, numbers] and their grid (time, height, width)."""
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            # What it would refuse, it sees a part of.
            pixels = pixels[: MAX_ASPECT * width, : MAX_ASPECT * height]
        made = self._process(pixels, return_tensors="np", input_data_format="channels_last")
        return np.asarray(made["pixel_values"], np.float32), np.asarray(made["image_grid_thw"])

    @torch.inference_mode()
    def look(self, prepared: Any) -> PictureRows:
        """See Family."""
        patches, grid = (torch.from_numpy(part).to(self._model.device) for part in prepared)
        seen = self._model.get_image_features(patches, grid)
        rows = torch.cat([seen.pooler_output[0], *(f[0] for f in getattr(seen, "deepstack_features", None) or ())], -1)
        height, width = (int(n) // self._merge for n in grid[0, 1:])
        return PictureRows(rows, tuple((0, h, w) for h in range(height) for w in range(width)))
