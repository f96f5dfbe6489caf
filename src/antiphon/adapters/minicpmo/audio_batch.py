"""Encodes the units of many streams together. On a GPU, a CUDA graph replays the whole pass.

There the keys and values of all streams lie in one pool of pages, so that a stream's memory grows with its audio. One
pass takes a unit of each stream, transforms its sound, encodes its 50 positions after the stream's own, and returns its
embeddings. The number of operators does not depend on the number of streams or on their age: the host copies the
numbers of a pass at once, and launches the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from antiphon.adapters.minicpmo.audio_encoder import AudioEncoder
from antiphon.adapters.minicpmo.log_mel import (
    INPUT_SAMPLES,
    MARGIN_FRAMES,
    UNIT_FRAMES,
    UNIT_SAMPLES,
    LogMel,
    first_sound,
    unit_sound,
)
from antiphon.audio import Pcm
from antiphon.engine.local.attention import Scoring, StepAttention
from antiphon.engine.local.kernels.attention import PagedAttention, is_paged_by_kernels
from antiphon.engine.local.kernels.graphs import CapturedPass, Graphs
from antiphon.engine.local.kv.cache import PAGE_ROWS, pages_of
from antiphon.engine.local.kv.page_pool import PagePool, PageTable
from antiphon.engine.local.kv.shape import KvShape
from antiphon.engine.local.tiles import Tiles
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import EngineError, ModelError, ModelLost, Refused
from antiphon.modeling.gathered import GatheredCalls

# The positions of a unit: one for two frames.
UNIT_POSITIONS = UNIT_FRAMES // 2
# The numbers of streams in a pass. More streams are encoded in several passes.
SIZES = (1, 4, 16, 32)


@dataclass(slots=True, eq=False)
class AudioStream:
    """The state of one stream. Used in the model's thread."""

    # The log-mel state: a row of LogMel's `memory`.
    memory: torch.Tensor
    # The newest samples, which the frames of the next unit need.
    sound: Pcm = field(default_factory=first_sound)
    # The number of units so far.
    units: int = 0
    # The number of positions (20 ms each) whose keys and values are kept: the first position of the next unit.
    length: int = 0
    # The pages of these positions; None before the first unit, and on a CPU.
    pages: PageTable | None = None
    # On a CPU, the keys and values of these positions: [layers, 2, heads, most positions, width of a head].
    kv: torch.Tensor | None = None
    # True if the stream takes no further units.
    closed: bool = False


