"""The metrics of one server, in Prometheus' text format. Each server has its own registry, since tests run several."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_latest
from prometheus_client.registry import Collector

from antiphon.admission.certificate import KINDS, Kind
from antiphon.admission.headroom import Headroom
from antiphon.contracts import LanguageModel, Urgency
from antiphon.engine.lane import Lane
from antiphon.loading.loaded import ModelWorker
from antiphon.recording.tracing.turns import TurnTrace
from antiphon.remote.mcp.servers import McpServers
from antiphon.remote.pool import Pool
from antiphon.roles import shown_role
from antiphon.server.memory import MemoryLedger
from antiphon.sessions.conversation.native_units import UnitDone
from antiphon.settings import ServerSettings

if TYPE_CHECKING:
    from antiphon.recording.tracing.otel import TurnExporter

_LATENCY_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0)
_LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# The metrics of telephone calls, by the names in their samples. A door has them too.
CALL_METRICS = (
    "antiphon_refused_total",
    "antiphon_rtp_packets_total",
    "antiphon_sip_provider_away",
    "antiphon_telephone_calls",
    "antiphon_telephone_calls_ended_total",
)
# Maximum number of recent measurements kept for each name.
MOST_RECENT = 2048


@dataclass(frozen=True, slots=True)
class Evidence:
    """The measurements that indicate load: `enough` within `long_s` seconds, or two within `short_s` seconds."""

    long_s: float
    short_s: float
    enough: int = 20


class Recent:
    """Recent measurements by name, each with its time. Histograms, in contrast, only accumulate.

    Values may be added from any thread. `clock` returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._values: dict[str, deque[tuple[float, float]]] = {}

    def add(self, name: str, value: float) -> None:
        """Add one measurement with the current time."""
        self._values.setdefault(name, deque(maxlen=MOST_RECENT)).append((self._clock(), value))

    def p95(self, name: str, within_s: float) -> float:
        """Return the 95th percentile of the values of the last `within_s` seconds; 0 without any."""
        found = sorted(value for _, value in self._within(name, within_s))
        return found[int(0.95 * (len(found) - 1))] if found else 0.0

    def sustained(self, name: str, evidence: Evidence) -> float:
        """Return a value that enough measurements have reached to indicate load instead of chance.

        The value is the 95th percentile over `long_s`, if that time has `enough` values, or the second largest value
        over `short_s`, whichever is larger.
        """
        late = sorted(value for _, value in self._within(name, evidence.short_s))[-2:]
        second = late[0] if len(late) == 2 else 0.0
        enough = len(self._within(name, evidence.long_s)) >= evidence.enough
        return max(second, self.p95(name, evidence.long_s) if enough else 0.0)

    def falls_s(self, name: str, evidence: Evidence, limit: float) -> float:
        """Return the seconds until `sustained` falls below `limit`, assuming that no further measurements arrive."""
        now_s, values = self._clock(), self._within(name, evidence.long_s)
        late = [at_s for at_s, value in values if value >= limit]
        spared = int(0.05 * len(values)) if len(values) >= evidence.enough else len(late)
        # `sustained` falls below the limit after two events: the second newest late value leaves the short window, and
        # the newest late value below the top 5 % leaves the long window.
        ends = [at_s + evidence.short_s for at_s in late[-2:-1]]
        ends += [at_s + evidence.long_s for at_s in late[: len(late) - spared]]
        return max(0.0, max(ends, default=now_s) - now_s)

    def _within(self, name: str, within_s: float) -> list[tuple[float, float]]:
        since_s = self._clock() - within_s
        return [pair for pair in tuple(self._values.get(name, ())) if pair[0] >= since_s]


