"""token2wav for many conversations: their windows share calls, and each has the audio that it has alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from antiphon.adapters.minicpmo.model import MiniCpmO
from antiphon.adapters.minicpmo.speech_decoder import CodeBuffer
from antiphon.adapters.minicpmo.token2wav.calls import WindowCalls
from antiphon.adapters.minicpmo.token2wav.flow import FlowSlots
from antiphon.adapters.minicpmo.token2wav.token2wav import WEIGHTS, Token2Wav, load, read_flow, read_hift
from antiphon.adapters.minicpmo.token2wav.vocoder import HiftSlots
from antiphon.adapters.spec import EngineModelOptions
from antiphon.contracts import NativeOptions, SpeakStep, Unit
from antiphon.engine.api import EngineSettings
from antiphon.errors import ModelError, Refused
from antiphon.events.duplex import NativeSampling
from antiphon.shares.places import current_owner
from tests.adapters import tiny_minicpmo, tiny_token2wav

CPU = torch.device("cpu")
FRAME = 480
# The delay of the vocoder in samples, which the last window of a turn adds.
DELAY = 8 * FRAME


class Read:
    """Returns a voice for a reference of `n` / 1000 throughout, and counts. Those below 0 are not finite."""

    def __init__(self) -> None:
        self.references: list[Any] = []

    def __call__(self, reference: Any) -> Any:
        self.references.append(reference)
        number = round(1000 * float(reference[0]))
        drawn = torch.Generator().manual_seed(abs(number))
        codes = torch.randint(98, (20 + abs(number),), generator=drawn)
        mel = torch.randn(2 * len(codes), 80, generator=drawn)
        return Made(codes, torch.randn(192, generator=drawn), mel if number >= 0 else mel * torch.nan)


class Made:
    def __init__(self, codes: torch.Tensor, embedding: torch.Tensor, mel: torch.Tensor) -> None:
        self.codes, self.embedding, self.mel = codes, embedding, mel


def reference(number: int) -> Any:
    return np.full(160, number / 1000, np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_token2wav.write(tmp_path_factory.mktemp("token2wav"))


def windows(folder: Path) -> WindowCalls:
    flow = FlowSlots(read_flow(folder, CPU).double(), 3, num_steps=2, max_prompt=30)
    made = WindowCalls(flow, HiftSlots(read_hift(folder, CPU).double(), 3))
    # As on a GPU.
    made.together = True
    return made


@pytest.fixture
def vocoder(folder: Path) -> Iterator[Token2Wav]:
    made = Token2Wav(windows(folder), Read(), reference(0))
    yield made
    made.close()


@pytest.fixture(scope="module")
def read_by_networks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Token2Wav]:
    folder = tmp_path_factory.mktemp("minicpmo")
    (folder / WEIGHTS).mkdir(parents=True)
    tiny_token2wav.write(folder / WEIGHTS)
    made = load(folder, CPU, 1, num_steps=1, graphs=False)
    assert made
    yield made
    made.close()


def turn(number: int) -> list[tuple[list[int], bool]]:
    """Return the windows of a turn of two seconds and a half."""
    buffer, drawn = CodeBuffer(3), torch.Generator().manual_seed(number)
    units = [torch.randint(98, (size,), generator=drawn).tolist() for size in (25, 25, 12)]
    return [each for i, unit in enumerate(units) for each in buffer.feed(unit, last=i == 2)]


async def spoken(stream: Any, windows: list[tuple[list[int], bool]]) -> Any:
    return np.concatenate([await stream.decode(codes, last=last) for codes, last in windows])


def test_windows_that_wait_together_have_the_audio_that_they_have_alone(vocoder: Token2Wav) -> None:
    calls, run = list[int](), vocoder.windows.run

    def counted(slots: Any, given: Any) -> Any:
        calls.append(len(slots))
        return run(slots, given)

    vocoder.windows.run = counted  # type: ignore[method-assign]

    async def main() -> None:
        alone = []
        for number in range(3):
            stream = await vocoder.open(reference(number))
            alone.append(await spoken(stream, turn(number)))
            # All of the codes, three of silence among them.
            assert len(alone[-1]) == 65 * 2 * FRAME + DELAY
            assert np.abs(alone[-1]).max() > 0.001
            stream.close()
        del calls[:]
        streams = [await vocoder.open(reference(number)) for number in range(3)]
        # So that they wait at the same time.
        await vocoder.thread.call(lambda: None)
        found = await asyncio.gather(*(spoken(stream, turn(n)) for n, stream in enumerate(streams)))
        for one, other in zip(alone, found, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)
        assert max(calls) > 1

    asyncio.run(main())


def test_an_interrupted_turn_leaves_nothing_to_the_next(vocoder: Token2Wav) -> None:
    async def main() -> None:
        stream = await vocoder.open(None)
        whole = await spoken(stream, turn(0))
        await spoken(stream, turn(1)[:2])
        stream.end_turn()
        np.testing.assert_array_equal(await spoken(stream, turn(0)), whole)

    asyncio.run(main())


def test_when_all_slots_are_taken_then_a_stream_is_refused_until_one_is_closed(vocoder: Token2Wav) -> None:
    async def main() -> None:
        streams = [await vocoder.open(None) for _ in range(3)]
        with pytest.raises(Refused, match="all 3 voices of the model are taken"):
            await vocoder.open(None)
        streams[1].close()
        streams[1].close()
        again = await vocoder.open(reference(1))
        with pytest.raises(Refused):
            await vocoder.open(None)
        with pytest.raises(ModelError, match="the conversation is closed"):
            await streams[1].decode(turn(0)[0][0], last=False)
        assert len(await again.decode(turn(0)[0][0], last=False)) == 50 * FRAME

    asyncio.run(main())


def test_when_a_voice_cannot_be_read_then_its_slot_is_free(vocoder: Token2Wav) -> None:
    def read(pcm: Any) -> Any:
        raise ModelError("no voice")

    vocoder.read = read

    async def main() -> None:
        for _ in range(4):
            with pytest.raises(ModelError, match="no voice"):
                await vocoder.open(reference(7))
        vocoder.default = None
        for _ in range(4):
            with pytest.raises(ModelError, match="the model has no default voice"):
                await vocoder.open(None)
        assert len(vocoder.free) == 3

    asyncio.run(main())


def test_when_a_stream_fails_then_the_others_get_their_audio_and_it_can_speak_again(vocoder: Token2Wav) -> None:
    async def main() -> None:
        streams = [await vocoder.open(reference(number)) for number in (1, -1, 2)]
        first = turn(0)[0][0]
        expected = await streams[0].decode(first, last=False)
        streams[0].end_turn()
        windows = [first, first, [*first[:-1], 6561]]
        found: Any = await asyncio.gather(
            *(s.decode(codes, last=False) for s, codes in zip(streams, windows, strict=True)), return_exceptions=True
        )
        # The voice has numbers that are not finite; the codes have one that is unknown.
        assert "not finite" in str(found[1])
        assert "a code is not in 0 to 6560" in str(found[2])
        np.testing.assert_allclose(found[0], expected, atol=1e-6)
        assert np.isfinite(await streams[2].decode(first, last=False)).all()

    asyncio.run(main())


def test_when_a_call_fails_then_the_next_window_begins_with_the_prompt(vocoder: Token2Wav) -> None:
    run = vocoder.windows.vocoder.vocode

    def failing(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    async def main() -> None:
        stream = await vocoder.open(None)
        whole = await spoken(stream, turn(0))
        await stream.decode(turn(1)[0][0], last=False)
        vocoder.windows.vocoder.vocode = failing  # type: ignore[method-assign]
        with pytest.raises(ModelError, match="RuntimeError: out of memory"):
            await stream.decode(turn(1)[1][0], last=False)
        vocoder.windows.vocoder.vocode = run  # type: ignore[method-assign]
        np.testing.assert_array_equal(await spoken(stream, turn(0)), whole)

    asyncio.run(main())


def test_when_a_key_brings_many_voices_then_they_are_forgotten_and_another_keys_is_not(vocoder: Token2Wav) -> None:
    read: Any = vocoder.read
    known = len(read.references)

    def speak(key: str, number: int) -> None:
        token = current_owner.set(key)
        asyncio.run(vocoder.open(reference(number))).close()
        current_owner.reset(token)

    speak("b", 0)
    for number in range(100):
        speak("a", number)
    assert len(read.references) == known + 101
    speak("b", 0)
    speak("a", 99)
    assert len(read.references) == known + 101
    speak("a", 1)
    assert len(read.references) == known + 102


@pytest.mark.parametrize(
    ("pcm", "says"),
    [
        (np.zeros(160_000, np.float32), ""),
        (tiny_minicpmo.sound(0)[:3200], ""),
        (np.tile(tiny_minicpmo.sound(0), 300), ""),
        (tiny_minicpmo.sound(0)[:3199], "the reference voice has"),
        (np.full(16_000, np.nan, np.float32), "not finite"),
    ],
    ids=["silence", "0.2 s", "five minutes", "less", "not finite"],
)
def test_a_bad_reference_works_or_is_refused_by_name(read_by_networks: Token2Wav, pcm: Any, says: str) -> None:
    async def main() -> None:
        if says:
            with pytest.raises(ModelError, match=says):
                await read_by_networks.open(pcm)
            return
        stream = await read_by_networks.open(pcm)
        found = await spoken(stream, turn(0))
        assert len(found) == 65 * 2 * FRAME + DELAY
        assert np.isfinite(found).all()
        stream.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda where: (where / "flow.pt").unlink(), "flow.pt: No such file"),
        (lambda where: (where / "hift.pt").write_bytes(b"nothing"), "hift.pt: "),
        (lambda where: (where / "flow.pt").write_bytes((where / "hift.pt").read_bytes()), "flow.pt: .* is missing"),
        (lambda where: (where / "flow.yaml").write_text("flow: 3"), "flow.yaml: "),
    ],
)
def test_when_a_file_is_missing_or_damaged_then_the_error_names_it(tmp_path: Path, change: Any, says: str) -> None:
    where = tmp_path / WEIGHTS
    where.mkdir(parents=True)
    change(tiny_token2wav.write(where))
    with pytest.raises(ModelError, match=says):
        load(tmp_path, CPU, 1, num_steps=1, graphs=False)


def test_without_the_folder_speech_is_text_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert load(tmp_path, CPU, 1, num_steps=1, graphs=False) is None
    assert "speech is text only" in caplog.text


def test_a_conversation_of_the_released_folder_has_sound(tmp_path: Path) -> None:
    options = EngineModelOptions(EngineSettings(kv_bytes=64 << 20), weights="fp32", threads=1, flow_steps=2)
    model = MiniCpmO(tiny_minicpmo.write(tmp_path, voice=True), "tiny", options, window=tiny_minicpmo.WINDOW)
    assert model.profile.voices == ("default",)

    async def main() -> int:
        sampling, lengths = NativeSampling(temperature=0.0), list[int]()
        stream = await model.open(NativeOptions(tiny_minicpmo.PROMPT, sampling=sampling, listen_only_units=0))
        for number in range(8):
            await stream.append(Unit(tiny_minicpmo.sound(number)))
            step = await stream.step(must_speak=True)
            assert isinstance(step, SpeakStep)
            lengths.append(len(step.pcm))
            assert np.isfinite(step.pcm).all()
            assert np.abs(step.pcm).max(initial=0.0) <= 1
        stream.close()
        return sum(lengths)

    assert asyncio.run(main()) > 5 * 24_000
    assert len(model.vocoder.free) > 0  # type: ignore[union-attr]
    assert model.load().room > 0
    model.vocoder.free.clear()  # type: ignore[union-attr]
    assert model.load().room == 0
    model.close()


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_minicpmo.write(tmp_path_factory.mktemp("minicpmo"), voice=True)


def steps_of(folder: Path, numbers: Sequence[int], *, gather_s: float, step_ahead: bool) -> dict[int, list[Any]]:
    """Return the steps of four units of conversations that are held at once, by their numbers."""
    steps = EngineSettings(kv_bytes=64 << 20, step_ahead=step_ahead)
    options = EngineModelOptions(steps, weights="fp32", threads=1, flow_steps=1, gather_s=gather_s)
    model = MiniCpmO(folder, "tiny", options, window=tiny_minicpmo.WINDOW)

    async def hold(number: int) -> list[Any]:
        sampling = NativeSampling(seed=number)
        stream = await model.open(NativeOptions(tiny_minicpmo.PROMPT, sampling=sampling, listen_only_units=0))
        found = []
        for unit in range(4):
            await stream.append(Unit(tiny_minicpmo.sound(unit + number)))
            found.append(await stream.step(must_speak=unit != 2))
        stream.close()
        return found

    async def main() -> dict[int, list[Any]]:
        return dict(zip(numbers, await asyncio.gather(*map(hold, numbers)), strict=True))

    made = asyncio.run(main())
    model.close()
    return made


def test_conversations_that_meet_and_go_ahead_say_and_sound_what_they_do_alone(released: Path) -> None:
    together = steps_of(released, range(2), gather_s=0.01, step_ahead=True)
    for number, steps in together.items():
        (alone,) = steps_of(released, [number], gather_s=0.0, step_ahead=False).values()
        assert [type(step) for step in steps] == [type(step) for step in alone]
        spoken = [(step, own) for step, own in zip(steps, alone, strict=True) if isinstance(own, SpeakStep)]
        assert len(spoken) >= 3
        for step, own in spoken:
            assert (step.text, step.end_of_turn) == (own.text, own.end_of_turn)
            np.testing.assert_allclose(step.pcm, own.pcm, atol=1e-3)
