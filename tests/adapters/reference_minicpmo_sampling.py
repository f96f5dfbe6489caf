"""MiniCPM-o's released rules for one conversation, step by step: the reference for the batched choosers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from antiphon.adapters.minicpmo.sampling import (
    GREEDY_TEMPERATURE,
    MAX_UNIT_CHARS,
    MAX_UNIT_TOKENS,
    PENALTY_TOKENS,
    TOKEN_DRAWS,
    SpecialTokens,
    UnitSampling,
)
from antiphon.engine.api import Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.errors import ModelError


@dataclass(slots=True)
class ReferenceUnitChooser:
    """Chooses the tokens of one conversation's units, from one row of logits at a time."""

    ids: SpecialTokens
    params: UnitSampling
    forbidden: Sequence[int]
    text: Callable[[list[int]], str]
    in_turn: bool = False
    num_units: int = 0
    chosen: list[int] = field(default_factory=list)
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_TOKENS))
    _must_listen: bool = False
    _must_speak: bool = False
    _uniforms: torch.Tensor = field(init=False)
    _random: RandomNumbers = field(init=False)

    def __post_init__(self) -> None:
        self._random = RandomNumbers(Sampling(temperature=0.0 if self.is_greedy else 1.0, seed=self.params.seed))

    def begin(self, *, listen: bool, speak: bool = False) -> bool:
        """Begin a unit, in which the model must listen if `listen`, and otherwise must say a word if `speak`.

        Returns whether this interrupts a turn. The caller must then append `turn_eos` to the context first, because the
        model expects the end of a turn before it listens.
        """
        self.chosen = []
        self._must_speak = speak and not listen
        self._must_listen = listen or (self.num_units < self.params.listen_first and not speak)
        self.num_units += 1
        cuts_turn = listen and self.in_turn
        if cuts_turn:
            self.in_turn = False
        return cuts_turn

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.params.temperature <= GREEDY_TEMPERATURE

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token, and record it. Raises ModelError if the logits are NaN."""
        self._uniforms = torch.tensor(self._random.take(TOKEN_DRAWS), dtype=torch.float64)
        token = self._choose(logits)
        self.chosen.append(token)
        if token not in self.ids.terminators:
            self.in_turn = token != self.ids.turn_eos
        return token

    def _choose(self, logits: torch.Tensor) -> int:
        ids = self.ids
        if len(self.chosen) == MAX_UNIT_TOKENS - 1:
            return ids.chunk_eos
        if self._must_listen:
            return ids.listen
        if self._must_speak:
            if not self.chosen:
                return ids.speak
            if len(self.chosen) == 1:
                # The first word must not end the unit or the turn.
                logits = logits.clone()
                logits[[*ids.terminators, ids.turn_eos, ids.speak]] = -torch.inf
                return self._word(logits)
        # The unchanged logits decide whether the unit is over. The next word is drawn from shaped logits.
        if self._is_over(logits):
            return ids.chunk_eos
        token = self._word(logits)
        if token == ids.listen and self.in_turn:
            token = ids.tts_bos
        spoken = [*self.chosen[1:], token]
        if self.chosen and token not in ids.terminators and len(self.text(spoken)) >= MAX_UNIT_CHARS:
            # The word would exceed the limit of the unit. The model may choose it again in the next one.
            self.in_turn = True
            return ids.chunk_eos
        return token

    def _word(self, logits: torch.Tensor) -> int:
        params = self.params
        shaped = logits.clone()
        shaped[list(self.forbidden)] = -torch.inf
        if params.repetition_penalty != 1.0 and self.recent:
            shaped[sorted(set(self.recent))] /= params.repetition_penalty
        end = self.ids.turn_eos
        shaped[end] = shaped[end] / params.turn_penalty if shaped[end] > 0 else shaped[end] * params.turn_penalty
        token = self._listens(shaped)
        if token is None:
            temperature = 0.0 if self.is_greedy else params.temperature
            drawn = Sampling(temperature=temperature, top_k=params.top_k, top_p=params.top_p or 1.0)
            token = _drawn(shaped, drawn, self._uniforms[1:])
        self.recent.append(token)
        return token

    def _listens(self, shaped: torch.Tensor) -> int | None:
        """Scale the logit of `listen` in place. Returns `listen` if it is likely enough to be chosen at once."""
        listen = self.ids.listen
        if torch.isneginf(shaped[listen]):
            return None
        shaped[listen] *= self.params.listen_scale
        return listen if int((shaped > shaped[listen]).sum()) < self.params.listen_top_k else None

    def _is_over(self, logits: torch.Tensor) -> bool:
        """Return whether `chunk_eos` is drawn from all tokens."""
        if self.is_greedy:
            return _drawn(logits, Sampling(), self._uniforms[:1]) == self.ids.chunk_eos
        probability = torch.exp((logits[self.ids.chunk_eos] - logits.logsumexp(0)).double())
        return bool(self._uniforms[0] < probability)


@dataclass(slots=True)
class ReferenceCodeChooser:
    """Chooses the codes of one unit's audio."""

    temperature: float
    repetition_penalty: float
    min_codes: int
    random: RandomNumbers
    greedy: bool = False
    window: int = 16
    codes: list[int] = field(default_factory=list)

    def __call__(self, logits: torch.Tensor) -> int:
        shaped = logits / self.temperature
        if self.codes and self.repetition_penalty != 1.0:
            counts = torch.bincount(torch.tensor(self.codes[-self.window :]), minlength=len(shaped))
            by = self.repetition_penalty**counts
            shaped = torch.where(shaped < 0, shaped * by, shaped / by)
        if len(self.codes) < self.min_codes:
            shaped[-1] = -torch.inf
        uniforms = torch.tensor(self.random.take(1), dtype=torch.float64)
        self.codes.append(_drawn(shaped, Sampling(temperature=0.0 if self.greedy else 1.0), uniforms))
        return self.codes[-1]


def _drawn(logits: torch.Tensor, params: Sampling, uniforms: torch.Tensor) -> int:
    token = int(draw_tokens(logits[None], RowChoices.of((params,), logits.device), uniforms))
    if token == NO_TOKEN:
        raise ModelError("the model's output is not a number")
    return token
