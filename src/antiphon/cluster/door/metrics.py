"""What a door counts, for `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# Pauses that a client hears: from a local restart to a host that nobody has reported dead.
PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)


class DoorMetrics:
    """The counters of one door, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.connections = Gauge("antiphon_door_connections", "WebSockets of clients that are open", registry=registry)
        self.pauses_s = Histogram(
            "antiphon_door_pause_seconds",
            "From the loss of a host until its session goes on",
            buckets=PAUSES_S,
            registry=registry,
        )
        self.lost = Counter("antiphon_door_lost", "Sessions that no host could resume", registry=registry)

    def exposed(self) -> bytes:
        """Return all of them in Prometheus's text format."""
        return generate_latest(self._registry)
