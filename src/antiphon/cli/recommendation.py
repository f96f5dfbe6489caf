"""Which profile a machine can hold a conversation with, from how fast one of them is there. Pure."""

from __future__ import annotations

from dataclasses import dataclass

# Of each profile's language model, billions of parameters; and the memory that the server takes with it, in GB
# (docs/measured.md).
SIZES = {"light": 0.135, "default": 0.494, "large": 1.544}
MEMORY_GB = {"light": 1.2, "default": 2.0, "large": 3.2}
# Tokens of a first clause, which is spoken while the rest is written.
CLAUSE_TOKENS = 8
# An answer that begins to be spoken later than this after its turn was taken in is felt as a pause.
OBJECTIVE_S = 0.8
# Speech goes on without a gap where its text comes at least so fast.
SPEECH_TOKENS_A_S = 6.0


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


def recommended(profile: str, speed: Speed, free_gb: float) -> tuple[str, str]:
    """The largest profile that answers within the objective and fits into the memory, and a sentence that says why.

    `speed`: of the language model of `profile`. `free_gb`: memory that the server may take. Where no profile is fast
    enough, the smallest one.
    """
    choice, notes = "light", list[str]()
    for name in ("light", "default", "large"):
        its = speed.scaled(SIZES[name] / SIZES[profile])
        fits = free_gb >= MEMORY_GB[name]
        quick = its.clause_s <= OBJECTIVE_S and its.tokens_a_s >= SPEECH_TOKENS_A_S
        if fits and quick:
            choice = name
        missing = "" if fits else f", which needs {MEMORY_GB[name]:g} GB"
        notes.append(f"{name} after {its.clause_s:.1f} s{missing}")
    return choice, f"answers begin to be spoken: {'; '.join(notes)} (objective {OBJECTIVE_S:g} s)"
