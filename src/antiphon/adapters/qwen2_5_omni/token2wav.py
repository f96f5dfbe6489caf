"""Codes to audio: a diffusion transformer makes a mel spectrogram, 100 frames a second, and BigVGAN makes the audio.

Both are modules of `transformers`. The published code computes a whole turn as one diffusion (`whole`). `WavStream`
instead computes the audio while the codes arrive. The transformer attends over blocks of 24 frames (12 codes, 240 ms),
at most two blocks back and one ahead. So each block is diffused in a window of just these blocks. The windows of
neighbouring blocks start from the same noise. The audio differs from that of `whole` for two reasons. In the diffusion
of a whole turn, each step lets a block see one block further, beyond the window used here. And the vocoder sees 40
frames (400 ms) back, which is all of its context on that side, and 12 frames ahead, which is most of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from antiphon.audio import Pcm
from antiphon.engine.model_thread import ModelThread

# The diffusion as published: the number of points in time, the scale of classifier-free guidance, and the sway
# coefficient, which concentrates the points at the beginning.
TIME_POINTS, GUIDANCE, SWAY = 10, 0.5, -1.0
# Blocks of context before and after the diffused blocks.
BLOCKS_BACK, BLOCKS_AHEAD = 2, 1
# Mel frames of context before and after the frames that the vocoder turns into audio.
FRAMES_BACK, FRAMES_AHEAD = 40, 12
# Blocks in the successive chunks of a turn. Small chunks at first reduce latency; larger ones overlap less.
CHUNK_BLOCKS = (1, 1, 2, 4)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A voice of the checkpoint, on the vocoder's device.

    `bos`: the text token that begins a reply in this voice. `conditioning`: float32 [1, width]. `reference_mel`:
    float32 [1, frames, mel bins].
    """

    bos: int
    conditioning: torch.Tensor
    reference_mel: torch.Tensor


class WavDecoder:
    """The modules that turn codes into audio, float32 at 24 kHz. The state of a turn is in its WavStream.

    `model`: a Qwen2_5OmniToken2WavModel. `num_codes`: the number of codes that have an embedding. `frame_samples`:
    samples per mel frame. `code_frames`: mel frames per code. `block_codes`: codes per block.
    """

    def __init__(self, model: Any) -> None:
        """Raises ValueError if a block of frames is not a whole number of codes."""
        self._dit, self._vocoder = model.code2wav_dit_model, model.code2wav_bigvgan_model
        config = model.config.dit_config
        self.mel_bins, self.code_frames = int(config.mel_dim), int(config.repeats)
        self.num_codes = int(config.num_embeds) + 1
        self.block_codes, left = divmod(int(config.block_size), self.code_frames)
        if left or not self.block_codes:
            raise ValueError(f"blocks of {config.block_size} frames are not a whole number of codes")
        self.frame_samples = int(torch.tensor(model.config.bigvgan_config.upsample_rates).prod())
        self.device: torch.device = model.device

    def noise(self, num_codes: int, random: torch.Generator) -> torch.Tensor:
        """Return the initial noise of a diffusion: float32 [frames, mel bins], on the CPU."""
        return torch.randn(num_codes * self.code_frames, self.mel_bins, generator=random)

    def diffusion(self, codes: Sequence[int], noise: torch.Tensor, speaker: Speaker) -> Diffusion:
        """Return a diffusion of codes that starts from noise [frames, mel bins]."""
        return Diffusion(self._dit, codes, noise.to(self.device), speaker)

    @torch.inference_mode()
    def wave(self, mel: torch.Tensor) -> torch.Tensor:
        """Return the audio of mel frames [frames, mel bins]: float32 [num_samples] in [-1, 1], on the CPU."""
        out: torch.Tensor = self._vocoder(mel.T[None]).reshape(-1).float().cpu()
        return out

    def whole(self, codes: Sequence[int], speaker: Speaker, random: torch.Generator) -> torch.Tensor:
        """Return the audio of a whole turn at once, as published: float32 [num_samples]. Call in the model's thread."""
        diffusion = self.diffusion(codes, self.noise(len(codes), random), speaker)
        for _ in diffusion.steps():
            pass
        return self.wave(diffusion.mel)


class Diffusion:
    """One run of the diffusion over codes. `mel`: float32 [frames, mel bins], the result after all steps."""

    def __init__(self, dit: Any, codes: Sequence[int], noise: torch.Tensor, speaker: Speaker) -> None:
        self._dit = dit
        self._codes = torch.tensor([list(codes)], device=noise.device)
        self._reference = speaker.reference_mel
        self._speaker = speaker.conditioning[:, None].repeat(1, len(noise), 1)
        self.mel = noise

    def steps(self) -> Iterator[None]:
        """Advance to the next point in time with each iteration, in the iterating thread."""
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
    """The audio of one turn, whose codes arrive a few at a time."""

    # The modules.
    model: WavDecoder
    # The thread that the modules run in. Each step of a diffusion is a separate call, so that the decoder's steps of
    # other sessions can run in between.
    thread: ModelThread
    # The voice of the turn.
    speaker: Speaker
    # The generator of the noise.
    random: torch.Generator
    # All codes of the turn so far.
    codes: list[int] = field(default_factory=list)
    # The noise of each code.
    _noise: list[torch.Tensor] = field(default_factory=list)
    # The mel frames of the diffused blocks, from frame `_mel_start` on.
    _mel: torch.Tensor | None = None
    _mel_start: int = 0
    _num_blocks: int = 0
    _num_voiced: int = 0
    _num_chunks: int = 0

    async def feed(self, codes: Sequence[int], *, last: bool = False) -> Pcm:
        """Append codes, and return the audio that they complete: float32 [num_samples], possibly empty.

        `last`: no codes follow, and all remaining audio is returned. Waits for the thread. Raises ModelError and
        Refused.
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
                # The remaining codes are one chunk.
                stop = -(-len(self.codes) // size)
            await self._diffuse(stop)
            at_end = last and self._num_blocks * size >= len(self.codes)
            pcm.append(await self.thread.call_model(lambda end=at_end: self._voiced(end)))  # type: ignore[misc]
        out: Pcm = torch.cat(pcm or [torch.zeros(0)]).numpy()
        return out

    async def _diffuse(self, stop: int) -> None:
        """Compute the mel frames of the blocks up to `stop`."""
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
        """Return the audio of new frames, without those of the context at the end. Called in the model's thread."""
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