class Metrics:
    """The counters, gauges and histograms of one server.

    All names begin with `antiphon_`, except those of the process (`process_resident_memory_bytes`, `process_open_fds`,
    ...), which exist only on Linux. Metrics may be updated from any thread.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.recent = Recent()
        ProcessCollector(registry=self.registry)
        self.sessions = Gauge("antiphon_sessions", "Live sessions.", ["dialect"], registry=self.registry)
        self.sessions_started = Counter(
            "antiphon_sessions_started", "Sessions begun.", ["dialect"], registry=self.registry
        )
        self.refused = Counter("antiphon_refused", "Sessions and requests refused.", ["reason"], registry=self.registry)
        self.audio_s = Counter(
            "antiphon_audio_seconds", "Audio received, in seconds.", ["kind"], registry=self.registry
        )
        self.latency_s = Histogram(
            "antiphon_latency_seconds",
            "partial: one partial decode. final: end of turn decided to transcript. vad: one chunk judged. "
            "file: a file's transcript. first_token: a chat request to its first token. unit: a native model's unit, "
            "from its time to its result.",
            ["kind"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.step_s = Histogram(
            "antiphon_step_seconds",
            "One batch in a model's lane.",
            ["lane", "urgency"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.queue_s = Histogram(
            "antiphon_queue_seconds",
            "Wait in a model's lane.",
            ["lane", "urgency"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.turns = Counter(
            "antiphon_turns",
            "preemptive_begun, preemptive_used, preemptive_dropped: responses begun before a turn had surely ended. "
            "preemptive_dropped_tokens: tokens of the dropped ones. ducks: responses paused for speech over them. "
            "ducks_without_interruption: paused responses that continued. "
            "false_starts: responses that began before the user had finished.",
            ["what"],
            registry=self.registry,
        )
        self.units = Counter(
            "antiphon_units",
            "Units of native models. done: their result came. late: it came more than a unit after the unit's time, "
            "which is when its audio was complete, or when silence took the place of audio that had not arrived. "
            "silent: silence took that place. early: the audio came more than half a unit ahead of its time.",
            ["what"],
            registry=self.registry,
        )
        self.voice_to_voice_s = Histogram(
            "antiphon_voice_to_voice_seconds",
            "From the end of the user's speech to the first audio of the answer.",
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.stage_s = Histogram(
            "antiphon_turn_stage_seconds",
            "endpoint: from the end of speech to the decision that it is over. final: to its transcript. first_token, "
            "first_sound: to those of the answer. heard: to its playback. Each begins where the previous one ends.",
            ["stage"],
            buckets=_LATENCY_S,
            registry=self.registry,
        )
        self.connections = Gauge("antiphon_connections", "Open connections.", registry=self.registry)
        self.sip_provider_away = Gauge(
            "antiphon_sip_provider_away",
            "1 while a registration at the SIP provider fails, so that no calls arrive.",
            registry=self.registry,
        )
        self.rtp_packets = Counter(
            "antiphon_rtp_packets",
            "Packets of callers over RTP that were lost, late, or foreign (of another address than agreed).",
            ["what"],
            registry=self.registry,
        )
        self.listener_connections = Gauge(
            "antiphon_listener_connections",
            "Open connections of protocols that are not HTTP.",
            ["listener"],
            registry=self.registry,
        )
        self.telephone_calls = Gauge(
            "antiphon_telephone_calls", "Live telephone calls.", ["carrier", "direction"], registry=self.registry
        )
        self.telephone_calls_ended = Counter(
            "antiphon_telephone_calls_ended",
            "Telephone calls that have ended, by what ended them.",
            ["carrier", "reason"],
            registry=self.registry,
        )
        self.loop_lag_s = Histogram(
            "antiphon_event_loop_lag_seconds",
            "Lag of the event loop, measured 20 times a second.",
            buckets=_LAG_S,
            registry=self.registry,
        )
        self.drained = Gauge("antiphon_draining", "1 while the server drains.", registry=self.registry)
        self.state_degraded = Gauge(
            "antiphon_state_degraded", "1 while conversations cannot be stored (`--state`).", registry=self.registry
        )

    def watch_memory(self, memory: MemoryLedger) -> None:
        """Report the memory held for clients, which each request of /metrics reads. Call it once."""
        self.registry.register(_Memory(memory))

    def watch_headroom(self, headroom: Headroom, held: Mapping[Kind, int]) -> None:
        """Report load, capacity, room and overload signals, which each request of /metrics reads. Call it once."""
        self.registry.register(_Headroom(headroom, held))

    def watch_tool_servers(self, servers: McpServers) -> None:
        """Report the tool servers, which each request of /metrics reads. Call it once."""
        self.registry.register(_ToolServers(servers))

    def watch(
        self,
        lanes: Sequence[Lane[Any, Any]],
        backlog_s: Callable[[], float],
        language: LanguageModel | None = None,
        workers: Mapping[str, ModelWorker] | None = None,
        detector_failures: Mapping[tuple[str, str], int] | None = None,
        pools: Sequence[Pool[Any]] = (),
    ) -> None:
        """Report lanes, workers, other servers, the longest backlog and the KV, read at each request of /metrics.

        `backlog_s` returns the longest backlog of all sessions, in seconds of audio. Call this once, when the models
        are loaded.
        """
        self.registry.register(_Lanes(lanes, backlog_s))
        self.registry.register(_Workers(workers or {}))
        if detector_failures is not None:
            self.registry.register(_DetectorFailures(detector_failures))
        if pools:
            self.registry.register(_Servers(pools))
        if language:
            self.registry.register(_Kv(language))

    def step(self, lane: str, priority: int, waited_s: float, took_s: float) -> None:
        """Record the waiting time and the duration of one step of a lane. Lanes call it in a worker's thread.

        `priority` is the value of a `contracts.Urgency`.
        """
        if priority == Urgency.FINAL:
            self.recent.add("wait", waited_s)
        urgency = Urgency(priority).name.lower()
        self.step_s.labels(lane, urgency).observe(took_s)
        self.queue_s.labels(lane, urgency).observe(waited_s)

    def measure(self, kind: str, seconds: float) -> None:
        """Record one latency of `antiphon_latency_seconds`; `kind` becomes its label."""
        self.latency_s.labels(kind).observe(seconds)
        self.recent.add(kind, seconds)

    def turn(self, trace: TurnTrace) -> None:
        """Record a turn that has ended. Its trace id becomes the exemplar."""
        exemplar = {"trace_id": trace.trace_id}
        if (took_s := trace.voice_to_voice_s) is not None:
            self.voice_to_voice_s.observe(took_s, exemplar)
        for stage, begin_s, end_s in trace.stages():
            self.stage_s.labels(stage).observe(end_s - begin_s, exemplar)

    def lagged(self, seconds: float) -> None:
        """Record the lag of the event loop. May be called from any thread."""
        self.loop_lag_s.observe(seconds)
        self.recent.add("loop", seconds)

    def count(self, what: str, number: int) -> None:
        """Add `number` to the counter of `antiphon_turns` that has the label `what`."""
        self.turns.labels(what).inc(number)

    def unit(self, unit: UnitDone) -> None:
        """Count a unit of a native model whose result has come, and keep its delay for the signal `units`."""
        for what in unit.counts:
            self.units.labels(what).inc()
        self.recent.add("units", unit.delay_s / unit.unit_s)

    def text(self, *, openmetrics: bool = False) -> bytes:
        """Return all metrics as /metrics sends them, in UTF-8.

        The format is version 0.0.4 of Prometheus' text format. If `openmetrics`, it is OpenMetrics, which has
        exemplars.
        """
        if openmetrics:
            found: bytes = openmetrics_latest(self.registry)  # type: ignore[no-untyped-call]
            return found
        return generate_latest(self.registry)

    def of_calls(self) -> bytes:
        """Return the metrics of telephone calls, as `text` does."""
        return generate_latest(self.registry.restricted_registry(CALL_METRICS))


class TurnReports:
    """Reports each turn that has ended: in the metrics, and as a trace if `--otel-endpoint` is set.

    Raises SettingsError if traces are enabled and OpenTelemetry is not installed.
    """

    def __init__(self, settings: ServerSettings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._exporter: TurnExporter | None = None
        if settings.otel_endpoint:
            from antiphon.recording.tracing.otel import TurnExporter

            self._exporter = TurnExporter(settings.otel_endpoint)

    def ended(self, trace: TurnTrace, *, session: str, dialect: str, client: str) -> None:
        """Report a turn that has ended. `client` is the `traceparent` that opened the session, or "". Does not wait."""
        self._metrics.turn(trace)
        if self._exporter is None:
            return
        from antiphon.recording.tracing.otel import is_kept

        if is_kept(trace, self._settings.otel_objective_s, self._settings.otel_sample):
            self._exporter.send(trace, {"antiphon.session": session, "antiphon.dialect": dialect}, client)

    def close(self) -> None:
        """Send the remaining traces. Blocks for a few seconds at most."""
        if self._exporter:
            self._exporter.close()


class _Kv(Collector):
    def __init__(self, language: LanguageModel) -> None:
        self._language = language

    def collect(self) -> Iterable[Metric]:
        load = self._language.load()
        for name, help, value in (
            ("antiphon_kv_conversations", "Conversations with KV, including parked ones.", load.conversations),
            ("antiphon_kv_generating", "Conversations being answered.", load.answering),
            ("antiphon_kv_parked", "Conversations whose KV is parked.", load.parked),
            ("antiphon_kv_bytes", "KV in memory, including that of closed conversations.", load.kv_bytes),
            ("antiphon_kv_limit_bytes", "Maximum KV in memory.", load.kv_total_bytes),
            ("antiphon_kv_parked_bytes", "KV that is parked.", load.parked_bytes),
            ("antiphon_language_model_away", "1 while the language model's server does not answer.", load.is_away),
        ):
            yield GaugeMetricFamily(name, help, value=value)


class _Servers(Collector):
    def __init__(self, pools: Sequence[Pool[Any]]) -> None:
        self._pools = pools

    def collect(self) -> Iterable[Metric]:
        name, labels = "antiphon_remote", ["role", "server"]
        requests = CounterMetricFamily(f"{name}_requests", "Requests to another server.", labels=labels)
        failures = CounterMetricFamily(f"{name}_failures", "Requests that failed there.", labels=labels)
        again = CounterMetricFamily(
            f"{name}_second_attempts", "Requests that replaced a late or failed one.", labels=labels
        )
        running = GaugeMetricFamily(f"{name}_running", "Requests under way.", labels=labels)
        away = GaugeMetricFamily(f"{name}_away", "1 while the server does not answer.", labels=labels)
        times = SummaryMetricFamily(
            f"{name}_seconds", "Seconds from a request to the beginning of its answer.", labels=labels
        )
        for pool in self._pools:
            for one in pool.all:
                found = [shown_role(pool.role), one.host]
                requests.add_metric(found, one.requests)
                failures.add_metric(found, one.failures)
                again.add_metric(found, one.second_attempts)
                running.add_metric(found, one.running)
                away.add_metric(found, float(one.is_away))
                times.add_metric(found, one.times.count, one.times.sum_s)
        yield from (requests, failures, again, running, away, times)


class _ToolServers(Collector):
    def __init__(self, servers: McpServers) -> None:
        self._servers = servers

    def collect(self) -> Iterable[Metric]:
        name, labels = "antiphon_tool", ["server"]
        tools = GaugeMetricFamily(f"{name}s", "Tools that a tool server offers.", labels=labels)
        away = GaugeMetricFamily(f"{name}_server_away", "1 while a tool server is not connected.", labels=labels)
        calls = CounterMetricFamily(f"{name}_calls", "Calls of a tool server's tools.", labels=labels)
        failures = CounterMetricFamily(f"{name}_failures", "Calls that failed.", labels=labels)
        running = GaugeMetricFamily(f"{name}_calls_running", "Calls under way.", labels=labels)
        times = SummaryMetricFamily(f"{name}_seconds", "Seconds from a call to its result.", labels=labels)
        for label, connection in self._servers.connections.items():
            tools.add_metric([label], len(connection.tools))
            away.add_metric([label], float(bool(connection.problem)))
        for label, counts in self._servers.counts.items():
            calls.add_metric([label], counts.calls)
            failures.add_metric([label], counts.failures)
            running.add_metric([label], counts.running)
            times.add_metric([label], counts.calls, counts.sum_s)
        yield from (tools, away, calls, failures, running, times)


class _Headroom(Collector):
    def __init__(self, headroom: Headroom, held: Mapping[Kind, int]) -> None:
        self._headroom, self._held = headroom, held

    def collect(self) -> Iterable[Metric]:
        held, certificate = self._held, self._headroom.certificate
        load = GaugeMetricFamily(
            "antiphon_load", "Fraction of the machine's capacity that is taken; only with a certificate."
        )
        if (taken := self._headroom.load(held)) is not None:
            load.add_metric([], taken)
        live = GaugeMetricFamily("antiphon_held_sessions", "Places taken, by kind.", labels=["kind"])
        room = GaugeMetricFamily(
            "antiphon_headroom_sessions", "Sessions of a certified kind that would be admitted.", labels=["kind"]
        )
        capacity = GaugeMetricFamily("antiphon_capacity_sessions", "Certified sessions of a kind.", labels=["kind"])
        for kind in KINDS:
            live.add_metric([kind], held.get(kind, 0))
            if (more := self._headroom.room(kind, held)) is not None:
                room.add_metric([kind], more)
            if certificate and (found := certificate.kinds.get(kind)):
                capacity.add_metric([kind], found.sessions)
        red = GaugeMetricFamily("antiphon_red", "1 while a signal says that there is no headroom.", labels=["light"])
        for light, is_red in self._headroom.overload.states().items():
            red.add_metric([light], float(is_red))
        yield from (load, live, room, capacity, red)


class _Memory(Collector):
    def __init__(self, memory: MemoryLedger) -> None:
        self._memory = memory

    def collect(self) -> Iterable[Metric]:
        held, limit = "antiphon_held_bytes", "antiphon_held_limit_bytes"
        yield GaugeMetricFamily(held, "Memory held for clients.", value=self._memory.num_bytes)
        yield GaugeMetricFamily(limit, "Maximum memory held for clients.", value=self._memory.limit_bytes)
        refused = CounterMetricFamily(
            "antiphon_held_refused", "Refusals for lack of memory, by limit.", labels=["scope"]
        )
        for scope, count in self._memory.num_refused.items():
            refused.add_metric([scope], count)
        yield refused


class _Workers(Collector):
    def __init__(self, workers: Mapping[str, ModelWorker]) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        alive = GaugeMetricFamily("antiphon_model_alive", "0 after a model is lost.", labels=["worker"])
        busy = GaugeMetricFamily("antiphon_model_busy_seconds", "Age of the step under way.", labels=["worker"])
        for name, worker in self._workers.items():
            alive.add_metric([name], 0 if worker.lost else 1)
            busy.add_metric([name], worker.busy_s())
        return (alive, busy)


class _DetectorFailures(Collector):
    def __init__(self, counts: Mapping[tuple[str, str], int]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        failures = CounterMetricFamily(
            "antiphon_turn_detector_failures",
            "Judgements of pauses and overlaps that a detector did not make. late: or made after 50 ms.",
            labels=["detector", "reason"],
        )
        for (name, reason), count in list(self._counts.items()):
            failures.add_metric([name, reason], count)
        return (failures,)


class _Lanes(Collector):
    def __init__(self, lanes: Sequence[Lane[Any, Any]], backlog_s: Callable[[], float]) -> None:
        self._lanes = lanes
        self._backlog_s = backlog_s

    def collect(self) -> Iterable[Metric]:
        depth = GaugeMetricFamily("antiphon_queue_jobs", "Jobs waiting in a model's lane.", labels=["lane"])
        running = GaugeMetricFamily("antiphon_running_jobs", "Jobs in a model's workers.", labels=["lane"])
        restarts = CounterMetricFamily("antiphon_lane_restarts", "Workers that were restarted.", labels=["lane"])
        age = GaugeMetricFamily("antiphon_queue_age_seconds", "Age of the oldest waiting job.", labels=["lane"])
        for lane in self._lanes:
            depth.add_metric([lane.name], lane.depth)
            running.add_metric([lane.name], lane.running)
            age.add_metric([lane.name], lane.oldest_age_s())
            restarts.add_metric([lane.name], lane.stats.restarts)
        backlog = GaugeMetricFamily("antiphon_backlog_seconds", "The longest backlog of a session.")
        backlog.add_metric([], self._backlog_s())
        return (depth, running, age, restarts, backlog)
