"""The interfaces by which a model's own code chooses tokens within a step: `Sampling.chooser` and `Sampling.program`.

Like `api.py`, this module uses no tensor library: logits, hidden states and rows are opaque here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

# Chosen instead of a token if the logits are NaN or every token is masked. The row fails when it is read.
NO_TOKEN = -1


class Chooser(Protocol):
    """A model's own method of choosing a token from logits. It replaces all other options of `Sampling`.

    One object holds the state of one session, on the host. The tokens of all sessions are chosen in one call, on the
    device of their logits. The model's thread calls both methods in turn, once for each token. Both may raise
    ModelError.
    """

    @staticmethod
    def choose(choosers: Sequence[Any], logits: Any) -> Any:
        """Choose for each session at once, on the device of the logits and without synchronizing with it.

        Args:
            choosers: Objects of one class, one for each session.
            logits: float32 [n, vocabulary], one row for each session. Must not be changed.

        Returns:
            int64 [n]. NO_TOKEN stands for a row whose logits are NaN.
        """
        ...

    def accept(self, chosen: int) -> int:
        """Return the token that `chosen` stands for, and remember it. Called after `chosen` is read from the device."""
        ...


@runtime_checkable
class ChooserAhead(Chooser, Protocol):
    """A Chooser that can choose a token before the host has read the token before it: for `step_ahead`.

    A choice that comes too late, because the generation has ended, is never accepted. So `choose` and `choose_ahead`
    must not change the state of a session; only `accept` does.
    """

    @staticmethod
    def choose_ahead(choosers: Sequence[Any], logits: Any, unread: Any, late: Sequence[bool]) -> Any:
        """Choose for each session as `choose` does.

        Args:
            choosers: As in `choose`.
            logits: As in `choose`.
            unread: int64 [n], on the device: what was chosen last for the sessions in `late`, and not accepted yet.
            late: For each session whether it has such a token.
        """
        ...


class StepProgram(Protocol):
    """A model's own method of choosing a token from the decoder's output, and of making the next input row from it.

    It serves decoders whose token is only one part of the next row, such as the first code of a frame of audio. It runs
    within the step, so the event loop is not involved between two rows of a session. One object holds the state of one
    generation. The model's thread calls all methods: `run` and `accept` in turn, once for each token, then `next_row`
    until it returns a row. `run` and `accept` may raise ModelError; `accept` raises it for NO_TOKEN.
    """

    @staticmethod
    def run(programs: Sequence[Any], logits: Any, hidden: Any) -> Any:
        """Choose each session's numbers for this step, from which its token follows, without a device synchronization.

        Args:
            programs: Objects of one class, one for each session.
            logits: float32 [n, vocabulary]. Must not be changed.
            hidden: The hidden states [n, width] that the logits were computed from. Must not be changed.

        Returns:
            int64 [n, k]. NO_TOKEN stands for a number that cannot be chosen.
        """
        ...

    def accept(self, numbers: Sequence[int]) -> int:
        """Return the token that these numbers, as read from the device, stand for. Remember the numbers."""
        ...

    def next_row(self) -> Any | None:
        """Return the row that follows the token, float [1, width], or None if its input has not arrived yet.

        After None the session waits, and `next_row` is called again before each step.
        """
        ...
