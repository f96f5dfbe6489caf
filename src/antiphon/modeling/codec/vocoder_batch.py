"""Vocodes many streams together. On a GPU, a table holds their states, so that a CUDA graph can replay a call.

Each stream has a slot, which is a row of the table. One call reads the rows of its streams, vocodes a few frames of
each, and writes the rows back. The graph is the same for all streams, regardless of their age: the host copies the
numbers of a call at once, and launches the graph. A chunk is vocoded in pieces of PIECE_FRAMES frames.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from antiphon.audio import Pcm
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs, power_of_two, warmed_sizes
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.codec.vocoder import StreamVocoder, VocoderState
from antiphon.modeling.codec.vocoder_layers import VocoderStreams, has_been, in_reach
from antiphon.modeling.gathered import GatheredCalls

# Maximum number of streams with a slot. Further streams are vocoded without a slot, which is slower.
NUM_SLOTS = 128
# The sizes of the pieces of a chunk, in frames. Each size has a graph for each number of streams.
PIECE_FRAMES = (4, 2, 1)

_Frames = tuple[Sequence[Sequence[int]], VocoderState]


class _Slot:
    """A stream's place in the table. It becomes free when no state refers to it any longer."""

    def __init__(self, row: int) -> None:
        self.row = row


class _SlotStreams(VocoderStreams):
    """The streams of one call. Their numbers of frames, int64 [streams], are on the device."""

    def __init__(self, layout: Any, before: torch.Tensor, had: torch.Tensor) -> None:
        # A slot may still have values of another stream.
        super().__init__(layout, torch.where(had[:, None] == 0, 0.0, before), (1,))
        self._had = had

    def positions(self, count: int) -> torch.Tensor:
        return (self._had[:, None, None] + torch.arange(count, device=self._had.device)).float()

    def _window(self, held: int, count: int) -> tuple[int, torch.Tensor]:
        return held, in_reach(held, held, count, self._had.device) & has_been(held, self._had, count)


