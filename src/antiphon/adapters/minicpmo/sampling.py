"""Chooses the tokens of a MiniCPM-o unit, in which the model listens or says a few words, and its voice's codes.

This module implements the released decoding rules, over the logits of all conversations at once. A unit in the context
is `<unit>`, its images and audio, the tokens chosen here, and `</unit>`. The last chosen token is one of three
terminators: `listen`, `chunk_eos` or `chunk_tts_eos`. After the latter two, the words continue in the next unit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from antiphon.engine.api import Sampling
from antiphon.engine.choosers import NO_TOKEN
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.engine.local.sampling import copied_to, flat_places
from antiphon.errors import ModelError

# Limits of a unit: tokens, including the terminator, and characters of text.
MAX_UNIT_TOKENS = 20
MAX_UNIT_CHARS = 28
# The number of recent words that the repetition penalty applies to.
PENALTY_TOKENS = 512
# Up to this temperature, the likeliest token is chosen.
GREEDY_TEMPERATURE = 1e-3
# Random numbers per token: one decides whether the unit is over, the other decides which word is next.
TOKEN_DRAWS = 2
# The value that is returned instead of a word if the unit is over.
UNIT_OVER = -2


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of the special tokens. Fields are named after the tokens: `listen` is `<|listen|>`."""

    # Begins a unit.
    unit: int
    # Ends a unit.
    unit_end: int
    # Begins the embeddings of a whole image.
    image: int
    # Ends the embeddings of a whole image.
    image_end: int
    # Begins the embeddings of a slice of an image.
    slice: int
    # Ends the embeddings of a slice.
    slice_end: int
    # Terminator: the model listens in this unit.
    listen: int
    # The model speaks in this unit.
    speak: int
    # Chosen instead of `listen` within a turn. The turn continues.
    tts_bos: int
    # Padding, which is never chosen.
    tts_pad: int
    # Terminator: the words continue in the next unit.
    chunk_eos: int
    # Terminator: the words continue in the next unit.
    chunk_tts_eos: int
    # Ends the model's turn.
    turn_eos: int

    @classmethod
    def of(cls, known: Callable[[str], int | None]) -> SpecialTokens:
        """Look up the ids with `known`, which maps a text to an id or None. Raises ValueError if a token is missing."""
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
        """The three tokens that end the generation of a unit."""
        return frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos))


@dataclass(frozen=True, slots=True)
class UnitSampling:
    """How the tokens and codes of a conversation are sampled. The defaults are the released ones."""

    # Sampling temperature of the tokens. Up to GREEDY_TEMPERATURE, the likeliest token and the likeliest code are
    # chosen.
    temperature: float = 0.7
    # The number of likeliest tokens to sample from; 0: all tokens.
    top_k: int = 20
    # The total probability of the likeliest tokens to sample from; 0: all tokens.
    top_p: float = 0.8
    # Divides the logits of the last PENALTY_TOKENS words.
    repetition_penalty: float = 1.05
    # Penalty of `turn_eos`. Above 1, the end of a turn is less likely, and turns get longer.
    turn_penalty: float = 1.1
    # Multiplies the logit of `listen`. If that logit is negative, a factor below 1 makes `listen` likelier.
    listen_scale: float = 1.0
    # `listen` is chosen whenever it is among this number of likeliest tokens; 0: this rule is off.
    listen_top_k: int = 0
    # The number of units at the start in which the model must listen.
    listen_first: int = 3
    # Sampling temperature of the codes.
    voice_temperature: float = 0.8
    # Repetition penalty of the codes; see CodeChooser.
    voice_repetition_penalty: float = 1.05
    # Seed of the random numbers. None: drawn from the system's entropy.
    seed: int | None = None


