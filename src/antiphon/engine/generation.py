"""A generation under way: the state that the model's thread and the reader of its tokens share.

For use inside engines only; the contract in `api.py` does not mention it. This module knows neither tensors nor how
tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from antiphon.engine.api import Finish, Sampling, Session, Token
from antiphon.engine.choosers import ChooserAhead
from antiphon.errors import EngineError, Refused

# Receives the next tokens of a generation. The last call also has the reason or the error that ended it.
Deliver = Callable[[Sequence[Token], Finish | Exception | None], None]


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
    # Called in the model's thread. Must not block.
    deliver: Deliver
    # The session's number of rows when the generation began.
    start: int
    # The number of tokens that are delivered together, the rest of them at the end; 0: all of them at the end.
    group: int = 1
    # The compiled form of `params.grammar`; None without a grammar.
    constraint: Constraint | None = None
    # The number of tokens sampled so far. Only the model's thread writes it.
    produced: int = 0
    # The number of tokens delivered so far. Only the model's thread writes it.
    delivered: int = 0
    # The number of tokens read so far. Only the reader writes it; the engine waits for a reader that falls too far
    # behind what was delivered.
    consumed: int = 0
    # True until `params.program` has made the row for the newest token. Until then the token's own row holds its place.
    waits_for_row: bool = False
    # The state that the runner keeps for the generation (a random number generator), opaque here.
    sampler: Any = None
    # The newest tokens, which are not delivered yet.
    held: list[Token] = field(default_factory=list)

    def add(self, token: Token) -> None:
        """Count a sampled token, and deliver it if its group is complete."""
        self.produced += 1
        self.held.append(token)
        if len(self.held) == self.group:
            self._deliver(None)

    def end(self, reason: Finish | Exception) -> None:
        """Deliver the rest of the tokens, and why the generation ended."""
        self._deliver(reason)

    def _deliver(self, reason: Finish | Exception | None) -> None:
        tokens, self.held = self.held, []
        self.delivered += len(tokens)
        self.deliver(tokens, reason)

    @property
    def goes_ahead(self) -> bool:
        """Whether a row may be computed for the next token before the host knows it.

        False if that token may be the last by its number, or if the host decides what follows it: grammars, most
        choosers, programs, and penalties that count tokens.
        """
        p = self.params
        on_host = self.constraint is not None or p.program is not None
        on_host = on_host or (p.chooser is not None and not isinstance(p.chooser, ChooserAhead))
        counts = p.presence_penalty or p.frequency_penalty
        return not (on_host or counts) and self.produced + 1 < p.max_tokens

    @property
    def lookback_rows(self) -> int:
        """The number of newest rows that the penalties consider."""
        params = self.params
        window = params.repetition_window if params.repetition_penalty != 1.0 else 0
        counted = self.produced if params.presence_penalty or params.frequency_penalty else 0
        return max(window, counted)


async def collected(
    session: Session, params: Sampling, until: Callable[[Sequence[Token]], bool] | None, group: int
) -> list[Token]:
    """Implement `Session.collect` by `Session.generate`, for engines whose tokens come one by one anyway."""
    start, tokens = session.length, list[Token]()
    try:
        async with aclosing(session.generate(params)) as stream:
            async for token in stream:
                tokens.append(token)
                if until and len(tokens) % group == 0 and until(tokens):
                    break
    except BaseException:
        # If the row before the tokens has left the context, they stay.
        with suppress(EngineError, Refused):
            session.rollback(start)
        raise
    return tokens
