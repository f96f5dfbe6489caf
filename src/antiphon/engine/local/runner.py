"""One forward pass of a `transformers` decoder over the rows of many sessions.

The decoder is used unchanged. Its inputs are embeddings. Its outputs are the logits of the rows from which a token is
sampled. Its attention implementation is set to the one in `attention.py`. In addition to the embeddings it gets each
row's position.

This module handles tensors. The scheduler decides which rows a step computes, and what the results mean for a session.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from antiphon.engine.api import EMBEDDED, EngineSettings, Token
from antiphon.engine.generation import Generation
from antiphon.engine.local.attention import ATTENTION_NAME, SegmentedAttention, StepAttention
from antiphon.engine.local.decode import PassOutput, PassShapes, PassSize
from antiphon.engine.local.kernels.attention import PagedAttention, is_paged_by_kernels, step_tiles
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.local.kv.cache import PAGE_ROWS
from antiphon.engine.local.kv.page_pool import PagePool
from antiphon.engine.local.kv.session_tensors import SessionTensors
from antiphon.engine.local.kv.shape import KvShape
from antiphon.engine.local.sampling import DrawnTokens, launch_choice
from antiphon.engine.local.step import RunnerStats, StepChunk
from antiphon.engine.local.streams import ThreadStream, used_here
from antiphon.errors import AntiphonError, ModelError

log = logging.getLogger(__name__)

Result = Token | Exception | None
KvStorage = SessionTensors | PagePool


@dataclass(slots=True, eq=False)
class RunnerStep:
    """A step that was launched. A LaunchedStep of the engine."""

    # The step's chunks.
    chunks: Sequence[StepChunk]
    # The results that are known already, by the `id` of their chunk.
    results: dict[int, Result] = field(default_factory=dict)
    # The chunks that sample, with their generations.
    sampled: Sequence[tuple[StepChunk, Generation]] = ()
    # Their tokens, in the same order; None if no chunk samples.
    drawn: DrawnTokens | None = None
    # Their hidden states, in the same order.
    hidden: Sequence[torch.Tensor | None] = ()
    # The counters to which the time for reading is added.
    stats: RunnerStats | None = None
    # The steps of single chunks, in the order of `chunks`, if these could not be computed together; otherwise empty.
    parts: Sequence[RunnerStep] = ()

    @torch.inference_mode()
    def read(self) -> list[Result]:
        """Wait for the step. Return for each chunk the sampled token, an error, or None if it samples none."""
        if self.parts:
            return [result for part in self.parts for result in part.read()]
        started = time.perf_counter()
        if self.drawn:
            # Those that the scheduler will discard.
            late = [i for i, (chunk, _) in enumerate(self.sampled) if chunk.session.rows.epoch != chunk.epoch]
            for (chunk, generation), choice, state in zip(
                self.sampled, self.drawn.read(late), self.hidden, strict=True
            ):
                if isinstance(choice, Exception):
                    self.results[id(chunk)] = _wrapped(choice)
                else:
                    state = state if generation.params.hidden else None
                    self.results[id(chunk)] = Token(choice.token, choice.logprob, state, choice.numbers)
        if self.stats:
            took_s = time.perf_counter() - started
            self.stats.sample_s += took_s
            self.stats.step_s += took_s
        return [self.results.get(id(chunk)) for chunk in self.chunks]


@dataclass(slots=True)
class Runner:
    """Steps a causal language model of `transformers`. A StepRunner; its model belongs to the model's thread."""

    # The model, in eval mode, on `device`. The runner changes it to use the engine's attention. If it has an attribute
    # `tapped`, which is float [rows, width] after a pass, the sinks of embedding rows receive their rows from it.
    model: Any
    # The device of the model and of its KV.
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    # The type that the model computes in.
    dtype: torch.dtype = torch.float32
    # The type that keys and values are stored in.
    kv_dtype: torch.dtype = torch.float32
    # The number of axes of a position: 1, or 3 for (time, height, width).
    position_axes: int = 1
    # The folder for the files of parked sessions; None: the system's temporary folder.
    kv_folder: Path | None = None
    # Whether the model's rotary embedding rotates the two halves of a key against each other, by its `inv_freq` alone
    # (Llama, Qwen). Only such keys can be moved to other positions.
    rotate_half: bool = False
    # The length of an input row, if the decoder takes more than its own width (features for its first layers); 0: its
    # own width.
    input_width: int = 0
    # Whether a step may be launched before the one before it is read; set by `storage`.
    step_ahead: bool = False
    # Counters of the steps so far.
    stats: RunnerStats = field(default_factory=RunnerStats)
    _storage: KvStorage | None = None
    _shapes: PassShapes | None = None
    _embed: Any = None
    _hidden: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.model.set_attn_implementation(ATTENTION_NAME)
        if self.device.type == "cuda":
            fuse_norms(self.model)
        self._embed = self.model.get_input_embeddings()
        self.model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)

    @property
    def config(self) -> Any:
        """The text decoder's configuration, even if the model has others: a `PretrainedConfig` of `transformers`."""
        return self.model.config.get_text_config()

    @property
    def width(self) -> int:
        """The length of an embedding row, including the features for the decoder's first layers."""
        return self.input_width or int(self.config.hidden_size)

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens of the head, from the configuration (`vocab_size`)."""
        return int(self.config.vocab_size)

    @property
    def eos_tokens(self) -> frozenset[int]:
        """The tokens that end a text, from the decoder's configuration (`eos_token_id`); empty if it has none."""
        found = GenerationConfig.from_model_config(self.config).eos_token_id
        return frozenset(int(i) for i in (found if isinstance(found, list) else [found]) if i is not None)

    @property
    def context_rows(self) -> int:
        """The number of positions that the model supports, from the configuration (`max_position_embeddings`)."""
        return int(self.config.max_position_embeddings)

    def stream(self) -> ThreadStream | None:
        """Return a stream for the model's thread; None if the device is not a CUDA device."""
        return ThreadStream(self.device) if self.device.type == "cuda" else None

    def storage(self, settings: EngineSettings) -> KvStorage:
        """Return memory for this decoder's keys and values, on its device, in `kv_dtype`.

        A pool of pages is allocated at once; session tensors are not. Raises torch.OutOfMemoryError. Raises ModelError
        if steps are to be captured and the device is not a CUDA device.
        """
        layout, shapes = settings.kv_on(self.device.type)
        self.step_ahead = settings.step_ahead
        captured = shapes == "captured" and "decode" in settings.graphs
        if captured and self.device.type != "cuda":
            raise ModelError("captured steps need a CUDA device")
        shape = self._kv_shape()
        if layout == "paged":
            pages = settings.kv_bytes // (shape.row_bytes * PAGE_ROWS)
            pool = PagePool(shape, pages, self.kv_folder)
            if shapes != "exact":
                sessions = settings.decode_rows
                rows = max(sessions + settings.prefill_rows, settings.prefill_only_rows)
                self._shapes = PassShapes(
                    self.decoder_pass, pool, self.position_axes, self._groups, sessions, rows, capture=captured
                )
                with torch.inference_mode():
                    self._shapes.warm(torch.zeros(1, 1, self.width, dtype=self.dtype, device=self.device))
            self._storage = pool
        else:
            self._storage = SessionTensors(shape, self.kv_folder)
        return self._storage

    def _kv_shape(self) -> KvShape:
        config = self.config
        heads = int(config.num_attention_heads)
        return KvShape(
            layers=int(config.num_hidden_layers),
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype=self.kv_dtype,
            device=self.device,
            frequencies=self._frequencies(),
        )

    def _frequencies(self) -> torch.Tensor | None:
        if not self.rotate_half:
            return None
        frequencies: torch.Tensor = self.model.get_decoder().rotary_emb.inv_freq
        return frequencies.float().to(self.device)

    def embeddings(self, rows: Any) -> torch.Tensor:
        """Return `rows`, float [n, width], on the model's device and in its type; copies only if these differ.

        Also accepts rows of the decoder's own width, without features. Raises ValueError if the rows have another
        shape.
        """
        given = torch.as_tensor(rows)
        if given.dim() != 2 or given.shape[1] not in (self.width, int(self.config.hidden_size)):
            raise ValueError(f"embeddings are [rows, {self.width}], not {list(given.shape)}")
        return given.to(self.device, self.dtype)

    def step(self, chunks: Sequence[StepChunk]) -> list[Result]:
        """Compute the chunks' keys and values in one pass, and return one result for each chunk. See `launch`."""
        return self.launch(chunks).read()

    @torch.inference_mode()
    def launch(self, chunks: Sequence[StepChunk]) -> RunnerStep:
        """Begin to compute the chunks' keys and values in one pass. See `RunnerStep.read` for the results.

        Never raises: if the pass fails, each chunk is tried by itself, so that only the chunk at fault fails.
        """
        started = time.perf_counter()
        try:
            step = self._forward(chunks)
        except Exception as error:
            # The model's code may raise any exception. It fails a session, never the engine.
            if len(chunks) == 1:
                log.error("a model step failed: %s", error)
                return RunnerStep(chunks, {id(chunks[0]): _wrapped(error)})
            return RunnerStep(chunks, parts=[self.launch([chunk]) for chunk in chunks])
        self.stats.steps += 1
        self.stats.rows += sum(c.count for c in chunks)
        self.stats.step_s += time.perf_counter() - started
        return step

    def decoder_pass(
        self, inputs: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor, attention: StepAttention
    ) -> PassOutput:
        """Run the decoder once, without branching on any tensor's values: a DecoderPass.

        `inputs` [1, rows, width], `positions` [1, rows] or [3, 1, rows], `keep` int64 [n]: the rows whose logits are
        wanted.
        """
        out = self.model(
            inputs_embeds=inputs,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            step_attention=attention,
        )
        hidden, self._hidden = self._hidden, None
        return PassOutput(out.logits[0], hidden, getattr(self.model, "tapped", None))

    def _forward(self, chunks: Sequence[StepChunk]) -> RunnerStep:
        started = time.perf_counter()
        outputs = [(part, self._compute(part, size)) for part, size in self._parts(chunks)]
        self.stats.forward_s += time.perf_counter() - started
        for part, output in outputs:
            self._feed_sinks(part, output.tapped)
        started = time.perf_counter()
        step = self._choose(chunks, outputs)
        self.stats.sample_s += time.perf_counter() - started
        return step

    def _parts(self, chunks: Sequence[StepChunk]) -> list[tuple[Sequence[StepChunk], PassSize | None]]:
        """Divide the chunks of a step into passes: one, unless they do not fit a pass of fixed size.

        Returns the size of each pass; None: the pass has no fixed size. All passes are queued on the device before the
        host waits for the tokens of one of them.
        """
        shapes = self._shapes
        if shapes is None:
            return [(chunks, None)]
        if size := shapes.size(chunks):
            return [(chunks, size)]
        parts = [c for c in chunks if c.count == 1], [c for c in chunks if c.count > 1]
        return [(part, shapes.size(part)) for part in parts if part]

    def _compute(self, chunks: Sequence[StepChunk], size: PassSize | None) -> PassOutput:
        """Compute the rows of each session, packed side by side.

        Returns the logits and hidden states of the rows that are sampled from, in order, and the tapped rows of all.
        """
        inputs, positions = self._inputs(chunks), self._positions(chunks)
        if self._shapes and size:
            output, last = self._shapes.run(size, inputs, positions, chunks)
            kept = [row for row, c in zip(last, chunks, strict=True) if c.sampled]
            if kept == list(range(len(kept))):
                logits, hidden, tapped = output
                return PassOutput(logits[: len(kept)], None if hidden is None else hidden[: len(kept)], tapped)
            rows = self._on_device(kept)
            return PassOutput(
                output.logits[rows], None if output.hidden is None else output.hidden[rows], output.tapped
            )
        ends = itertools.accumulate(c.count for c in chunks)
        keep = self._on_device([end - 1 for c, end in zip(chunks, ends, strict=True) if c.sampled])
        return self.decoder_pass(inputs, positions, keep, self._step_attention(chunks))

    def _step_attention(self, chunks: Sequence[StepChunk]) -> StepAttention:
        if isinstance(self._storage, PagePool) and is_paged_by_kernels(self._storage):
            tiles = step_tiles(chunks, self._groups, self.device)
            return PagedAttention(self._storage, tiles, tiles.table.shape[1])
        assert self._storage is not None
        return SegmentedAttention(chunks, self._storage.step(chunks))

    @property
    def _groups(self) -> int:
        """The number of query heads for each key head."""
        config = self.config
        return int(config.num_attention_heads) // self._kv_shape().kv_heads

    def _choose(
        self, chunks: Sequence[StepChunk], outputs: Sequence[tuple[Sequence[StepChunk], PassOutput]]
    ) -> RunnerStep:
        """Choose the tokens of a step. `outputs`: its passes, with their chunks."""
        sampled = [(c, c.sampled) for part, _ in outputs for c in part if c.sampled]
        if not sampled:
            return RunnerStep(chunks)
        # The tensors of a captured pass are valid only until the next step, which may be launched before this is read.
        logits = _joined([output.logits for _, output in outputs]).to(torch.float32, copy=self.step_ahead)
        states = [output.hidden for _, output in outputs if output.hidden is not None]
        hidden = _joined(states) if states else None
        kept: Sequence[torch.Tensor | None] = [None] * len(sampled)
        if hidden is not None and any(g.params.hidden for _, g in sampled):
            kept = hidden.clone().unbind()
        unread_rows = [
            i
            for i, (c, g) in enumerate(sampled)
            if c.follows and (g.params.repetition_penalty != 1.0 or g.params.chooser)
        ]
        unread = None
        if unread_rows:
            unread = self._on_device([0] * len(sampled))
            self._put_unread(unread, [(i, sampled[i][0]) for i in unread_rows])
        rows = [(generation, chunk.recent) for chunk, generation in sampled]
        drawn = launch_choice(logits, rows, hidden, unread, unread_rows)
        for row, place in drawn.places():
            sampled[row][0].token.tokens, sampled[row][0].token.index = drawn.numbers, place
        if self.step_ahead:
            drawn.begin_copy()
        return RunnerStep(chunks, sampled=sampled, drawn=drawn, hidden=kept, stats=self.stats)

    def _put_unread(self, target: torch.Tensor, places: Sequence[tuple[int, StepChunk]]) -> None:
        """Write the tokens that the chunks follow to these places of `target`, int64 [n], without reading them.

        A row without a token, whose session fails when it is read, gets an arbitrary one.
        """
        # The tokens of a step are in one tensor, unless it failed as a whole.
        groups = dict[int, tuple[torch.Tensor, list[int], list[int]]]()
        for place, chunk in places:
            if chunk.follows and chunk.follows.tokens is not None:
                tokens = chunk.follows.tokens
                _, own, indices = groups.setdefault(id(tokens), (tokens, [], []))
                own.append(place)
                indices.append(chunk.follows.index)
        for tokens, own, indices in groups.values():
            where, which = self._on_device([own, indices])
            target.index_copy_(0, where, tokens.index_select(0, which).clamp_(min=0))

    def _feed_sinks(self, chunks: Sequence[StepChunk], tapped: torch.Tensor | None) -> None:
        """Pass the tapped layer's output for embedding rows to their sinks."""
        at = 0
        for chunk in chunks:
            for rows in chunk.sinks:
                if tapped is None:
                    raise ModelError("the model has no tapped layer")
                first = at + rows.start - chunk.start
                rows.sink(rows.offset, tapped[first : first + rows.count])
            at += chunk.count

    def _inputs(self, chunks: Sequence[StepChunk]) -> torch.Tensor:
        ids = [0 if i is EMBEDDED else i for c in chunks for i in c.ids]
        tokens = self._on_device(ids)
        starts = itertools.accumulate((c.count for c in chunks), initial=0)
        if unread := [(place, c) for place, c in zip(starts, chunks, strict=False) if c.follows]:
            self._put_unread(tokens, unread)
        rows: torch.Tensor = self._embed(tokens).to(self.dtype)
        # The embedding rows of all chunks, by their width: rows without features are narrower. All rows of a width are
        # written at once.
        given, at = dict[int, tuple[list[int], list[torch.Tensor]]](), 0
        for chunk in chunks:
            for first, embeddings in chunk.embeddings:
                places, parts = given.setdefault(embeddings.shape[1], ([], []))
                start = at + first - chunk.start
                places.extend(range(start, start + len(embeddings)))
                parts.append(used_here(embeddings))
            at += chunk.count
        for width, (places, parts) in given.items():
            rows[:, :width].index_copy_(0, self._on_device(places), _joined(parts).to(rows.dtype))
        return rows[None]

    def _positions(self, chunks: Sequence[StepChunk]) -> torch.Tensor:
        if self.position_axes == 1:
            flat = [p for c in chunks for p in (_first_axis(c) if c.positions else range(c.start, c.stop))]
            return self._on_device(flat)[None]
        rows = [p for c in chunks for p in (c.positions or [(i,) * 3 for i in range(c.start, c.stop)])]
        return self._on_device(rows).T[:, None]

    def _on_device(self, numbers: Sequence[Any]) -> torch.Tensor:
        """The numbers as an int64 tensor on the device. A blocking copy would wait for all queued work."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    def _keep_hidden(self, _: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        self._hidden = inputs[0][0]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _first_axis(chunk: StepChunk) -> list[int]:
    assert chunk.positions is not None
    return [p[0] for p in chunk.positions]


def _wrapped(error: Exception) -> Exception:
    if isinstance(error, AntiphonError):
        return error
    wrapped = ModelError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
