"""Health, readiness and metrics: GET /health, /ready and /metrics. Probes and scrapers need no API key."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from antiphon import __version__
from antiphon.server.state import ServerState


async def health(request: Request) -> Response:
    """GET /health: 200 as long as the process serves, with what the MiniCPM-o front end reads of a worker."""
    state: ServerState = request.app.state.antiphon
    return JSONResponse({"status": "ok", "version": __version__} | worker_health(state))


async def ready(request: Request) -> Response:
    """GET /ready: 200 while new sessions are admitted, 503 while models load and while the server drains."""
    state: ServerState = request.app.state.antiphon
    if state.draining:
        return JSONResponse({"status": "draining", "sessions": state.num_sessions}, status_code=503)
    if state.models is None:
        return JSONResponse({"status": "loading"}, status_code=503)
    return JSONResponse({"status": "ready", "models": list(state.models.names), "sessions": state.num_sessions})


async def metrics(request: Request) -> Response:
    """GET /metrics: the server's metrics for Prometheus. Gauges of lanes and KV are read at this moment."""
    state: ServerState = request.app.state.antiphon
    return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def worker_health(state: ServerState) -> dict[str, Any]:
    """Return what the MiniCPM-o demo's front end asks a worker's /health for.

    `avg_inference_time_ms` is the mean of all lanes' jobs since the start. The session's id is left out where the
    server has API keys, since /health is open.
    """
    lanes = [lane.stats for lane in state.models.lanes] if state.models else []
    num_jobs, busy_s = sum(s.jobs for s in lanes), sum(s.busy_s for s in lanes)
    return {
        "worker_status": "loading" if state.models is None else "duplex_active" if state.live else "idle",
        "current_session_id": next((live.id for live in state.live if not state.settings.server.api_keys), None),
        "total_requests": state.num_admitted,
        "avg_inference_time_ms": round(busy_s / num_jobs * 1000, 2) if num_jobs else 0.0,
    }
