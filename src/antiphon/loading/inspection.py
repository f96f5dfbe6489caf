"""What a folder or a released model is, and whether this server loads it: `antiphon inspect`, and the refusal of
`serve`.

Only JSON files and the headers of weights are read. Nothing is imported that computes.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

import msgspec

from antiphon.adapters import SPECS
from antiphon.errors import StoreError
from antiphon.loading.machine import free_gb, gpus
from antiphon.loading.selection import adapter_of_files, flag_of
from antiphon.released import Family, Release, families, releases
from antiphon.released.comparison import (
    TensorComparison,
    closest,
    compare,
    expected_tensors,
    named,
    tensor_problems,
    unknown_fields,
)
from antiphon.released.folder import folder_problem, is_text_model, link_outside, missing_files, path_problem
from antiphon.released.headers import StoredTensor, shards, stored_tensors
from antiphon.released.manifest import Fields, flat
from antiphon.released.memory import ModelMemory, gb, memory_of_tensors
from antiphon.roles import ModelRole

# Beginnings of the `model_type` of models that have no adapter here, and the models' names.
UNSERVED = {
    "omni_speech": "Llama-Omni",
    "qwen2_audio": "Qwen2-Audio",
    "moshi": "Moshi",
    "csm": "CSM",
    "voxtral": "Voxtral",
    "kyutai": "Kyutai STT",
    "dia": "Dia",
    "phi4_multimodal": "Phi-4-multimodal",
    "granite_speech": "Granite Speech",
    "qwen3_5_omni": "Qwen3.5-Omni",
}
TOKENIZER = "tokenizer_config.json"
# The roles of models that `transformers` reads, also from pickled weights.
PICKLED_ROLES = ("language", "video_model")
# The share of a device's free memory that weights and sessions may take; the rest is for a step's working memory.
USABLE = 0.92


class AddedToken(msgspec.Struct, frozen=True):
    """A special token of tokenizer_config.json."""

    content: str


class TokenizerFields(msgspec.Struct, frozen=True):
    """The fields of tokenizer_config.json that are checked: the special tokens by id, and the template of chats."""

    added_tokens_decoder: dict[str, AddedToken] = {}
    chat_template: object = None


@dataclass(frozen=True, slots=True)
class Inspection:
    """What a path is. `problems` and `notes` are lines, each with its remedy; without problems, the model loads."""

    # The folder or file.
    path: Path
    # The model's name in words, or the name of an architecture that is not served.
    title: str
    # Why the model does not load.
    problems: tuple[str, ...] = ()
    # What is unusual, and does not keep the model from loading.
    notes: tuple[str, ...] = ()
    # The release whose manifest the folder was compared with; "" if none has its sizes.
    release: str = ""
    # The role and the adapter that would serve it; "" if none would.
    role: ModelRole | str = ""
    # See `role`.
    adapter: str = ""
    # The tensors beside those of the manifest. None: not compared.
    tensors: TensorComparison | None = None
    # The number of tensors in the files, and their bytes.
    num_tensors: int = 0
    # See `num_tensors`.
    file_bytes: int = 0
    # Fields of config.json that no release of the family has.
    unknown_fields: tuple[str, ...] = ()
    # Whether the tokenizer's files are there.
    has_tokenizer: bool = False
    # What weights and a session take on a GPU. None: unknown.
    memory: ModelMemory | None = None
    # Where it fits on this machine, in words; "" if it fits nowhere.
    fits: str = ""
    # The command that serves it; "" if it is not served.
    command: str = ""


def inspect(path: Path, *, pickled: bool = False) -> Inspection:
    """Return what a path is. Takes less than a second, for checkpoints of any size.

    `pickled`: weights in pickled files are accepted. Raises OSError if a file cannot be read.
    """
    path = path.expanduser().resolve()
    found = Inspection(path, "no model")
    if problem := path_problem(path):
        return replace(found, problems=(problem,))
    if path.is_file() or (path / "model.gguf").is_file():
        command = f"antiphon serve --language-model {quote(str(path))}"
        return replace(found, title="a GGUF file", role="language", adapter=_adapter("", ""), command=command)
    if adapter := adapter_of_files(path):
        return _described(found, adapter)
    problem = folder_problem(path, pickled=pickled)
    if not (path / "config.json").is_file():
        return replace(found, problems=(problem,))
    try:
        fields = flat((path / "config.json").read_bytes())
    except ValueError as error:
        return replace(found, problems=(f"config.json cannot be read: {error}",))
    found = _identified(found, fields)
    if problem:
        return replace(found, problems=(*found.problems, problem), command="")
    return found if found.problems else _compared(found, fields)


def _described(found: Inspection, adapter: str) -> Inspection:
    """Return the inspection of a folder without config.json, as the adapter that recognizes it describes it."""
    spec = SPECS[adapter]
    module, function = spec.describe.split(":")
    title, problem = getattr(import_module(module), function)(found.path)
    problems = tuple(line for line in (link_outside(found.path), problem) if line)
    command = f"antiphon serve {flag_of(spec.role)} {quote(str(found.path))}"
    return replace(found, title=title, role=spec.role, adapter=adapter, problems=problems, command=command)


def check(path: Path, role: ModelRole, *, pickled: bool = False) -> tuple[str, ...]:
    """Check that a folder can be loaded for a role, before anything is loaded. Returns the notes about it.

    Raises StoreError with the first problem and the command that shows all.
    """
    found = inspect(path, pickled=pickled)
    problems = list(found.problems)
    if found.role and found.role != role:
        problems.insert(0, f"{found.title} is for {flag_of(found.role)}, not for {flag_of(role)}")
    if problems:
        more = f" (and {len(problems) - 1} more: antiphon inspect {quote(str(path))})" if problems[1:] else ""
        raise StoreError(f"{flag_of(role)} {path}: {problems[0]}{more}")
    return found.notes


def _identified(found: Inspection, fields: Fields) -> Inspection:
    """Return the inspection with the model's name and its adapter, or with the reason that it is not served."""
    model_type, architecture = str(fields.get("model_type") or ""), _architecture(fields)
    family = families().get(model_type)
    title = family.title if family else model_type or architecture or "no model"
    adapter = _adapter(model_type, architecture)
    if method := _quantization(fields):
        problem = (
            f"its weights are quantized ({method}), which is not read; take the release in bfloat16: --weights int8 "
            "rounds it while it is loaded"
        )
        return replace(found, title=f"{title}, {method}", problems=(problem,))
    if not adapter:
        name = next((name for start, name in UNSERVED.items() if model_type.startswith(start)), "")
        what = f"{name} ({model_type})" if name else title
        served = ", ".join(dict.fromkeys(one.title for one in families().values()))
        problem = f"that is {what}: not served; these are: {served}, and the text models of transformers"
        return replace(found, title=what, problems=(problem,))
    if any(name.startswith("auto_map") for name in fields) and not family:
        problem = "its model needs the Python code of its folder (auto_map), which is never run"
        return replace(found, title=title, problems=(problem,))
    return replace(found, title=title, role=SPECS[adapter].role, adapter=adapter)


