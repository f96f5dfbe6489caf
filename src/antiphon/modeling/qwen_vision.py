"""Encodes pictures of any shape with Qwen's vision encoders. Each row has a position (time, height, width).

Qwen2.5-VL, Qwen3-VL and Qwen3-Omni share this module. The encoder itself comes from `transformers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from antiphon.modeling.media_rows import PictureRows
from antiphon.vision.images import Pixels

# Maximum number of rows of a picture, which is the models' own limit for a video frame.
MAX_ROWS = 768
# Minimum number of rows of a video frame, as in Qwen's Omni models.
MIN_VIDEO_ROWS = 128
# The encoder refuses pictures with a larger ratio of the longer side to the shorter one.
MAX_ASPECT = 200


class QwenVisionEncoder:
    """Encodes pictures with a model of `transformers` that has `get_image_features`.

    `folder`: the checkpoint's folder, which contains the settings of the image processor. `vision`: the configuration
    of the model's vision encoder.
    """

    def __init__(self, folder: Path, model: Any, vision: Any) -> None:
        """Read the image processor of a checkpoint. Raises OSError or ValueError if it has none."""
        self._model = model
        self._merge = int(vision.spatial_merge_size)
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        factor = int(vision.patch_size) * self._merge
        processor.size = {
            "shortest_edge": processor.size["shortest_edge"],
            "longest_edge": min(processor.size["longest_edge"], MAX_ROWS * factor**2),
        }
        self._processor: Any = processor
        self._video_size = {"shortest_edge": MIN_VIDEO_ROWS * factor**2, "longest_edge": MAX_ROWS * factor**2}

    def prepare(self, pixels: Pixels, *, in_video: bool = False) -> Any:
        """Return the patches, float32 [patches, numbers per patch], and their grid, int [1, 3] (time, height, width).
        Runs on the CPU.

        Scales the picture down to MAX_ROWS rows, and crops it if it is longer than the encoder accepts. `in_video`: the
        picture is a video frame for an Omni model; small frames are scaled up to MIN_VIDEO_ROWS rows.
        """
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            # The encoder would refuse the whole picture, so it gets only a part.
            pixels = pixels[: MAX_ASPECT * width, : MAX_ASPECT * height]
        size = {"size": self._video_size} if in_video else {}
        made = self._processor(pixels, return_tensors="np", input_data_format="channels_last", **size)
        return np.asarray(made["pixel_values"], np.float32), np.asarray(made["image_grid_thw"])

    @torch.inference_mode()
    def look(self, prepared: Any) -> PictureRows:
        """Return the rows of a prepared picture. Each row ends with the features for the decoder's first layers.

        Runs the encoder, so it must be called in the model's thread.
        """
        patches, grid = (torch.from_numpy(part).to(self._model.device) for part in prepared)
        encoded = self._model.get_image_features(patches, grid)
        # The features of a layer are one tensor per picture. Before `transformers` 5.23, they are one tensor for all
        # pictures.
        layers = getattr(encoded, "deepstack_features", None) or ()
        features = [layer if isinstance(layer, torch.Tensor) else layer[0] for layer in layers]
        rows = torch.cat([encoded.pooler_output[0], *features], -1)
        height, width = (int(n) // self._merge for n in grid[0, 1:])
        return PictureRows(rows, tuple((0, h, w) for h in range(height) for w in range(width)))
