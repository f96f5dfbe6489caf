"""From text to frames of audio codes, as Qwen3-TTS and Qwen3-Omni make them.

A decoder on the engine samples the first code of each frame, and a small code predictor the other fifteen, for all
sessions at once. A frame's input row is the sum of its codes' embeddings and of one text token's: text is read while it
is spoken, one token a frame. What turns codes into audio is in `codec_vocoder.py`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import silu

from antiphon.engine.api import NO_TOKEN, Sampling, Session
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens, is_plain
from antiphon.engine.local.kernels.graphs import capture
from antiphon.engine.local.kernels.norms import fuse_norms
from antiphon.engine.local.sampling import RowEdits, RowSampler, sample_rows
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.gathered import GatheredCalls

log = logging.getLogger(__name__)

# The last codes of the talker's vocabulary are control codes, and no audio.
SPECIAL_CODES = 1024
# The most frames of one utterance (generation_config.json, max_new_tokens).
MAX_FRAMES = 2048
# Frames of 80 ms in the successive chunks of audio: the first audio comes soon, then the vocoder runs fewer steps.
CHUNK_FRAMES = (1, 2, 4, 8, 12)
# The most rows of a text that are made at once, before the frames that take them.
TEXT_ROWS_AHEAD = 16
# The most frames that the vocoder is given at once: the sessions that share its thread wait for it.
MAX_VOCODER_FRAMES = 25


@dataclass(frozen=True, slots=True)
class CodecSampling:
    """How the codes of one utterance are chosen, and how many frames it has.

    `first`: of the first code of a frame; `rest`: of its other codes. `min_frames`, `max_frames`: the code that ends
    the audio is not chosen before the first, and the audio is cut at the second.
    """

    first: Sampling
    rest: Sampling
    min_frames: int = 2
    max_frames: int = MAX_FRAMES


# What the makers of Qwen3-TTS sample with (generation_config.json).
DEFAULT_CODEC_SAMPLING = CodecSampling(
    Sampling(temperature=0.9, top_k=50, repetition_penalty=1.05, repetition_window=MAX_FRAMES),
    Sampling(temperature=0.9, top_k=50),
)


class TextProjection(nn.Module):
    """Projects text tokens' embeddings to the talker's width; checkpoint names under `talker.text_projection.`."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Linear(in_width, in_width), nn.Linear(in_width, out_width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [n, out_width] of x, [n, in_width]."""
        out: torch.Tensor = self.linear_fc2(silu(self.linear_fc1(x)))
        return out


class FrameKv:
    """The keys and values of one frame of the code predictor, for all sessions; what its attention calls as a cache.

    They lie in one tensor whose size the first frame of so many sessions sets, and attention reads its beginning: each
    frame runs the same kernels on the same shapes, as a CUDA graph requires. A pass writes the positions of its rows.
    """

    def __init__(self, config: Any, sessions: int, positions: int, like: torch.Tensor) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = (int(config.num_hidden_layers), 2, sessions, int(config.num_key_value_heads), positions, head_dim)
        self._held = like.new_empty(shape)
        # The positions that the next pass writes.
        self.rows = slice(0, 0)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's keys and values [n, heads, rows, head_dim], and return all up to theirs."""
        held_keys, held_values = self._held[layer]
        held_keys[:, :, self.rows] = keys
        held_values[:, :, self.rows] = values
        return held_keys[:, :, : self.rows.stop], held_values[:, :, : self.rows.stop]


