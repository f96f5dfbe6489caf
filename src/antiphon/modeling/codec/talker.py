"""Chooses the codes of a frame of audio, in Qwen3-TTS and Qwen3-Omni.

A decoder on the engine samples the first code of each frame. A small code predictor then samples the other fifteen.
Both compute all sessions at once. `frames.py` turns frames into an utterance, and `vocoder.py` turns codes
into audio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from antiphon.engine.api import Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local.device_sampling import RowChoices, draw_tokens
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs, power_of_two, warmed_sizes
from antiphon.engine.local.sampling import RowEdits, RowSampler, sample_rows
from antiphon.errors import ModelError

# The number of control codes, which are the last codes of the talker's vocabulary and are not audio.
SPECIAL_CODES = 1024
# Limit of frames of one utterance (max_new_tokens in generation_config.json).
MAX_FRAMES = 2048


@dataclass(frozen=True, slots=True)
class CodecSampling:
    """How the codes of one utterance are chosen, and its number of frames.

    `first`: the sampling of the first code of a frame. `rest`: the sampling of its other codes. `min_frames`: number of
    frames before the end code may be chosen. `max_frames`: number of frames after which the audio is cut off.
    """

    first: Sampling
    rest: Sampling
    min_frames: int = 2
    max_frames: int = MAX_FRAMES


# The sampling that was released with Qwen3-TTS (generation_config.json).
DEFAULT_CODEC_SAMPLING = CodecSampling(
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, repetition_window=MAX_FRAMES),
    Sampling(temperature=0.9, top_k=50),
)


class TextProjection(nn.Module):
    """Projects the embeddings of text tokens to the talker's width (`talker.text_projection.` in checkpoints)."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(in_width, in_width), nn.Linear(in_width, out_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, out_width] for x, [n, in_width]."""
        out: torch.Tensor = self.linear_fc2(silu(self.linear_fc1(x)))
        return out


class FrameKv:
    """The keys and values of one frame of the code predictor, for all sessions: the cache of its attention.

    They are in one tensor with room for a whole frame, and attention reads the start of the tensor. So all frames of
    the same number of sessions run the same kernels on the same shapes, as a CUDA graph requires. Each pass writes the
    positions of its own rows.
    """

    def __init__(self, config: Any, sessions: int, positions: int, like: torch.Tensor) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (int(config.num_hidden_layers), 2, sessions, int(config.num_key_value_heads), positions, head_dim)
        self._held = like.new_empty(shape)
        # The positions that the next pass writes.
        self.rows = slice(0, 0)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys and values [n, heads, rows, head_dim], and return those of all rows so far."""
        held_keys, held_values = self._held[layer]
        held_keys[:, :, self.rows] = keys
        held_values[:, :, self.rows] = values
        return held_keys[:, :, : self.rows.stop], held_values[:, :, : self.rows.stop]


class CodePredictor(nn.Module):
    """Samples the codes of a frame after the first one, in order, with a small decoder.

    `model`: a Qwen3Model, or a module with the same interface. Its attention is set to torch's. `tables`, `heads`: an
    embedding and a head for each of these codes. `width`: the width of the talker's rows. Parameters have their names
    in the checkpoint.
    """

    def __init__(self, model: Any, tables: nn.ModuleList, heads: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.model, self.codec_embedding, self.lm_head = model, tables, heads
        # Without a mask, sdpa is causal for several rows, and lets a single row see all rows, as needed here.
        model.set_attn_implementation("sdpa")
        inner = int(model.config.hidden_size)
        # The larger talkers are wider than their code predictor.
        self.small_to_mtp_projection = nn.Linear(width, inner) if inner != width else nn.Identity()

    @property
    def num_codes(self) -> int:
        """The number of codes that are sampled for a frame: all except the first."""
        return len(self.lm_head)

    @torch.inference_mode()
    def forward(
        self, thoughts: torch.Tensor, first: torch.Tensor, choices: RowChoices, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the other codes of one frame for each of n sessions, without waiting for the device.

        `thoughts`: the hidden states [n, width] from which the first codes were chosen. `first`: the embeddings of the
        first codes [n, width]. `choices`: the sessions' sampling parameters. `uniforms`: their random numbers, float64
        [n, num_codes]. All are on the model's device.

        Returns the codes, int64 [n, num_codes], and the sum [n, width] of all the frame's embeddings, on the same
        device. A code is NO_TOKEN if its logits are NaN; the values after it in its row are meaningless. Must be called
        in the model's thread.
        """
        dtype = self.model.norm.weight.dtype
        rows, codes, summed = torch.stack((thoughts, first), 1).to(dtype), list[torch.Tensor](), first.clone()
        positions = torch.arange(self.num_codes + 1, device=first.device)[None]
        past = FrameKv(self.model.config, len(first), self.num_codes + 1, rows)
        for number, (head, table) in enumerate(zip(self.lm_head, self.codec_embedding, strict=True)):
            past.rows = slice(number + 2 - rows.shape[1], number + 2)
            hidden = self.model(
                inputs_embeds=self.small_to_mtp_projection(rows),
                position_ids=positions[:, past.rows],
                # A frame is shorter than any attention window, so no mask is needed.
                attention_mask=dict.fromkeys(("full_attention", "sliding_attention")),
                past_key_values=past,
                use_cache=True,
            ).last_hidden_state
            codes.append(draw_tokens(head(hidden[:, -1]).float(), choices, uniforms[:, number]))
            # A failed row continues with an arbitrary code.
            embedded = table(codes[-1].clamp(min=0))
            summed += embedded
            rows = embedded[:, None].to(dtype)
        return torch.stack(codes, 1), summed