def _quantization(fields: Fields) -> str:
    """Return the method by which weights are quantized, as any section of a configuration names it; "" for none."""
    for name, value in fields.items():
        if re.search(r"(^|\.)quantization_config\.(quant_method|quant_algo)$", name) and value:
            return str(value)
        if re.search(r"(^|\.)quantization\.bits$", name):
            return f"MLX, {value} bits"
    return ""


def _architecture(fields: Fields) -> str:
    names = msgspec.json.decode(str(fields.get("architectures") or "[]"))
    return str(names[0]) if isinstance(names, list) and names else ""


def _adapter(model_type: str, architecture: str) -> str:
    """Return the adapter that loads a type of checkpoints; "" for none.

    The types of text models are not listed: `transformers` has too many of them.
    """
    for name, spec in SPECS.items():
        if model_type and model_type in (spec.model_types or ()):
            return name
    is_text = is_text_model(architecture) and _is_known_to_transformers(model_type)
    if is_text or not (model_type or architecture):
        return next(name for name, spec in SPECS.items() if spec.model_types == ())
    return ""


def _is_known_to_transformers(model_type: str) -> bool:
    """Whether `transformers` has a folder for a type. Does not import it, which takes seconds."""
    spec = find_spec("transformers")
    places = (spec.submodule_search_locations or ()) if spec else ()
    return not places or any((Path(place) / "models" / model_type.replace("-", "_")).is_dir() for place in places)


def _compared(found: Inspection, fields: Fields) -> Inspection:
    """Return the inspection with the tensors, the fields and the files beside those of the closest release."""
    model_type = str(fields.get("model_type"))
    family = families().get(model_type, Family(title=found.title))
    own = [release for release in releases().values() if release.model_type == model_type]
    release = closest(fields, own)
    try:
        tensors = stored_tensors(found.path, ("", *family.parts))
        is_pickled = not shards(found.path)
    except ValueError as error:
        again = f"antiphon pull {release.id}" if release else "fetch it again"
        return replace(found, problems=(f"{error}; {again}",))
    if is_pickled and found.role not in PICKLED_ROLES:
        problem = f"its weights are pickled, and {found.title} is read from safetensors alone; convert them"
        return replace(found, problems=(problem,))
    found = replace(
        found,
        num_tensors=len(tensors),
        file_bytes=sum(tensor.num_bytes for tensor in tensors.values()),
        unknown_fields=unknown_fields(fields, own) if own else (),
        has_tokenizer=not any(missing_files(found.path, ("tokenizer.json|vocab.json+merges.txt|tokenizer.model",))),
    )
    problems = list(_file_problems(found, family, release))
    notes = []
    if found.unknown_fields:
        notes.append(f"config.json: {named(found.unknown_fields)}: not in the release; it may have no effect")
    if is_pickled:
        notes.append("its weights are pickled: its tensors are not compared")
    if release is None or is_pickled:
        if own and release is None:
            notes.append(f"no manifest of {family.title} has these sizes: its tensors are not compared")
        return replace(_placed(found, None), problems=tuple(problems), notes=tuple(notes))
    expected = expected_tensors(family, release, fields)
    comparison = compare(expected, tensors)
    problems += _tensor_lines(comparison, release, own, family, fields, tensors)
    problems += _token_problems(found.path, release)
    if comparison.unknown and not comparison.missing:
        notes.append(f"{named(comparison.unknown)}: not in the release, and not read")
    found = replace(found, title=release.repository, release=release.id, tensors=comparison)
    found = _placed(found, memory_of_tensors(family, release, fields, expected), family)
    return replace(found, problems=tuple(problems), notes=(*notes, *found.notes))


