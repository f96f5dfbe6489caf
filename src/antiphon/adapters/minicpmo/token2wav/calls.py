"""Calls of token2wav for many streams: windows of any length to audio, in one pass that a CUDA graph replays on a GPU.

The flow fills up shorter windows, so it computes all of them together. The pass also vocodes the usual windows. Those
that begin or end a stream have other shapes, and are vocoded after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from antiphon.adapters.minicpmo.token2wav.encoder import FRAMES_A_CODE
from antiphon.adapters.minicpmo.token2wav.flow import CodeWindow, FlowSlots
from antiphon.adapters.minicpmo.token2wav.history import Positions
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from antiphon.audio import Pcm
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs, power_of_two, warmed_sizes


class SoundPass(CapturedPass[tuple[torch.Tensor, torch.Tensor]]):
    """A pass for `count` streams with a whole window each: its tensors and, if captured, its graph.

    `numbers`, int64 [count, width]: for each stream what the vocoder needs of it (HiftSlots.usual), and what the flow
    needs (FlowSlots.plan). The row `spare` is vocoded for streams whose window is not a usual one.
    """

    def __init__(self, flow: FlowSlots, vocoder: HiftSlots, count: int) -> None:
        self._flow, self._vocoder = flow, vocoder
        # A stream that fills up the pass.
        self._fill = np.concatenate([[vocoder.spare, 0], flow.no_plan(flow.most)])
        self.numbers = torch.from_numpy(np.tile(self._fill, (count, 1))).to(flow.device)

    def run(
        self, vocoded: Sequence[tuple[int, int] | None], plans: Sequence[Positions]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `compute` for n streams, in tensors that are valid until the next run. Does not wait."""
        spare = (self._vocoder.spare, 0)
        rows = [np.concatenate([own or spare, plan]) for own, plan in zip(vocoded, plans, strict=True)]
        padded = np.stack([*rows, *[self._fill] * (len(self.numbers) - len(rows))])
        self.numbers.copy_(torch.from_numpy(padded), non_blocking=True)
        mel, audio = self.result()
        return mel[: len(rows)], audio[: len(rows)]

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mel frames [count, bands, frames] and the audio [count, samples] of the windows in `numbers`."""
        rows, frames, plans = torch.split(self.numbers, [1, 1, self.numbers.shape[1] - 2], 1)
        mel = self._flow.compute(plans, self._flow.most)
        return mel, self._vocoder.vocode(mel, rows[:, 0], frames[:, 0], starts=False, last=False)


class WindowCalls:
    """Turns windows of codes into audio. `flow` and `vocoder` have the same number of slots. Not thread-safe.

    `together`: windows are computed together, filled up to a whole one. That is not faster on a CPU, where each is
    computed alone. `captures`: the passes are captured on a GPU. `passes`: by their number of streams.
    """

    def __init__(self, flow: FlowSlots, vocoder: HiftSlots, *, captures: bool = True) -> None:
        self.flow, self.vocoder = flow, vocoder
        self.together = flow.device.type != "cpu"
        self.passes: dict[int, SoundPass] = {}
        self._graphs = Graphs("windows of token2wav", enabled=captures and self.together)

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture the passes for up to WARMED_SESSIONS streams. Takes a second for every few of them."""
        for count in warmed_sizes(self.flow.spare):
            self._pass(count)

    @torch.inference_mode()
    def run(self, slots: Sequence[int], windows: Sequence[CodeWindow]) -> list[Pcm]:
        """Return the audio of the next window of each stream, float32 [num_samples] at 24 kHz. Waits for the device.

        The streams have begun in `flow` and in `vocoder`, and their windows pass FlowSlots.check. See HiftSlots.run for
        the length of the audio.
        """
        if not self.together:
            return [self._alone(slot, window) for slot, window in zip(slots, windows, strict=True)]
        counts = [FRAMES_A_CODE * self.flow.check(window) for window in windows]
        vocoded = [
            self.vocoder.usual(slot, frames, last=window.last)
            for slot, frames, window in zip(slots, counts, windows, strict=True)
        ]
        plans = [self.flow.plan(slot, each, self.flow.most) for slot, each in zip(slots, windows, strict=True)]
        mel, audio = self._pass(power_of_two(len(slots))).run(vocoded, plans)
        others: dict[tuple[int, bool], list[int]] = {}
        for i, own in enumerate(vocoded):
            if own is None:
                others.setdefault((counts[i], windows[i].last), []).append(i)
        if not others:
            return list(audio.float().cpu().numpy())
        made = dict(enumerate(audio))
        for (frames, last), members in others.items():
            given = mel[members, :, :frames]
            made |= zip(members, self.vocoder.run([slots[i] for i in members], given, last), strict=True)
        sounds = [made[i] for i in range(len(slots))]
        joined = torch.cat(sounds).float().cpu().numpy()
        return [joined[begin:end] for begin, end in pairwise([0, *accumulate(map(len, sounds))])]

    def _alone(self, slot: int, window: CodeWindow) -> Pcm:
        made = self.flow.check(window)
        plan = torch.from_numpy(self.flow.plan(slot, window, made)[None]).to(self.flow.device)
        (audio,) = self.vocoder.run([slot], self.flow.compute(plan, made), window.last)
        sound: Pcm = audio.float().cpu().numpy()
        return sound

    def _pass(self, count: int) -> SoundPass:
        found = self.passes.get(count)
        if found is None:
            found = self.passes[count] = SoundPass(self.flow, self.vocoder, count)
            found.capture(self._graphs, self.flow.device)
        return found
