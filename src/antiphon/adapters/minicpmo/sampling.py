"""Which tokens MiniCPM-o chooses in a unit: to listen, or to speak a few words; and which codes its voice chooses.

These are the released rules of decoding, over the logits of one conversation. A unit in the context is `<unit>`, what
was seen and heard, the tokens chosen here, and `</unit>`. The last of the chosen tokens is one of three terminators:
`listen`, or `chunk_eos` or `chunk_tts_eos`, after which the words go on in the next unit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from antiphon.engine.api import Sampling
from antiphon.engine.local.device_sampling import NO_TOKEN, RowChoices, draw_tokens
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
    """Chooses the tokens of one conversation's units: a Chooser for `Sampling.chooser`. Called in the model's thread.

    `begin` is called before each unit. `ids`: the special tokens. `forbidden`: tokens that are never spoken. `text`:
    decodes tokens, to count their characters. `random`: seeded by the owner; each token takes TOKEN_DRAWS numbers of
    it, none where the likeliest is chosen. `in_turn`: a turn is being spoken, and the
    model cannot listen before it has ended it. `num_units`: units begun. `chosen`: the tokens of the last unit so far.
    """

    ids: SpecialTokens
    params: UnitSampling
    forbidden: Sequence[int]
    text: Callable[[list[int]], str]
    random: torch.Generator = field(default_factory=torch.Generator)
    in_turn: bool = False
    num_units: int = 0
    chosen: list[int] = field(default_factory=list)
    _recent: deque[int] = field(default_factory=lambda: deque(maxlen=PENALTY_TOKENS))
    _must_listen: bool = False
    _must_speak: bool = False
    _uniforms: torch.Tensor = field(default_factory=lambda: torch.zeros(TOKEN_DRAWS, dtype=torch.float64))

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

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is chosen."""
        return self.params.temperature <= GREEDY_TEMPERATURE

    def __call__(self, logits: torch.Tensor) -> int:
        """Return the next token and remember it. Raises ModelError where the logits are not numbers."""
        if not self.is_greedy:
            self._uniforms = torch.rand(TOKEN_DRAWS, generator=self.random, dtype=torch.float64)
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
                # The first word: anything that does not end the unit or the turn.
                logits = logits.clone()
                logits[[*ids.terminators, ids.turn_eos, ids.speak]] = -torch.inf
                return self._word(logits)
        # Whether the unit is over is drawn from the model's own logits; which word comes next, from shaped ones.
        if self._is_over(logits):
            return ids.chunk_eos
        token = self._word(logits)
        if token == ids.listen and self.in_turn:
            token = ids.tts_bos
        spoken = [*self.chosen[1:], token]
        if self.chosen and token not in ids.terminators and len(self.text(spoken)) >= MAX_UNIT_CHARS:
            # The word is not said in this unit; it may be in the next.
            self.in_turn = True
            return ids.chunk_eos
        return token

    def _word(self, logits: torch.Tensor) -> int:
        params = self.params
        shaped = logits.clone()
        shaped[list(self.forbidden)] = -torch.inf
        if params.repetition_penalty != 1.0 and self._recent:
            shaped[sorted(set(self._recent))] /= params.repetition_penalty
        end = self.ids.turn_eos
        shaped[end] = shaped[end] / params.turn_penalty if shaped[end] > 0 else shaped[end] * params.turn_penalty
        token = self._listens(shaped)
        if token is None:
            temperature = 0.0 if self.is_greedy else params.temperature
            drawn = Sampling(temperature=temperature, top_k=params.top_k, top_p=params.top_p or 1.0)
            token = _drawn(shaped, drawn, self._uniforms[1:])
        self._recent.append(token)
        return token

    def _listens(self, shaped: torch.Tensor) -> int | None:
        """Scale the logit of `listen`, in place. Returns `listen` where that is likely enough to be chosen at once."""
        listen = self.ids.listen
        if torch.isneginf(shaped[listen]):
            return None
        shaped[listen] *= self.params.listen_scale
        return listen if int((shaped > shaped[listen]).sum()) < self.params.listen_top_k else None

    def _is_over(self, logits: torch.Tensor) -> bool:
        """Whether `chunk_eos` is drawn, of all tokens."""
        if self.is_greedy:
            return _drawn(logits, Sampling(), self._uniforms[:1]) == self.ids.chunk_eos
        probability = torch.exp((logits[self.ids.chunk_eos] - logits.logsumexp(0)).double())
        return bool(self._uniforms[0] < probability)


@dataclass(slots=True)
class CodeChooser:
    """Chooses the codes of one unit's audio: a Chooser for `Sampling.chooser`. The vocabulary's last code ends a turn.

    `min_codes`: the end is not chosen before this number of codes. `repetition_penalty`: for each time a code is among
    the last `window` codes. `random`: each code takes one number of it, none where `greedy` takes the likeliest code.
    `codes`: those chosen so far.
    """

    temperature: float
    repetition_penalty: float
    min_codes: int
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
        if len(self.codes) < self.min_codes:
            shaped[-1] = -torch.inf
        uniforms = torch.zeros(1) if self.greedy else torch.rand(1, generator=self.random, dtype=torch.float64)
        self.codes.append(_drawn(shaped, Sampling(temperature=0.0 if self.greedy else 1.0), uniforms))
        return self.codes[-1]


def _drawn(logits: torch.Tensor, params: Sampling, uniforms: torch.Tensor) -> int:
    token = int(draw_tokens(logits[None], RowChoices.of((params,), logits.device), uniforms))
    if token == NO_TOKEN:
        raise ModelError("the model's output is not a number")
    return token
