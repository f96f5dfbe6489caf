"""Which profile a machine can hold a conversation with, from how fast a language model is there. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

# Of each profile's language model, billions of parameters; and the memory that the server takes with it, in GB
# (docs/measured.md). `hub` is not among them: it was not tried.
SIZES = {"light": 0.135, "default": 0.494, "large": 1.544}
MEMORY_GB = {"light": 1.2, "default": 2.0, "large": 3.2}
# Tokens of a first clause, which is spoken while the rest is written.
CLAUSE_TOKENS = 8
# An answer that begins to be spoken later than this after its turn was taken in is felt as a pause.
OBJECTIVE_S = 0.8
# The light profile hears English only, and is often wrong: it is for machines where the default one takes so long.
LIGHT_FROM_S = 1.6
# Speech goes on without a gap where its text comes at least so fast.
SPEECH_TOKENS_A_S = 6.0
# A step takes so many times as long as the products of its weights, and a short question as many steps. Measured for
# the 0.5B model on two cores.
STEP_SHARE, QUESTION_STEPS = 1.3, 2.5


@dataclass(frozen=True, slots=True)
class Speed:
    """How a language model answers a short question: seconds to its first token, and tokens a second from then on."""

    first_s: float
    tokens_a_s: float

    @property
    def clause_s(self) -> float:
        """Seconds until there is something to speak."""
        return self.first_s + CLAUSE_TOKENS / self.tokens_a_s

    def scaled(self, factor: float) -> Speed:
        """That of a model with so many times the parameters: on the same machine both figures go with the weights."""
        return Speed(self.first_s * factor, self.tokens_a_s / factor)


def estimated(seconds_a_billion: float, profile: str) -> Speed:
    """The speed of a profile's language model on a machine that takes so long for a row's billion products."""
    step_s = seconds_a_billion * SIZES[profile] * STEP_SHARE
    return Speed(step_s * QUESTION_STEPS, 1 / step_s)


def recommended(profile: str, speed: Speed, free_gb: float, among: Collection[str] = tuple(SIZES)) -> tuple[str, str]:
    """The largest profile that answers within the objective and fits into the memory, and a sentence that says why.

    `speed`: of the language model of `profile`. `free_gb`: memory that the server may take. `among`: the profiles that
    may be chosen. Up to LIGHT_FROM_S the default one is better than `light`.
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