def _file_problems(found: Inspection, family: Family, release: Release | None) -> Iterator[str]:
    again = f"antiphon pull {release.id}" if release else "copy it from the release"
    for missing in missing_files(found.path, family.needs):
        yield f"{missing} is missing: {again}"
    if found.role == "language" and not _has_template(found.path):
        yield "it has no chat template: a base model, which continues texts; take its release for chats (Instruct)"


def _has_template(folder: Path) -> bool:
    """Whether a text model's folder says how a chat is written."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return bool(msgspec.json.decode((folder / TOKENIZER).read_bytes(), type=TokenizerFields).chat_template)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return False


def _tensor_lines(
    comparison: TensorComparison,
    release: Release,
    own: Collection[Release],
    family: Family,
    fields: Fields,
    tensors: Mapping[str, StoredTensor],
) -> Iterator[str]:
    """Yield what is wrong with the tensors. If they are those of another release, only that."""
    needed = [n for n in comparison.missing if not n.startswith((*family.unread, *release.unread))]
    if not needed and not comparison.wrong:
        return
    for other in own:
        if other is not release:
            theirs = compare(expected_tensors(family, other, other.fields), tensors)
            if not (theirs.missing or theirs.wrong or theirs.unknown):
                yield (
                    f"its config.json is that of {release.repository}, and its weights are those of "
                    f"{other.repository}; take both from one release"
                )
                return
    for line in tensor_problems(replace(comparison, missing=tuple(needed))):
        yield f"{line} (of {release.repository}); antiphon pull {release.id}"


def _token_problems(folder: Path, release: Release) -> Iterator[str]:
    """Yield the special tokens whose ids are not those of the release."""
    path = folder / TOKENIZER
    if not release.special_tokens or not path.is_file():
        return
    try:
        added = msgspec.json.decode(path.read_bytes(), type=TokenizerFields).added_tokens_decoder
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        yield f"{TOKENIZER} cannot be read: {error}"
        return
    ids = {token.content: int(number) for number, token in added.items() if number.isdigit()}
    wrong = [f"{t} is {ids[t]}, not {i}" for t, i in release.special_tokens.items() if t in ids and ids[t] != i]
    if wrong:
        yield f"its tokenizer is of another model: {named(wrong)}; antiphon pull {release.id}"


def _placed(found: Inspection, memory: ModelMemory | None, family: Family | None = None) -> Inspection:
    """Return the inspection with where the model fits on this machine, and the command that serves it."""
    weights = memory.weight_bytes if memory else found.file_bytes
    needed = weights + (memory.session_bytes if memory else 0)
    card = max(gpus(), key=lambda gpu: gpu.free_bytes, default=None)
    fits, notes = "", []
    on_gpu = card is not None and needed <= USABLE * card.free_bytes
    if card is not None and on_gpu:
        fits = f"{card.name}, {gb(card.free_bytes)} GB free"
    elif needed <= free_gb() * 1e9:
        fits = f"the memory of this machine, {gb(free_gb() * 1e9)} GB free; no GPU holds it, so it may be slow"
    else:
        there = f"{card.name} has {gb(card.free_bytes)} GB free" if card else "there is no GPU"
        notes.append(
            f"it needs {gb(needed)} GB with one session: {there}, and {gb(free_gb() * 1e9)} GB of this machine's "
            "memory are free"
        )
    words = ["antiphon", "serve", flag_of(found.role), quote(str(found.path))] if found.role else []
    words += [*(["--device", "cuda"] if on_gpu else []), *(family.flags if family else ())]
    return replace(found, memory=memory, fits=fits, command=" ".join(words), notes=(*found.notes, *notes))


def named_release(name: str) -> Release | None:
    """Return the release of a name: its id, its repository on the hub, or the repository's last part."""
    wanted = name.lower()
    for release in releases().values():
        if wanted in (release.id, release.repository.lower(), release.repository.lower().rpartition("/")[2]):
            return release
    return None
