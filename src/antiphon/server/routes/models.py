"""The loaded models in OpenAI's shape: GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from antiphon.server.body import json_response
from antiphon.server.errors import error_response
from antiphon.server.state import ServerState


class ModelEntry(msgspec.Struct):
    """One model. `created` is when the server started, in Unix seconds.

    `video` is only there for the model that answers about a video: whether it sees pictures, or is given the text that
    was read on them. `languages` is only there for the model that transcribes: ISO 639-1.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    video: Literal["pictures", "text"] | UnsetType = UNSET
    languages: tuple[str, ...] | UnsetType = UNSET


class ModelList(msgspec.Struct):
    """The loaded models, and `default` last."""

    object: Literal["list"]
    data: list[ModelEntry]


async def models(request: Request) -> Response:
    """GET /v1/models: the loaded models and `default`; an empty list while they load."""
    return json_response(ModelList("list", _entries(request.app.state.antiphon)))


async def model(request: Request) -> Response:
    """GET /v1/models/{id}: one of the same entries; 404 (`model_not_found`) for any other id."""
    name = request.path_params["id"]
    for entry in _entries(request.app.state.antiphon):
        if entry.id == name:
            return json_response(entry)
    return error_response(404, f"The model '{name}' does not exist.", code="model_not_found", param="model")


def _entries(state: ServerState) -> list[ModelEntry]:
    if state.models is None:
        return []
    video_model, transcriber = state.models.video_model, state.models.transcriber
    answers, hears = video_model.profile if video_model else None, transcriber.profile if transcriber else None
    return [
        ModelEntry(
            name,
            "model",
            state.started_s,
            "antiphon",
            answers.sees if answers and name == answers.id else UNSET,
            hears.languages if hears and name == hears.id else UNSET,
        )
        for name in (*state.models.names, "default")
    ]
