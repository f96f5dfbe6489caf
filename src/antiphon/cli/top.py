"""`antiphon top`: shows in the terminal what a server is doing, from its `/metrics`."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import httpx
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from antiphon.client.network import UNTRUSTED_HINT, is_untrusted, trusted
from antiphon.errors import RemoteError, SettingsError
from antiphon.settings import Settings

TIMEOUT_S = 5.0
# Kinds of `antiphon_latency_seconds` that are shown first, in the order of a turn; the other kinds follow.
STAGES = ("vad", "partial", "final", "first_token")
# Stages of `antiphon_turn_stage_seconds`: the parts of a turn's delay.
TURN_STAGES = ("endpoint", "final", "first_token", "first_sound")
# Gauges that are 1 while something is wrong, and the words for it in the first line.
STATES = (
    ("antiphon_draining", "draining"),
    ("antiphon_state_degraded", "store failing"),
    ("antiphon_language_model_away", "language model away"),
)
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Reading:
    """All samples of one reading of the metrics, by name and labels. `at_s`: its time, in monotonic seconds."""

    at_s: float
    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over the samples that have these labels; 0 if there are none."""
        return sum(v for (n, found), v in self.samples.items() if n == name and labels.items() <= dict(found).items())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Return the sum of a metric for each value of `label`, sorted by value."""
        out = defaultdict[str, float](float)
        for (n, found), value in self.samples.items():
            if n == name and labels.items() <= dict(found).items():
                out[dict(found).get(label, "")] += value
        return dict(sorted(out.items()))


def parsed(text: str, at_s: float) -> Reading:
    """Parse Prometheus's text format. Raises ValueError for any other text."""
    families = text_string_to_metric_families(text)
    samples = {(s.name, tuple(sorted(s.labels.items()))): float(s.value) for family in families for s in family.samples}
    return Reading(at_s, samples)


def quantile(before: Reading, now: Reading, name: str, q: float, **labels: str) -> float | None:
    """Return the quantile `q` of a histogram's observations between two readings, in seconds.

    If both readings are the same object, all observations since the server's start count. Interpolates between the
    bounds of the buckets. Returns None if there are no observations.
    """
    counts = now.by(f"{name}_bucket", "le", **labels)
    if before is not now:
        earlier = before.by(f"{name}_bucket", "le", **labels)
        counts = {le: count - earlier.get(le, 0.0) for le, count in counts.items()}
    buckets = sorted((inf if le == "+Inf" else float(le), count) for le, count in counts.items())
    if not buckets or buckets[-1][1] <= 0:
        return None
    wanted, low, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted:
            return low if bound == inf else low + (bound - low) * (wanted - below) / max(count - below, 1e-9)
        low, below = bound, count
    return low


def board(url: str, before: Reading, now: Reading) -> Group:
    """Lay out the events between two readings and the state at the second one.

    If both readings are the same object, the events since the server's start are shown.
    """
    parts = [_stages(before, now), _kinds(now), _lanes(before, now), _room(before, now)]
    if now.by("antiphon_telephone_calls", "carrier"):
        parts.append(_calls(before, now))
    if now.by("antiphon_remote_requests_total", "server"):
        parts.append(_servers(before, now))
    if now.by("antiphon_tool_calls_total", "server"):
        parts.append(_tool_servers(before, now))
    return Group(_head(url, before, now), *(part for table in parts for part in ("", table)))


def _head(url: str, before: Reading, now: Reading) -> str:
    sessions = {k: v for k, v in now.by("antiphon_sessions", "dialect").items() if v}
    states = [word for metric, word in STATES if now.value(metric)]
    refused = now.value("antiphon_refused_total") - (before.value("antiphon_refused_total") if before is not now else 0)
    by_dialect = ", ".join(f"{count:.0f} {dialect}" for dialect, count in sessions.items()) or "none"
    units = [_since(before, now, "antiphon_units_total", what=what) for what in ("done", "late")]
    counts = f"; units: {units[0]:.0f}, late: {units[1]:.0f}" if now.value("antiphon_units_total") else ""
    lost = [name for name, alive in now.by("antiphon_model_alive", "worker").items() if not alive]
    return "\n".join(
        [
            f"{url}  {', '.join(states + [f'{name} is lost' for name in lost]) or 'serves'}",
            f"sessions: {by_dialect}; connections: {now.value('antiphon_connections'):.0f}; refused: {refused:.0f}",
            f"load: {_load(now)}; headroom: {_lights(now)}{counts}",
        ]
    )


