"""Which tokens MiniCPM-o chooses in a unit: to listen, or to speak a few words; and which codes its voice chooses.

These are the released rules of decoding, over the logits of all conversations at once. A unit in the context is
`<unit>`, what was seen and heard, the tokens chosen here, and `</unit>`. The last of the chosen tokens is one of three
terminators: `listen`, or `chunk_eos` or `chunk_tts_eos`, after which the words go on in the next unit.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from antiphon.engine.api import NO_TOKEN, Sampling
from antiphon.engine.local.device_sampling import RandomNumbers, RowChoices, draw_tokens
from antiphon.engine.local.sampling import copied_to, flat_places
from antiphon.errors import ModelError

# Most tokens that are chosen in a unit, the terminator among them; most characters of its text.
MAX_UNIT_TOKENS = 20
MAX_UNIT_CHARS = 28
# The repetition penalty looks back on so many words.
PENALTY_TOKENS = 512
# At temperatures up to this, the likeliest token is chosen.
GREEDY_TEMPERATURE = 1e-3
# Random numbers of each token: whether the unit is over, and which word comes.
TOKEN_DRAWS = 2
# In place of a word: the unit is over.
UNIT_OVER = -2


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The ids of the special tokens, by the tokenizer's names for them: `listen` is `<|listen|>`."""

    unit: int
    unit_end: int
    image: int
    image_end: int
    slice: int
    slice_end: int
    listen: int
    speak: int
    tts_bos: int
    tts_pad: int
    chunk_eos: int
    chunk_tts_eos: int
    turn_eos: int

    @classmethod
    def of(cls, known: Callable[[str], int | None]) -> SpecialTokens:
        """Look the tokens up with `known`: text to id, or to None. Raises ValueError for a token that is missing."""
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
        """The three tokens of which one ends the choices in each unit; they are the generation's stop tokens."""
        return frozenset((self.listen, self.chunk_eos, self.chunk_tts_eos))


@dataclass(frozen=True, slots=True)
class UnitSampling:
    """How the tokens and codes of a conversation are drawn. The defaults are the released ones.

    `temperature`: of the tokens; up to GREEDY_TEMPERATURE, the likeliest token and code are chosen. `top_k`, `top_p`: 0
    leaves all tokens in. `repetition_penalty`: divides the logits of the last PENALTY_TOKENS words. `turn_penalty`:
    above 1, the end of a turn is less likely, and turns get longer. `listen_scale`: multiplies the logit of `listen`;
    where that is below 0, less than 1 makes it likelier. `listen_top_k`: `listen` is chosen where it is one of so many
    likeliest tokens; 0: never for that. `listen_first`: so many units at the start only listen, whatever the model
    would choose. `voice_temperature`, `voice_repetition_penalty`: of the codes. `seed`: None draws one from the
    system's entropy.
    """

    temperature: float = 0.7
    top_k: int = 20
    top_p: float = 0.8
    repetition_penalty: float = 1.05
    turn_penalty: float = 1.1
    listen_scale: float = 1.0
    listen_top_k: int = 0
    listen_first: int = 3
    voice_temperature: float = 0.8
    voice_repetition_penalty: float = 1.05
    seed: int | None = None


@dataclass(slots=True)
class UnitChooser:
    """Chooses the tokens of one conversation's units: a Chooser for `Sampling.chooser`.

    `begin` is called before each unit. `ids`: the special tokens. `forbidden`: tokens that are never spoken, the same
    for all conversations of a model. `text`: decodes tokens, to count their characters. `in_turn`: a turn is being
    spoken, and the model cannot listen before it has ended it. `num_units`: units begun. `chosen`: the tokens of the
    last unit so far. `recent`: the last words, on which the penalty looks back. `random`: of these numbers, each token
    takes TOKEN_DRAWS.
    """

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
    # How a word is drawn, once its logits are shaped.
    _drawing: Sampling = field(init=False)
    random: RandomNumbers = field(init=False)

    def __post_init__(self) -> None:
        params = self.params
        temperature = params.temperature if params.temperature > GREEDY_TEMPERATURE else 0.0
        self._drawing = Sampling(temperature=temperature, top_k=params.top_k, top_p=params.top_p or 1.0)
        self.random = RandomNumbers(Sampling(temperature=temperature, seed=params.seed))

    def begin(self, *, listen: bool, speak: bool = False) -> bool:
        """Begin a unit, in which the model has to listen if `listen`, and else has to say a word if `speak`.

        Returns whether this cuts a turn off. The caller then has to append `turn_eos` to the context first: the model
        expects the end of a turn before it listens.
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

        Whether the unit is over is drawn from the model's own logits; which word comes next, from shaped ones.
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
        """Return the token that comes next, and remember it: what was drawn may have to wait for the next unit.

        Raises ModelError where the logits were not numbers.
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
        """The token that comes whatever is drawn."""
        if len(self.chosen) == MAX_UNIT_TOKENS - 1:
            return self.ids.chunk_eos
        if self._must_listen:
            return self.ids.listen
        return self.ids.speak if self._must_speak and not self.chosen else None

    @property
    def _is_first_word(self) -> bool:
        """Whether a word has to come, which ends neither the unit nor the turn."""
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
            # The word is not said in this unit; it may be in the next.
            self.in_turn = True
            return ids.chunk_eos
        return token


def _shaped(choosers: Sequence[UnitChooser], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits that words are drawn from, and whether `listen` is so likely that it is chosen at once: bool [n]."""
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
    """Chooses the codes of one unit's audio: a Chooser for `Sampling.chooser`. The vocabulary's last code ends a turn.

    `min_codes`: the end is not chosen before this number of codes. `repetition_penalty`: for each time a code is among
    the last `window` codes. `random`: each code takes one number of it. `greedy`: the likeliest code is chosen.
    `codes`: those chosen so far.
    """

    temperature: float
    repetition_penalty: float
    min_codes: int
    random: RandomNumbers
    greedy: bool = False
    window: int = 16
    codes: list[int] = field(default_factory=list)

    @staticmethod
    def choose(choosers: Sequence[CodeChooser], logits: torch.Tensor) -> torch.Tensor:
        """Return the next code of each conversation, or NO_TOKEN."""
        device, size = logits.device, logits.shape[1]
        times = [Counter(c.codes[-c.window :]) for c in choosers]
        ends = flat_places([(size - 1,) if len(c.codes) < c.min_codes else () for c in choosers], size)
        repeated, too_early = copied_to(device, np.int64, flat_places(times, size), ends)
        penalties = [c.repetition_penalty**n for c, found in zip(choosers, times, strict=True) for n in found.values()]
        by, temperature = copied_to(device, np.float32, penalties, [c.temperature for c in choosers])
        shaped = logits / temperature[:, None]
        flat = shaped.view(-1)
        old = flat[repeated]
        flat[repeated] = torch.where(old < 0, old * by, old / by)
        flat.index_fill_(0, too_early, -torch.inf)
        uniforms = torch.tensor([c.random.take(1)[0] for c in choosers], dtype=torch.float64)
        choices = RowChoices.of([Sampling(temperature=0.0 if c.greedy else 1.0) for c in choosers], device)
        return draw_tokens(shaped, choices, uniforms.to(device, non_blocking=True))

    def accept(self, chosen: int) -> int:
        """Remember a code that was chosen. Raises ModelError where the logits were not numbers."""
        if chosen == NO_TOKEN:
            raise ModelError("the model's output is not a number")
        self.codes.append(chosen)
        return chosen
