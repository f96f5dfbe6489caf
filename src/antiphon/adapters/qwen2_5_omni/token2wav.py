"""Codes to audio: a diffusion transformer makes a mel spectrogram of them, 100 frames a second, and BigVGAN the sound.

Both are the modules of `transformers`. As published, a whole turn is one diffusion (`whole`). Here it is made while
its codes come (`WavStream`): the transformer attends over blocks of 24 frames (12 codes, 240 ms), at most two blocks
back and one ahead, so a block is diffused in a window of just these. The windows of neighbouring blocks start from the
same noise. What differs from the whole turn: the published steps see beyond the window, a block further each step; and
the vocoder sees 40 frames (400 ms) back and 12 ahead, which is all and most of what it looks at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from antiphon.audio import Pcm
from antiphon.engine.model_thread import ModelThread

# The diffusion as published: points in time, how far a prediction is moved away from the unconditioned one, and how
# much denser the points lie at the beginning.
TIME_POINTS, GUIDANCE, SWAY = 10, 0.5, -1.0
# Blocks of context that a block's diffusion has before and behind it.
BLOCKS_BACK, BLOCKS_AHEAD = 2, 1
# Mel frames of context that the vocoder has before and behind the frames that it turns into sound.
FRAMES_BACK, FRAMES_AHEAD = 40, 12
# Blocks in the successive chunks of a turn: the first audio comes soon, then windows overlap less.
CHUNK_BLOCKS = (1, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of the checkpoint, on the vocoder's device.

    `bos`: the text token that opens a reply in it. `conditioning`: float32 [1, width]. `reference_mel`: float32
    [1, frames, mel bins].
    """

    bos: int
    conditioning: torch.Tensor
    reference_mel: torch.Tensor


class WavDecoder:
    """The modules that turn codes into audio; what a turn has seen is in its WavStream. float32, 24 kHz.

    `model`: a Qwen2_5OmniToken2WavModel. `num_codes`: codes from this one on have no embedding. `frame_samples`: of a
    mel frame. `code_frames`, `block_codes`: mel frames of a code, and codes of a block.
    """

    def __init__(self, model: Any) -> None:
        """Raises ValueError where a block of frames is not a whole number of codes."""
        self._dit, self._vocoder = model.code2wav_dit_model, model.code2wav_bigvgan_model
        config = model.config.dit_config
        self.mel_bins, self.code_frames = int(config.mel_dim), int(config.repeats)
        self.num_codes = int(config.num_embeds) + 1
        self.block_codes, left = divmod(int(config.block_size), self.code_frames)
        if left or not self.block_codes:
            raise ValueError(f"blocks of {config.block_size} frames are no whole number of codes")
        self.frame_samples = int(torch.tensor(model.config.bigvgan_config.upsample_rates).prod())
        self.device: torch.device = model.device

    def noise(self, num_codes: int, random: torch.Generator) -> torch.Tensor:
        """Draw what a diffusion begins with: float32 [frames, mel bins], on the CPU."""
        return torch.randn(num_codes * self.code_frames, self.mel_bins, generator=random)

    def diffusion(self, codes: Sequence[int], noise: torch.Tensor, speaker: Speaker) -> Diffusion:
        """Return the diffusion of some codes, from noise [frames, mel bins]."""
        return Diffusion(self._dit, codes, noise.to(self.device), speaker)

    @torch.inference_mode()
    def wave(self, mel: torch.Tensor) -> torch.Tensor:
        """Return the audio of mel frames [frames, mel bins]: float32 [num_samples] in [-1, 1], on the CPU."""
        out: torch.Tensor = self._vocoder(mel.T[None]).reshape(-1).float().cpu()
        return out

    def whole(self, codes: Sequence[int], speaker: Speaker, random: torch.Generator) -> torch.Tensor:
        """Return the audio of a whole turn at once, as published: float32 [num_samples]. Called in the thread."""
        diffusion = self.diffusion(codes, self.noise(len(codes), random), speaker)
        for _ in diffusion.steps():
            pass
        return self.wave(diffusion.mel)


