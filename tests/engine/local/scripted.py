"""A runner without a model: it derives tokens from the rows, and records every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from antiphon.engine.api import EngineSettings, Row, Token
from antiphon.engine.local.sampling import Choice, choose_tokens
from antiphon.engine.local.step import RunnerStats, StepChunk

VOCABULARY = 1000


class Memory:
    """A Storage for a KvCache that holds rows as lists, so that a test can check what was copied and parked."""

    row_bytes = 1

    def extend(self, source: list[Any] | None, rows: int, valid: int, *, shared: bool) -> list[Any]:
        return [*(source or [])[:valid], *[None] * (rows - valid)]

    def own(self, handle: list[Any], first: int) -> None:
        return

    def free(self, handle: list[Any]) -> None:
        return

    def evict(self, handle: list[Any], first: int, end: int, stop: int) -> bool:
        handle[first : first + stop - end] = handle[end:stop]
        return True

    def to_host(self, source: list[Any], rows: int) -> list[Any]:
        return source[:rows]

    def to_disk(self, parked: list[Any]) -> tuple[Any, ...]:
        return tuple(parked)

    def restore(self, parked: Sequence[Any], target: list[Any], rows: int) -> None:
        target[:rows] = parked[:rows]

    def discard(self, parked: Any) -> None:
        return


@dataclass
class ScriptedStep:
    """A step whose results are known."""

    results: list[Token | Exception | None]

    def read(self) -> list[Token | Exception | None]:
        return self.results


def _ids(chunk: StepChunk) -> Sequence[Row]:
    return chunk.follows.tokens if chunk.follows and chunk.follows.tokens else chunk.ids


@dataclass
class ScriptedRunner:
    """Writes each row's id into the memory; the likeliest token after a row is that row's id + 1, modulo 1000.

    The embedding of token i is the row [i]. A token's hidden state is the id of the row before it. `before(step
    number)` is called in the model's thread before a step.
    """

    context_rows: int = 4096
    before: Callable[[int], None] = lambda _: None
    steps: list[list[StepChunk]] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    stats: RunnerStats = field(default_factory=RunnerStats)
    vocabulary_size: int = VOCABULARY
    width: int = 1
    eos_tokens: frozenset[int] = frozenset((VOCABULARY - 1,))

    def stream(self) -> None:
        return None

    def storage(self, settings: EngineSettings) -> Memory:
        return self.memory

    def embeddings(self, rows: Any) -> Any:
        if any(len(row) != self.width for row in rows):
            raise ValueError(f"embeddings are [rows, {self.width}]")
        return rows

    def launch(self, chunks: Sequence[StepChunk]) -> ScriptedStep:
        self.before(len(self.steps))
        self.steps.append(list(chunks))
        for chunk in chunks:
            for i, row in enumerate(_ids(chunk)):
                chunk.handle[chunk.start + i] = row
        return ScriptedStep([self._token(c) if c.sampled else None for c in chunks])

    def _token(self, chunk: StepChunk) -> Token | Exception:
        generation, last = chunk.sampled, _ids(chunk)[-1]
        assert generation is not None
        if last is None:
            _, rows = chunk.embeddings[-1]
            last = int(rows[-1][0])
        logits = torch.full((1, self.vocabulary_size), -20.0)
        logits[0, (last + 1) % self.vocabulary_size] = 0.0
        hidden = torch.tensor([[float(last)]])
        recent = (*chunk.recent, last) if chunk.follows else chunk.recent
        (choice,) = choose_tokens(logits, [(generation, recent)], hidden)
        if isinstance(choice, Choice):
            chunk.token.tokens = [choice.token]
        if isinstance(choice, Exception):
            return choice
        return Token(choice.token, choice.logprob, [float(last)] if generation.params.hidden else None, choice.numbers)

    @property
    def rows(self) -> int:
        """The number of rows computed so far."""
        return sum(c.count for step in self.steps for c in step)
