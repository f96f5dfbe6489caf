"""Lanes for calls that belong to no model: what clients send is rendered, encoded and compiled in their threads.

The event loop's default executor has one queue for everybody, which the slow calls of one client fill. Here API keys
have turns, as in the lanes of models.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

from antiphon.engine.lane import Lane

Params = ParamSpec("Params")
Result = TypeVar("Result")
# Calls that may wait; a session has one at a time.
MAX_WAITING = 1024


class CallLane:
    """Runs calls in `workers` threads, which start with the first call and end with the process.

    `max_each`: how many calls of one owner run at a time; None: as many as there are workers.
    """

    def __init__(self, name: str, workers: int, *, max_each: int | None = None) -> None:
        self._name, self._workers, self._max_each = name, workers, max_each
        self._lock = threading.Lock()
        self._lane: Lane[Callable[[], Any], tuple[Any, Exception | None]] | None = None

    async def run(self, function: Callable[Params, Result], *args: Params.args, **kwargs: Params.kwargs) -> Result:
        """Wait for a turn of the `current_owner` and return what the function returns, or raise what it raises.

        A caller that is cancelled takes a call back that has not begun. Raises Refused where MAX_WAITING calls wait.
        """
        result, error = await self._started().run(partial(function, *args, **kwargs))
        if error is not None:
            raise error
        returned: Result = result
        return returned

    def _started(self) -> Lane[Callable[[], Any], tuple[Any, Exception | None]]:
        with self._lock:
            if self._lane is None:
                self._lane = Lane(
                    self._name, _call, workers=self._workers, max_queue=MAX_WAITING, max_each=self._max_each
                )
            return self._lane


def _call(calls: Sequence[Callable[[], Any]]) -> list[tuple[Any, Exception | None]]:
    """What one call returns or raises: its errors are its caller's, and no fault of the lane."""
    try:
        return [(call(), None) for call in calls]
    except Exception as error:
        return [(None, error)]


# Prompts and media of clients, on their way to a model.
PROMPTS = CallLane("prompts", min(8, max(2, os.cpu_count() or 2)))
# Messages with JSON schemas, and the grammars made of them: two keys at once, each with one.
GRAMMARS = CallLane("grammars", 2, max_each=1)
