"""Encodes pictures of any shape with Qwen's vision encoders. Each row has a position (time, height, width).

Qwen2.5-VL, Qwen3-VL and Qwen3-Omni share this module. The encoder itself comes from `transformers`. It packs the
patches of several pictures in one pass, in which each picture, or each window of a picture, is a *segment*: its patches
attend only to each other. `transformers` attends segment by segment. The attention of this module is one call for all
segments of a layer, and the host reads nothing from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from antiphon.engine.api import Position
from antiphon.modeling.media_rows import PictureRows
from antiphon.vision.images import Pixels

# Maximum number of rows of a picture, which is the models' own limit for a video frame.
MAX_ROWS = 768
# Minimum number of rows of a video frame, as in Qwen's Omni models.
MIN_VIDEO_ROWS = 128
# The encoder refuses pictures with a larger ratio of the longer side to the shorter one.
MAX_ASPECT = 200
# The name by which `transformers` finds `attend_segments`. With "flash" in it, the encoders pass on the bounds of the
# segments, instead of calling it for each segment.
ATTENTION_NAME = "antiphon_flash_segments"


class PreparedPicture(NamedTuple):
    """The input of the encoder.

    `patches`: float32 [patches, numbers per patch]. `grid`: the numbers of their rows and columns. `positions`: one for
    each row of the decoder's input.
    """

    patches: npt.NDArray[np.float32]
    grid: tuple[int, int]
    positions: tuple[Position, ...]


class QwenVisionEncoder:
    """Encodes pictures with a model of `transformers` that has `get_image_features`.

    `folder`: the checkpoint's folder, which contains the settings of the image processor. `vision`: the configuration
    of the model's vision encoder.
    """

    def __init__(self, folder: Path, model: Any, vision: Any) -> None:
        """Read the image processor of a checkpoint. Raises OSError or ValueError if it has none."""
        self._model = model
        # In an Omni model of older `transformers`, the encoder is a part of the thinker itself.
        self._encoder = model.visual if hasattr(model, "visual") else model.model.visual
        # Not by `set_attn_implementation`, which looks for the package of any implementation with "flash" in its name.
        self._encoder.config._attn_implementation = ATTENTION_NAME
        self._merge = int(vision.spatial_merge_size)
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        factor = int(vision.patch_size) * self._merge
        processor.size = {
            "shortest_edge": processor.size["shortest_edge"],
            "longest_edge": min(processor.size["longest_edge"], MAX_ROWS * factor**2),
        }
        self._processor: Any = processor
        self._video_size = {"shortest_edge": MIN_VIDEO_ROWS * factor**2, "longest_edge": MAX_ROWS * factor**2}

    def prepare(self, pixels: Pixels, *, in_video: bool = False) -> PreparedPicture:
        """Return the patches of a picture. Runs on the CPU, without torch.

        Scales the picture down to MAX_ROWS rows, and crops it if it is longer than the encoder accepts. `in_video`: the
        picture is a video frame for an Omni model; small frames are scaled up to MIN_VIDEO_ROWS rows.
        """
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT * min(height, width):
            # The encoder would refuse the whole picture, so it gets only a part.
            pixels = pixels[: MAX_ASPECT * width, : MAX_ASPECT * height]
        size = {"size": self._video_size} if in_video else {}
        made = self._processor(pixels, return_tensors="np", input_data_format="channels_last", **size)
        _, down, across = (int(n) for n in made["image_grid_thw"][0])
        positions = tuple((0, h, w) for h in range(down // self._merge) for w in range(across // self._merge))
        return PreparedPicture(np.asarray(made["pixel_values"], np.float32), (down, across), positions)

    def num_patches(self, picture: PreparedPicture) -> int:
        """Return the number of a picture's patches."""
        return len(picture.patches)

    @torch.inference_mode()
    def look(self, pictures: Sequence[PreparedPicture]) -> list[PictureRows]:
        """Return the rows of each picture. Each row ends with the features for the decoder's first layers.

        Runs the encoder in one pass, so it must be called in the model's thread.
        """
        grid = torch.tensor([(1, *picture.grid) for picture in pictures])
        patches = torch.from_numpy(np.concatenate([picture.patches for picture in pictures]))
        # The grid stays on the host, where the encoder reads it.
        encoded = self._model.get_image_features(self._on_device(patches), grid, segments={}, **self._places(grid))
        sizes = [len(picture.positions) for picture in pictures]
        # The features of a layer are one tensor per picture. Before `transformers` 5.23, they are one tensor for all
        # pictures.
        layers = getattr(encoded, "deepstack_features", None) or ()
        features = [torch.split(layer, sizes) if isinstance(layer, torch.Tensor) else layer for layer in layers]
        # Copies, so that the rows of a session do not keep those of the others alive.
        rows = [torch.cat(own, -1) for own in zip(encoded.pooler_output, *features, strict=True)]
        return [PictureRows(own, picture.positions) for own, picture in zip(rows, pictures, strict=True)]

    def _places(self, grid: torch.Tensor) -> dict[str, torch.Tensor]:
        """The places of the patches as the encoder's keyword arguments. Otherwise it would compute them on the device.

        `grid`: int64 [pictures, 3], on the host.
        """
        encoder = self._encoder
        places = {"position_ids": self._on_device(get_vision_position_ids(grid, self._merge))}
        if hasattr(encoder, "fullatt_block_indexes"):
            windows, bounds = get_vision_window_index(grid, self._merge, encoder.window_size, encoder.patch_size)
            places |= {"window_index": self._on_device(windows), "cu_window_seqlens": bounds}
        else:
            indices, weights = get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=encoder.num_grid_per_side,
                mode=encoder.interpolation_mode,
                align_corners=encoder.interpolation_align_corners,
                spatial_merge_size=self._merge,
            )
            places |= {"interp_indices": self._on_device(indices), "interp_weights": self._on_device(weights)}
        return places

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._model.device, non_blocking=True)