class Diffusion:
    """One run of the diffusion over some codes. `mel`: float32 [frames, mel bins], the result after all steps."""

    def __init__(self, dit: Any, codes: Sequence[int], noise: torch.Tensor, speaker: Speaker) -> None:
        self._dit = dit
        self._codes = torch.tensor([list(codes)], device=noise.device)
        self._reference = speaker.reference_mel
        self._speaker = speaker.conditioning[:, None].repeat(1, len(noise), 1)
        self.mel = noise

    def steps(self) -> Iterator[None]:
        """Advance from one point in time to the next with each step, in the thread that iterates."""
        times = torch.linspace(0, 1, TIME_POINTS, device=self.mel.device)
        times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        solver: Any = RungeKutta4ODESolver
        for i in range(TIME_POINTS - 1):
            with torch.inference_mode():
                self.mel = solver(self._predicted, self.mel[None]).integrate(times[i : i + 2])[-1][0]
            yield

    def _predicted(self, time: torch.Tensor, mel: torch.Tensor) -> torch.Tensor:
        made = self._dit(
            hidden_states=mel,
            quantized_code=self._codes,
            speaker_embedding=self._speaker,
            condition_vector=self._reference,
            time_step=time,
            apply_cfg=True,
        )
        guided, free = made.chunk(2)
        out: torch.Tensor = guided + (guided - free) * GUIDANCE
        return out


@dataclass(slots=True)
class WavStream:
    """The audio of one turn, whose codes come a few at a time.

    `thread`: where the modules run. Each step of the diffusion is a call of its own, so that the decoder's steps of
    other sessions come in between. `random`: of the noise. `codes`: all that were fed.
    """

    model: WavDecoder
    thread: ModelThread
    speaker: Speaker
    random: torch.Generator
    codes: list[int] = field(default_factory=list)
    # Of the codes so far, and of the blocks that are diffused: all frames, or those from `_mel_start` on.
    _noise: list[torch.Tensor] = field(default_factory=list)
    _mel: torch.Tensor | None = None
    _mel_start: int = 0
    _num_blocks: int = 0
    _num_voiced: int = 0
    _num_chunks: int = 0

    async def feed(self, codes: Sequence[int], *, last: bool = False) -> Pcm:
        """Return the audio that these codes, which follow those so far, complete: float32 [num_samples], may be empty.

        `last`: no codes follow, and the audio is returned to its end. Waits for the thread. Raises ModelError, Refused.
        """
        self.codes += codes
        self._noise += [self.model.noise(1, self.random) for _ in codes]
        pcm = list[torch.Tensor]()
        size = self.model.block_codes
        while self._num_blocks * size < len(self.codes):
            wanted = CHUNK_BLOCKS[min(self._num_chunks, len(CHUNK_BLOCKS) - 1)]
            stop = self._num_blocks + wanted
            if (stop + BLOCKS_AHEAD) * size > len(self.codes):
                if not last:
                    break
                # The rest is one chunk.
                stop = -(-len(self.codes) // size)
            await self._diffuse(stop)
            at_end = last and self._num_blocks * size >= len(self.codes)
            pcm.append(await self.thread.call_model(lambda end=at_end: self._voiced(end)))  # type: ignore[misc]
        out: Pcm = torch.cat(pcm or [torch.zeros(0)]).numpy()
        return out

    async def _diffuse(self, stop: int) -> None:
        """Make the mel frames of the blocks up to `stop`."""
        model, size = self.model, self.model.block_codes
        start = max(0, self._num_blocks - BLOCKS_BACK)
        window = slice(start * size, (stop + BLOCKS_AHEAD) * size)
        diffusion = model.diffusion(self.codes[window], torch.cat(self._noise[window]), self.speaker)
        steps = diffusion.steps()
        for _ in range(TIME_POINTS - 1):
            await self.thread.call_model(lambda: next(steps))
        frames = size * model.code_frames
        made = diffusion.mel[(self._num_blocks - start) * frames : (stop - start) * frames]
        self._mel = made if self._mel is None else torch.cat((self._mel, made))
        self._num_blocks = stop
        self._num_chunks += 1

    def _voiced(self, at_end: bool) -> torch.Tensor:
        """The audio of the frames that have none yet, but for those at the end that are context. In the thread."""
        assert self._mel is not None
        stop = self._mel_start + len(self._mel) - (0 if at_end else FRAMES_AHEAD)
        if stop <= self._num_voiced:
            return torch.zeros(0)
        start = max(0, self._num_voiced - FRAMES_BACK)
        given = self._mel[start - self._mel_start :]
        wave = self.model.wave(given)
        self._mel, self._mel_start = given, start
        samples = self.model.frame_samples
        out = wave[(self._num_voiced - start) * samples : (stop - start) * samples]
        self._num_voiced = stop
        return out
