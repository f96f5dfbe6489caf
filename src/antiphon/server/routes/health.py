"""Health, readiness and metrics: GET /health, /ready and /metrics. Probes and scrapers need no API key."""

from __future__ import annotations

import hmac
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from starlette.requests import Request
from starlette.responses import Response

from antiphon import __version__
from antiphon.admission.certificate import Kind
from antiphon.errors import Unauthorized
from antiphon.loading.loaded import LoadedModels
from antiphon.server.http.auth import bearer
from antiphon.server.http.body import json_response
from antiphon.server.state import ServerState


class Health(msgspec.Struct):
    """The body of /health: the status, and the fields that the MiniCPM-o demo's front end reads from a worker."""

    # Always "ok", since only a process that serves responds.
    status: Literal["ok"]
    # The version of antiphon.
    version: str
    # "duplex_active" while any session is live.
    worker_status: Literal["loading", "duplex_active", "idle"]
    # Always None, since /health requires no key.
    current_session_id: None
    # Number of sessions and requests admitted since the start.
    total_requests: int
    # Mean duration of a job over all lanes since the start, in milliseconds.
    avg_inference_time_ms: float


class Readiness(msgspec.Struct):
    """The body of /ready. Fields that are unknown, or have nothing to report, are left out."""

    # "ready" is sent with status 200, all other values with 503.
    status: Literal["ready", "loading", "draining", "model_lost"]
    # The ids of the loaded models.
    models: list[str] | UnsetType = UNSET
    # The kinds of sessions that the models serve.
    serves: tuple[Kind, ...] | UnsetType = UNSET
    # Number of places taken.
    sessions: int | UnsetType = UNSET
    # The lanes and engines that have stopped computing, each with the reason.
    lost: dict[str, str] | UnsetType = UNSET
    # The models on other servers that do not respond, each with the reason.
    degraded: dict[str, str] | UnsetType = UNSET
    # Present and true if turns and files can have labels of their voices.
    labels_speakers: bool | UnsetType = UNSET


async def health(request: Request) -> Response:
    """GET /health: return 200 while the process serves."""
    return json_response(_health(request.app.state.antiphon))


async def ready(request: Request) -> Response:
    """GET /ready: return 200 while new sessions are admitted, and 503 while models load, while the server drains, or
    after a model is lost.

    A model on another server that does not respond is not a reason for 503. Running sessions, captions and speech do
    not need that model, and all hosts behind a load balancer would become unready at the same time.
    """
    state: ServerState = request.app.state.antiphon
    if state.admission.draining:
        return json_response(Readiness("draining", sessions=state.admission.num_sessions), 503)
    if state.models is None:
        return json_response(Readiness("loading"), 503)
    if lost := state.models.lost():
        names = list(state.models.names)
        return json_response(Readiness("model_lost", names, sessions=state.admission.num_sessions, lost=lost), 503)
    models = state.models
    degraded = models.degraded() or UNSET
    names, kinds = list(models.names), served_kinds(models)
    labels: bool | UnsetType = True if models.speaker_model and models.speaker_model.profile.clustering else UNSET
    sessions = state.admission.num_sessions
    return json_response(Readiness("ready", names, kinds, sessions, degraded=degraded, labels_speakers=labels))


def served_kinds(models: LoadedModels) -> tuple[Kind, ...]:
    """Return the kinds of sessions that these models serve, in the order of the certificate's kinds."""
    hears = models.transcriber is not None and models.vad is not None
    talker = models.for_conversations
    has: dict[Kind, bool] = {
        "captions": hears,
        "conversation": talker is not None,
        "speech": models.synthesizer is not None,
        "video": models.for_video is not None,
        "duplex": talker is not None,
        "native": talker is not None and talker.native is not None,
    }
    return tuple(kind for kind, is_there in has.items() if is_there)


async def metrics(request: Request) -> Response:
    """GET /metrics: return the server's metrics for Prometheus. Gauges of lanes and KV are read at this moment.

    Raises Unauthorized if `--metrics-key` is set and the request does not have that key.
    """
    state: ServerState = request.app.state.antiphon
    key = state.settings.server.metrics_key
    if key and not hmac.compare_digest(key.encode(), (bearer(request.headers) or "").encode()):
        raise Unauthorized("the key of the metrics is missing or unknown")
    if "application/openmetrics-text" in request.headers.get("accept", ""):
        return Response(state.metrics.text(openmetrics=True), media_type=OPENMETRICS)
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _health(state: ServerState) -> Health:
    lanes = [lane.stats for lane in state.models.lanes] if state.models else []
    num_jobs, busy_s = sum(s.jobs for s in lanes), sum(s.busy_s for s in lanes)
    return Health(
        status="ok",
        version=__version__,
        worker_status="loading" if state.models is None else "duplex_active" if state.sessions.live else "idle",
        current_session_id=None,
        total_requests=state.admission.num_admitted,
        avg_inference_time_ms=round(busy_s / num_jobs * 1000, 2) if num_jobs else 0.0,
    )