class CodePredictor(nn.Module):
    """Samples the codes of a frame behind the first, one after another, by a small decoder of its own.

    `model`: a Qwen3Model, or what is called as one; it is changed to use torch's attention. `tables`, `heads`: an
    embedding and a head for each of these codes. `width`: of the talker's rows. Parameters have the checkpoint's names.
    """

    def __init__(self, model: Any, tables: nn.ModuleList, heads: nn.ModuleList, width: int) -> None:
        super().__init__()
        self.model, self.codec_embedding, self.lm_head = model, tables, heads
        # Its rule for a pass without a mask is the one needed here: several rows are causal, one row sees all.
        model.set_attn_implementation("sdpa")
        inner = int(model.config.hidden_size)
        # The larger talkers are wider than their predictor.
        self.small_to_mtp_projection = nn.Linear(width, inner) if inner != width else nn.Identity()

    @property
    def num_codes(self) -> int:
        """How many codes it samples for a frame: all but the first."""
        return len(self.lm_head)

    @torch.inference_mode()
    def forward(
        self, thoughts: torch.Tensor, first: torch.Tensor, choices: RowChoices, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the other codes of one frame each for n sessions, without waiting for the device.

        `thoughts`: the hidden states [n, width] that the first codes were chosen from. `first`: the embeddings of the
        first codes [n, width]. `choices`: how the sessions' codes are chosen. `uniforms`: the random numbers they are
        chosen with, float64 [n, num_codes]. All are on the model's device, and so are the results: the codes, int64
        [n, num_codes], and the sum of all the frame's embeddings [n, width]. A code is NO_TOKEN where the logits are
        not numbers; what follows it in its row means nothing. To be called in the model's thread.
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
                # No mask, and none to be made: a frame is shorter than any window.
                attention_mask=dict.fromkeys(("full_attention", "sliding_attention")),
                past_key_values=past,
                use_cache=True,
            ).last_hidden_state
            codes.append(draw_tokens(head(hidden[:, -1]).float(), choices, uniforms[:, number]))
            # A row that failed goes on with any code.
            embedded = table(codes[-1].clamp(min=0))
            summed += embedded
            rows = embedded[:, None].to(dtype)
        return torch.stack(codes, 1), summed