def _stages(before: Reading, now: Reading) -> Table:
    table = Table("stage", "times", "p50, ms", "p95, ms", box=None, pad_edge=False)
    for title, name, labels in (
        ("voice to voice", "antiphon_voice_to_voice_seconds", {}),
        *((f"  {stage}", "antiphon_turn_stage_seconds", {"stage": stage}) for stage in TURN_STAGES),
    ):
        if count := _since(before, now, f"{name}_count", **labels):
            table.add_row(title, f"{count:.0f}", *(_ms(quantile(before, now, name, q, **labels)) for q in (0.5, 0.95)))
    kinds = now.by("antiphon_latency_seconds_count", "kind")
    for kind in [*(k for k in STAGES if k in kinds), *(k for k in kinds if k not in STAGES)]:
        number = _since(before, now, "antiphon_latency_seconds_count", kind=kind)
        spread = [quantile(before, now, "antiphon_latency_seconds", q, kind=kind) for q in (0.5, 0.95)]
        table.add_row(kind, f"{number:.0f}", *map(_ms, spread))
    return table


def _load(now: Reading) -> str:
    loads = now.by("antiphon_load", "")
    return f"{loads['']:.0%}" if loads else "unknown, no certificate"


def _lights(now: Reading) -> str:
    red = [light for light, is_red in now.by("antiphon_red", "light").items() if is_red]
    return f"none, {', '.join(red)} red" if red else "no light is red"


def _kinds(now: Reading) -> Table:
    """List the sessions of each kind; with a certificate, also the number admitted now and the certified number."""
    table = Table("kind", "held", "more", "certified", box=None, pad_edge=False)
    known = [now.by(f"antiphon_{name}_sessions", "kind") for name in ("held", "headroom", "capacity")]
    for kind in known[0]:
        table.add_row(kind, *(f"{numbers[kind]:.0f}" if kind in numbers else "-" for numbers in known))
    return table


def _lanes(before: Reading, now: Reading) -> Table:
    head = ("lane", "urgency", "steps", "wait p95, ms", "step p95, ms", "waiting", "running", "oldest, s")
    table = Table(*head, box=None, pad_edge=False)
    for lane in sorted({*now.by("antiphon_queue_jobs", "lane"), *now.by("antiphon_step_seconds_count", "lane")}):
        state = [
            f"{now.value('antiphon_queue_jobs', lane=lane):.0f}",
            f"{now.value('antiphon_running_jobs', lane=lane):.0f}",
            f"{now.value('antiphon_queue_age_seconds', lane=lane):.1f}",
        ]
        urgencies = now.by("antiphon_step_seconds_count", "urgency", lane=lane) or {"": 0.0}
        for number, urgency in enumerate(urgencies):
            labels = {"lane": lane, "urgency": urgency}
            steps = _since(before, now, "antiphon_step_seconds_count", **labels)
            waits, takes = (
                quantile(before, now, f"antiphon_{name}_seconds", 0.95, **labels) for name in ("queue", "step")
            )
            shown = (lane, *state) if number == 0 else ("", "", "", "")
            table.add_row(shown[0], urgency, f"{steps:.0f}", _ms(waits), _ms(takes), *shown[1:])
    return table


def _servers(before: Reading, now: Reading) -> Table:
    """List the servers of models that run elsewhere."""
    head = ("server", "role", "requests", "failed", "again", "running", "mean, ms", "")
    table = Table(*head, box=None, pad_edge=False)
    for server in now.by("antiphon_remote_requests_total", "server"):
        for role in now.by("antiphon_remote_requests_total", "role", server=server):
            one = {"server": server, "role": role}
            counts = [
                f"{_since(before, now, f'antiphon_remote_{what}_total', **one):.0f}"
                for what in ("requests", "failures", "second_attempts")
            ]
            answers = _since(before, now, "antiphon_remote_seconds_count", **one)
            mean_s = _since(before, now, "antiphon_remote_seconds_sum", **one) / answers if answers else None
            running = f"{now.value('antiphon_remote_running', **one):.0f}"
            away = "away" if now.value("antiphon_remote_away", **one) else ""
            table.add_row(server, role, *counts, running, _ms(mean_s), away)
    return table


