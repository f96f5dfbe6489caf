"""Decides whether one more session fits: by a certificate, by the sessions of the last seconds, and by lights: signals
of a machine that has no room, each red or not, without flickering.

Pure: the time is an argument. A client that left within RETURN_S and comes back takes its old place: it adds no load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from antiphon.admission.certificate import KINDS, Certificate, Kind, load_of
from antiphon.errors import Refused

# What each light is red from, but for `finals`; docs/design/admission.md.
LIMITS = {"loop": 0.25, "lane": 2.0, "wait": 1.0, "memory": 0.95, "system": 0.97, "kv": 0.97}
FINALS_S = 2.0
# Without a certificate, what sessions cost is seen this many seconds after they came. Those that are younger may be so
# many (`--burst-sessions`), or this part of the older ones.
YOUNG_S, MOST_YOUNG, MOST_YOUNG_GPU, YOUNG_PART = 5.0, 8, 64, 0.25
# A client that begins a session within RETURN_S of the end of its last one adds no load.
RETURN_S = 10.0
# Sessions that ended within DEPARTURES_S tell when the next one ends; MAX_RETRY_S where none did.
DEPARTURES_S, MAX_RETRY_S, MIN_RETRY_S, MAX_DEPARTURES = 60.0, 10.0, 1.0, 4096
# Sums of shares are not exact.
ROUNDING = 1e-9
# For so long a signal is over its limit before its light is red, and for so long below GREEN of it before it is green.
RED_AFTER_S, GREEN_AFTER_S, GREEN = 0.5, 5.0, 0.7
# Of what fills: it stays where it is when nobody is admitted any more, so that a little less has to do.
FILLS, GREEN_FILL = ("memory", "system", "kv"), 0.97
# A signal at FAR times its limit for SHEDS_S: the machine cannot hold even the sessions of now.
FAR, SHEDS_S = 2.0, 30.0
NOTHING: Mapping[str, float] = {}


@dataclass(slots=True)
class OverloadSignal:
    """One signal. `limit`: red from there on. `green`: part of it below which it is green. `value`: the last one."""

    limit: float
    green: float = GREEN
    value: float = 0.0
    # Since when the signal is on the side that would change the light; None where it is not.
    _since_s: float | None = field(default=None, repr=False)

    red: bool = False
    # Since when the value has been at FAR times the limit or more; None where it is not.
    far_since_s: float | None = field(default=None, repr=False)
    # Seconds until the signal itself is low again, if nothing is added to it.
    _falls_s: float = field(default=0.0, repr=False)

    def see(self, value: float, now_s: float, falls_s: float = 0.0) -> None:
        """Take in the signal's value now. Times have to rise.

        `falls_s`: seconds until the value is low again if nothing is added, for a signal over a window of time.
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
        """Return the seconds until the light can be green again."""
        if self._since_s is None:
            return self._falls_s + GREEN_AFTER_S
        return max(0.0, GREEN_AFTER_S - (now_s - self._since_s))


class Overload:
    """All signals of one server, by name. `limits`: what each is red from."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._signals = {
            name: OverloadSignal(limit, GREEN_FILL if name in FILLS else GREEN) for name, limit in limits.items()
        }

    def see(self, values: Mapping[str, float], now_s: float, falls_s: Mapping[str, float] = NOTHING) -> None:
        """Take in the signals' values now, and for those over a window when they fall (`OverloadSignal.see`).

        Raises KeyError for a signal without a limit.
        """
        for name, value in values.items():
            self._signals[name].see(value, now_s, falls_s.get(name, 0.0))

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the red lights."""
        return tuple(name for name, light in self._signals.items() if light.red)

    def sheds(self, now_s: float) -> tuple[str, ...]:
        """The names of the red lights that refuse clients that come back too: the sessions of now are too many."""
        return tuple(name for name in self.red if name in FILLS or self._is_far(self._signals[name], now_s))

    @staticmethod
    def _is_far(light: OverloadSignal, now_s: float) -> bool:
        return light.far_since_s is not None and now_s - light.far_since_s >= SHEDS_S

    def green_below(self, name: str) -> float:
        """Return the value below which a red light may turn green. Raises KeyError for an unknown name."""
        light = self._signals[name]
        return light.green * light.limit

    def clears_s(self, now_s: float) -> float:
        """Return the seconds until the last red light can be green; 0 where none is red."""
        return max((light.clears_s(now_s) for light in self._signals.values() if light.red), default=0.0)

    def states(self) -> dict[str, bool]:
        """Whether each is red, by name."""
        return {name: light.red for name, light in self._signals.items()}


