"""What MiniCPM-o does in a unit: listen, or speak a few tokens. The released rules of decoding, over the logits of one conversation.

A unit in the context is `<unit>`, what was seen and heard, the tokens of the decision, and `</unit>`. The decision ends with one of three
terminators: `listen`, or that the words go on in the next unit (`chunk_eos`, `chunk_tts_eos`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

# Tokens a unit may speak, the terminator among them; characters of its text.
MAX_TOKENS = 20
MAX_CHARACTERS = 28
PENALTY_WINDOW = 512
# From here on down only the likeliest is left.
COLD = 1e-3


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens, by the tokenizer's names for them."""

    unit: int
    unit_end: int
    image: int
    image_end: int
    slice: int
    slice_end: int
    listen: int
    tts_bos: int
    tts_pad: int
    chunk_eos: int
    chunk_tts_eos: int
    turn_eos: int

    @classmethod
    def of(cls, known: Callable[[str], int | None]) -> SpecialTokens:
        """`known`: a token's id by its text. Raises ValueError for one that is none."""
        names = {"unit": "<unit>", "unit_end": "</unit>", "image": "<image>", "image_end": "</image>"}
        names |= {"slice": "<slice>", "slice_end": "</slice>"}
        found = {}
        for name in cls.__slots__:
            text = names.get(name, f"<|{name}|>")
            token = known(text)
            if token is None:
                raise ValueError(f"the tokenizer has no {text}")
            found[name] = int(token)
        return cls(**found)

    @property
    def terminators(self) -> frozenset[int]:
        """They end a unit."""
        return frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos))


@dataclass(frozen=True, slots=True)
class UnitSampling:
    """How tokens are chosen. `temperature` 0: the likeliest. `turn_penalty` above 1 makes turns longer. `listen_first`: units that listen whatever
    the model would. Defaults are the released ones.
    """

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    turn_penalty: float = 1.1
    listen_first: int = 3
    voice_temperature: float = 0.8
    voice_repetition_penalty: float = 1.05
    seed: int | None = None


@dataclass(slots=True)
class UnitChooser:
    """The chooser of one conversation's units (`Sampling.chooser`). `begin` before each; `text` decodes tokens, for their length."""

    ids: SpecialTokens
    manner: UnitSampling
    forbidden: Sequence[int]
    text: Callable[[list[int]], str]
    random: torch.Generator = field(default_factory=torch.Generator)
    # A turn is being spoken: the model may not listen before it has ended it.
    in_turn: bool = False
    units: int = 0
    chosen: list[int] = field(default_factory=list)
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_WINDOW))
    _must_listen: bool = False

    def begin(self, *, listen: bool) -> bool:
        """A unit begins. `listen`: it must. Whether the turn that is being spoken has to be closed first, by a `turn_eos` in the context."""
        self.chosen = []
        self._must_listen = listen or self.units < self.manner.listen_first
        self.units += 1
        closes = listen and self.in_turn
        if closes:
            self.in_turn = False
        return closes

    def __call__(self, logits: torch.Tensor) -> int:
        token = self._choose(logits)
        self.chosen.append(token)
        if token not in self.ids.terminators:
            self.in_turn = token != self.ids.turn_eos
        return token

    def _choose(self, logits: torch.Tensor) -> int:
        ids = self.ids
        if len(self.chosen) == MAX_TOKENS - 1:
            return ids.chunk_eos
        if self._must_listen:
            return ids.listen
        # That the unit is over is decided by the model as it is; which word comes next, by the rest of the rules.
        if self._drawn(logits) == ids.chunk_eos:
            return ids.chunk_eos
        token = self._word(logits)
        if token == ids.listen and self.in_turn:
            token = ids.tts_bos
        spoken = [*self.chosen[1:], token]
        if self.chosen and token not in ids.terminators and len(self.text(spoken)) >= MAX_CHARACTERS:
            # It is not said in this unit; it may be in the next.
            self.in_turn = True
            return ids.chunk_eos
        return token

    def _word(self, logits: torch.Tensor) -> int:
        manner = self.manner
        shaped = logits.clone()
        shaped[list(self.forbidden)] = -torch.inf
        if manner.repetition_penalty != 1.0 and self._recent:
            shaped[sorted(set(self._recent))] /= manner.repetition_penalty
        end = self.ids.turn_eos
        shaped[end] = shaped[end] / manner.turn_penalty if shaped[end] > 0 else shaped[end] * manner.turn_penalty
        if manner.temperature > COLD:
            shaped = _filtered(shaped / manner.temperature, manner.top_k, manner.top_p)
        token = self._drawn(shaped)
        self._recent.append(token)
        return token

    def _drawn(self, logits: torch.Tensor) -> int:
        if self.manner.temperature <= COLD:
            return int(logits.argmax())
        return int(torch.multinomial(torch.softmax(logits, -1), 1, generator=self.random))


def _filtered(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    if top_k > 0:
        logits = logits.masked_fill(logits < torch.topk(logits, min(top_k, len(logits))).values[-1], -torch.inf)
    if top_p > 0:
        values, order = torch.sort(logits, descending=True)
        before = torch.softmax(values, -1).cumsum(-1)
        logits = logits.index_fill(0, order[1:][before[:-1] > top_p], -torch.inf)
    return logits


@dataclass(slots=True)
class CodeChooser:
    """The chooser of one unit's sound codes. `least`: codes before it may end; the last code of the table ends it."""

    temperature: float
    repetition_penalty: float
    least: int
    random: torch.Generator
    greedy: bool = False
    window: int = 16
    codes: list[int] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor) -> int:
        shaped = logits / self.temperature
        if self.codes and self.repetition_penalty != 1.0:
            counts = torch.bincount(torch.tensor(self.codes[-self.window :]), minlength=len(shaped))
            by = self.repetition_penalty**counts
            shaped = torch.where(shaped < 0, shaped * by, shaped / by)
        if len(self.codes) < self.least:
            shaped[-1] = -torch.inf
        drawn = shaped.argmax() if self.greedy else torch.multinomial(shaped.softmax(-1), 1, generator=self.random)
        self.codes.append(int(drawn))
        return self.codes[-1]
