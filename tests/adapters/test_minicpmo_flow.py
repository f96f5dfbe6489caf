"""The flow of token2wav over slots, against the published code on tiny random weights (tiny_token2wav.py).

The golden numbers are from minicpmo-utils 1.0.7, which computes one stream at a time (published_token2wav.py).
"""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from antiphon.adapters.minicpmo.token2wav.files import read_flow_config
from antiphon.adapters.minicpmo.token2wav.flow import CodeWindow, Flow, FlowSlots
from antiphon.errors import ModelError
from tests.adapters import tiny_token2wav as tiny
from tests.engine.local.operators import Operators

PUBLISHED = np.load(tiny.GOLDEN)


class GivenVoice(NamedTuple):
    codes: torch.Tensor
    embedding: torch.Tensor
    mel: torch.Tensor


VOICES = {length: GivenVoice(*tiny.voice(length)) for length, _ in tiny.STREAMS}


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    path = tmp_path_factory.mktemp("flow") / "flow.yaml"
    path.write_text(tiny.flow_yaml(tiny.BANDS, tiny.GOLDEN_CODES))
    made = Flow(read_flow_config(path)).eval().requires_grad_(False)
    assert sorted(made.state_dict()) == PUBLISHED["names"].tolist()
    tiny.fill(made)
    return made


@torch.inference_mode()
def slots(flow: Flow, count: int, dtype: torch.dtype = torch.float64, kv_dtype: torch.dtype | None = None) -> FlowSlots:
    made = FlowSlots(flow.to(dtype), count, num_steps=tiny.STEPS, max_prompt=70, kv_dtype=kv_dtype)
    made.noise = tiny.noise().to(dtype)
    # What no stream has written must not matter.
    for row in range(count + 1):
        for each in made.rows(row):
            each.fill_(torch.nan)
    return made


def frames_of(made: FlowSlots, windows: dict[int, CodeWindow], *, filled: bool = True) -> list[np.ndarray]:
    """Return the frames of a window of each slot. `filled`: as on a GPU, where windows have one size."""
    counts = [made.check(window) for window in windows.values()]
    room = made.most if filled else max(counts)
    plans = np.stack([made.plan(slot, window, room) for slot, window in windows.items()])
    found = made.compute(torch.from_numpy(plans), room).numpy()
    return [own[:, : 2 * count] for own, count in zip(found, counts, strict=True)]


def run(made: FlowSlots, slot: int, stream: int, at: int, *, filled: bool = True) -> np.ndarray:
    return frames_of(made, {slot: CodeWindow(*tiny.windows(stream)[at])}, filled=filled)[0]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-8), (torch.float32, 2.0)])
def test_frames_are_the_published_ones(flow: Flow, dtype: torch.dtype, tolerance: float, filled: bool) -> None:
    if dtype == torch.float32:
        # In multiples of the published code's own errors.
        tolerance *= float(PUBLISHED["float32_error"])
    made = slots(flow, 1, dtype)
    for stream, (length, sizes) in enumerate(tiny.STREAMS):
        made.begin(0, VOICES[length])
        for at in range(len(sizes)):
            found = run(made, 0, stream, at, filled=filled)
            np.testing.assert_allclose(found, PUBLISHED[f"float64.{stream}.{at}"], rtol=0, atol=tolerance)


def test_when_keys_and_values_have_half_the_bytes_then_frames_are_nearly_the_published_ones(flow: Flow) -> None:
    half, whole = slots(flow, 1, torch.float32, torch.float16), slots(flow, 1, torch.float32)
    assert half.decoded.attention.nbytes == whole.decoded.attention.nbytes // 2
    for stream, (length, sizes) in enumerate(tiny.STREAMS):
        half.begin(0, VOICES[length])
        for at in range(len(sizes)):
            expected = PUBLISHED[f"float64.{stream}.{at}"]
            found = run(half, 0, stream, at)
            np.testing.assert_allclose(found, expected, rtol=0, atol=0.01 * np.abs(expected).max())


