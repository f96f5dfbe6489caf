"""Health and readiness, and what the MiniCPM-o front end asks a worker."""

from __future__ import annotations

from typing import Any

from antiphon.server.state import ServerState


def worker_health(state: ServerState) -> dict[str, Any]:
    """What the MiniCPM-o demo's front end asks a worker's /health for."""
    steps = [lane.stats for lane in state.models.lanes] if state.models else []
    jobs, busy_s = sum(s.jobs for s in steps), sum(s.busy_s for s in steps)
    return {
        "worker_status": "loading" if state.models is None else "duplex_active" if state.live else "idle",
        # /health is asked without a key.
        "current_session_id": next((live.id for live in state.live if not state.settings.server.api_keys), None),
        "total_requests": state.num_admitted,
        "avg_inference_time_ms": round(busy_s / jobs * 1000, 2) if jobs else 0.0,
    }
