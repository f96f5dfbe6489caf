"""A service of many hosts on a virtual clock: callers arrive, are placed, refused, moved and lost.

Each host makes its decisions with the real code (`admission.headroom.Headroom`), and so do doors
(`cluster.door.hosts.Hosts`). `cluster.autoscaling.Autoscaler` sets the number of hosts. Only the behaviour of callers
and the start-up time of hosts are simulated. Everything else takes no time, unless stated here.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.admission.certificate import Certificate, CertifiedKind, Kind, Objective
from antiphon.admission.headroom import Headroom
from antiphon.cluster.autoscaling import Autoscaler
from antiphon.cluster.door.hosts import Hosts
from antiphon.errors import Refused
from antiphon.store.sessions import Host

KIND: Kind = "conversation"
# Number of times that a refused caller tries again. It waits between one and two times Retry-After.
COMES_AGAIN = 3
# Seconds after which the session of a failed host is lost unless another host has taken it up, and the delays, in
# seconds, after which its client tries to resume.
GRACE_S, RESUME_BACKOFF_S = 120.0, (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
# Seconds between two decisions of the autoscaler.
SCALE_EVERY_S = 5.0


def certificate_of(sessions: int) -> Certificate:
    """Return a certificate for `places` conversations."""
    kinds = {KIND: CertifiedKind(sessions, Objective(2.0, ""), ())}
    return Certificate(1, "", {}, (), {}, kinds, mixed=1.0)


@dataclass(slots=True, eq=False)
class SimHost:
    """One host. It takes up moved sessions one after another."""

    # The host's address, which identifies it.
    url: str
    # The number of its zone.
    zone: int
    # Decides whether another session is admitted.
    headroom: Headroom
    # Number of open sessions, in the form that `headroom` takes.
    held: dict[Kind, int] = field(default_factory=lambda: {KIND: 0})
    # Ids of the open sessions.
    sessions: set[int] = field(default_factory=set)
    # True while the host runs.
    is_up: bool = True
    # True if the host releases its sessions before it stops.
    is_draining: bool = False
    # The time at which it will have prefilled all sessions that it took up.
    busy_until_s: float = 0.0

    @property
    def load(self) -> float:
        load = self.headroom.load(self.held)
        assert load is not None, "all hosts have a certificate"
        return load

    def admit(self, session: int, now_s: float, *, resumes: bool = False) -> bool:
        """Admit a session. Raises Refused if there is no headroom."""
        if not self.is_up or self.is_draining:
            return False
        try:
            self.headroom.admit(KIND, self.held, now_s, resumes=resumes)
        except Refused:
            return False
        self.held[KIND] += 1
        self.sessions.add(session)
        return True

    def leave(self, session: int) -> None:
        self.sessions.remove(session)
        self.held[KIND] -= 1


@dataclass(slots=True)
class Counts:
    """What happened to callers, and to the number of hosts."""

    # Callers that arrived.
    came: int = 0
    # Callers that were admitted, at the first try or later.
    taken: int = 0
    # Callers that were refused at the first try.
    refused_once: int = 0
    # Callers that gave up.
    turned_away: int = 0
    # Sessions that no host took up in time.
    lost: int = 0
    # The highest load of a single host at any time.
    most_load: float = 0.0
    # For each moved session, the seconds of its interruption.
    away_s: list[float] = field(default_factory=list)
    # At each decision of the autoscaler: (time, hosts, sessions, largest load, spread of loads).
    trace: list[tuple[float, int, int, float, float]] = field(default_factory=list)
    # Hosts that were started.
    ups: int = 0
    # Hosts that were stopped.
    downs: int = 0
    # Times that the number of hosts began to fall after it rose, or to rise after it fell.
    reversals: int = 0


Rate = Callable[[float], float]


class Service:
    """A simulated service.

    `places` is the certified number of conversations of each host. `rate` is the number of callers per second, as a
    function of time. `policy` chooses the host for a caller: `random`; `two` (the emptier of two random hosts); `least`
    (the emptiest host); or `doors` (that number of doors, each of which knows only its own sessions). `tries` is the
    number of hosts that are asked before a caller is refused. `talk_s` is the mean duration of a session; durations are
    exponentially distributed. `start_s` is the start-up time of a host. `prefill_s` is the time that a host needs to
    take up one session of another host.
    """

    def __init__(
        self,
        num_hosts: int,
        places: int,
        rate: Rate,
        *,
        policy: str = "least",
        tries: int = 3,
        talk_s: float = 300.0,
        start_s: float = 60.0,
        prefill_s: float = 0.0,
        scaler: Autoscaler | None = None,
        most_rate: float = 0.0,
        num_doors: int = 16,
        comes_again: int = COMES_AGAIN,
        seed: int = 1,
    ) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.counts = Counts()
        self._places, self._rate, self._policy, self._tries = places, rate, policy, tries
        self._talk_s, self._start_s, self._prefill_s, self._scaler = talk_s, start_s, prefill_s, scaler
        self._most_rate, self._comes_again = most_rate or rate(0.0), comes_again
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = iter(range(1 << 62))
        self.hosts: list[SimHost] = []
        self._certificate = certificate_of(places)
        self._starting = 0
        self._last_change = 0
        self._at: dict[int, SimHost | None] = {}
        for _ in range(num_hosts):
            self._add_host()
        self._doors = [Hosts((), lambda: self.now_s) for _ in range(num_doors if policy == "doors" else 0)]
        self._left: dict[int, Callable[[], None]] = {}
        self._by_url: dict[str, SimHost] = {}
        self._show_doors()
        self._after(0.0, self._arrive)
        self._after(SCALE_EVERY_S, self._look)

    # --- the clock ----------------------------------------------------------------------------------------------------

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + seconds, next(self._numbers), act))

    def run(self, until_s: float) -> Counts:
        """Run the simulation until this time."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._events)
            act()
        self.now_s = until_s
        return self.counts

    # --- callers ------------------------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """Let a caller arrive with the probability of the current rate (thinning of a process at the largest rate)."""
        self._after(self.random.expovariate(self._most_rate), self._arrive)
        if self.random.random() * self._most_rate < self._rate(self.now_s):
            self.counts.came += 1
            self._ask(next(self._numbers), 0)

    def _ask(self, session: int, attempt: int) -> None:
        for host, door in self._in_order():
            if host.admit(session, self.now_s):
                self._took(session, host, door)
                self.counts.taken += 1
                self._after(self.random.expovariate(1 / self._talk_s), lambda: self._over(session))
                return
        self.counts.refused_once += attempt == 0
        if attempt < self._comes_again:
            # Waits between one and two times Retry-After, so that callers do not all return at once.
            self._after(10.0 * self.random.uniform(1.0, 2.0), lambda: self._ask(session, attempt + 1))
        else:
            self.counts.turned_away += 1

    def _took(self, session: int, host: SimHost, door: Hosts | None) -> None:
        self._at[session] = host
        if door:
            # The door counts the session as its own until the session ends.
            counted = door.session_at(host.url)
            counted.__enter__()
            self._left[session] = lambda: counted.__exit__(None, None, None)
        self.counts.most_load = max(self.counts.most_load, host.load)

    def _over(self, session: int) -> None:
        host = self._at.pop(session, None)
        self._left.pop(session, lambda: None)()
        if host:
            host.leave(session)

    # --- placing ------------------------------------------------------------------------------------------------------

    def _in_order(self) -> list[tuple[SimHost, Hosts | None]]:
        """Return the hosts in the order in which they are offered the caller, and the caller's door."""
        up = [h for h in self.hosts if h.is_up and not h.is_draining] if self._policy != "doors" else []
        tries = min(self._tries, len(up))
        match self._policy:
            case "random":
                found = self.random.sample(up, tries)
            case "two":
                found = []
                for _ in range(tries):
                    found.append(min(self.random.sample(up, min(2, len(up))), key=lambda h: h.held[KIND]))
            case "least":
                found = heapq.nsmallest(tries, up, key=lambda h: (h.held[KIND], self.random.random()))
            case _:
                return self._by_door()
        return [(host, None) for host in found]

    def _by_door(self) -> list[tuple[SimHost, Hosts | None]]:
        door = self.random.choice(self._doors)
        return [(self._by_url[url], door) for url in door.in_order()[: self._tries]]

    def _show_doors(self) -> None:
        self._by_url = {host.url: host for host in self.hosts}
        alive = [Host(h.url, h.url, h.load, h.is_draining) for h in self.hosts if h.is_up]
        for door in self._doors:
            door.found(alive)

    # --- hosts --------------------------------------------------------------------------------------------------------

    def _add_host(self) -> None:
        number = next(self._numbers)
        self.hosts.append(SimHost(f"http://{number}", number % 3, Headroom(self._certificate, self._places)))

    def _look(self) -> None:
        """Read the loads of all hosts, and start or stop hosts."""
        up = [host for host in self.hosts if host.is_up and not host.is_draining]
        loads = [host.load for host in up]
        num = sum(host.held[KIND] for host in self.hosts)
        mean = sum(loads) / max(1, len(loads))
        spread = (sum((load - mean) ** 2 for load in loads) / max(1, len(loads))) ** 0.5
        self.counts.trace.append((self.now_s, len(up), num, max(loads, default=0.0), spread))
        if self._scaler:
            wanted = self._scaler.wanted(loads, self._starting, self.now_s)
            change = wanted - len(up) - self._starting
            if change:
                sign = 1 if change > 0 else -1
                self.counts.reversals += self._last_change == -sign
                self._last_change = sign
            for _ in range(max(0, change)):
                self._starting += 1
                self.counts.ups += 1
                self._after(self._start_s * self.random.uniform(0.7, 1.3), self._started)
            for host in sorted(up, key=lambda h: h.load)[: max(0, -change)]:
                self.counts.downs += 1
                host.is_draining = True
                self._move_all(host)
        self._show_doors()
        self._after(SCALE_EVERY_S, self._look)

    def _started(self) -> None:
        self._starting -= 1
        self._add_host()

    def _move_all(self, host: SimHost) -> None:
        """Let a draining host release its sessions, a few per second."""
        for index, session in enumerate(list(host.sessions)):
            self._after(index / 10, lambda one=session: self._away(one, host))
        self._after(len(host.sessions) / 10 + 1.0, lambda: self._gone(host))

    def _gone(self, host: SimHost) -> None:
        host.is_up = False
        if host in self.hosts:
            self.hosts.remove(host)

    def lose_zone(self, zone: int, noticed_s: float) -> int:
        """Remove all hosts of a zone at once, and return the number of their sessions. Clients notice after a delay."""
        hosts, num = [h for h in self.hosts if h.zone == zone], 0
        for host in hosts:
            self._gone(host)
            for session in list(host.sessions):
                num += 1
                self._after(self.random.uniform(0, noticed_s), lambda one=session, h=host: self._away(one, h))
        self._show_doors()
        return num

    def _away(self, session: int, host: SimHost) -> None:
        """Move a session from its host to another host."""
        if self._at.get(session) is host:
            host.leave(session)
            self._left.pop(session, lambda: None)()
            self._at[session] = None
            self._resume(session, self.now_s, 0)

    def _resume(self, session: int, since_s: float, attempt: int) -> None:
        if session not in self._at:
            # The caller has hung up in the meantime.
            return
        for host, door in self._in_order():
            if host.admit(session, self.now_s, resumes=True):
                self._took(session, host, door)
                host.busy_until_s = max(host.busy_until_s, self.now_s) + self._prefill_s
                self.counts.away_s.append(host.busy_until_s - since_s)
                return
        if self.now_s - since_s > GRACE_S:
            self.counts.lost += 1
            del self._at[session]
            return
        backoff_s = RESUME_BACKOFF_S[min(attempt, len(RESUME_BACKOFF_S) - 1)] * self.random.uniform(0.5, 1.5)
        self._after(backoff_s, lambda: self._resume(session, since_s, attempt + 1))
