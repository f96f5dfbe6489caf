"""Recommends a profile for a machine, from the speed of a language model on it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# The billions of parameters of each profile's language model, and the memory of a server with that profile, in GB
# (docs/measured.md). `hub` is missing because it was not tried.
SIZES = {"light": 0.135, "default": 0.494, "large": 1.544}
MEMORY_GB = {"light": 1.2, "default": 2.0, "large": 3.2}
# The number of tokens of a first clause, which is spoken while the rest is written.
CLAUSE_TOKENS = 8
# An answer whose speech begins later than this after the turn arrived is perceived as a pause.
OBJECTIVE_S = 0.8
# The same limit for `default`. It is longer, because `light`, the next smaller profile, hears English only and is often
# wrong.
LIGHT_FROM_S = 1.6
# Speech has no gaps if its text arrives at least at this rate, in tokens a second.
SPEECH_TOKENS_A_S = 6.0
# STEP_SHARE: the time of a step relative to the products of its weights. QUESTION_STEPS: the time of a short question
# in steps. Measured for the 0.5B model on two cores.
STEP_SHARE, QUESTION_STEPS = 1.3, 2.5


@dataclass(frozen=True, slots=True)
class Speed:
    """A language model's speed with a short question: seconds to its first token, and tokens a second after it."""

    first_s: float
    tokens_a_s: float

    @property
    def clause_s(self) -> float:
        """Seconds until there is a clause to speak."""
        return self.first_s + CLAUSE_TOKENS / self.tokens_a_s

    def scaled(self, factor: float) -> Speed:
        """The speed of a model with `factor` times the parameters: both figures scale with the weights."""
        return Speed(self.first_s * factor, self.tokens_a_s / factor)


def estimated(seconds_a_billion: float, profile: str) -> Speed:
    """The speed of a profile's language model. `seconds_a_billion`: the time to multiply a row by a billion weights."""
    step_s = seconds_a_billion * SIZES[profile] * STEP_SHARE
    return Speed(step_s * QUESTION_STEPS, 1 / step_s)


def recommended(profile: str, speed: Speed, free_gb: float, among: Collection[str] = tuple(SIZES)) -> tuple[str, str]:
    """The largest profile that answers within the objective and fits into memory, and a sentence with the reason.

    `speed`: of the language model of `profile`. `free_gb`: memory available to the server. `among`: the profiles to
    choose from. The default profile is preferred to `light` up to LIGHT_FROM_S.
    """
    choice, notes = "", list[str]()
    for name, size in SIZES.items():
        its = speed.scaled(size / SIZES[profile])
        fits = free_gb >= MEMORY_GB[name]
        limit_s = LIGHT_FROM_S if name == "default" else OBJECTIVE_S
        quick = its.clause_s <= limit_s and its.tokens_a_s >= SPEECH_TOKENS_A_S
        if name in among and (not choice or (fits and quick)):
            choice = name
        missing = "" if fits else f", which needs {MEMORY_GB[name]:g} GB"
        notes.append(f"{its.clause_s:.1f} s with {name}{missing}")
    rule = (
        f"the largest profile that takes at most {OBJECTIVE_S:g} s is chosen; default is also chosen up to "
        f"{LIGHT_FROM_S:g} s"
    )
    return choice or "light", f"time until an answer begins to be spoken: {', '.join(notes)}; {rule}"