class CapturedFrames:
    """A CodePredictor whose frames a CUDA device replays: 15 passes are some thousand launches, and one with this.

    For so many sessions as a power of two, whose codes are all chosen as the makers do; `call` returns None for others.
    """

    def __init__(self, predictor: CodePredictor, first_codes: nn.Module) -> None:
        self._predictor, self._first_codes = predictor, first_codes
        # By the number of sessions.
        self._frames: dict[int, _CapturedFrame] = {}
        self._memory: Any = torch.cuda.graph_pool_handle()
        self._works = True

    def call(
        self, thoughts: torch.Tensor, first: torch.Tensor, params: Sequence[Sampling], uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return what CodePredictor.forward does for n sessions, in tensors that hold until the next call.

        `first`: the first codes, int64 [n], and `uniforms`, on the host.
        """
        # What clients choose otherwise is not worth the seconds in which nobody speaks.
        if not self._works or any(_way(p) != _way(DEFAULT_CODEC_SAMPLING.rest) for p in params):
            return None
        count = 1 << (len(params) - 1).bit_length()
        if count not in self._frames:
            try:
                self._frames[count] = _CapturedFrame(
                    self._predictor, self._first_codes, [params[0]] * count, thoughts, self._memory
                )
            except RuntimeError as error:
                # The frames are computed as they are, and slower.
                log.warning("frames of codes are not captured as CUDA graphs: %s", error)
                self._works = False
                return None
        return self._frames[count].run(thoughts, first, uniforms)


def _way(params: Sampling) -> tuple[float, int, float, float]:
    return params.temperature, params.top_k, params.top_p, params.min_p


class _CapturedFrame:
    """The passes of one frame for sessions that choose by `params`, over tensors that stay where they are."""

    def __init__(
        self,
        predictor: CodePredictor,
        first_codes: nn.Module,
        params: Sequence[Sampling],
        like: torch.Tensor,
        memory: Any,
    ) -> None:
        device, count = like.device, len(params)
        self._thoughts = like.new_zeros(count, like.shape[1])
        self._first = torch.zeros(count, dtype=torch.int64, device=device)
        self._uniforms = torch.zeros(count, predictor.num_codes, dtype=torch.float64, device=device)
        # Kept, as the graph reads its tensors.
        self._choices = RowChoices.of(params, device)

        def frame() -> tuple[torch.Tensor, torch.Tensor]:
            made: tuple[torch.Tensor, torch.Tensor] = predictor(
                self._thoughts, first_codes(self._first), self._choices, self._uniforms
            )
            return made

        self._graph, self._out = capture(frame, device, memory)

    def run(
        self, thoughts: torch.Tensor, first: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        count = len(thoughts)
        self._thoughts[:count].copy_(thoughts)
        self._first[:count].copy_(first, non_blocking=True)
        self._uniforms[:count].copy_(uniforms, non_blocking=True)
        self._graph.replay()
        codes, summed = self._out
        return codes[:count], summed[:count]


class _PredictionRequest(NamedTuple):
    thought: torch.Tensor
    code: int
    params: Sampling
    random: RandomNumbers


class CodePredictorBatch:
    """Runs a CodePredictor in the model's thread, once for all sessions that ask before the next step.

    `first_codes`: the embedding table of the first codes.
    """

    def __init__(self, thread: ModelThread, predictor: CodePredictor, first_codes: nn.Module) -> None:
        self._predictor, self._first_codes = predictor, first_codes
        self._calls = GatheredCalls[_PredictionRequest, tuple[list[int], torch.Tensor]](thread, self._frames)
        table: Any = first_codes.weight
        self._captured: CapturedFrames | None = None
        if table.device.type == "cuda":
            fuse_norms(predictor)
            self._captured = CapturedFrames(predictor, first_codes)

    async def codes(
        self, thought: torch.Tensor, code: int, params: Sampling, random: RandomNumbers
    ) -> tuple[list[int], torch.Tensor]:
        """Return the other codes of a frame, and the sum of all its codes' embeddings [width], on the model's device.

        `thought`: the hidden state [width] that the first code, `code`, was chosen from. `params`: how the codes are
        chosen, a plain Sampling (`is_plain`); ValueError for another. `random`: of the utterance; one number is drawn
        for each code. Waits for the model's thread. Raises ModelError where the predictor fails, or this session's
        logits are not numbers, Refused once the thread is closed.
        """
        if not is_plain(params):
            raise ValueError("the code predictor has no penalties, biases or exclusions")
        return await self._calls.call(_PredictionRequest(thought, code, params, random))

    def _frames(self, batch: Sequence[_PredictionRequest]) -> list[tuple[list[int], torch.Tensor] | ModelError]:
        """The codes of each request, read from the device once, and the sums of their embeddings [width]."""
        like: Any = self._first_codes.weight
        first = torch.tensor([r.code for r in batch])
        uniforms = torch.tensor([r.random.take(self._predictor.num_codes) for r in batch], dtype=torch.float64)
        params = [r.params for r in batch]
        with torch.inference_mode():
            thoughts = torch.stack([r.thought for r in batch]).to(like.device, like.dtype)
            if self._captured and (made := self._captured.call(thoughts, first, params, uniforms)):
                codes, summed = made[0], made[1].clone()
            else:
                choices = RowChoices.of(params, like.device)
                # A copy that blocks would also wait for all the work that the device was given before.
                embedded = self._first_codes(first.to(like.device, non_blocking=True))
                uniforms = uniforms.to(like.device, non_blocking=True)
                codes, summed = self._predictor(thoughts, embedded, choices, uniforms)
        return [
            ModelError("the model's output is not a number") if NO_TOKEN in frame else (frame, row)
            for frame, row in zip(codes.tolist(), summed, strict=True)
        ]


class FirstCodeChooser:
    """Chooses the first codes of one utterance's frames; a Chooser of the engine.

    `params`: penalties look back on the codes of this utterance only. `end`: the code that ends the audio, which is not
    chosen before `min_frames`. `size`: of the talker's vocabulary, of whose control codes none but `end` is chosen.
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
        # No penalty brings a logit back from minus infinity, so they may come first.
        left = logits.masked_fill(barred, -torch.inf)
        return sample_rows(left, [c._sampler for c in choosers], [c._edits() for c in choosers])

    def accept(self, chosen: int) -> int:
        """Remember a code that was chosen. Raises ModelError where none was."""
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


async def generate_frames(
    session: Session,
    predictors: CodePredictorBatch,
    next_text: Callable[[], Awaitable[torch.Tensor]],
    sampling: CodecSampling,
    end: int,
    size: int,
    max_frames: int | None = None,
) -> AsyncGenerator[list[int], None]:
    """Yield frames of codes, one code for each codebook, after the rows that the session holds, until the audio ends.

    `next_text`: returns the row [width] of the text's next token; each frame takes one, and waits for it. `end`,
    `size`: as in FirstCodeChooser. `max_frames`: a bound below that of `sampling`. The session gets a row for each
    frame. Raises ModelError, EngineError, Refused.
    """
    chooser = FirstCodeChooser(sampling.first, end, size, sampling.min_frames)
    random = RandomNumbers(sampling.rest)
    one_token = Sampling(max_tokens=1, hidden=True, chooser=chooser)
    for _ in range(min(max_frames or sampling.max_frames, sampling.max_frames)):
        async with aclosing(session.generate(one_token)) as tokens:
            (token,) = [t async for t in tokens]
        if token.id == end:
            return
        # The row of the first code alone is replaced by that of the whole frame.
        session.rollback(session.length - 1)
        codes, summed = await predictors.codes(token.hidden, token.id, sampling.rest, random)
        yield [token.id, *codes]
        session.append_embeddings((summed + await next_text())[None])


class TextRows:
    """The rows of a text, one for each frame: its tokens, then its end mark, then padding for as long as it is asked.

    `rows`: from tokens to the talker's rows [n, width]; called in the model's thread.
    `ids`: the first tokens; None: the text and its end mark are in the session already.
    `more`: the tokens that follow, as they come; the rows wait for them.
    """

    def __init__(
        self,
        thread: ModelThread,
        rows: Callable[[Sequence[int]], torch.Tensor],
        eos: int,
        pad: int,
        ids: list[int] | None,
        more: AsyncIterator[list[int]] | None,
    ) -> None:
        self._thread, self._rows, self._eos, self._pad = thread, rows, eos, pad
        self._ids, self._more = ids or [], more
        self._ended = ids is None
        # Bound: TEXT_ROWS_AHEAD.
        self._ready: deque[torch.Tensor] = deque()
        self._padding: torch.Tensor | None = None

    async def next(self) -> torch.Tensor:
        """Return the next row [width]. Waits for tokens that have not come, and for the model's thread.

        That makes the rows of the next tokens at once, of those that have come. Raises ModelError where `rows` fails,
        and whatever `more` raises.
        """
        if not self._ready:
            await self._wait_for_tokens()
            if self._ids or not self._ended:
                tokens, self._ids = self._ids[:TEXT_ROWS_AHEAD] or [self._eos], self._ids[TEXT_ROWS_AHEAD:]
                self._ended = self._ended or self._eos in tokens
                self._ready.extend(await self._thread.call_model(lambda: self._rows(tokens)))
        if self._ready:
            return self._ready.popleft()
        if self._padding is None:
            self._padding = (await self._thread.call_model(lambda: self._rows([self._pad])))[0]
        return self._padding

    async def _wait_for_tokens(self) -> None:
        while not self._ids and self._more is not None:
            tokens = await anext(self._more, None)
            if tokens is None:
                self._more = None
            else:
                self._ids += tokens


def chunk_sizes(first: int | None = None) -> Iterator[int]:
    """Yield without end how many frames the successive chunks of an utterance's audio have.

    `first`: of the first chunk, at most MAX_VOCODER_FRAMES; the others are larger, up to the last of CHUNK_FRAMES.
    """
    if first:
        first = min(first, MAX_VOCODER_FRAMES)
        yield first
    yield from (size for size in CHUNK_FRAMES if size > (first or 0))
    while True:
        yield CHUNK_FRAMES[-1]