class Headroom:
    """Decides for one server. `certificate`: None where live headroom alone rules.

    `max_sessions`: of which a session of a kind without a certificate takes a share. `burst`: sessions that may begin
    within YOUNG_S without a certificate.
    """

    def __init__(self, certificate: Certificate | None, max_sessions: int, *, burst: int = MOST_YOUNG) -> None:
        self.certificate, self.burst, self._max_sessions = certificate, burst, max_sessions
        captions = certificate.kinds.get("captions") if certificate else None
        finals_s = captions.objective.p95_s if captions else FINALS_S
        self.overload = Overload(LIMITS | {"finals": finals_s})
        # When the youngest sessions were admitted. Bound: the burst, or a part of the sessions.
        self._young_s: deque[float] = deque()
        # Places that became free within DEPARTURES_S: when, and whose they were. One that its client took again has
        # the client "".
        self._departures: deque[tuple[float, Kind, str]] = deque(maxlen=MAX_DEPARTURES)

    def admit(
        self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, resumes: bool = False, client: str = ""
    ) -> None:
        """Take in one session of a kind beside those that are `held`, or raise Refused, which says why.

        The caller adds the session to `held` before it asks again, and calls `left` when the session ends.

        Args:
            resumes: The session lived on another host. It is refused only by a certificate.
            client: Who begins it, to recognize a client that comes back; "" recognizes none.
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
        """Note that a session admitted at `admitted_s` has ended: its client may come back in its place."""
        with suppress(ValueError):
            self._young_s.remove(admitted_s)
        self._departures.append((now_s, kind, client))

    def check(
        self, kind: Kind, held: Mapping[Kind, int], now_s: float, *, overload: bool = True, client: str = ""
    ) -> None:
        """Raise Refused as `admit` does, and take nothing in. `overload`: whether a red one refuses."""
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
        while self._young_s and now_s - self._young_s[0] >= YOUNG_S:
            self._young_s.popleft()
        older = max(0, sum(held.values()) - len(self._young_s))
        if len(self._young_s) >= max(self.burst, int(YOUNG_PART * older)):
            raise Refused("many sessions have just begun", max(MIN_RETRY_S, YOUNG_S - (now_s - self._young_s[0])))

    def next_end_s(self, now_s: float) -> float:
        """Return the seconds until a session ends, by those of the last minute: between MIN_ and MAX_RETRY_S."""
        while self._departures and now_s - self._departures[0][0] > DEPARTURES_S:
            self._departures.popleft()
        if not self._departures:
            return MAX_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, DEPARTURES_S / len(self._departures)))

    def _left_place(self, kind: Kind, client: str, now_s: float) -> int | None:
        """Return the index of the newest place that this client left within RETURN_S; None where there is none."""
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
        """The part of what may be held that these sessions take: 1 where no other is admitted.

        None without a certificate: what the machine holds is then not known.
        """
        if not self.certificate:
            return None
        kinds = [kind for kind in KINDS if held.get(kind)]
        return self._share(held) / (self._most(kinds[0], held) if kinds else 1.0)

    def room(self, kind: Kind, held: Mapping[Kind, int]) -> int | None:
        """How many more sessions of a kind would be admitted beside these, one by one: 0 while a light is red.

        None for a kind that is not certified: how many the machine holds is then not known.
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
        """The load that may be reached: less where kinds are mixed."""
        assert self.certificate
        return self.certificate.most_mixed if any(held.get(other) for other in KINDS if other != kind) else 1.0