class _Segments:
    """The segments of a pass as a batch. `bounds`: int32 [segments + 1], on the host.

    Segments are padded to the longest one, rounded up to 8 because the GPU's kernels need it. `count`: the number of
    segments. `most`: the places of each. `rows` int64 [count * most]: the patch of each place, and 0 for padding.
    `seen` bool [count, 1, 1, most]: the places with a patch. `places` int64 [patches]: the place of each patch. If all
    segments are equally long, there is no padding, and the last three are None.
    """

    def __init__(self, bounds: torch.Tensor, device: torch.device) -> None:
        lengths = np.diff(bounds.numpy())
        self.count, self.most = len(lengths), int(lengths.max())
        self.rows = self.seen = self.places = None
        if lengths.min() < self.most:
            self.most = -(-self.most // 8) * 8
            seen = np.arange(self.most) < lengths[:, None]
            rows = np.zeros(seen.shape, np.int64)
            rows[seen] = np.arange(seen.sum())
            self.rows, self.places, self.seen = (
                torch.from_numpy(numbers).to(device, non_blocking=True)
                for numbers in (rows.reshape(-1), np.flatnonzero(seen), seen[:, None, None])
            )

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """Return [segments, heads, most, head_dim] for packed rows, [1, heads, patches, head_dim]."""
        if self.rows is not None:
            rows = rows.index_select(2, self.rows)
        return rows.view(rows.shape[1], self.count, self.most, -1).transpose(0, 1)

    def packed(self, batch: torch.Tensor) -> torch.Tensor:
        """Return [1, patches, heads, head_dim] for a batch, [segments, heads, most, head_dim]."""
        rows = batch.transpose(1, 2).flatten(0, 1)
        return (rows if self.places is None else rows.index_select(0, self.places))[None]


def attend_segments(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    segments: dict[int, _Segments],
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each segment, called by `transformers` as an attention implementation.

    `query`, `key`, `value`: [1, heads, patches, head_dim]. `cu_seq_lens_q`: the bounds of the segments, int32 [segments
    + 1], on the host. `segments`: the segments of this pass so far, by the identity of their bounds. Returns [1,
    patches, heads, head_dim] and no weights.
    """
    own = segments.get(id(cu_seq_lens_q))
    if own is None:
        own = segments[id(cu_seq_lens_q)] = _Segments(cu_seq_lens_q, query.device)
    q, k, v = own.batch(query), own.batch(key), own.batch(value)
    out = scaled_dot_product_attention(q, k, v, attn_mask=own.seen, scale=scaling)
    return own.packed(out), None


AttentionInterface.register(ATTENTION_NAME, attend_segments)
