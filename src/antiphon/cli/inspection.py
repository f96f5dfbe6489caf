"""`antiphon inspect`: what a folder, a file or a released model's name is, and whether this machine serves it."""

from __future__ import annotations

import json
from pathlib import Path

from antiphon.errors import SettingsError, StoreError
from antiphon.loading.inspection import Inspection, inspect, named_release
from antiphon.released import Release, families, releases
from antiphon.released.memory import gb
from antiphon.settings import Settings


def run_inspect(settings: Settings, name: str, *, as_json: bool) -> int:
    """Print what `name` is: a folder, a file, or a release by its name here or on the hub.

    Returns the exit status: 1 if it does not load. Raises SettingsError for a name that is neither, and StoreError if
    the release is not on this machine, or cannot be read.
    """
    try:
        found = inspect(_path(settings, name), pickled=settings.models.pickled_weights)
    except OSError as error:
        raise StoreError(f"{error.filename or name}: {error.strerror or error}") from error
    print(_json(found) if as_json else "\n".join(_lines(found)))
    return int(bool(found.problems))


def _path(settings: Settings, name: str) -> Path:
    """Return the folder of a name: the path itself, or the copy of a release on this machine."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    release = named_release(name)
    if release is None:
        raise SettingsError(f"{name}: no such folder or file, and no release of that name (antiphon pull --list)")
    folder = _copy_of(settings, release)
    if folder is None:
        size = sum(file.size for file in release.files)
        raise StoreError(
            f"{release.repository} is not on this machine ({gb(size) + ' GB' if size else 'of unknown size'}): "
            f"antiphon pull {release.id}"
        )
    return folder


def _copy_of(settings: Settings, release: Release) -> Path | None:
    """Return the folder of a release in the store or in the hub's cache, or None."""
    # A folder that is given by its path is inspected without these, whose imports take longer than reading its headers.
    from antiphon.loading.loader import store_of
    from antiphon.store.sources import hub_snapshot

    kept = store_of(settings.models).home / "models" / release.id
    return kept if (kept / "config.json").is_file() else hub_snapshot(release.repository)


def _lines(found: Inspection) -> list[str]:
    lines = [f"{found.path}", f"  model      {found.title}" + (f" ({found.release})" if found.release else "")]
    if found.adapter:
        lines.append(f"  served as  {found.role}, by {found.adapter}")
    if found.num_tensors:
        compared = ""
        if found.tensors:
            missing, unknown = len(found.tensors.missing), len(found.tensors.unknown)
            compared = f": {found.tensors.num_found:,} as released, {missing:,} missing, {unknown:,} unknown"
            compared += f", {len(found.tensors.wrong):,} of another shape" if found.tensors.wrong else ""
        lines.append(f"  tensors    {found.num_tensors:,}, {gb(found.file_bytes)} GB{compared}")
    if found.num_tensors:
        lines.append(f"  tokenizer  {'here' if found.has_tokenizer else 'missing'}")
    if found.memory:
        session = f"{found.memory.session_bytes / 1e6:,.0f} MB a session ({found.memory.session.load})"
        lines.append(f"  memory     {gb(found.memory.weight_bytes)} GB of weights, {session}")
    if found.num_tensors:
        lines.append(f"  fits       {found.fits or 'not on this machine'}")
    lines += [f"  note       {note}" for note in found.notes]
    lines += [f"  problem    {problem}" for problem in found.problems]
    if found.command and not found.problems:
        lines.append(f"  serve      {found.command}")
    return lines


def _json(found: Inspection) -> str:
    tensors, memory = found.tensors, found.memory
    values = {
        "path": str(found.path),
        "model": found.title,
        "release": found.release,
        "role": found.role,
        "adapter": found.adapter,
        "tensors": {
            "in_files": found.num_tensors,
            "bytes": found.file_bytes,
            "found": tensors.num_found if tensors else None,
            "missing": tensors.missing if tensors else [],
            "unknown": tensors.unknown if tensors else [],
            "wrong_shape": list(tensors.wrong) if tensors else [],
        },
        "unknown_fields": found.unknown_fields,
        "tokenizer": found.has_tokenizer,
        "weight_bytes": memory.weight_bytes if memory else None,
        "session_bytes": memory.session_bytes if memory else None,
        "session": memory.session.load if memory else None,
        "fits": found.fits,
        "notes": found.notes,
        "problems": found.problems,
        "serve": found.command,
    }
    return json.dumps(values, ensure_ascii=False, indent=1)


def release_lines(settings: Settings) -> list[str]:
    """Return a line for each released model, with its size and whether it is on this machine."""
    lines = []
    for release in releases().values():
        folder = _copy_of(settings, release)
        there = "missing" if folder is None else "here" if folder.name == release.id else "in the hub's cache"
        lines.append(f"{release.id:30} {families()[release.model_type].title:14} {release.repository:44} {there}")
    return lines
