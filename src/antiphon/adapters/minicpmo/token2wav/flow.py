"""The flow: windows of codes to mel frames, for many streams at once.

Each stream has a slot, which is a row of every table. A slot holds the prompt of its voice, and the newest frames of
the stream. What a stream forgets, and when, is as in the makers' code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from antiphon.adapters.minicpmo.token2wav.dit import MelDecoder
from antiphon.adapters.minicpmo.token2wav.encoder import FRAMES_A_CODE, CodeEncoder
from antiphon.adapters.minicpmo.token2wav.files import FlowConfig
from antiphon.adapters.minicpmo.token2wav.history import FramePlaces, Held, Positions
from antiphon.adapters.minicpmo.token2wav.voice import MAX_REFERENCE_S, PromptVoice

# The number of Euler steps of the makers.
NUM_STEPS = 10
# Frames that a stream keeps besides as many frames as its voice's prompt has.
KEPT_FRAMES = 100
# The limit of a window, in codes, with its lookahead.
WINDOW_CODES = 28
# The limit of a prompt, in codes of 40 ms.
MAX_PROMPT_CODES = int(25 * MAX_REFERENCE_S)
# Limit of voices whose prompts are kept on the device. The prompt of another voice is computed again for each turn.
MAX_PROMPTS = 4
# The noise is drawn from this seed, so that the same codes give the same audio in every process. The makers draw
# other noise in every process.
NOISE_SEED = 0


class Flow(nn.Module):
    """The networks. Parameters have their names in the checkpoint.

    `num_codes`: the number of codes that have an embedding.
    """

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.num_codes = config.vocab_size
        self.input_embedding = nn.Embedding(config.vocab_size, config.input_size)
        self.spk_embed_affine_layer = nn.Linear(config.spk_embed_dim, config.output_size)
        self.encoder = CodeEncoder(config.encoder)
        self.encoder_proj = nn.Linear(config.encoder.output_size, config.output_size)
        self.decoder = MelDecoder(config.decoder)


class CodeWindow(NamedTuple):
    """Codes of a stream that become audio together. `last`: they end the stream, so all of them yield frames.

    Otherwise those of the lookahead do not, and must be given again in the next window.
    """

    codes: Sequence[int]
    last: bool


class _Slot:
    """What the host knows of a slot. `prompt_codes`: the length of the voice's prompt."""

    def __init__(self, slots: FlowSlots, prompt_codes: int) -> None:
        self.prompt_codes = prompt_codes
        self.codes, self.frames = Held(slots.code_positions), Held(slots.frame_positions)
        # What the decoder holds, the newest window first.
        self.decoded = Held(slots.frame_positions)

    def plan(self, count: int, room: int) -> list[Positions]:
        """Return the positions of a window of `count` codes that yield frames. The slot then holds them.

        For codes, frames and decoded frames: the positions of `room` new codes, of which the first `count` are held;
        then the numbers at all positions (Held.numbers).
        """
        held, sizes = (self.codes, self.frames, self.decoded), (1, FRAMES_A_CODE, FRAMES_A_CODE)
        new = [each.free(size * room) for each, size in zip(held, sizes, strict=True)]
        own = [positions[: size * count] for positions, size in zip(new, sizes, strict=True)]
        numbers = [each.numbers(positions) for each, positions in zip(held, own, strict=True)]
        self._forget(*own)
        return [*new, *numbers]

    def _forget(self, codes: Positions, frames: Positions, decoded: Positions) -> None:
        prompt, kept = FRAMES_A_CODE * self.prompt_codes, KEPT_FRAMES // FRAMES_A_CODE
        self.codes.positions = np.concatenate([self.codes.positions, codes])
        self.frames.positions = np.concatenate([self.frames.positions, frames])
        # The makers' decoder puts new frames first, and then keeps the first and the last ones. So the frames that it
        # forgets are in the middle: at first those of the prompt.
        self.decoded.positions = np.concatenate([decoded, self.decoded.positions])
        if len(self.frames) > prompt + KEPT_FRAMES:
            self.codes.positions = _ends(self.codes.positions, self.prompt_codes, kept)
            self.frames.positions = _ends(self.frames.positions, prompt, KEPT_FRAMES)
            self.decoded.positions = _ends(self.decoded.positions, prompt, KEPT_FRAMES)


def _ends(positions: Positions, first: int, last: int) -> Positions:
    return np.concatenate([positions[:first], positions[len(positions) - last :]])