@pytest.mark.parametrize("seed", range(3))
def test_when_streams_join_and_leave_then_each_has_the_published_frames(flow: Flow, seed: int) -> None:
    chance, made, checked, kinds = random.Random(seed), slots(flow, 3), 0, set[tuple[int, bool]]()
    # By slot: a stream, and the number of its next window.
    open_streams: dict[int, tuple[int, int]] = {}
    while checked < 40:
        free = [slot for slot in range(3) if slot not in open_streams]
        if free and (not open_streams or chance.random() < 0.6):
            slot, stream = chance.choice(free), chance.randrange(len(tiny.STREAMS))
            made.begin(slot, VOICES[tiny.STREAMS[stream][0]])
            open_streams[slot] = (stream, 0)
            continue
        if chance.random() < 0.1:
            # Its client interrupts it.
            del open_streams[chance.choice(list(open_streams))]
            continue
        chosen = chance.sample(list(open_streams), chance.randint(1, len(open_streams)))
        given = {slot: CodeWindow(*tiny.windows(open_streams[slot][0])[open_streams[slot][1]]) for slot in chosen}
        kinds.update((len(window.codes), window.last) for window in given.values() if len(given) > 1)
        for slot, frames in zip(given, frames_of(made, given), strict=True):
            stream, at = open_streams[slot]
            np.testing.assert_allclose(frames, PUBLISHED[f"float64.{stream}.{at}"], rtol=0, atol=1e-8)
            checked += 1
            if given[slot].last:
                del open_streams[slot]
            else:
                open_streams[slot] = (stream, at + 1)
    # Windows of other lengths share calls with whole ones.
    assert len(kinds) > 3


def test_a_call_has_the_same_operators_for_any_number_and_length_of_windows(flow: Flow) -> None:
    counted = []
    for windows in (
        [CodeWindow([1] * 28, False)],
        [CodeWindow([1] * 28, False), CodeWindow([2] * 9, False), CodeWindow([3], True)],
    ):
        made = slots(flow, 4)
        for slot in range(len(windows)):
            made.begin(slot, VOICES[20])
        with Operators() as operators:
            frames_of(made, dict(enumerate(windows)))
        counted.append(operators.names)
    assert any("mish" in name for name in counted[0])
    assert counted[0] == counted[1]


@torch.inference_mode()
def test_a_call_reads_nothing_from_the_device(flow: Flow) -> None:
    # Tensors of the meta device have no values that could be read.
    made = FlowSlots(copy.deepcopy(flow).to("meta"), 2, num_steps=1, max_prompt=70)
    plans = torch.zeros(2, made.width(25), dtype=torch.long, device="meta")
    assert made.compute(plans, 25).shape == (2, tiny.BANDS, 50)


def test_when_a_voice_is_known_then_its_prompt_is_copied(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.adapters.minicpmo.token2wav.flow.MAX_PROMPTS", 1)
    made, found = slots(flow, 1), []
    for length in (20, 20, 33, 20):
        with Operators() as operators:
            made.begin(0, VOICES[length])
        found.append(any("mish" in name for name in operators.names))
    assert found == [True, False, True, True]
    np.testing.assert_allclose(run(made, 0, 0, 0), PUBLISHED["float64.0.0"], rtol=0, atol=1e-8)


def test_a_prompt_is_cut_to_the_limit(flow: Flow) -> None:
    codes, embedding, mel = VOICES[70]
    found = []
    for voice in (VOICES[70], GivenVoice(codes[:30], embedding, mel[:60])):
        made = FlowSlots(flow.to(torch.float64), 1, num_steps=1, max_prompt=30)
        made.begin(0, voice)
        found.append(run(made, 0, 0, 0))
    assert np.array_equal(*found)


@pytest.mark.parametrize(
    ("window", "last"),
    [([1, 2, 3], False), ([], True), ([1] * 29, False), ([1] * 26, True), ([5, 100], True), ([-1, 5], True)],
)
def test_when_a_window_has_no_frames_or_unknown_codes_then_it_is_refused(
    flow: Flow, window: list[int], last: bool
) -> None:
    with pytest.raises(ValueError, match=r"a window has|a code "):
        slots(flow, 1).check(CodeWindow(window, last))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("flow: [", "flow.yaml: .*"),
        ("- 1", "flow.yaml: not a mapping"),
        ("flow: !new:os.system {input_size: 3}", "flow.yaml: Object missing required field `encoder`"),
        (tiny.flow_yaml().replace("in_channels: 320", "in_channels: 3"), "channels do not belong to 80 mel bands"),
        (tiny.flow_yaml().replace("'swish'", "'relu'"), "activation_type is 'relu', not 'swish'"),
    ],
)
def test_when_a_configuration_is_of_another_kind_then_the_error_says_so(tmp_path: Path, given: str, says: str) -> None:
    (tmp_path / "flow.yaml").write_text(given)
    with pytest.raises(ModelError, match=says):
        read_flow_config(tmp_path / "flow.yaml")
