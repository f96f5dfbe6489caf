"""Vocodes the mel frames of many streams of token2wav.

Each stream has a slot. One row of a table has what the layers kept of it. A call reads the rows of its streams, turns
their mel frames into audio, and writes the rows back. The usual window has WINDOW_FRAMES frames, and is the same for
streams of any age, so that a CUDA graph can replay it (calls.py). Windows that begin or end a stream have other shapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from antiphon.adapters.minicpmo.token2wav.hift import DELAY_FRAMES, FRAME_SAMPLES, CausalHift, WindowHift
from antiphon.adapters.minicpmo.token2wav.hift_layers import Past

# The mel frames of the usual window: 25 codes, without the lookahead.
WINDOW_FRAMES = 50


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream's progress. `frames`: the mel frames vocoded so far. `waiting`: those before the first call."""

    frames: int = 0
    waiting: torch.Tensor | None = None


class HiftSlots:
    """A vocoder whose streams have slots. Slots are numbered by the caller.

    `table`, [num_slots + 1, size], and `exact`, float64: the rows of the slots. The row `spare` fills up a call with
    too few streams. Free rows may hold any values. Not thread-safe.
    """

    def __init__(self, hift: CausalHift | WindowHift, num_slots: int) -> None:
        self.hift, self.spare = hift, num_slots
        self._streams: dict[int, _Stream] = {}
        weight = hift.conv_pre.weight
        with torch.no_grad():
            # A first window of any length shows how much the layers keep.
            mel = weight.new_zeros(1, hift.config.in_channels, DELAY_FRAMES + 1)
            past, exact = Past(None), Past(None)
            hift(mel, past, exact, torch.zeros(1, dtype=torch.long, device=weight.device), last=False)
            self.table = past.after().new_zeros(num_slots + 1, past.after().shape[1])
            self.exact = exact.after().new_zeros(num_slots + 1, exact.after().shape[1])

    def begin(self, slot: int) -> None:
        """Begin a stream in a slot. The slot's last stream, if it did not end, is dropped."""
        self._streams[slot] = _Stream()

    def usual(self, slot: int, frames: int, *, last: bool) -> tuple[int, int] | None:
        """Return what `vocode` needs of a stream's next window if it is a usual one, and count its frames.

        These are the slot, and the stream's frames so far. None: the window has another shape, and is one for `run`.
        """
        stream = self._streams[slot]
        if last or frames != WINDOW_FRAMES or not stream.frames:
            return None
        stream.frames += frames
        return slot, stream.frames - frames

    @torch.inference_mode()
    def run(self, slots: Sequence[int], mel: torch.Tensor, last: bool) -> list[torch.Tensor]:
        """Return the audio of the next frames of n streams, each float32 [samples] in [-1, 1], 24 kHz.

        The audio lags DELAY_FRAMES behind the frames. A CausalHift's stream begins with silence of that length, so its
        windows return as much audio as they have frames, as the released code does. A WindowHift's first window returns
        less instead. Frames wait without audio until a stream has more than DELAY_FRAMES. The last window returns the
        rest, which is longer by the delay. A stream whose only window is the last one has no silence.

        Args:
            slots: The slots of the streams, which have begun.
            mel: The frames, float32 [n, 80, frames]. With `last`, there may be none.
            last: These frames end the streams. The slots then need another `begin`.
        """
        made: dict[int, torch.Tensor] = {}
        streams = [self._streams[slot] for slot in slots]
        windows = [
            mel[i : i + 1] if s.waiting is None else torch.cat((s.waiting, mel[i : i + 1]), 2)
            for i, s in enumerate(streams)
        ]
        groups: dict[tuple[bool, int], list[int]] = {}
        for i, (stream, window) in enumerate(zip(streams, windows, strict=True)):
            count = window.shape[2]
            if not stream.frames and (not count or (count <= DELAY_FRAMES and not last)):
                stream.waiting = window.clone()
                made[i] = mel.new_zeros(0)
            else:
                groups.setdefault((not stream.frames, count), []).append(i)
        for (starts, count), members in groups.items():
            given = mel if len(members) == len(slots) and count == mel.shape[2] else None
            numbers = torch.tensor([(slots[i], streams[i].frames) for i in members])
            rows, frames = numbers.to(mel.device, non_blocking=True).unbind(1)
            joined = torch.cat([windows[i] for i in members]) if given is None else given
            audio = self.vocode(joined, rows, frames, starts=starts, last=last)
            if starts and not last and isinstance(self.hift, CausalHift):
                audio = torch.nn.functional.pad(audio, (DELAY_FRAMES * FRAME_SAMPLES, 0))
            made |= zip(members, audio, strict=True)
            for i in members:
                streams[i].frames, streams[i].waiting = streams[i].frames + count, None
        if last:
            for slot in slots:
                del self._streams[slot]
        return [made[i] for i in range(len(slots))]

    def vocode(
        self, mel: torch.Tensor, rows: torch.Tensor, frames: torch.Tensor, *, starts: bool, last: bool
    ) -> torch.Tensor:
        """Read the rows of the table, vocode the frames, and write the rows back. Return float32 [n, samples].

        `rows`, `frames`: the slots and the frames so far, int64 [n] on the device. Rows with 0 frames are read as 0.
        """
        if starts:
            past, exact = Past(None), Past(None)
        else:
            past, exact = (
                Past(table.index_select(0, rows).masked_fill(frames[:, None] == 0, 0.0))
                for table in (self.table, self.exact)
            )
        audio: torch.Tensor = self.hift(mel, past, exact, frames, last=last)
        if not last:
            self.table.index_copy_(0, rows, past.after())
            self.exact.index_copy_(0, rows, exact.after())
        return audio
