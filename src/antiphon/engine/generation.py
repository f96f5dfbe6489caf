"""A generation that is under way: what an engine's thread and the reader of the tokens share.

Engines use it inside; the contract in `api.py` does not have it. It knows neither tensors nor how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.engine.api import Finish, Sampling, Token


class Constraint(Protocol):
    """A rule about which tokens may follow, such as a compiled grammar. One object serves one generation.

    Both methods are called in the model's thread, between steps: what they take delays every session.
    """

    def allowed(self) -> Any:
        """Return the tokens that may come next as uint32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32.

        None allows all tokens. Raises GrammarError for a rule that takes too long to follow.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance past a token that was sampled. Raises ValueError where the rule does not allow that token."""
        ...


@dataclass(slots=True)
class Generation:
    """A generation that is under way, shared by the model's thread and its reader.

    `deliver`: called in the model's thread with each token, then with one Finish or the error that ended it; it must
    not block. `start`: the session's rows when it began. `constraint`: what `params.grammar` was compiled to.
    `produced`: tokens sampled, counted by the model's thread. `consumed`: tokens read, counted by the reader; the
    engine waits for a reader that falls too far behind. `waits_for_row`: `params.program` has no row yet for the newest
    token, whose own row stands in for it.
    """

    params: Sampling
    deliver: Callable[[Token | Finish | Exception], None]
    start: int
    constraint: Constraint | None = None
    produced: int = 0
    consumed: int = 0
    waits_for_row: bool = False
    # The runner's own state of the generation (a random number generator); opaque here.
    sampler: Any = None
