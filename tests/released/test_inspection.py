"""What `antiphon inspect` says of folders of released checkpoints, and of folders that do not load."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.main import main
from antiphon.errors import StoreError
from antiphon.loading.inspection import check, inspect
from antiphon.released import Release, families, releases
from antiphon.released.folder import link_outside
from antiphon.released.headers import INDEX, WHOLE, StoredTensor
from antiphon.released.manifest import TensorPattern, expanded
from antiphon.released.memory import memory_of
from tests.adapters.tiny_piper import write_voice
from tests.forking import run
from tests.released.making import config_of, write_file, write_release

ASR, TTS, BASE, OMNI = (
    "qwen3-asr-0.6b",
    "qwen3-tts-0.6b-customvoice",
    "qwen3-tts-0.6b-base",
    "qwen3-omni-30b-a3b-instruct",
)
HEAD = "thinker.lm_head.weight"
Change = Callable[[dict[str, StoredTensor]], None]


def made(folder: Path, name: str = ASR, **options: Any) -> Path:
    return write_release(folder / name, releases()[name], words=False, **options)


@pytest.mark.parametrize("release", list(releases().values()), ids=list(releases()))
def test_a_folder_as_released_has_every_tensor_and_no_other(release: Release, tmp_path: Path) -> None:
    found = inspect(write_release(tmp_path / "model", release, words=False))
    assert (found.release, found.problems, found.unknown_fields) == (release.id, (), ())
    assert found.tensors is not None
    assert (found.tensors.missing, found.tensors.unknown, dict(found.tensors.wrong)) == ((), (), {})
    assert found.tensors.num_found == found.num_tensors > 100
    assert found.command.startswith("antiphon serve --")
    assert found.memory == memory_of(families()[release.model_type], release)


@pytest.mark.parametrize("name", [ASR, OMNI, "minicpm-o-4.5", "qwen2.5-omni-3b", "smolvlm2-256m-video-instruct"])
def test_a_folder_with_fewer_layers_is_compared_with_as_many(name: str, tmp_path: Path) -> None:
    found = inspect(made(tmp_path, name, layers=2))
    assert found.release == name
    assert found.tensors is not None
    assert (found.problems, found.tensors.missing, found.tensors.unknown) == ((), (), ())


def replaced(name: str, shape: tuple[int, ...]) -> Change:
    return lambda tensors: tensors.update({name: StoredTensor(shape, "BF16", "")})


def renamed(tensors: dict[str, StoredTensor]) -> None:
    tensors["thinker.output.weight"] = tensors.pop(HEAD)


def without_prefix(tensors: dict[str, StoredTensor]) -> None:
    moved = {name.removeprefix("thinker."): tensor for name, tensor in tensors.items()}
    tensors.clear()
    tensors.update(moved)


LAYER = "thinker.model.layers.3.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop(HEAD), f"{HEAD} is missing"),
        (renamed, f"{HEAD} is missing; thinker.output.weight, which is unknown, may be its name"),
        (without_prefix, "the names of 612 tensors begin with '' instead of 'thinker.'"),
        (replaced(LAYER, (1024, 3072)), f"{LAYER} is transposed: [1024, 3072], not [3072, 1024]"),
        (replaced(LAYER, (3072, 512)), f"{LAYER} is [3072, 512], not [3072, 1024]"),
        (replaced(HEAD, (151_000, 1024)), f"{HEAD} has 151,000 rows, and config.json asks for 151,936"),
    ],
    ids=["removed", "renamed", "prefix", "transposed", "shape", "vocabulary"],
)
def test_a_wrong_tensor_is_named_with_the_remedy(change: Change, said: str, tmp_path: Path) -> None:
    found = inspect(made(tmp_path, change=change))
    (line,) = found.problems
    assert line.startswith(said)
    assert line.endswith("antiphon pull qwen3-asr-0.6b")


def test_a_further_tensor_is_a_note(tmp_path: Path) -> None:
    found = inspect(made(tmp_path, change=replaced("thinker.extra.weight", (4, 4))))
    assert (found.problems, found.notes) == ((), ("thinker.extra.weight: not in the release, and not read",))


def test_the_config_of_another_release_beside_the_weights_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, TTS)
    (folder / "config.json").write_text(json.dumps(config_of(releases()[BASE])))
    (line,) = inspect(folder).problems
    assert "its config.json is that of Qwen/Qwen3-TTS-12Hz-0.6B-Base" in line
    assert "its weights are those of Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice" in line


def test_a_field_that_is_not_understood_is_a_note(tmp_path: Path) -> None:
    config = config_of(releases()[ASR])
    config["thinker_config"]["text_config"]["attention_sinks"] = 4
    found = inspect(made(tmp_path, config=config))
    assert found.unknown_fields == ("thinker_config.text_config.attention_sinks",)
    assert "attention_sinks: not in the release" in found.notes[0]


def test_another_vocabulary_in_config_and_weights_is_accepted(tmp_path: Path) -> None:
    config = config_of(releases()[ASR])
    config["thinker_config"]["text_config"]["vocab_size"] = 152_064
    assert inspect(made(tmp_path, config=config)).problems == ()


def test_the_tokenizer_of_another_model_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path)
    tokens = {"added_tokens_decoder": {"151700": {"content": "<|im_end|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (line,) = inspect(folder).problems
    assert "its tokenizer is of another model: <|im_end|> is 151700, not 151645" in line


def cut(folder: Path) -> None:
    with (folder / WHOLE).open("r+b") as file:
        file.truncate((folder / WHOLE).stat().st_size - 1)


def lora(folder: Path) -> None:
    for name in ("config.json", WHOLE):
        (folder / name).unlink()
    (folder / "adapter_config.json").write_text("{}")


def lora_beside(folder: Path) -> None:
    (folder / WHOLE).rename(folder / "adapter_model.safetensors")


def gguf(folder: Path) -> None:
    (folder / WHOLE).unlink()
    (folder / "q4.gguf").write_bytes(b"GGUF" + bytes(20))


def gguf_named_safetensors(folder: Path) -> None:
    (folder / WHOLE).write_bytes(b"GGUF" + bytes(20))


def pickled(folder: Path) -> None:
    (folder / WHOLE).rename(folder / "pytorch_model.bin")


def no_shard(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: "model-00001-of-00001.safetensors"}}))


def shard_elsewhere(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {HEAD: "../model.safetensors"}}))


def link(folder: Path) -> None:
    target = folder.parent / "elsewhere.safetensors"
    (folder / WHOLE).rename(target)
    (folder / WHOLE).symlink_to(target)


def pointer(folder: Path) -> None:
    (folder / WHOLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))


def nested_quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["thinker_config"]["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(config))


def mlx_quantized(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization": {"group_size": 64, "bits": 4}}))


def llama_omni(folder: Path) -> None:
    config = {"model_type": "omni_speech2s_llama", "architectures": ["OmniSpeech2SLlamaForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cut, "model.safetensors was cut"),
        (lambda folder: (folder / "config.json").unlink(), "it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json cannot be read: it is no JSON object"),
        (lambda folder: (folder / WHOLE).unlink(), "it has no weights (model.safetensors)"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json or vocab.json and merges.txt is missing"),
        (lora, "it is an adapter (LoRA): adapter_config.json changes another model's weights"),
        (lora_beside, "it holds an adapter (LoRA, adapter_model.safetensors) and no weights of a model"),
        (gguf, "its weights are a GGUF file (q4.gguf), and safetensors are needed"),
        (gguf_named_safetensors, "model.safetensors is a GGUF file, not a safetensors file"),
        (pickled, "its weights are pickled (pytorch_model.bin), and only safetensors are read"),
        (no_shard, "model-00001-of-00001.safetensors is missing, and model.safetensors.index.json names it"),
        (shard_elsewhere, "model.safetensors.index.json names ../model.safetensors, which is not a file of the folder"),
        (link, "model.safetensors is a link to "),
        (pointer, "model.safetensors is the pointer of Git LFS to a file"),
        (quantized, "its weights are quantized (awq), which is not read"),
        (nested_quantized, "its weights are quantized (fp8), which is not read"),
        (mlx_quantized, "its weights are quantized (MLX, 4 bits), which is not read"),
        (llama_omni, "that is Llama-Omni (omni_speech2s_llama): not served; these are: Qwen3-ASR, "),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_folder_that_does_not_load_is_refused_in_one_line(
    change: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    folder = made(tmp_path)
    change(folder)
    (line,) = inspect(folder).problems
    assert line.startswith(said)
    with pytest.raises(StoreError, match=r"^--transcriber .*: "):
        check(folder, "transcriber")


def test_a_missing_preprocessor_is_named(tmp_path: Path) -> None:
    folder = made(tmp_path, "qwen3-vl-2b-instruct")
    (folder / "preprocessor_config.json").unlink()
    (line,) = inspect(folder).problems
    assert line == "preprocessor_config.json is missing: antiphon pull qwen3-vl-2b-instruct"


def test_files_of_the_wrong_kind_are_named(tmp_path: Path) -> None:
    safetensors, gguf_file, other = tmp_path / "a.gguf", tmp_path / "b.bin", tmp_path / "c.gguf"
    write_file(safetensors, {"x": StoredTensor((2,), "F32", "")})
    gguf_file.write_bytes(b"GGUF" + bytes(20))
    other.write_bytes(b"nothing")
    said = [inspect(path).problems[0] for path in (safetensors, gguf_file, other, tmp_path / "none")]
    assert said == [
        "it is a safetensors file; name the folder that it is in, with config.json and the tokenizer",
        "it is a GGUF file, whose name has to end in .gguf",
        "it is neither a checkpoint's folder nor a .gguf file",
        "there is no such folder or file",
    ]
    gguf_file.rename(tmp_path / "d.gguf")
    assert inspect(tmp_path / "d.gguf").command.startswith("antiphon serve --language-model ")


def test_pickled_weights_are_accepted_if_asked_for(tmp_path: Path) -> None:
    folder = made(tmp_path, "qwen3-0.6b")
    pickled(folder)
    assert "--pickled-weights" in inspect(folder).problems[0]
    assert inspect(folder, pickled=True).problems == ()
    folder = made(tmp_path, TTS)
    pickled(folder)
    (line,) = inspect(folder, pickled=True).problems
    assert line == "its weights are pickled, and Qwen3-TTS is read from safetensors alone; convert them"


def test_a_text_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    folder = made(tmp_path, "qwen3-0.6b")
    (folder / "tokenizer_config.json").write_text("{}")
    (line,) = inspect(folder).problems
    assert line.startswith("it has no chat template: a base model")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert inspect(folder).problems == ()


def test_the_links_of_a_hubs_cache_are_its_own(tmp_path: Path) -> None:
    cache = tmp_path / "models--Qwen--Qwen3-ASR-0.6B"
    folder, blobs = cache / "snapshots" / "abc", cache / "blobs"
    write_release(folder, releases()[ASR], words=False)
    blobs.mkdir()
    (folder / WHOLE).rename(blobs / "1234")
    (folder / WHOLE).symlink_to("../../blobs/1234")
    assert inspect(folder).problems == ()
    (blobs / "1234").unlink()
    assert "does not exist" in link_outside(folder)


def test_a_model_of_another_role_is_refused_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"Qwen3-ASR-0.6B is for --transcriber, not for --synthesizer"):
        check(made(tmp_path), "synthesizer")


def test_a_folder_of_voices_is_told_by_its_files_and_refused_by_the_name_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "voices"
    write_voice(folder, "en_US-tiny-low")
    write_voice(folder, "de_DE-tiny-low", espeak={"voice": "de"}, language={"code": "de_DE"})
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "voices in Piper's format: de_DE-tiny-low (de), en_US-tiny-low (en)" in printed
    assert "served as  synthesizer, by piper" in printed
    assert f"serve      antiphon serve --synthesizer {folder}" in printed
    with pytest.raises(StoreError, match="is for --synthesizer, not for --transcriber"):
        check(folder, "transcriber")
    (folder / "de_DE-tiny-low.onnx.json").unlink()
    (folder / "linked.bin").symlink_to("/etc/hostname")
    assert main(["inspect", "--json", str(folder)]) == 1
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert "linked.bin is a link to /etc/hostname" in problems[0]
    assert problems[1].startswith("de_DE-tiny-low.onnx has no de_DE-tiny-low.onnx.json")


@pytest.mark.slow
def test_serve_refuses_what_inspect_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made(tmp_path, change=lambda tensors: tensors.pop(HEAD))
    assert main(["inspect", str(folder)]) == 1
    assert f"problem    {HEAD} is missing" in capsys.readouterr().out
    assert main(["inspect", "--json", str(folder)]) == 1
    assert json.loads(capsys.readouterr().out)["tensors"]["missing"] == [HEAD]
    arguments = ["--port", "0", "--home", str(tmp_path / "home"), "--transcriber", str(folder)]
    # In a process of its own, because `serve` changes settings of its process.
    served = run("antiphon", "serve", *arguments)
    assert served.returncode == 1
    assert f"{HEAD} is missing" in served.stderr


def test_inspect_of_the_largest_release_is_quick(tmp_path: Path) -> None:
    folder = made(tmp_path, OMNI)
    started = time.process_time()
    inspect(folder)
    # 28,010 tensors take 0.3 s here. The limit is far above, so that only another order of work exceeds it.
    assert time.process_time() - started < 3


def test_a_pattern_stands_for_all_its_names() -> None:
    names = list(expanded("a.{0..1}.b.{2,5}.c"))
    assert names == ["a.0.b.2.c", "a.0.b.5.c", "a.1.b.2.c", "a.1.b.5.c"]
    assert list(expanded("a.{0..9}.b.{0..1}", {"a.": 1, "a.*.b.": 3})) == ["a.0.b.0", "a.0.b.1", "a.0.b.2"]


@pytest.mark.parametrize("release", list(releases().values()), ids=list(releases()))
def test_a_manifest_names_the_sources_of_its_facts(release: Release) -> None:
    assert release.sources
    assert release.facts
    assert all(isinstance(pattern, TensorPattern) and pattern.shape for pattern in release.tensors)
    assert {file.name for file in release.files} >= {"config.json"}
    names = [name for pattern in release.tensors for name in expanded(pattern.name)]
    assert len(names) == len(set(names))