@dataclass(slots=True)
class UnitChooser:
    """Chooses the tokens of one conversation's units: a Chooser for `Sampling.chooser`.

    `begin` is called before each unit.
    """

    # The special tokens.
    ids: SpecialTokens
    # How tokens are sampled.
    params: UnitSampling
    # Tokens that are never spoken, the same for all conversations of a model.
    forbidden: Sequence[int]
    # Decodes tokens, to count their characters.
    text: Callable[[list[int]], str]
    # True while the model is in a turn, which it must end before it can listen.
    in_turn: bool = False
    # Units begun so far.
    num_units: int = 0
    # The tokens of the current unit so far.
    chosen: list[int] = field(default_factory=list)
    # The last words, which the repetition penalty applies to.
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_TOKENS))
    _must_listen: bool = False
    _must_speak: bool = False
    # The sampling parameters for a word, applied to the shaped logits.
    _drawing: Sampling = field(init=False)
    # The source of random numbers. Each token takes TOKEN_DRAWS.
    random: RandomNumbers = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        temperature = params.temperature if params.temperature > GREEDY_TEMPERATURE else 0.0
        self._drawing = Sampling(temperature=temperature, top_k=params.top_k, top_p=params.top_p or 1.0)
        self.random = RandomNumbers(Sampling(temperature=temperature, seed=params.seed))

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

    @staticmethod
    def choose(choosers: Sequence[UnitChooser], logits: torch.Tensor) -> torch.Tensor:
        """Return the next word of each conversation, UNIT_OVER or NO_TOKEN.

        The unchanged logits decide whether the unit is over. The next word is drawn from shaped logits.
        """
        device, end = logits.device, choosers[0].ids.chunk_eos
        uniforms = torch.tensor([c.random.take(TOKEN_DRAWS) for c in choosers], dtype=torch.float64)
        uniforms = uniforms.to(device, non_blocking=True)
        greedy = [c._drawing.temperature <= 0 for c in choosers]
        flags = torch.tensor([greedy, [c._is_first_word for c in choosers]]).to(device, non_blocking=True)
        over = uniforms[:, 0] < torch.exp((logits[:, end] - logits.logsumexp(1)).double())
        if any(greedy):
            over = torch.where(flags[0], logits.argmax(1) == end, over)
        shaped, listens = _shaped(choosers, logits)
        word = draw_tokens(shaped, RowChoices.of([c._drawing for c in choosers], device), uniforms[:, 1])
        chosen = word.where(~listens, choosers[0].ids.listen).where(flags[1] | ~over, UNIT_OVER)
        return chosen.where(word != NO_TOKEN, NO_TOKEN)

    def accept(self, chosen: int) -> int:
        """Return the next token, and record it. It may differ from `chosen`, which the rules of a unit can override.

        Raises ModelError if the logits were NaN.
        """
        token = self._forced
        if token is None:
            token = self._fitting(chosen)
        self.chosen.append(token)
        if token not in self.ids.terminators:
            self.in_turn = token != self.ids.turn_eos
        return token

    @property
    def _forced(self) -> int | None:
        """The token that overrides the drawn one, or None."""
        if len(self.chosen) == MAX_UNIT_TOKENS - 1:
            return self.ids.chunk_eos
        if self._must_listen:
            return self.ids.listen
        return self.ids.speak if self._must_speak and not self.chosen else None

    @property
    def _is_first_word(self) -> bool:
        """Whether the next token must be a word, which ends neither the unit nor the turn."""
        return self._must_speak and len(self.chosen) == 1

    def _fitting(self, chosen: int) -> int:
        ids = self.ids
        if chosen == NO_TOKEN:
            raise ModelError("the model's output is not a number")
        if chosen == UNIT_OVER:
            return ids.chunk_eos
        self.recent.append(chosen)
        if self._is_first_word:
            return chosen
        token = ids.tts_bos if chosen == ids.listen and self.in_turn else chosen
        spoken = [*self.chosen[1:], token]
        if self.chosen and token not in ids.terminators and len(self.text(spoken)) >= MAX_UNIT_CHARS:
            # The word would exceed the limit of the unit. The model may choose it again in the next one.
            self.in_turn = True
            return ids.chunk_eos
        return token


