"""What a path of the user is, before any of its weights are read: a model's folder, or why it is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from antiphon.released.headers import INDEX, WHOLE

# Files of other formats, which nothing here reads as a checkpoint's weights.
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
LORA = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
# The folders of a hub's cache: a snapshot's files are links to the blobs of the same repository.
SNAPSHOTS, REPOSITORY = "snapshots", "models--"
# The first bytes of a GGUF file.
GGUF = b"GGUF"
# The limit of a file of settings, in bytes: a tokenizer of 150,000 tokens has 11 MB.
MAX_JSON_BYTES = 64 << 20


def path_problem(path: Path) -> str:
    """Return why a path cannot be a model: it does not exist, or is a file of the wrong kind. "" if it can be one.

    A file may only be a GGUF file, which a language model is converted from.
    """
    if not path.exists():
        return "there is no such folder or file"
    if path.is_dir():
        return ""
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    if start.startswith(GGUF):
        return "" if path.suffix == ".gguf" else "it is a GGUF file, whose name has to end in .gguf"
    if start[8:9] == b"{" or path.suffix == ".safetensors":
        return "it is a safetensors file; name the folder that it is in, with config.json and the tokenizer"
    return "it is neither a checkpoint's folder nor a .gguf file"


def folder_problem(folder: Path, *, pickled: bool = False) -> str:
    """Return why a folder cannot be loaded, whatever its model is; "" if it may be.

    `pickled`: pickled weights are read if there are no others.
    """
    names = {path.name for path in folder.iterdir()}
    if outside := link_outside(folder):
        return outside
    if "config.json" not in names:
        if lora := names & set(LORA):
            return (
                f"it is an adapter (LoRA): {min(lora)} changes another model's weights; merge it into them "
                "(merge_and_unload of peft), and name the merged model's folder"
            )
        if found := sorted(folder.glob("*.gguf")):
            if "model.gguf" in names:
                return ""
            return f"it holds a GGUF file; --language-model takes the file itself: {found[0]}"
        inner = sorted(path.parent for path in folder.glob("*/config.json"))
        return "it has no config.json" + (f"; its folder {inner[0].name} has one" if inner else "")
    if WHOLE in names or INDEX in names:
        return ""
    if lora := names & set(LORA):
        return f"it holds an adapter (LoRA, {min(lora)}) and no weights of a model; merge it into them first"
    if found := sorted(folder.glob("*.gguf")):
        return (
            f"its weights are a GGUF file ({found[0].name}), and safetensors are needed; --language-model reads the "
            "file itself"
        )
    if found := sorted(path for pattern in PICKLES for path in folder.glob(pattern)):
        if pickled:
            return ""
        return (
            f"its weights are pickled ({found[0].name}), and only safetensors are read; convert them, or set "
            "--pickled-weights"
        )
    if found := sorted(folder.glob("*.safetensors")):
        return f"it has neither {WHOLE} nor {INDEX}, only {found[0].name}, which no index names"
    return f"it has no weights ({WHOLE})"


def is_text_model(architecture: str) -> bool:
    """Return whether the name of a model's class is that of a decoder of text, as in `transformers`."""
    return architecture.endswith(("ForCausalLM", "LMHeadModel"))


def link_outside(folder: Path) -> str:
    """Return which file is a link that leaves the folder, in words; "" if none does.

    The links of a hub's cache stay in the cache of their repository, and are not meant.
    """
    root = folder.resolve()
    allowed = [root]
    if root.parent.name == SNAPSHOTS and root.parents[1].name.startswith(REPOSITORY):
        allowed.append(root.parents[1])
    for path in (*folder.iterdir(), *folder.glob("*/*")):
        if path.is_symlink():
            target = path.resolve()
            if not any(target.is_relative_to(place) for place in allowed):
                shown = path.relative_to(folder)
                return f"{shown} is a link to {target}, outside of the folder; replace it by the file"
            if not target.exists():
                return f"{path.relative_to(folder)} is a link to a file that does not exist; fetch it again"
    return ""


def missing_files(folder: Path, needs: Sequence[str]) -> Iterator[str]:
    """Yield the names of the files that are needed and missing. Of names joined by "|", one is enough.

    Names joined by "+" belong together, as in "tokenizer.json|vocab.json+merges.txt".
    """
    for need in needs:
        choices = [choice.split("+") for choice in need.split("|")]
        if not any(all((folder / name).is_file() for name in choice) for choice in choices):
            yield " or ".join(" and ".join(choice) for choice in choices)
