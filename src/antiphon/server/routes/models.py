"""The loaded models in OpenAI's shape: GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon.server.errors import error_response
from antiphon.server.state import ServerState


async def models(request: Request) -> Response:
    """GET /v1/models: the loaded models and `default`; an empty list while they load."""
    return JSONResponse({"object": "list", "data": _entries(request.app.state.antiphon)})


async def model(request: Request) -> Response:
    """GET /v1/models/{id}: one of the same entries; 404 (`model_not_found`) for any other id."""
    name = request.path_params["id"]
    for entry in _entries(request.app.state.antiphon):
        if entry["id"] == name:
            return JSONResponse(entry)
    return error_response(404, f"The model '{name}' does not exist.", code="model_not_found", param="model")


def _entries(state: ServerState) -> list[dict[str, object]]:
    if state.models is None:
        return []
    entries: list[dict[str, object]] = [
        {"id": name, "object": "model", "created": state.started_s, "owned_by": "antiphon"}
        for name in (*state.models.names, "default")
    ]
    if video_model := state.models.video_model:
        # Whether the model that answers about a video sees pictures, or is given the text that was read on them.
        profile = video_model.profile
        entries = [e | ({"video": profile.sees} if e["id"] == profile.id else {}) for e in entries]
    return entries