def _shaped(choosers: Sequence[UnitChooser], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits to draw words from, and whether `listen` wins by the rule of `listen_top_k`: bool [n]."""
    device, size, ids = logits.device, logits.shape[1], choosers[0].ids
    params = [c.params for c in choosers]
    recent = [set(c.recent) if c.params.repetition_penalty != 1.0 else () for c in choosers]
    no_words = (*ids.terminators, ids.turn_eos, ids.speak)
    first_words = flat_places([no_words if c._is_first_word else () for c in choosers], size)
    places = (choosers[0].forbidden, first_words, flat_places(recent, size))
    never, no_word, repeated = copied_to(device, np.int64, *places)
    penalties = [p.repetition_penalty for p, some in zip(params, recent, strict=True) for _ in some]
    rows = ([p.turn_penalty for p in params], [p.listen_scale for p in params], [p.listen_top_k for p in params])
    by, turn, scale, ranks = copied_to(device, np.float32, penalties, *rows)
    shaped = logits.index_fill(1, never, -torch.inf)
    flat = shaped.view(-1)
    flat.index_fill_(0, no_word, -torch.inf)
    flat[repeated] = flat[repeated] / by
    end = shaped[:, ids.turn_eos]
    shaped[:, ids.turn_eos] = torch.where(end > 0, end / turn, end * turn)
    listen = shaped[:, ids.listen]
    possible = ~listen.isneginf()
    shaped[:, ids.listen] = torch.where(possible, listen * scale, listen)
    if not any(p.listen_top_k for p in params):
        return shaped, torch.zeros_like(possible)
    return shaped, possible & ((shaped > shaped[:, ids.listen, None]).sum(1) < ranks)


@dataclass(slots=True)
class CodeChooser:
    """Chooses the codes of a unit's audio: a ChooserAhead for `Sampling.chooser`.

    The vocabulary's last code ends a turn.
    """

    # Divides the logits.
    temperature: float
    # Penalty of a code for each of its occurrences among the last `window` codes.
    repetition_penalty: float
    # Minimum number of codes before the code that ends a turn.
    min_codes: int
    # The source of random numbers. Each code takes one.
    random: RandomNumbers
    # True if the likeliest code is chosen.
    greedy: bool = False
    # The number of recent codes that the penalty applies to.
    window: int = 16
    # The codes chosen so far.
    codes: list[int] = field(default_factory=list)

    @staticmethod
    def choose(choosers: Sequence[CodeChooser], logits: torch.Tensor) -> torch.Tensor:
        """Return the next code of each conversation, or NO_TOKEN."""
        return CodeChooser.choose_ahead(choosers, logits, None, [False] * len(choosers))

    @staticmethod
    def choose_ahead(
        choosers: Sequence[CodeChooser], logits: torch.Tensor, unread: torch.Tensor | None, late: Sequence[bool]
    ) -> torch.Tensor:
        """Return the next code of each conversation, or NO_TOKEN. See `ChooserAhead`."""
        device, size, each = logits.device, logits.shape[1], list(zip(choosers, late, strict=True))
        times = [Counter(c.codes[waits - c.window :]) for c, waits in each]
        ends = [(size - 1,) if len(c.codes) + waits < c.min_codes else () for c, waits in each]
        waiting = [i for i, waits in enumerate(late) if waits]
        known = [[*c.codes[1 - c.window :], *[-1] * c.window][: c.window] for c, waits in each if waits]
        places = (
            flat_places(times, size),
            flat_places(ends, size),
            waiting,
            [code for codes in known for code in codes],
        )
        repeated, too_early, rows, codes = copied_to(device, np.int64, *places)
        penalties = [c.repetition_penalty**n for c, found in zip(choosers, times, strict=True) for n in found.values()]
        powers = [c.repetition_penalty**n for c, waits in each if waits for n in range(c.window + 1)]
        by, temperature, table = copied_to(device, np.float32, penalties, [c.temperature for c in choosers], powers)
        shaped = logits / temperature[:, None]
        flat, newest = shaped.view(-1), None
        if unread is not None and waiting:
            newest = unread.index_select(0, rows).clamp(min=0)
            before = flat[rows * size + newest]
        old = flat[repeated]
        flat[repeated] = torch.where(old < 0, old * by, old / by)
        if newest is not None:
            # The unread code has one occurrence more than those that are known.
            count = 1 + (codes.view(len(waiting), -1) == newest[:, None]).sum(1)
            by = table.view(len(waiting), -1).gather(1, count[:, None])[:, 0]
            flat[rows * size + newest] = torch.where(before < 0, before * by, before / by)
        flat.index_fill_(0, too_early, -torch.inf)
        uniforms = torch.tensor([c.random.peek(int(waits), 1)[0] for c, waits in each], dtype=torch.float64)
        choices = RowChoices.of([Sampling(temperature=0.0 if c.greedy else 1.0) for c in choosers], device)
        return draw_tokens(shaped, choices, uniforms.to(device, non_blocking=True))

    def accept(self, chosen: int) -> int:
        """Record a chosen code. Raises ModelError if the logits were NaN."""
        self.random.take(1)
        if chosen == NO_TOKEN:
            raise ModelError("the model's output is not a number")
        self.codes.append(chosen)
        return chosen