class FlowSlots:
    """The flow's streams, each with a slot. Used only in the thread of token2wav.

    Each slot holds a prompt of at most `max_prompt` codes. The row `spare`, the last one, fills up a call with too few
    streams. `most`: the limit of the codes of a window that yield frames. `noise`: [frames, bands], from NOISE_SEED.
    `slot_bytes`: the memory of a slot.
    """

    def __init__(
        self,
        flow: Flow,
        num_slots: int,
        *,
        num_steps: int = NUM_STEPS,
        max_prompt: int = MAX_PROMPT_CODES,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """`kv_dtype`: the type of the decoder's keys and values. None: float16 on a GPU, as the makers offer."""
        self.flow, self.spare, self.max_prompt = flow, num_slots, max_prompt
        self.device = flow.encoder_proj.weight.device
        self.most = WINDOW_CODES - flow.encoder.lookahead
        self.code_positions, self.frame_positions = positions(max_prompt)
        with torch.inference_mode():
            flow.encoder.prepare(self.code_positions, self.frame_positions)
            flow.decoder.prepare(num_steps)
            self.encoded = flow.encoder.tables(num_slots, self.code_positions, self.frame_positions)
            like = flow.encoder_proj.weight
            kept = kv_dtype or (torch.float16 if self.device.type == "cuda" else like.dtype)
            self.decoded = flow.decoder.tables(num_slots, self.frame_positions, kept)
            self.speakers = like.new_zeros(num_slots + 1, flow.decoder.bands)
            drawn = torch.Generator().manual_seed(NOISE_SEED)
            self.noise = torch.randn(self.frame_positions, flow.decoder.bands, generator=drawn).to(like)
        self._slots: dict[int, _Slot] = {}
        self._prompts: OrderedDict[int, tuple[PromptVoice, list[torch.Tensor]]] = OrderedDict()

    @property
    def slot_bytes(self) -> int:
        """The bytes of one row of all tables."""
        return sum(row.nbytes for row in self.rows(self.spare))

    @torch.inference_mode()
    def begin(self, slot: int, voice: PromptVoice) -> None:
        """Begin a stream in the voice. The first stream of a voice takes the time of ten seconds of audio.

        A prompt of more than `max_prompt` codes is cut. Raises ValueError if the voice has no codes, or codes that have
        no embedding.
        """
        codes = np.asarray(voice.codes, np.int64)[: self.max_prompt]
        if not len(codes):
            raise ValueError("the voice has no codes")
        if codes.min() < 0 or codes.max() >= self.flow.num_codes:
            raise ValueError(f"a code of the voice is not in 0 to {self.flow.num_codes - 1}")
        own = self._slots[slot] = _Slot(self, len(codes))
        for row in self.rows(slot):
            row.zero_()
        speaker = F.normalize(torch.as_tensor(voice.embedding).to(self.noise).view(1, -1), dim=1)
        self.speakers[slot] = self.flow.spk_embed_affine_layer(speaker)[0]
        known = self._prompts.get(id(voice))
        if known is None:
            self._read_prompt(slot, own, voice, codes)
            return
        self._prompts.move_to_end(id(voice))
        own.plan(len(codes), len(codes))
        for row, kept in zip(self._kept_rows(slot, len(codes)), known[1], strict=True):
            row.copy_(kept)

    def _read_prompt(self, slot: int, own: _Slot, voice: PromptVoice, codes: Positions) -> None:
        frames = FRAMES_A_CODE * len(codes)
        given = torch.as_tensor(voice.mel)[:frames].to(self.noise)[None]
        # The makers repeat the first codes as the lookahead of the prompt.
        ahead = codes[np.arange(self.flow.encoder.lookahead) % len(codes)]
        numbers = self._numbers(slot, own, np.concatenate([codes, ahead]), len(codes), len(codes))
        self.compute(torch.from_numpy(numbers[None]).to(self.device), len(codes), given)
        kept = [row.clone() for row in self._kept_rows(slot, len(codes))]
        self._prompts[id(voice)] = (voice, kept)
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def check(self, window: CodeWindow) -> int:
        """Return the number of codes of a window that yield frames.

        Raises ValueError if there are none, more than `most`, or codes that have no embedding.
        """
        codes, last = window
        made = len(codes) - (0 if last else self.flow.encoder.lookahead)
        if not 0 < made <= self.most:
            raise ValueError(f"a window has {len(codes)} codes")
        if min(codes) < 0 or max(codes) >= self.flow.num_codes:
            raise ValueError(f"a code is not in 0 to {self.flow.num_codes - 1}: {min(codes)} to {max(codes)}")
        return made

    def plan(self, slot: int, window: CodeWindow, room: int) -> Positions:
        """Return what `compute` needs of a stream's next window, int64 [width(room)]. The stream then holds it.

        `window`: passes `check`. `room`: at least its number of codes that yield frames. The window is filled up to it.
        """
        return self._numbers(slot, self._slots[slot], np.asarray(window.codes, np.int64), self.check(window), room)

    def no_plan(self, room: int) -> Positions:
        """Return what `compute` needs to fill up a call: a window of the spare row, whose frames see only each other.

        Convolutions keep nothing of it, so that it computes the same each time.
        """
        codes = np.zeros(room + self.flow.encoder.lookahead, np.int64)
        return np.concatenate([[self.spare, 0, 0, len(codes)], codes, *_Slot(self, 0).plan(room, room)])

    def width(self, room: int) -> int:
        """Return the number of numbers in a plan."""
        return sum(self._sizes(room))

    def _sizes(self, room: int) -> list[int]:
        frames = FRAMES_A_CODE * room
        positions = (self.code_positions, self.frame_positions, self.frame_positions)
        return [1, 1, 1, 1, room + self.flow.encoder.lookahead, room, frames, frames, *positions]

    def _numbers(self, slot: int, own: _Slot, codes: Positions, made: int, room: int) -> Positions:
        filled = np.pad(codes, (0, room + self.flow.encoder.lookahead - len(codes)))
        return np.concatenate([[slot, len(own.codes), made, len(codes)], filled, *own.plan(made, room)])

    @torch.inference_mode()
    def compute(self, plans: torch.Tensor, room: int, given: torch.Tensor | None = None) -> torch.Tensor:
        """Return the mel frames of windows, float32 [streams, bands, frames]. Does not wait for the device.

        What follows a window's own frames is meaningless.

        `plans`, int64 [streams, width(room)]: see `plan`. `given`: the frames of a voice's prompt, [1, frames, bands];
        None in all other windows.
        """
        flow = self.flow
        slot, held, made, num_codes, codes, new_codes, new_frames, new_decoded, at_codes, at_frames, at_decoded = (
            torch.split(plans, self._sizes(room), 1)
        )
        rows, counts, frame_counts = slot[:, 0], made[:, 0], FRAMES_A_CODE * made[:, 0]
        encoded = flow.encoder(
            flow.input_embedding(codes),
            self.encoded,
            FramePlaces(rows, new_codes, at_codes, counts),
            FramePlaces(rows, new_frames, at_frames, frame_counts),
            held[:, 0],
            num_codes[:, 0],
        )
        # The stream holds as many decoded frames as frames.
        noise = self.noise[FRAMES_A_CODE * held + torch.arange(new_decoded.shape[1], device=self.device)]
        conditions, speakers = flow.encoder_proj(encoded), self.speakers.index_select(0, rows)
        places = FramePlaces(rows, new_decoded, at_decoded, frame_counts)
        mel: torch.Tensor = flow.decoder(noise, conditions, speakers, given, self.decoded, places)
        return mel.transpose(1, 2)

    def rows(self, slot: int) -> Iterator[torch.Tensor]:
        """Yield the views of all tables at a slot."""
        guided = slice(2 * slot, 2 * slot + 2)
        encoded, decoded = self.encoded, self.decoded
        yield from (self.speakers[slot], encoded.ahead[slot], encoded.up[slot])
        yield from (encoded.codes[:, slot], encoded.frames[:, slot])
        yield from (decoded.convolutions[:, :, guided], decoded.attention[:, :, guided])

    def _kept_rows(self, slot: int, codes: int) -> Iterator[torch.Tensor]:
        """Yield what a prompt of `codes` codes fills of the tables at a slot, without the speaker."""
        _, ahead, up, of_codes, of_frames, convolutions, attention = self.rows(slot)
        yield from (ahead, up, of_codes[:, :codes], of_frames[:, : 2 * codes])
        yield from (convolutions, attention[:, :, :, : 2 * codes])


def positions(max_prompt: int) -> tuple[int, int]:
    """Return the numbers of positions of a slot, for codes and for frames, if a prompt has `max_prompt` codes.

    Both are multiples of 8, which attention kernels of a GPU prefer.
    """
    codes = max_prompt + KEPT_FRAMES // FRAMES_A_CODE + WINDOW_CODES
    return tuple(-(-each // 8) * 8 for each in (codes, 2 * codes))  # type: ignore[return-value]