class CapturedFrames:
    """A CodePredictor whose frames are replayed as CUDA graphs: one launch instead of thousands for the 15 passes.

    `usual`: the sampling in the captured frames. The number of sessions of a graph is a power of two.
    """

    def __init__(self, predictor: CodePredictor, first_codes: nn.Module, usual: Sampling) -> None:
        self._predictor, self._first_codes, self._usual = predictor, first_codes, usual
        # The captured frames by number of sessions; None if the capture failed.
        self._frames: dict[int, _CapturedFrame | None] = {}
        self._graphs = Graphs("frames of codes")

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture the frames of up to WARMED_SESSIONS sessions. Takes several seconds."""
        table: Any = self._first_codes.weight
        for count in warmed_sizes():
            self._frame(count, table)

    def call(
        self, thoughts: torch.Tensor, first: torch.Tensor, params: Sequence[Sampling], uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the result of CodePredictor.forward for n sessions, in tensors that are valid until the next call.

        Returns None if a session does not use the usual sampling, or if capturing failed. `first`: the first codes,
        int64 [n]. `uniforms`: float64 [n, num_codes], on the host.
        """
        # Frames with a client's own sampling are not captured, because a capture would silence every session for
        # seconds.
        if any(_way(p) != _way(self._usual) for p in params):
            return None
        frame = self._frame(power_of_two(len(params)), thoughts)
        return None if frame is None else frame.run(thoughts, first, uniforms)

    def _frame(self, count: int, like: torch.Tensor) -> _CapturedFrame | None:
        if count not in self._frames:
            frame = _CapturedFrame(self._predictor, self._first_codes, [self._usual] * count, like)
            self._frames[count] = frame if frame.capture(self._graphs, like.device) else None
        return self._frames[count]


def _way(params: Sampling) -> tuple[float, int, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


class _CapturedFrame(CapturedPass[tuple[torch.Tensor, torch.Tensor]]):
    """The passes of one frame, on tensors with fixed addresses. `params`: the sampling of each session."""

    def __init__(
        self,
        predictor: CodePredictor,
        first_codes: nn.Module,
        params: Sequence[Sampling],
        like: torch.Tensor,
    ) -> None:
        self._predictor, self._first_codes = predictor, first_codes
        device, count = like.device, len(params)
        self._thoughts = like.new_zeros(count, like.shape[1])
        self._first = torch.zeros(count, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(count, predictor.num_codes, dtype=torch.float64, device=device)
        # Must stay alive, because the graph reads its tensors.
        self._choices = RowChoices.of(params, device)

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._first_codes(self._first)
        made: tuple[torch.Tensor, torch.Tensor] = self._predictor(
            self._thoughts, embedded, self._choices, self._uniforms
        )
        return made

    def run(
        self, thoughts: torch.Tensor, first: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(thoughts)
        self._thoughts[:count].copy_(thoughts)
        self._first[:count].copy_(first)
        self._uniforms[:count].copy_(uniforms, non_blocking=True)
        codes, summed = self.result()
        return codes[:count], summed[:count]


class FirstCodeChooser:
    """Chooses the first codes of one utterance's frames. A Chooser of the engine.

    `params`: the sampling; penalties apply only to codes of this utterance. `end`: the code that ends the audio. It is
    not chosen before `min_frames`, and no other control code is ever chosen. `size`: the size of the talker's
    vocabulary.
    """

    def __init__(self, params: Sampling, end: int, size: int, min_frames: int) -> None:
        self._sampler, self._end, self._min_frames = RowSampler(params, size), end, min_frames
        self._codes: list[int] = []
        self._times = Counter[int]()

    @staticmethod
    def choose(choosers: Sequence[FirstCodeChooser], logits: torch.Tensor) -> torch.Tensor:
        """Return the next code of each utterance, or NO_TOKEN."""
        codes, device = torch.arange(logits.shape[1], device=logits.device), logits.device
        ends = torch.tensor([[c._end, c._may_end] for c in choosers]).to(device, non_blocking=True)
        is_end, may_end = codes == ends[:, :1], ends[:, 1:] > 0
        barred = (is_end & ~may_end) | ((codes >= len(codes) - SPECIAL_CODES) & ~is_end)
        # A penalty cannot raise a logit of minus infinity, so codes may be barred before the penalties.
        left = logits.masked_fill(barred, -torch.inf)
        return sample_rows(left, [c._sampler for c in choosers], [c._edits() for c in choosers])

    def accept(self, chosen: int) -> int:
        """Record a chosen code. Raises ModelError if it is NO_TOKEN."""
        if chosen == NO_TOKEN:
            raise ModelError("the model's output is not a number")
        self._codes.append(chosen)
        self._times[chosen] += 1
        return chosen

    @property
    def _may_end(self) -> bool:
        return len(self._codes) >= self._min_frames

    def _edits(self) -> RowEdits:
        if self._sampler.params.repetition_window < len(self._codes):
            return self._sampler.edits(self._codes, len(self._codes))
        return self._sampler.edits_of(self._times, self._times)
