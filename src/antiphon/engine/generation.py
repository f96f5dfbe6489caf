"""A generation under way: the state that the model's thread and the reader of its tokens share.

For use inside engines only; the contract in `api.py` does not mention it. This module knows neither tensors nor how
tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from antiphon.engine.api import Finish, Sampling, Token


class Constraint(Protocol):
    """A rule about which tokens may follow, such as a compiled grammar. One object serves one generation.

    The model's thread calls both methods between steps, so their time delays every session.
    """

    def allowed(self) -> Any:
        """Return the tokens that may come next as uint32 [ceil(vocabulary / 32)], bit t % 32 of word t // 32.

        None allows all tokens. Raises GrammarError if the rule takes too long to evaluate.
        """
        ...

    def accept(self, token: int) -> None:
        """Advance past a sampled token. Raises ValueError if the rule does not allow that token."""
        ...


@dataclass(slots=True)
class Generation:
    """A generation under way, shared by the model's thread and its reader."""

    # The options by which the tokens are chosen.
    params: Sampling
    # Called in the model's thread with each token, then with one Finish or the error that ended it. Must not block.
    deliver: Callable[[Token | Finish | Exception], None]
    # The session's number of rows when the generation began.
    start: int
    # The compiled form of `params.grammar`; None without a grammar.
    constraint: Constraint | None = None
    # The number of tokens sampled so far. Only the model's thread writes it.
    produced: int = 0
    # The number of tokens read so far. Only the reader writes it; the engine waits for a reader that falls too far
    # behind.
    consumed: int = 0
    # True until `params.program` has made the row for the newest token. Until then the token's own row holds its place.
    waits_for_row: bool = False
    # The state that the runner keeps for the generation (a random number generator), opaque here.
    sampler: Any = None
