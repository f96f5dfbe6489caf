"""What is told of each turn of a conversation when it is over: metrics, and a trace where one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from antiphon.server.metrics import Metrics
from antiphon.settings import ServerSettings
from antiphon.tracing.turns import TurnTrace

if TYPE_CHECKING:
    from antiphon.tracing.otel import TurnExporter


class TurnReports:
    """Of one server. Raises SettingsError where traces are asked for and OpenTelemetry is not installed."""

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._exporter: TurnExporter | None = None
        if settings.otel_endpoint:
            from antiphon.tracing.otel import TurnExporter

            self._exporter = TurnExporter(settings.otel_endpoint)

    def ended(self, trace: TurnTrace, *, session: str, dialect: str, client: str) -> None:
        """Tell of a turn that is over. `client`: the `traceparent` that the session was opened with, or "".

        Does not wait.
        """
        self._metrics.turn(trace)
        if self._exporter is None:
            return
        from antiphon.tracing.otel import is_kept

        if is_kept(trace, self._settings.otel_objective_s, self._settings.otel_sample):
            self._exporter.send(trace, {"antiphon.session": session, "antiphon.dialect": dialect}, client)

    def close(self) -> None:
        """Send what waits. Blocks for seconds at most."""
        if self._exporter:
            self._exporter.close()
