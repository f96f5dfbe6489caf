"""Lets images share passes on a CPU, as they do on a GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from antiphon.engine.model_thread import ModelThread
from antiphon.modeling.gathered import ImageBatch


class SharedPasses(ImageBatch[Any, Any]):
    """An ImageBatch as on a GPU. `passes`: the number of images of each pass so far."""

    def __init__(
        self, thread: ModelThread, encode: Callable[[Sequence[Any]], Sequence[Any]], num_patches: Callable[[Any], int]
    ) -> None:
        self.passes: list[int] = []
        self.thread = thread

        def counted(images: Sequence[Any]) -> Sequence[Any]:
            self.passes.append(len(images))
            return encode(images)

        super().__init__(thread, counted, num_patches, torch.device("meta"))

    async def together(self, calls: Sequence[Coroutine[Any, Any, Any]], waiting: int) -> list[Any]:
        """Return the results or errors of calls. The thread serves none before `waiting` of them ask for rows."""
        places = [await self.places.take() for _ in range(self.places.num_places)]
        tasks, gate = [asyncio.create_task(call) for call in calls], threading.Event()
        while self.places.num_waiting < waiting:  # noqa: ASYNC110 - Places has no event for it.
            await asyncio.sleep(0.001)
        self.thread.post(lambda: gate.wait(20) and None)
        for give_back in places:
            give_back()
        # Each task gets its place, and posts its request.
        for _ in range(20):
            await asyncio.sleep(0)
        gate.set()
        return await asyncio.gather(*tasks, return_exceptions=True)
