"""Signals of a machine that has no room, each red or not, without flickering. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# For so long a signal is over its limit before its light is red, and for so long below GREEN of it before it is green.
RED_AFTER_S, GREEN_AFTER_S, GREEN = 0.5, 5.0, 0.7
# Of what fills: it stays where it is when nobody is admitted any more, so that a little less has to do.
FILLS, GREEN_FILL = ("memory", "system", "kv"), 0.97
# A signal at FAR times its limit for SHEDS_S: the machine cannot hold even the sessions of now.
FAR, SHEDS_S = 2.0, 30.0
NOTHING: Mapping[str, float] = {}


@dataclass(slots=True)
class Light:
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


class Lights:
    """All signals of one server, by name. `limits`: what each is red from."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._lights = {name: Light(limit, GREEN_FILL if name in FILLS else GREEN) for name, limit in limits.items()}

    def see(self, values: Mapping[str, float], now_s: float, falls_s: Mapping[str, float] = NOTHING) -> None:
        """Take in the signals' values now, and for those over a window when they fall (`Light.see`).

        Raises KeyError for a signal without a limit.
        """
        for name, value in values.items():
            self._lights[name].see(value, now_s, falls_s.get(name, 0.0))

    @property
    def red(self) -> tuple[str, ...]:
        """The names of the red lights."""
        return tuple(name for name, light in self._lights.items() if light.red)

    def sheds(self, now_s: float) -> tuple[str, ...]:
        """The names of the red lights that refuse clients that come back too: the sessions of now are too many."""
        return tuple(name for name in self.red if name in FILLS or self._is_far(self._lights[name], now_s))

    @staticmethod
    def _is_far(light: Light, now_s: float) -> bool:
        return light.far_since_s is not None and now_s - light.far_since_s >= SHEDS_S

    def green_below(self, name: str) -> float:
        """Return the value below which a red light may turn green. Raises KeyError for an unknown name."""
        light = self._lights[name]
        return light.green * light.limit

    def clears_s(self, now_s: float) -> float:
        """Return the seconds until the last red light can be green; 0 where none is red."""
        return max((light.clears_s(now_s) for light in self._lights.values() if light.red), default=0.0)

    def states(self) -> dict[str, bool]:
        """Whether each is red, by name."""
        return {name: light.red for name, light in self._lights.items()}
