"""Many streams of Qwen3-ASR as on a GPU: all sound is encoded in one pass, and each stream is as if it were alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.qwen3_asr import transcriber
from antiphon.adapters.qwen3_asr.audio_encoder import EncodedSound, KnownWindow, SoundRequest
from antiphon.adapters.qwen3_asr.transcriber import Qwen3Asr, Qwen3AsrStream
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import Window
from antiphon.engine.api import EngineSettings
from antiphon.modeling.sound.window_encoder import WindowPass
from tests.adapters import tiny_qwen3_asr as tiny
from tests.engine.local.operators import Operators

AUDIO = tiny.sound(27)
SETTINGS = EngineSettings(kv_bytes=64 << 20, kv_layout="paged", decode_shapes="bucketed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("qwen3_asr"))


@pytest.fixture
def unguarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Disable the guard against loops, because random weights repeat themselves."""
    monkeypatch.setattr(transcriber, "LOOP_REPEATS", 10_000)
    return


def run(folder: Path, act: Callable[[Qwen3Asr], Awaitable[None]]) -> None:
    async def main() -> None:
        model = Qwen3Asr(folder, "tiny", EngineModelOptions(SETTINGS, weights="fp32", threads=1))
        try:
            await asyncio.wait_for(act(model), 60)
        finally:
            model.close()

    asyncio.run(main())


def said(number: int, seconds: float) -> Window:
    """The window of a stream after some seconds. The streams begin at different places of the sound."""
    start = 3_000 * number
    return Window(AUDIO[start : start + int(seconds * 16_000)], language="en", max_tokens=4, start_sample=start)


async def decoded(stream: Qwen3AsrStream, window: Window) -> tuple[Any, ...]:
    found = await stream.decode(window)
    return found.prompt_tokens, [t for piece in found.pieces for t in piece.tokens]


# The seconds of sound at each partial, and at the final. Some end in the middle of an encoder window, some at its end,
# and some finals are shorter than the partial before them.
SCHEDULES = ((0.3, 1.7, 8.0, 9.5), (2.0, 8.02, 8.04, 16.1), (12.3,), (4.0, 9.0, 8.5), (1.0, 1.0), (17.0, 19.0, 18.2))


@pytest.mark.parametrize("leaves", [False, True])
def test_partials_and_finals_of_many_streams_are_those_of_each_alone(
    folder: Path, unguarded: None, leaves: bool
) -> None:
    async def act(model: Qwen3Asr) -> None:
        expected = []
        for number, schedule in enumerate(SCHEDULES):
            expected.append([await decoded(model.open(), said(number, seconds)) for seconds in schedule])
        model.parts.audio_encoder.windows.together = True

        async def follow(number: int) -> None:
            stream = model.open()
            for step, seconds in enumerate(SCHEDULES[number]):
                if leaves and number == 1 and step == 2:
                    with pytest.raises(TimeoutError):
                        async with asyncio.timeout(0):
                            await stream.decode(said(number, seconds))
                    stream.close()
                    return
                assert await decoded(stream, said(number, seconds)) == expected[number][step], (number, seconds)

        async with asyncio.TaskGroup() as group:
            for number in range(len(SCHEDULES)):
                group.create_task(follow(number))

    run(folder, act)


def test_when_the_sound_of_a_stream_is_no_number_then_only_that_stream_fails(folder: Path, unguarded: None) -> None:
    async def act(model: Qwen3Asr) -> None:
        expected = [await decoded(model.open(), said(n, 9.0)) for n in range(3)]
        model.parts.audio_encoder.windows.together = True
        streams = [model.open() for _ in range(3)]
        await asyncio.gather(*(s.decode(said(n, 3.0)) for n, s in enumerate(streams)))
        windows = [said(n, 9.0) for n in range(3)]
        broken = windows[1].pcm.copy()
        broken[100_000] = np.nan
        found = await asyncio.gather(
            decoded(streams[0], windows[0]),
            decoded(streams[1], Window(broken, language="en", max_tokens=4, start_sample=windows[1].start_sample)),
            decoded(streams[2], windows[2]),
            return_exceptions=True,
        )
        assert [found[0], found[2]] == [expected[0], expected[2]]
        assert str(found[1]) == "the sound is not a number"
        assert await decoded(streams[1], windows[1]) == expected[1]

    run(folder, act)


def test_when_a_caller_left_then_the_rows_it_did_not_take_are_not_taken_for_known(
    folder: Path, unguarded: None
) -> None:
    """The frames are those of the sound that was encoded last, and the rows in the KV those of the sound before it."""

    async def act(model: Qwen3Asr) -> None:
        encoder, stream = model.parts.audio_encoder, model.open()
        first, other = said(0, 9.0), said(0, 9.0)
        changed = other.pcm.copy()
        changed[5_000:9_000] *= 0.1
        other = Window(changed, language="en", max_tokens=4)
        await stream.decode(first)
        # A decode that was cancelled after its sound was encoded.
        await model.engine.thread.call(lambda: encoder.encode([SoundRequest(stream.mel, changed, ())]))
        finished = model.counts.finished
        found = await decoded(stream, other)
        # The window of 8 s in the KV was replaced.
        assert model.counts.finished == finished + 1
        assert found == await decoded(model.open(), other)

    run(folder, act)


def test_a_further_stream_adds_at_most_one_operator_to_a_batch(folder: Path) -> None:
    async def act(model: Qwen3Asr) -> None:
        encoder = model.parts.audio_encoder
        encoder.windows.together = True
        lengths = [5.0 + 0.6 * n for n in range(8)]

        def counted(count: int) -> list[int]:
            mels, known = [encoder.open() for _ in range(count)], [list[KnownWindow]() for _ in range(count)]
            found = []
            for more in range(3):
                requests = [
                    SoundRequest(mel, AUDIO[: int((lengths[n] + more) * 16_000)], known[n])
                    for n, mel in enumerate(mels)
                ]
                with torch.inference_mode(), Operators() as recorded:
                    made = encoder.encode(requests)
                found.append(len(recorded.names))
                for own, result in zip(known, made, strict=True):
                    assert isinstance(result, EncodedSound)
                    del own[result.num_same :]
                    own.extend(result.finished)
            return found

        with torch.inference_mode(), Operators() as body:
            WindowPass(encoder.windows, 1).compute()
        few, many = counted(1), counted(8)
        assert max(few) - len(body.names) <= 20
        # A finished window is copied for the engine, which keeps it. Nothing else is done for each stream.
        assert sum(many) - sum(few) <= 8 + len(body.names) + 20

    run(folder, act)
