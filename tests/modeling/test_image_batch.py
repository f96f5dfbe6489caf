"""Images of many sessions in one pass: its bounds, its order, and the failures of single images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError
from antiphon.modeling.gathered import MAX_PASS_PATCHES, MAX_WAITING_GPU, ImageBatch

# Not a CPU, so images share passes.
DEVICE = "meta"


class Encoder:
    """Encodes an image, which is its number of patches, as its negative. `passes`: the images of each pass so far.

    `fails`: whether a pass of these images raises an exception.
    """

    def __init__(self, fails: Callable[[Sequence[int]], bool] = lambda images: False) -> None:
        self.passes: list[list[int]] = []
        self._fails = fails

    def encode(self, images: Sequence[int]) -> list[int]:
        self.passes.append(list(images))
        if self._fails(images):
            raise torch.OutOfMemoryError(f"no memory for {len(images)}")
        return [-image for image in images]


def rows_of(
    encoder: Encoder, requests: Sequence[Sequence[int]], device: str = DEVICE, leave: Sequence[int] = ()
) -> list[Any]:
    """Return the result or the error of each request. All of them wait when the thread begins to serve them.

    `leave`: the numbers of the requests whose callers are cancelled before.
    """

    async def main() -> list[Any]:
        thread, gate = ModelThread("thread of a test"), threading.Event()
        batch = ImageBatch(thread, encoder.encode, lambda image: image, device)
        thread.post(lambda: gate.wait(20) and None)
        tasks = [asyncio.create_task(batch.rows(request)) for request in requests]
        # Each task posts its request before it waits.
        await asyncio.sleep(0)
        for number in leave:
            tasks[number].cancel()
        await asyncio.sleep(0)
        gate.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert batch.places.num_waiting == 0
        thread.close()
        return found

    return asyncio.run(main())


def test_images_that_wait_share_a_pass_and_each_session_gets_its_own_in_order() -> None:
    encoder = Encoder()
    assert rows_of(encoder, [[5], [3, 9, 3], [], [4]]) == [[-5], [-3, -9, -3], [], [-4]]
    assert encoder.passes == [[3, 3, 4, 5, 9]]


def test_a_pass_has_a_limit_of_patches_with_their_padding() -> None:
    encoder, large = Encoder(), MAX_PASS_PATCHES // 3
    requests = [[large], [large - 1, 1], [large], [large], [2 * MAX_PASS_PATCHES]]
    assert rows_of(encoder, requests) == [[-image for image in request] for request in requests]
    assert all(len(images) * max(images) <= MAX_PASS_PATCHES for images in encoder.passes if len(images) > 1)
    assert encoder.passes == [[1, large - 1, large], [large, large], [2 * MAX_PASS_PATCHES]]


def test_only_a_limited_number_of_requests_delays_the_next_step() -> None:
    encoder = Encoder()
    assert rows_of(encoder, [[1]] * (MAX_WAITING_GPU + 2)) == [[-1]] * (MAX_WAITING_GPU + 2)
    assert encoder.passes[0] == [1] * MAX_WAITING_GPU


def test_when_a_pass_fails_then_its_images_are_encoded_one_by_one_and_only_the_one_at_fault_fails() -> None:
    encoder = Encoder(fails=lambda images: 7 in images)
    one, two, both, other = rows_of(encoder, [[1], [7], [2, 7, 3], [4]])
    assert (one, other) == ([-1], [-4])
    for error in (two, both):
        assert isinstance(error, ModelError)
        assert str(error) == "OutOfMemoryError: no memory for 1"


def test_when_a_pass_is_too_large_for_the_memory_then_nobody_fails() -> None:
    encoder = Encoder(fails=lambda images: len(images) > 1)
    assert rows_of(encoder, [[1], [2, 3]]) == [[-1], [-2, -3]]


def test_images_whose_caller_left_are_not_encoded() -> None:
    encoder = Encoder()
    left, found = rows_of(encoder, [[1], [2]], leave=[0])
    assert isinstance(left, asyncio.CancelledError)
    assert found == [-2]
    assert encoder.passes == [[2]]


def test_on_a_cpu_each_image_is_a_pass() -> None:
    encoder = Encoder(fails=lambda images: 7 in images)
    found = rows_of(encoder, [[5, 3], [7]], "cpu")
    assert found[0] == [-5, -3]
    assert isinstance(found[1], ModelError)
    assert encoder.passes == [[3], [5], [7]]
