"""How many lines are logged of what a client can cause without a key: it costs its sender nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

# Lines in each window, in seconds.
REFUSED_LINES, REFUSED_WINDOW_S = 20, 60.0


class LineLimit:
    """Admits REFUSED_LINES log lines in each window of REFUSED_WINDOW_S, and counts the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._window_s = clock()
        self._admitted = self._unlogged = 0

    def admit(self) -> int | None:
        """Return the number of lines that were left out since the last one, or None: this one is left out too."""
        if self._clock() >= self._window_s + REFUSED_WINDOW_S:
            self._window_s, self._admitted = self._clock(), 0
        if self._admitted >= REFUSED_LINES:
            self._unlogged += 1
            return None
        self._admitted += 1
        unlogged, self._unlogged = self._unlogged, 0
        return unlogged

    def warn(self, log: logging.Logger, text: str, *values: object) -> None:
        """Log a warning, where it is admitted, with the number of those that were left out."""
        if (unlogged := self.admit()) is not None:
            log.warning(f"{text}%s", *values, f" unlogged={unlogged}" if unlogged else "")