class VocoderCall(CapturedPass[torch.Tensor]):
    """A call of `count` streams with `frames` frames each: its tensors and, if captured, its graph.

    `numbers`, int64 [count, frames * codebooks + 2]: the codes of each stream, its slot, and its number of frames so
    far.
    """

    def __init__(self, slots: VocoderSlots, count: int, frames: int) -> None:
        vocoder, table = slots.vocoder, slots.table
        self._slots, self._frames = slots, frames
        self.numbers = torch.zeros(count, frames * vocoder.num_codebooks + 2, dtype=torch.long, device=table.device)
        self.numbers[:, -2] = slots.spare

    def run(self, numbers: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the audio [n, samples] of n streams, in a tensor that is valid until the next run."""
        spare = [0] * (self.numbers.shape[1] - 2)
        padded = [*numbers, *[[*spare, self._slots.spare, 0]] * (len(self.numbers) - len(numbers))]
        self.numbers.copy_(torch.tensor(padded), non_blocking=True)
        return self.result()[: len(numbers)]

    def compute(self) -> torch.Tensor:
        """Vocode the frames in `numbers`, and return float32 [count, samples]."""
        vocoder, table, count = self._slots.vocoder, self._slots.table, len(self.numbers)
        rows = self.numbers[:, -2]
        streams = _SlotStreams(vocoder.layout, table.index_select(0, rows), self.numbers[:, -1])
        audio = vocoder.vocode(self.numbers[:, :-2].view(count, self._frames, -1), streams)
        table.index_copy_(0, rows, streams.after)
        return audio.float().clamp(-1, 1)


class VocoderSlots:
    """A StreamVocoder whose streams have slots.

    `table`, [num_slots + 1, StreamVocoder.state_size]: the rows of the slots. The row `spare` fills up a call with too
    few streams. `captures`: calls are captured. Used only in the model's thread.
    """

    def __init__(self, vocoder: StreamVocoder, num_slots: int = NUM_SLOTS, *, captures: bool = True) -> None:
        self.vocoder, self.spare = vocoder, num_slots
        self.table = next(vocoder.parameters()).new_zeros(num_slots + 1, vocoder.state_size)
        self._free = list(range(num_slots))
        self._calls: dict[tuple[int, int], VocoderCall] = {}
        self._graphs = Graphs("calls of the vocoder", enabled=captures)

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture the calls of up to WARMED_SESSIONS streams. Takes a second for every few of them."""
        for count in warmed_sizes():
            for frames in PIECE_FRAMES:
                self._call(count, frames)

    @torch.inference_mode()
    def vocode(self, frames: Sequence[Sequence[Sequence[int]]], states: Sequence[VocoderState]) -> torch.Tensor | None:
        """Return the result of StreamVocoder.forward for streams that do not begin with a trimmed chunk.

        Returns None if there are not enough free slots. A stream without a slot gets one.
        """
        if not self._have_slots(states):
            return None
        made, at, count = list[torch.Tensor](), 0, power_of_two(len(states))
        length = len(frames[0])
        while at < length:
            size = next(n for n in PIECE_FRAMES if n <= length - at)
            numbers = [
                [*(code for frame in own[at : at + size] for code in frame), state.row, state.frames + at]
                for own, state in zip(frames, states, strict=True)
            ]
            # The next run of the graph overwrites this audio.
            made.append(self._call(count, size).run(numbers).clone())
            at += size
        for state in states:
            state.frames += length
        return torch.cat(made, 1).cpu()

    def _have_slots(self, states: Sequence[VocoderState]) -> bool:
        """Give every stream its own slot, and copy its state there. Returns False if there are not enough slots."""
        without = [s for s in states if s.kept is not self.table or s.is_shared]
        if len(without) > len(self._free):
            return False
        for state in without:
            slot = _Slot(self._free.pop())
            weakref.finalize(slot, self._free.append, slot.row)
            if state.kept is not None:
                self.table[slot.row] = state.kept[state.row]
            state.kept, state.row, state.slot, state.is_shared = self.table, slot.row, slot, False
        return True

    def _call(self, count: int, frames: int) -> VocoderCall:
        call = self._calls.get((count, frames))
        if call is None:
            call = self._calls[count, frames] = VocoderCall(self, count, frames)
            call.capture(self._graphs, call.numbers.device)
        return call


class VocoderBatch:
    """Runs a vocoder in the model's thread, for all streams that ask before the next step.

    On a GPU, streams with equal numbers of frames are vocoded together. On a CPU they are vocoded one by one, because a
    joint call would occupy the thread too long.

    `graphs`: on a GPU, streams get `slots`, and the constructor captures calls, which takes seconds.
    """

    def __init__(self, thread: ModelThread, vocoder: StreamVocoder, *, graphs: bool = True) -> None:
        self._vocoder = vocoder
        self.together = next(vocoder.parameters()).device.type != "cpu"
        self.slots: VocoderSlots | None = None
        if self.together and graphs:
            self.slots = VocoderSlots(vocoder)
            self.slots.warm()
        self._calls = GatheredCalls[_Frames, Pcm](thread, self._vocode)

    async def audio(self, frames: Sequence[Sequence[int]], state: VocoderState) -> Pcm:
        """Return the audio of a stream's next frames: float32 [num_samples] in [-1, 1], 24 kHz.

        `frames`: the frames, each with one code for each codebook. `state`: the stream's state, which is advanced.
        Waits for the model's thread. Raises ModelError, and Refused after the thread is closed.
        """
        return await self._calls.call((frames, state))

    def _vocode(self, requests: Sequence[_Frames]) -> list[Pcm | ModelError]:
        groups: dict[tuple[int, bool, int], list[int]] = {}
        for number, (frames, state) in enumerate(requests):
            alone, begins = 0 if self.together else number, self._vocoder.trims_start and state.kept is None
            groups.setdefault((len(frames), begins, alone), []).append(number)
        made: dict[int, Pcm | ModelError] = {}
        for (_, begins, _), members in groups.items():
            frames, states = zip(*(requests[i] for i in members), strict=True)
            try:
                audio = self.slots.vocode(frames, states) if self.slots and not begins else None
                if audio is None:
                    audio = self._vocoder(frames, states)
            except Exception as error:
                # The model's code may raise any exception. The other groups still get their audio.
                made |= dict.fromkeys(members, ModelError(f"{type(error).__name__}: {error}"))
            else:
                made |= dict(zip(members, audio.numpy(), strict=True))
        return [made[i] for i in range(len(requests))]
