"""A decoder's hidden states of all rows of a conversation, for a second decoder that reads them: a talker.

A row's hidden state is known after the row is computed. The states of appended rows arrive in their sink. The state of
a sampled token arrives with the token after it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from antiphon.engine.local.streams import used_here


class RowStates:
    """The states of adjacent rows that were appended together. `sink` is a Sink, called in the model's thread.

    `states`: float [count, width]; None until the first rows are computed.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.states: torch.Tensor | None = None

    def sink(self, offset: int, states: torch.Tensor) -> None:
        if self.states is None:
            # Rows that leave the context before they are computed stay zero.
            self.states = states.new_zeros(self.count, states.shape[1])
        self.states[offset : offset + len(states)] = states


HiddenRow = tuple[RowStates, int]


class HiddenRows:
    """The hidden states of one conversation's rows, in the order of the rows. Used from one event loop.

    `embed`: maps tokens to the decoder's input rows, float [n, width]. Tokens are appended as embeddings, because only
    embeddings can have a sink. So their KV is not shared with other conversations, and penalties ignore them. The
    states stay on the model's device as long as their rows are in the conversation.
    """

    def __init__(self, embed: Callable[[torch.Tensor], Any], device: torch.device) -> None:
        self._embed, self._device = embed, device
        self._rows: list[HiddenRow] = []

    @property
    def known(self) -> int:
        """The number of rows at the start whose state is known or will arrive in a sink. Excludes the newest token."""
        return len(self._rows)

    @property
    def newest(self) -> HiddenRow:
        """The last of the `known` rows."""
        return self._rows[-1]

    @torch.no_grad()
    def embedded(self, ids: Sequence[int]) -> Any:
        """Return tokens as the decoder's input rows."""
        return self._embed(torch.tensor(list(ids), device=self._device))

    def expect(self, count: int) -> Callable[[int, Any], None]:
        """Return the Sink of the next `count` rows after the known ones."""
        block = RowStates(count)
        self._rows += [(block, i) for i in range(count)]
        return block.sink

    def add(self, state: torch.Tensor) -> None:
        """Store the state, [width], of the sampled row that follows the known rows."""
        block = RowStates(1)
        block.sink(0, state[None])
        self._rows.append((block, 0))

    def truncate(self, length: int) -> None:
        """Forget the rows from `length` on."""
        del self._rows[length:]

    def snapshot(self) -> list[HiddenRow]:
        """Return the known rows, for `states`. Later changes of the conversation do not affect the result."""
        return list(self._rows)


def states(rows: Sequence[HiddenRow], like: torch.Tensor) -> torch.Tensor:
    """Return the states, [n, width], of rows of a snapshot. Called after the engine has computed the rows.

    Rows that left the context before they were computed are zeros, as wide as `like`.
    """
    out = [like.new_zeros(0, like.shape[-1])]
    for block, group in itertools.groupby(rows, lambda row: row[0]):
        at = [i for _, i in group]
        out.append(like.new_zeros(len(at), like.shape[-1]) if block.states is None else used_here(block.states)[at])
    return torch.cat(out)
