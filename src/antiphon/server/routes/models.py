"""The loaded models in OpenAI's shape: GET /v1/models, /v1/models/{id} and /v1/audio/models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from antiphon.loading.loaded import LoadedModels
from antiphon.protocols.elevenlabs.rest import models_of
from antiphon.protocols.model_names import HEARS, SPEAKS, hosted_task, is_hosted_model
from antiphon.server.http.body import json_response
from antiphon.server.http.errors import error_response
from antiphon.server.routes.vendors.elevenlabs import is_elevenlabs
from antiphon.server.state import ServerState

# The task of each role, as Hugging Face names it.
TASKS = {
    "transcriber": HEARS,
    "synthesizer": SPEAKS,
    "language_model": "text-generation",
    "conversation_model": "any-to-any",
    "video_model": "image-text-to-text",
}


class ModelEntry(msgspec.Struct):
    """One model, in OpenAI's format with additional fields."""

    # The name that requests use.
    id: str
    # Always "model".
    object: Literal["model"]
    # When the server started, in Unix seconds.
    created: int
    # Always "antiphon".
    owned_by: str
    # The task (TASKS); left out of `default`, which stands for the model of each task.
    task: str | UnsetType = UNSET
    # The languages that it understands or speaks, as ISO-639-1 codes.
    languages: list[str] | UnsetType = UNSET
    # If the id is a name of the hosted service, the loaded model that serves it.
    root: str | UnsetType = UNSET
    # The video model's input: "pictures", or "text" if it gets the text that was read from them.
    video: Literal["pictures", "text"] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The loaded models, followed by `default`."""

    object: Literal["list"]
    data: list[ModelEntry]


class SpeechModel(msgspec.Struct):
    """A synthesizer, for programs that show a choice of models."""

    id: str
    name: str


class SpeechModelList(msgspec.Struct):
    """The body of /v1/audio/models: the loaded synthesizer, or an empty list."""

    models: list[SpeechModel]


async def models(request: Request) -> Response:
    """GET /v1/models: return the loaded models and `default`; an empty list while they load.

    Programs for ElevenLabs' service get the synthesizer in its form.
    """
    state: ServerState = request.app.state.antiphon
    if is_elevenlabs(request):
        synthesizer = state.models.synthesizer if state.models else None
        return json_response(models_of(synthesizer.profile if synthesizer else None))
    return json_response(ModelList("list", list(_entries(state))))


async def model(request: Request) -> Response:
    """GET /v1/models/{id}: return one of these entries, or the entry of a usable name of the hosted service.

    Returns 404 (`model_not_found`) for any other id.
    """
    name, state = request.path_params["id"], request.app.state.antiphon
    entries = list(_entries(state))
    for entry in entries:
        if entry.id == name:
            return json_response(entry)
    if not state.settings.server.strict_models and is_hosted_model(name):
        tasks = hosted_task(name)
        found = next((e for task in tasks for e in entries if e.task == task), None)
        if found:
            return json_response(msgspec.structs.replace(found, id=name, root=found.id))
    return error_response(404, f"The model '{name}' does not exist.", code="model_not_found", param="model")


async def speech_models(request: Request) -> Response:
    """GET /v1/audio/models: return the loaded synthesizer, for programs that show a choice of models."""
    entries = _entries(request.app.state.antiphon)
    found = [SpeechModel(entry.id, entry.id) for entry in entries if entry.task == TASKS["synthesizer"]]
    return json_response(SpeechModelList(found))


def _entries(state: ServerState) -> Iterator[ModelEntry]:
    if state.models is None:
        return
    video_model = state.models.for_video
    answers = video_model.profile if video_model else None
    tasks = _profiles(state.models)
    for name in (*state.models.names, "default"):
        task, languages = tasks.get(name, (UNSET, UNSET))
        video = answers.sees if answers and name == answers.id else UNSET
        yield ModelEntry(name, "model", state.started_s, "antiphon", task, languages, UNSET, video)


def _profiles(models: LoadedModels) -> dict[str, tuple[str, list[str] | UnsetType]]:
    """Return the task and the languages of each model, by its id."""
    found: dict[str, tuple[str, list[str] | UnsetType]] = {}
    for role, task in TASKS.items():
        loaded: Any = getattr(models, role)
        if loaded is not None:
            found.setdefault(loaded.profile.id, (task, list(getattr(loaded.profile, "languages", ())) or UNSET))
    return found