class AudioPass(CapturedPass[tuple[torch.Tensor, torch.Tensor]]):
    """A pass over a unit of each of `count` streams: its tensors and, if captured, its graph.

    `numbers`, int64 [count, 2 + pages]: each stream's number of units and of positions so far, and its pages. `sound`,
    `memory`: see LogMel.unit. Padding streams use the scratch page.
    """

    def __init__(self, pages: AudioPages, count: int) -> None:
        pool, mel = pages.pool, pages.mel
        self._encoder, self._mel, self._pool = pages.encoder, mel, pool
        self._by_kernels = is_paged_by_kernels(pool)
        most = pages_of(most_positions(pages.encoder))
        self.numbers = torch.zeros(count, 2 + most, dtype=torch.int64, device=pool.rows.device)
        self.sound = mel.filters.new_zeros(count, INPUT_SAMPLES)
        self.memory = mel.filters.new_zeros(count, mel.memory_size)

    def run(self, streams: Sequence[AudioStream], sounds: Sequence[Pcm]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the embeddings [n, 10, width] of the next unit of n streams, and their new log-mel states.

        `sounds`: the inputs of the units, made by `unit_sound`. The streams have pages for the unit.
        """
        count = len(streams)
        numbers = np.zeros(self.numbers.shape, np.int64)
        for row, stream in zip(numbers, streams, strict=False):
            assert stream.pages is not None
            row[:2] = stream.units, stream.length
            row[2 : 2 + len(stream.pages.pages)] = stream.pages.pages
        self.numbers.copy_(torch.from_numpy(numbers), non_blocking=True)
        self.sound[:count].copy_(torch.from_numpy(np.stack(sounds)), non_blocking=True)
        self.memory[:count].copy_(torch.stack([stream.memory for stream in streams]))
        embeddings, memory = self.result()
        # The next replay overwrites these tensors.
        return embeddings[:count].clone(), memory[:count].clone()

    def compute(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the units of all streams, and return [count, 10, width] and [count, memory_size]."""
        units, starts, table = self.numbers[:, 0], self.numbers[:, 1], self.numbers[:, 2:]
        frames, memory = self._mel.unit(self.sound, self.memory, units)
        places = starts[:, None] + torch.arange(UNIT_POSITIONS, device=starts.device)
        slots = (table.gather(1, places // PAGE_ROWS) * PAGE_ROWS + places % PAGE_ROWS).flatten()
        attention: StepAttention
        if self._by_kernels:
            attention = PagedAttention(self._pool, unit_tiles(starts, table, slots), table.shape[1])
        else:
            attention = UnitAttention(self._pool, starts, table, slots)
        return self._encoder.units(frames, units == 0, places, attention), memory


def unit_tiles(starts: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> Tiles:
    """Return the work of the kernels for units of n streams: each unit is a tile. The arguments: see UnitAttention."""
    numbers = torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    counts = torch.full_like(numbers, UNIT_POSITIONS)
    return Tiles(table.int(), numbers, numbers * UNIT_POSITIONS, counts, starts.int(), slots, UNIT_POSITIONS)


class UnitAttention:
    """The attention of units of n streams over pages that are gathered side by side, for devices without kernels.

    `starts` int64 [n]: the first position of each unit. `table` int64 [n, pages]: the pages of each stream. `slots`
    int64 [n * 50]: the pool's row for each position of the units.
    """

    def __init__(self, pool: PagePool, starts: torch.Tensor, table: torch.Tensor, slots: torch.Tensor) -> None:
        layers = pool.rows.shape[0]
        self._pool, self._slots, self._pages = pool, slots, table.flatten()
        self._paged = pool.rows.view(layers, 2, -1, PAGE_ROWS, *pool.rows.shape[3:])
        columns = torch.arange(table.shape[1] * PAGE_ROWS, device=starts.device)
        seen = columns < starts[:, None] + UNIT_POSITIONS
        # Added to the scores: a position sees the stream's positions, not the rest of its pages.
        mask = torch.zeros(seen.shape, dtype=pool.rows.dtype, device=starts.device)
        self._mask = mask.masked_fill_(~seen, -torch.inf)[:, None, None]

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Store the new keys and values, and return each position's attention output; shapes as in StepAttention."""
        self._pool.write(layer, self._slots, keys, values)
        count = len(self._mask)
        both = self._paged[layer].index_select(1, self._pages)
        both = both.view(2, count, -1, *keys.shape[1:]).transpose(2, 3)
        q = query.view(count, -1, *query.shape[1:]).transpose(1, 2)
        out = scaled_dot_product_attention(q, both[0], both[1], attn_mask=self._mask)
        return out.transpose(1, 2).flatten(0, 1)


class AudioPages:
    """The keys and values of all streams in one pool of pages, and the passes over them. Used in the model's thread.

    The pool has room for the longest context of `sessions` streams, 145 MB for each with the released model in
    bfloat16, and is allocated at once. A stream takes pages as its audio comes. `captures`: passes are captured.
    """

    def __init__(self, encoder: AudioEncoder, sessions: int, *, captures: bool = True) -> None:
        self.encoder = encoder
        weight, heads = encoder.apm.conv1.weight, encoder.apm.layers[0].self_attn
        shape = KvShape(len(encoder.apm.layers), heads.num_heads, heads.head_dim, weight.dtype, weight.device)
        self.pool = PagePool(shape, sessions * pages_of(most_positions(encoder)))
        self.mel = LogMel(encoder.filters, weight.device)
        self._passes: dict[int, AudioPass] = {}
        self._graphs = Graphs("passes of the audio encoder", enabled=captures)

    @torch.inference_mode()
    def warm(self) -> None:
        """Capture the passes, which takes seconds."""
        for count in SIZES:
            self._pass(count)

    def take(self, stream: AudioStream) -> None:
        """Take the pages of a stream's next unit. Raises ModelError if no page is free."""
        try:
            stop = stream.length + UNIT_POSITIONS
            stream.pages = self.pool.extend(stream.pages, stop, stream.length, shared=False)
        except EngineError:
            raise ModelError("the audio encoder has no free page for another second of this stream") from None

    def encode(self, streams: Sequence[AudioStream], sounds: Sequence[Pcm]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of `AudioPass.run` for at most SIZES[-1] streams, which have pages for the unit."""
        return self._pass(next(size for size in SIZES if size >= len(streams))).run(streams, sounds)

    def _pass(self, count: int) -> AudioPass:
        found = self._passes.get(count)
        if found is None:
            found = self._passes[count] = AudioPass(self, count)
            found.capture(self._graphs, self.pool.rows.device)
        return found


class _StreamAttention:
    """The attention of a unit of one stream over its own tensor `kv`, after the first `start` positions there."""

    def __init__(self, kv: torch.Tensor, start: int) -> None:
        self._kv, self._start = kv, start

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        both = self._kv[layer, :, :, : self._start + len(keys)]
        for kept, new in zip(both, (keys, values), strict=True):
            kept[:, self._start :] = new.transpose(0, 1)
        return scaled_dot_product_attention(query.transpose(0, 1)[None], both[:1], both[1:])[0].transpose(0, 1)


class AudioBatch:
    """Runs an audio encoder in the model's thread, for all streams that ask before the next step.

    On a GPU, streams are encoded together over `pages`, which have room for `sessions` streams. With `graphs` the
    constructor captures the passes. On a CPU streams are encoded one by one, each with a tensor of its own, because a
    joint pass would occupy the thread too long.
    """

    def __init__(self, thread: ModelThread, encoder: AudioEncoder, sessions: int, *, graphs: bool = True) -> None:
        self._thread, self._encoder = thread, encoder
        device = encoder.apm.conv1.weight.device
        self._mel = LogMel(encoder.filters, device)
        self._new = self._mel.filters.new_zeros(self._mel.memory_size)
        self._most_positions = most_positions(encoder)
        self.pages: AudioPages | None = None
        if device.type != "cpu":
            self.pages = AudioPages(encoder, sessions, captures=graphs)
            self.pages.warm()
        self._calls = GatheredCalls[tuple[AudioStream, Pcm], torch.Tensor](thread, self.encode, followed=True)

    def open(self) -> AudioStream:
        """Return the state of a new stream, which the caller closes. It takes no memory before its first unit."""
        return AudioStream(self._new)

    async def feed(self, stream: AudioStream, pcm: Pcm) -> torch.Tensor:
        """Encode a stream's next second, float32 [16000], into its embeddings, [10, width], and advance the stream.

        Each position attends to its unit and to all earlier positions of the stream. When the encoder runs out of
        positions, the stream begins again with position 0. Waits for the model's thread.

        Raises ModelError if the audio is not a second of finite numbers, if no page is free, or if the stream is
        closed; and Refused after the thread is closed. The stream is then unchanged.
        """
        return await self._calls.call((stream, pcm))

    def close(self, stream: AudioStream) -> None:
        """Give back the stream's pages. A no-op for a closed stream. Does not wait."""
        with suppress(Refused, ModelLost):
            self._thread.post(lambda: self.release(stream))

    def release(self, stream: AudioStream) -> None:
        """Close a stream, in the model's thread."""
        stream.closed = True
        self._forget(stream)
        stream.kv = None

    @torch.inference_mode()
    def encode(self, requests: Sequence[tuple[AudioStream, Pcm]]) -> list[torch.Tensor | ModelError]:
        """Encode the next unit of each stream, in the model's thread, as `feed` does. Returns errors in their place."""
        made = dict[int, torch.Tensor | ModelError]()
        ready = list[int]()
        for number, (stream, pcm) in enumerate(requests):
            try:
                self._prepare(stream, pcm)
                ready.append(number)
            except ModelError as error:
                made[number] = error
        most = SIZES[-1] if self.pages else 1
        for at in range(0, len(ready), most):
            members = ready[at : at + most]
            try:
                made |= zip(members, self._encode([requests[i] for i in members]), strict=True)
            except Exception as error:
                # The model's code may raise any exception. The other passes still give their embeddings.
                made |= dict.fromkeys(members, ModelError(f"{type(error).__name__}: {error}"))
        return [made[number] for number in range(len(requests))]

    def _prepare(self, stream: AudioStream, pcm: Pcm) -> None:
        """Make room for a stream's next unit. Raises ModelError if it cannot be encoded."""
        if stream.closed:
            raise ModelError("the audio stream is closed")
        if pcm.shape != (UNIT_SAMPLES,) or not np.isfinite(pcm).all():
            raise ModelError(f"a unit is {UNIT_SAMPLES} finite samples, not {list(pcm.shape)}")
        if stream.length + UNIT_POSITIONS > self._most_positions:
            self._forget(stream)
        if self.pages:
            self.pages.take(stream)

    def _encode(self, requests: Sequence[tuple[AudioStream, Pcm]]) -> tuple[torch.Tensor, ...]:
        streams = [stream for stream, _ in requests]
        inputs = [unit_sound(stream.sound, pcm) for stream, pcm in requests]
        sounds = [sound for sound, _ in inputs]
        embeddings, memory = self.pages.encode(streams, sounds) if self.pages else self._alone(streams[0], sounds[0])
        for stream, (_, kept), own in zip(streams, inputs, memory.unbind(), strict=True):
            stream.sound, stream.memory = kept, own
            stream.units += 1
            stream.length += UNIT_POSITIONS
        return embeddings.unbind()

    def _alone(self, stream: AudioStream, sound: Pcm) -> tuple[torch.Tensor, torch.Tensor]:
        if stream.kv is None:
            layers, heads = self._encoder.apm.layers, self._encoder.apm.layers[0].self_attn
            # Memory is taken as positions are written.
            shape = (len(layers), 2, heads.num_heads, self._most_positions, heads.head_dim)
            stream.kv = self._encoder.apm.conv1.weight.new_empty(shape)
        units = torch.tensor([stream.units])
        given = torch.from_numpy(sound)[None].to(self._mel.filters.dtype)
        frames, memory = self._mel.unit(given, stream.memory[None], units)
        places = torch.arange(stream.length, stream.length + UNIT_POSITIONS)[None]
        attention = _StreamAttention(stream.kv, stream.length)
        return self._encoder.units(frames, units == 0, places, attention), memory

    def _forget(self, stream: AudioStream) -> None:
        """Let a stream begin again with position 0."""
        if self.pages and stream.pages is not None:
            self.pages.pool.free(stream.pages)
        stream.length = 0


def most_positions(encoder: AudioEncoder) -> int:
    """Return the number of positions at which a stream begins again with position 0.

    The released code begins again if the unit and its margins would reach the last position that the encoder supports.
    """
    room = int(encoder.apm.embed_positions.num_embeddings) - UNIT_POSITIONS - MARGIN_FRAMES
    return max(1, -(-room // UNIT_POSITIONS)) * UNIT_POSITIONS
