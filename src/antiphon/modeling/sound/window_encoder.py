"""The audio encoder of Qwen3-ASR and Qwen3-Omni, for windows of many sounds in one pass.

Three convolutions see one chunk of 1 s at a time. Attention sees one window of up to 8 s. `transformers` packs the rows
of all windows, and calls attention once for each window and layer. Here windows are padded and masked, so that the
number of operators does not depend on the number of windows. On a GPU, a pass has one of a few sizes, which CUDA graphs
can replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs
from antiphon.modeling.sound.log_mel import Frames

# The numbers of windows in a pass on a GPU. More windows take several passes.
PASS_WINDOWS = (1, 4, 16, 64)


class MelWindow(NamedTuple):
    """The frames of a window. `num_frames`: their number, at least 1.

    `chunks`: the frames without their floor, float32 [n, bins, chunk_frames]. What follows the frames is meaningless.
    The only chunk of a window may be shorter; then no zeros follow its frames. `floor`: the least value of a frame.
    """

    chunks: Frames
    num_frames: int
    floor: float = -np.inf

    def write(self, into: Frames) -> None:
        """Write the frames with their floor to `into`, float32 [chunks, bins, chunk_frames], and zeros after them."""
        size = self.chunks.shape[2]
        whole, left = divmod(self.num_frames, size)
        count = whole + (left > 0)
        np.maximum(self.chunks[:count], np.float32(self.floor), out=into[:count])
        if left:
            into[whole, :, left:] = 0
        into[count:] = 0


class WindowPass(CapturedPass[torch.Tensor]):
    """A pass of up to `count` windows: its tensors and, if captured, its graph.

    `chunks`, float32 [count, chunks, bins, chunk_frames]: the frames of the windows, followed by zeros. `num_rows`,
    int64 [count]: the number of rows of each window, at least 1.
    """

    def __init__(self, encoder: WindowEncoder, count: int) -> None:
        device = encoder.device
        self._encoder = encoder
        self.chunks = torch.zeros(count, *encoder.window_shape, device=device)
        self.num_rows = torch.ones(count, dtype=torch.long, device=device)

    def run(self, windows: Sequence[MelWindow]) -> torch.Tensor:
        """Return the rows [count, rows, width], in a tensor that is valid until the next run. Does not wait."""
        on_gpu = self.chunks.device.type != "cpu"
        # The allocator of pinned memory does not give it away before it is copied.
        given = torch.empty(self.chunks.shape, pin_memory=on_gpu)
        counts = torch.ones(len(self.num_rows), dtype=torch.long, pin_memory=on_gpu)
        # As arrays, because writing to a tensor would be an operator for each window.
        for own, into, window in zip(range(len(windows)), given.numpy(), windows, strict=False):
            window.write(into)
            counts.numpy()[own] = self._encoder.rows(window.num_frames)
        self.chunks.copy_(given, non_blocking=True)
        self.num_rows.copy_(counts, non_blocking=True)
        return self.result()

    def compute(self) -> torch.Tensor:
        """Return the rows [count, rows, width] of the frames in `chunks`."""
        return self._encoder.forward(self.chunks, self.num_rows)


class WindowEncoder:
    """The rows of a decoder for windows of frames. Used in the model's thread.

    `chunk_frames`, `window_frames`: the number of frames in a chunk and in a window. `window_shape`: the shape of the
    chunks of a whole window. `device`: where the rows are computed. `together`: windows are encoded in passes of many.
    On a CPU they are encoded one by one, without padding, because a pass of many would not be faster there.
    """

    def __init__(
        self, tower: Any, projection: Callable[[torch.Tensor], torch.Tensor], *, most: int = PASS_WINDOWS[-1]
    ) -> None:
        """`tower`: an audio encoder of `transformers`, with its convolutions and layers. `projection`: follows them.

        `most`: limit of windows in a pass, one of PASS_WINDOWS.
        """
        config = tower.config
        self._tower, self._projection = tower, projection
        self._sizes = [count for count in PASS_WINDOWS if count <= most]
        self._heads = int(config.encoder_attention_heads)
        self.chunk_frames = 2 * int(config.n_window)
        self.window_frames = int(config.n_window_infer)
        self.window_shape = (self.window_frames // self.chunk_frames, int(config.num_mel_bins), self.chunk_frames)
        self.device: torch.device = tower.conv2d1.weight.device
        self.together = self.device.type != "cpu"
        self._passes: dict[int, WindowPass] = {}
        self._graphs = Graphs("passes of the audio encoder", enabled=False)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the passes as CUDA graphs, which takes seconds. Does nothing if windows are encoded one by one."""
        if self.together:
            self._graphs = Graphs("passes of the audio encoder")
            for count in self._sizes:
                self._pass(count)

    @torch.inference_mode()
    def encode(self, windows: Sequence[MelWindow]) -> list[torch.Tensor]:
        """Return the rows [n, width] of each window. Those of a window do not depend on the other windows."""
        is_padded = [self.together and window.chunks.shape[2] == self.chunk_frames for window in windows]
        padded, most = list(compress(windows, is_padded)), self._sizes[-1]
        made = (rows for at in range(0, len(padded), most) for rows in self._in_a_pass(padded[at : at + most]))
        return [next(made) if joint else self._alone(window) for window, joint in zip(windows, is_padded, strict=True)]

    def rows(self, num_frames: int) -> int:
        """Return the number of rows for a window's frames: three convolutions halve each of its chunks."""
        whole, left = divmod(num_frames, self.chunk_frames)
        return whole * _halved(self.chunk_frames) + _halved(left)

    def forward(self, chunks: torch.Tensor, num_rows: torch.Tensor | int) -> torch.Tensor:
        """Return the rows of windows, [n, rows, width].

        Args:
            chunks: float32 [n, chunks, bins, frames].
            num_rows: The number of rows of every window, or of each, int64 [n]. In the latter case, the rows after
                those of a window are meaningless, and other rows do not depend on them.
        """
        tower = self._tower
        count = chunks.shape[0]
        x = chunks.flatten(0, 1)[:, None].to(tower.conv2d1.weight.dtype)
        for convolution in (tower.conv2d1, tower.conv2d2, tower.conv2d3):
            # In place, because the first convolution's output is by far the largest tensor.
            x = torch.ops.aten.gelu_(convolution(x))
        x = tower.conv_out(x.permute(0, 3, 1, 2).flatten(2))
        x = x + tower.positional_embedding.positional_embedding[: x.shape[1]].to(x.dtype)
        x = x.view(count, -1, x.shape[2])
        mask = None
        if isinstance(num_rows, int):
            x = x[:, :num_rows]
        else:
            mask = (torch.arange(x.shape[1], device=x.device) < num_rows[:, None])[:, None, None]
        for layer in tower.layers:
            x = self._layer(layer, x, mask)
        rows: torch.Tensor = self._projection(tower.ln_post(x))
        return rows

    def _layer(self, layer: Any, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        attention = layer.self_attn
        normed = layer.self_attn_layer_norm(x)
        query, keys, values = (
            part(normed).unflatten(2, (self._heads, -1)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        seen = functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=attention.scaling)
        x = x + attention.out_proj(seen.transpose(1, 2).flatten(2))
        hidden = layer.activation_fn(layer.fc1(layer.final_layer_norm(x)))
        out: torch.Tensor = x + layer.fc2(hidden)
        return out

    def _alone(self, window: MelWindow) -> torch.Tensor:
        count = -(-window.num_frames // self.chunk_frames)
        chunks = torch.empty(1, count, *window.chunks.shape[1:])
        window.write(chunks[0].numpy())
        return self.forward(chunks.to(self.device), self.rows(window.num_frames))[0]

    def _in_a_pass(self, windows: Sequence[MelWindow]) -> Iterator[torch.Tensor]:
        made = self._pass(next(n for n in self._sizes if n >= len(windows))).run(windows)
        # A copy, because the next run overwrites the rows.
        made = made[: len(windows)].clone()
        return (rows[: self.rows(window.num_frames)] for rows, window in zip(made, windows, strict=True))

    def _pass(self, count: int) -> WindowPass:
        found = self._passes.get(count)
        if found is None:
            found = self._passes[count] = WindowPass(self, count)
            found.capture(self._graphs, self.device)
        return found


def _halved(frames: int) -> int:
    for _ in range(3):
        frames = (frames + 1) // 2
    return frames
