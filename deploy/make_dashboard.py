"""Writes the Grafana dashboard: `python deploy/make_dashboard.py > deploy/grafana-dashboard.json`.

Each panel is a line of PANELS. A test checks that the file is up to date, and that the metrics in it exist.
"""

from __future__ import annotations

import json
from typing import Any

# (row, title, unit, (legend, query), ...)
PANELS: tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Sessions", "Sessions by kind", "short", (("{{kind}}", "sum by (kind) (antiphon_held_sessions)"),)),
    (
        "Sessions",
        "Load, of what the machine holds",
        "percentunit",
        (("{{instance}}", "antiphon_load"),),
    ),
    ("Sessions", "Room left", "short", (("{{kind}}", "sum by (kind) (antiphon_headroom_sessions)"),)),
    (
        "Sessions",
        "Refused a minute",
        "short",
        (("{{reason}}", "sum by (reason) (rate(antiphon_refused_total[1m])) * 60"),),
    ),
    (
        "Turns",
        "Voice to voice",
        "s",
        tuple(
            (f"p{q}", f"histogram_quantile(0.{q}, sum by (le) (rate(antiphon_voice_to_voice_seconds_bucket[5m])))")
            for q in (50, 95)
        ),
    ),
    (
        "Turns",
        "Stages of a turn, p95",
        "s",
        (
            (
                "{{stage}}",
                "histogram_quantile(0.95, sum by (le, stage) (rate(antiphon_turn_stage_seconds_bucket[5m])))",
            ),
        ),
    ),
    (
        "Turns",
        "Finals and partials, p95",
        "s",
        (("{{kind}}", "histogram_quantile(0.95, sum by (le, kind) (rate(antiphon_latency_seconds_bucket[5m])))"),),
    ),
    ("Turns", "Decisions a minute", "short", (("{{what}}", "sum by (what) (rate(antiphon_turns_total[5m])) * 60"),)),
    ("Models", "Red lights", "short", (("{{light}}", "max by (light) (antiphon_red)"),)),
    (
        "Models",
        "Wait in lanes, p95",
        "s",
        (
            (
                "{{lane}} {{urgency}}",
                "histogram_quantile(0.95, sum by (le, lane, urgency) (rate(antiphon_queue_seconds_bucket[5m])))",
            ),
        ),
    ),
    (
        "Models",
        "Steps of models, p95",
        "s",
        (("{{lane}}", "histogram_quantile(0.95, sum by (le, lane) (rate(antiphon_step_seconds_bucket[5m])))"),),
    ),
    (
        "Models",
        "Models alive",
        "short",
        (
            ("{{worker}}", "min by (worker) (antiphon_model_alive)"),
            ("language model's server", "1 - max(antiphon_language_model_away)"),
        ),
    ),
    (
        "Process",
        "Event loop lag, p95",
        "s",
        (
            (
                "{{instance}}",
                "histogram_quantile(0.95, sum by (le, instance) (rate(antiphon_event_loop_lag_seconds_bucket[5m])))",
            ),
        ),
    ),
    (
        "Process",
        "Memory",
        "bytes",
        (
            ("process {{instance}}", "process_resident_memory_bytes"),
            ("held for clients {{instance}}", "antiphon_held_bytes"),
            ("KV {{instance}}", "antiphon_kv_bytes"),
        ),
    ),
    ("Process", "Audio behind, the furthest session", "s", (("{{instance}}", "antiphon_backlog_seconds"),)),
    (
        "Process",
        "Connections",
        "short",
        (("{{instance}}", "antiphon_connections"), ("store failing {{instance}}", "antiphon_state_degraded")),
    ),
)
WIDTH, HEIGHT, A_ROW = 6, 8, 4


def dashboard() -> dict[str, Any]:
    """Return the dashboard in the form that Grafana imports. Grafana asks for the data source."""
    panels: list[dict[str, Any]] = []
    y, row = 0, ""
    for number, (of_row, title, unit, queries) in enumerate(PANELS):
        if of_row != row:
            y += HEIGHT if row else 0
            panels.append({"type": "row", "title": of_row, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "id": 100 + y})
            row, y = of_row, y + 1
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": title,
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "gridPos": {"x": WIDTH * (number % A_ROW), "y": y, "w": WIDTH, "h": HEIGHT},
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(65 + i), "expr": query, "legendFormat": legend, "exemplar": unit == "s"}
                    for i, (legend, query) in enumerate(queries)
                ],
            }
        )
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    return {
        "title": "antiphon",
        "uid": "antiphon",
        "tags": ["antiphon"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source]},
        "panels": panels,
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
