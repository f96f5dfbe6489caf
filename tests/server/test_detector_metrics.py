"""What turn detectors did not judge, in the metrics."""

from __future__ import annotations

from prometheus_client import generate_latest

from antiphon.pipelines.turn_blend import DetectorFailures
from antiphon.server.metrics import Metrics


def test_failures_of_detectors_are_counted_by_name_and_reason() -> None:
    metrics, failures = Metrics(), DetectorFailures()
    metrics.watch((), lambda: 0.0, detector_failures=failures.counts)
    failures.add("turn-1-mini", "late")
    failures.add("turn-1-mini", "late")
    failures.add("host:1", "error", "gone")
    shown = generate_latest(metrics.registry).decode()
    assert 'antiphon_turn_detector_failures_total{detector="turn-1-mini",reason="late"} 2.0' in shown
    assert 'antiphon_turn_detector_failures_total{detector="host:1",reason="error"} 1.0' in shown