def _tool_servers(before: Reading, now: Reading) -> Table:
    """List the servers whose tools are functions of conversations."""
    table = Table("tool server", "tools", "calls", "failed", "running", "mean, ms", "", box=None, pad_edge=False)
    for server in now.by("antiphon_tool_calls_total", "server"):
        calls, failures = (
            _since(before, now, f"antiphon_tool_{what}_total", server=server) for what in ("calls", "failures")
        )
        mean_s = _since(before, now, "antiphon_tool_seconds_sum", server=server) / calls if calls else None
        tools, running = (now.value(f"antiphon_tool{what}", server=server) for what in ("s", "_calls_running"))
        away = "away" if now.value("antiphon_tool_server_away", server=server) else ""
        numbers = (f"{number:.0f}" for number in (tools, calls, failures, running))
        table.add_row(server, *numbers, _ms(mean_s), away)
    return table


def _calls(before: Reading, now: Reading) -> Table:
    """List the telephone calls of each carrier: those that go on, and what has ended the others."""
    table = Table("telephone", "in", "out", "ended", "by", box=None, pad_edge=False)
    for carrier in now.by("antiphon_telephone_calls", "carrier"):
        live = (now.value("antiphon_telephone_calls", carrier=carrier, direction=d) for d in ("incoming", "outgoing"))
        name = "antiphon_telephone_calls_ended_total"
        reasons = now.by(name, "reason", carrier=carrier)
        ended = {reason: _since(before, now, name, carrier=carrier, reason=reason) for reason in reasons}
        by = ", ".join(f"{reason} {count:.0f}" for reason, count in ended.items() if count)
        table.add_row(carrier, *(f"{count:.0f}" for count in live), f"{sum(ended.values()):.0f}", by)
    return table


def _room(before: Reading, now: Reading) -> Table:
    table = Table("room", "used", "of", box=None, pad_edge=False)
    table.add_row("memory for clients", *map(_mb, (now.value("antiphon_held_bytes"), _limit(now, "held"))))
    if now.value("antiphon_kv_limit_bytes"):
        table.add_row("KV", *map(_mb, (now.value("antiphon_kv_bytes"), _limit(now, "kv"))))
        table.add_row("KV, parked", _mb(now.value("antiphon_kv_parked_bytes")), "")
    table.add_row("process", _mb(now.value("process_resident_memory_bytes")), "")
    table.add_row("event loop, p95", f"{_ms(quantile(before, now, 'antiphon_event_loop_lag_seconds', 0.95))} ms", "")
    table.add_row("audio behind, most", f"{now.value('antiphon_backlog_seconds'):.1f} s", "")
    return table


def _since(before: Reading, now: Reading, name: str, **labels: str) -> float:
    return now.value(name, **labels) - (before.value(name, **labels) if before is not now else 0.0)


def _limit(now: Reading, what: str) -> float:
    return now.value(f"antiphon_{what}_limit_bytes")


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / (1 << 20):.0f} MB"


def top(
    settings: Settings,
    url: str,
    every_s: float,
    *,
    once: bool,
    ca: str | None = None,
    fingerprint: str | None = None,
) -> None:
    """Show a server's board and refresh it every `every_s` seconds until interrupted.

    `once`: print the board since the server's start, and return. The key for `/metrics`, if the server needs one, is
    the setting `metrics_key`. `ca` and `fingerprint` are for https:// (see `trusted`). Raises RemoteError if the server
    cannot be reached or is not antiphon, and SettingsError.
    """
    console = Console(soft_wrap=True)
    key = settings.server.metrics_key
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = url.rstrip("/").removesuffix("/metrics")
    try:
        tls = trusted(url, ca, fingerprint) or True
    except ValueError as error:
        raise SettingsError(f"--ca: {error}") from None
    with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False, verify=tls) as client:
        before = _read(client)
        if once:
            console.print(board(url, before, before))
            return
        with Live(board(url, before, before), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                now = _read(client)
                live.update(board(url, before, now), refresh=True)
                before = now


def _read(client: httpx.Client) -> Reading:
    try:
        answer = client.get("/metrics").raise_for_status()
        found = parsed(answer.text, time.monotonic())
    except httpx.HTTPStatusError as error:
        message = f"{client.base_url} answers {error.response.status_code} for /metrics"
        if error.response.status_code == 401:
            wants = "needs another key than" if "authorization" in client.headers else "needs a key:"
            message += f": it {wants} ANTIPHON_METRICS_KEY"
        raise RemoteError(message) from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        why = UNTRUSTED_HINT if is_untrusted(error) else str(error)
        raise RemoteError(f"the metrics of {client.base_url} cannot be read: {why}") from None
    if not any(name == "antiphon_connections" for name, _ in found.samples):
        raise RemoteError(f"{client.base_url} is not an antiphon server")
    return found
