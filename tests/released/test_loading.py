"""Each adapter reads each release in full: no tensor is left over, and none is filled with random values.

The folders have all names, shapes and shards of the release. The weights are on the meta device, which has no values.
"""

from __future__ import annotations

from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from antiphon.adapters.minicpmo import checkpoint as minicpmo
from antiphon.adapters.qwen2_5_omni import checkpoint as qwen2_5_omni
from antiphon.adapters.qwen3_asr import checkpoint as qwen3_asr
from antiphon.adapters.qwen3_omni import checkpoint as qwen3_omni
from antiphon.adapters.qwen3_tts import checkpoint as qwen3_tts
from antiphon.adapters.vlm.session import read as read_vlm
from antiphon.engine.local.weights import load_whole
from antiphon.modeling.tensors import Tensors
from antiphon.released import Release, families, releases
from antiphon.released.comparison import expected_tensors
from antiphon.released.memory import is_read
from tests.engine.local import tiny
from tests.released.making import write_release

META, BF16 = torch.device("meta"), torch.bfloat16
OWN = {"qwen3_tts": qwen3_tts, "minicpmo": minicpmo}


def read_on(device: torch.device, folder: Path, model_type: str) -> Any:
    """Read a folder as its adapter does, with all weights on a device."""
    name = device.type
    match model_type:
        case "qwen3_tts" | "minicpmo":
            return OWN[model_type].read(folder, device, BF16)
        case "qwen3_asr":
            return qwen3_asr.read(folder, name, BF16)
        case "qwen3_omni_moe":
            return qwen3_omni.read(folder, name, name, BF16)
        case "qwen2_5_omni":
            return qwen2_5_omni.read(folder, name, name, BF16)
        case "qwen3":
            return load_whole(AutoModelForCausalLM, folder, dtype=BF16, device_map=name)
        case _:
            return read_vlm(folder, name, BF16)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the tensors that are read by name, and the reports of `transformers`."""
    found: dict[str, Any] = {"names": set(), "reports": []}
    get, load = Tensors.__getitem__, PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]
    opened = Tensors.__init__

    def init(self: Any, folder: Path, *rest: Any) -> None:
        opened(self, folder, *rest)
        self.part = "speech_tokenizer/" if folder.name == "speech_tokenizer" else ""

    def read(self: Any, name: str) -> torch.Tensor:
        found["names"].add(self.part + name)
        return get(self, name)

    def loaded(cls: Any, *args: Any, **options: Any) -> Any:
        result = load(cls, *args, **options)
        found["reports"].append(result[1])
        return result

    monkeypatch.setattr(Tensors, "__init__", init)
    monkeypatch.setattr(Tensors, "__getitem__", read)
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", classmethod(loaded))
    return found


# The other releases are read by `make heavy`: each takes ten seconds or more.
QUICK = ("qwen3-0.6b", "qwen3-tts-0.6b-base", "smolvlm2-500m-video-instruct")


@pytest.mark.parametrize(
    "release",
    [pytest.param(r, marks=pytest.mark.slow if r.id in QUICK else pytest.mark.heavy) for r in releases().values()],
    ids=list(releases()),
)
def test_an_adapter_reads_every_tensor_of_a_release(release: Release, tmp_path: Path, seen: dict[str, Any]) -> None:
    folder = write_release(tmp_path / "model", release)
    (folder / "spk_dict.pt").write_bytes(b"")
    if release.model_type == "qwen2_5_omni":
        torch.save({"Chelsie": speaker()}, folder / "spk_dict.pt")
    read_on(META, folder, release.model_type)
    family = families()[release.model_type]
    every = set(expected_tensors(family, release, release.fields))
    unread = {name for name in every if not is_read(family, release, name)}
    if release.model_type in OWN:
        assert every - seen["names"] == unread
        assert seen["names"] <= every
    else:
        (report,) = seen["reports"]
        # `transformers` does not report some of the buffers that it leaves out.
        assert set(report["unexpected_keys"]) <= unread
        assert not report["missing_keys"]


@pytest.mark.slow
def test_a_missing_tensor_is_refused_by_the_loader(tmp_path: Path) -> None:
    """`transformers` itself gives such a tensor random values."""

    def change(tensors: dict[str, Any]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]

    folder = write_release(tmp_path, releases()["qwen3-0.6b"], layers=2, change=change)
    with pytest.raises(ValueError, match=r"it lacks model.layers.1.mlp.up_proj.weight"):
        read_on(META, folder, "qwen3")


class Code:
    """Creates a file when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> Any:
        return Path.touch, (self.made,)


@pytest.mark.slow
def test_pickled_weights_are_loaded_and_no_code_in_them_is_run(tmp_path: Path) -> None:
    model = tiny.model("qwen3")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    loaded = load_whole(AutoModelForCausalLM, tmp_path, dtype=torch.float32)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    torch.save(expected | {"code": Code(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        load_whole(AutoModelForCausalLM, tmp_path, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / "pytorch_model.bin", weights_only=False)
    assert (tmp_path / "ran").exists()


@pytest.mark.slow
def test_weights_that_keep_their_dtype_are_pages_of_the_file(tmp_path: Path) -> None:
    tiny.model("qwen3").save_pretrained(tmp_path)
    model = load_whole(AutoModelForCausalLM, tmp_path, dtype=torch.float32)
    mapped = [line.split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    ranges = [(int(start, 16), int(rest.split()[0], 16)) for start, rest, *_ in mapped]
    assert all(any(start <= p.data_ptr() < end for start, end in ranges) for p in model.parameters())


def speaker() -> dict[str, Any]:
    return {"bos_token": 151_872, "cond": torch.zeros(1, 128), "ref_mel": torch.zeros(1, 10, 80)}
