"""Decides whether one more session fits: by a certificate, by the number of recent sessions, and by overload signals.

Each signal is red or green, with hysteresis. A client that returns within RETURN_S of the end of its last session takes
its old place, since it adds no load. The module is pure: the time is an argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from antiphon.admission.certificate import KINDS, Certificate, Kind, load_of
from antiphon.admission.unit_times import UnitTimes
from antiphon.errors import Refused

# The value at which each signal turns red; see docs/design/admission.md. The limit of `finals` is the certificate's
# objective for captions, or FINALS_S.
LIMITS = {"loop": 0.25, "lane": 2.0, "wait": 1.0, "units": 0.8, "memory": 0.95, "system": 0.97, "kv": 0.97}
FINALS_S = 2.0
# Without a certificate, the load of a session is visible only YOUNG_S after it began. The number of younger sessions is
# limited to the burst (`--burst-sessions`; by default MOST_YOUNG or MOST_YOUNG_GPU) or to YOUNG_PART of the older
# sessions, whichever is larger.
YOUNG_S, MOST_YOUNG, MOST_YOUNG_GPU, YOUNG_PART = 5.0, 8, 64, 0.25
# Without a certificate, sessions of a native model are admitted while the expected time of a unit is below the limit of
# `units`. Before the first unit is measured, they are at most MOST_UNMEASURED.
MOST_UNMEASURED = 1
# A client that begins a session within RETURN_S of the end of its last one takes its old place.
RETURN_S = 10.0
# The rate of sessions that ended within DEPARTURES_S predicts when the next one ends; MAX_RETRY_S if none ended.
DEPARTURES_S, MAX_RETRY_S, MIN_RETRY_S, MAX_DEPARTURES = 60.0, 10.0, 1.0, 4096
# Tolerance for sums of shares, which are not exact.
ROUNDING = 1e-9
# A signal turns red after RED_AFTER_S at its limit or above, and green after GREEN_AFTER_S below GREEN times its limit.
RED_AFTER_S, GREEN_AFTER_S, GREEN = 0.5, 5.0, 0.7
# The signals of memory stay constant while no session is admitted, so they turn green just below the limit.
FILLS, GREEN_FILL = ("memory", "system", "kv"), 0.97
# If a signal stays at FAR times its limit or above for SHEDS_S, the machine cannot hold even its current sessions.
FAR, SHEDS_S = 2.0, 30.0
NOTHING: Mapping[str, float] = {}


@dataclass(slots=True)
class OverloadSignal:
    """One signal of overload, red or green, with hysteresis."""

    # The signal turns red at this value.
    limit: float
    # Fraction of `limit` below which the signal turns green.
    green: float = GREEN
    # The latest value.
    value: float = 0.0
    # The time at which the value began to call for the other color; None if it does not.
    _since_s: float | None = field(default=None, repr=False)

    # Whether the signal is red.
    red: bool = False
    # The time at which the value reached FAR times the limit; None if it is below.
    far_since_s: float | None = field(default=None, repr=False)
    # Seconds until the value falls if no load is added.
    _falls_s: float = field(default=0.0, repr=False)

    def see(self, value: float, now_s: float, falls_s: float = 0.0) -> None:
        """Record the current value. `now_s` must not decrease between calls.

        `falls_s` is for a signal over a window of time: the seconds until its value falls if no load is added.
        """
        self.value, self._falls_s = value, falls_s
        if value < FAR * self.limit:
            self.far_since_s = None
        elif self.far_since_s is None:
            self.far_since_s = now_s
        changing = value < self.green * self.limit if self.red else value >= self.limit
        if not changing:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (GREEN_AFTER_S if self.red else RED_AFTER_S):
            self.red, self._since_s = not self.red, None

    def clears_s(self, now_s: float) -> float:
        """Return the seconds until the signal can turn green, if it is red."""
        if self._since_s is None:
            return self._falls_s + GREEN_AFTER_S
        return max(0.0, GREEN_AFTER_S - (now_s - self._since_s))


class Overload:
    """All signals of one server by name. `limits` has the value at which each signal turns red."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._signals = {
            name: OverloadSignal(limit, GREEN_FILL if name in FILLS else GREEN) for name, limit in limits.items()
        }

    def see(self, values: Mapping[str, float], now_s: float, falls_s: Mapping[str, float] = NOTHING) -> None:
        """Record the current values of the signals. `falls_s`: see `OverloadSignal.see`.

        Raises KeyError for a signal without a limit.
        """
        for name, value in values.items():
            self._signals[name].see(value, now_s, falls_s.get(name, 0.0))

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the red signals, in the order of LIMITS."""
        return tuple(name for name, light in self._signals.items() if light.red)

    def sheds(self, now_s: float) -> tuple[str, ...]:
        """Return the names of the red signals that refuse even returning clients: the machine is overloaded."""
        return tuple(name for name in self.red if name in FILLS or self._is_far(self._signals[name], now_s))

    @staticmethod
    def _is_far(light: OverloadSignal, now_s: float) -> bool:
        return light.far_since_s is not None and now_s - light.far_since_s >= SHEDS_S

    def green_below(self, name: str) -> float:
        """Return the value below which a red signal may turn green. Raises KeyError for an unknown name."""
        light = self._signals[name]
        return light.green * light.limit

    def clears_s(self, now_s: float) -> float:
        """Return the seconds until all signals can be green; 0 if none is red."""
        return max((light.clears_s(now_s) for light in self._signals.values() if light.red), default=0.0)

    def states(self) -> dict[str, bool]:
        """Return for each signal, by name, whether it is red."""
        return {name: light.red for name, light in self._signals.items()}


class Headroom:
    """Admits or refuses the sessions of one server.

    Without a certificate, only overload signals and the number of recent sessions limit them: at most `burst` sessions
    begin within YOUNG_S. With a certificate, a session of a kind that is not in it takes 1 / `max_sessions` of the
    machine.
    """

    def __init__(self, certificate: Certificate | None, max_sessions: int, *, burst: int = MOST_YOUNG) -> None:
        self.certificate, self.burst, self._max_sessions = certificate, burst, max_sessions
        captions = certificate.kinds.get("captions") if certificate else None
        finals_s = captions.objective.p95_s if captions else FINALS_S
        self.overload = Overload(LIMITS | {"finals": finals_s})
        # The measured times of a native model's units.
        self.units = UnitTimes()
        # Times at which the youngest sessions were admitted. Bounded by the burst or by YOUNG_PART of the sessions.
        self._young_s: deque[float] = deque()
        # Sessions that ended within DEPARTURES_S: time, kind, client. The client is "" if it has returned since then.
        self._departures: deque[tuple[float, Kind, str]] = deque(maxlen=MAX_DEPARTURES)

    def admit(
        self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, resumes: bool = False, client: str = ""
    ) -> None:
        """Admit one session of a kind in addition to those in `held`.

        The caller adds the session to `held` before its next call, and calls `left` when the session ends.

        Args:
            kind: The kind of the session.
            held: The current number of sessions of each kind.
            now_s: The time; never decreases.
            resumes: The session moves here from another host. Only a certificate can refuse it.
            client: Identifies a client that returns; "" matches none.

        Raises:
            Refused: The session does not fit. The message has the reason.
        """
        if not resumes or self.certificate:
            self.check(kind, held, now_s, overload=not resumes, client=client)
        if resumes:
            return
        if (place := self._left_place(kind, client, now_s)) is not None:
            self._departures[place] = (self._departures[place][0], kind, "")
        elif not self.certificate:
            self._young_s.append(now_s)

    def left(self, admitted_s: float, now_s: float, kind: Kind, client: str = "") -> None:
        """Record that a session admitted at `admitted_s` has ended. Its client may take the same place again."""
        with suppress(ValueError):
            self._young_s.remove(admitted_s)
        self._departures.append((now_s, kind, client))

    def check(
        self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, overload: bool = True, client: str = ""
    ) -> None:
        """Raise Refused if `admit` would. Does not admit the session. With `overload`, red signals also refuse it."""
        returns = self._left_place(kind, client, now_s) is not None
        red = self.overload.sheds(now_s) if returns else self.overload.red
        if overload and red:
            retry_s = max(MIN_RETRY_S, self.overload.clears_s(now_s))
            raise Refused(f"the server has no headroom now ({', '.join(red)})", retry_s)
        if self.certificate:
            if self._share(held) + self._share({kind: 1}) > self._most(kind, held) + ROUNDING:
                reason = f"the server holds as many sessions as it was certified for ({kind})"
                raise Refused(reason, self.next_end_s(now_s))
            return
        if returns:
            return
        if kind == "native":
            self._check_units(held.get(kind, 0) + 1, now_s)
        while self._young_s and now_s - self._young_s[0] >= YOUNG_S:
            self._young_s.popleft()
        older = max(0, sum(held.values()) - len(self._young_s))
        if len(self._young_s) >= max(self.burst, int(YOUNG_PART * older)):
            raise Refused("many sessions have just begun", max(MIN_RETRY_S, YOUNG_S - (now_s - self._young_s[0])))

    def _check_units(self, sessions: int, now_s: float) -> None:
        """Raise Refused if `sessions` sessions of a native model are expected to be late with their units."""
        expected = self.units.expected(sessions, now_s)
        if expected is None and sessions > MOST_UNMEASURED:
            raise Refused("the time of a unit is not measured yet", MIN_RETRY_S)
        if expected is not None and expected >= LIMITS["units"]:
            reason = f"with one more session, units would take {expected:.0%} of their time"
            raise Refused(reason, self.next_end_s(now_s))

    def next_end_s(self, now_s: float) -> float:
        """Estimate the seconds until a session ends from the rate of departures: MIN_RETRY_S to MAX_RETRY_S."""
        while self._departures and now_s - self._departures[0][0] > DEPARTURES_S:
            self._departures.popleft()
        if not self._departures:
            return MAX_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, DEPARTURES_S / len(self._departures)))

    def _left_place(self, kind: Kind, client: str, now_s: float) -> int | None:
        """Return the index of the newest place that this client left within RETURN_S, or None."""
        if not client:
            return None
        for index in range(len(self._departures) - 1, -1, -1):
            left_s, of_kind, by = self._departures[index]
            if now_s - left_s > RETURN_S:
                return None
            if (of_kind, by) == (kind, client):
                return index
        return None

    def load(self, held: Mapping[Kind, int]) -> float | None:
        """Return the share of the certified load that these sessions take; at 1 no further session is admitted.

        Returns None without a certificate, since the capacity is unknown.
        """
        if not self.certificate:
            return None
        kinds = [kind for kind in KINDS if held.get(kind)]
        return self._share(held) / (self._most(kinds[0], held) if kinds else 1.0)

    def room(self, kind: Kind, held: Mapping[Kind, int]) -> int | None:
        """Return how many more sessions of a kind would be admitted in addition to `held`; 0 while a signal is red.

        Returns None for a kind that is not certified, since the capacity is unknown.
        """
        if not self.certificate or kind not in self.certificate.kinds:
            return None
        places = max(0, self._max_sessions - sum(held.values()))
        if self.overload.red:
            return 0
        left = self._most(kind, held) + ROUNDING - self._share(held)
        return max(0, min(places, int(left / self._share({kind: 1}))))

    def _share(self, held: Mapping[Kind, int]) -> float:
        return load_of(held, self.certificate, self._max_sessions)

    def _most(self, kind: Kind, held: Mapping[Kind, int]) -> float:
        """Return the load limit, which is lower if the sessions are of several kinds."""
        assert self.certificate
        return self.certificate.most_mixed if any(held.get(other) for other in KINDS if other != kind) else 1.0
