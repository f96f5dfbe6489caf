"""Signals of a machine that has no room, each red or not, without flickering. Pure: the time is an argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# For so long a signal is over its limit before its light is red, and for so long below GREEN of it before it is green.
RED_AFTER_S, GREEN_AFTER_S, GREEN = 0.5, 5.0, 0.7
# Of what fills: it stays where it is when nobody is admitted any more, so that a little less has to do.
FILLS, GREEN_FILL = ("memory", "system", "kv"), 0.97


@dataclass(slots=True)
class Light:
    """One signal. `limit`: red from there on. `green`: part of it below which it is green. `value`: the last one."""

    limit: float
    green: float = GREEN
    value: float = 0.0
    red: bool = False
    # Since when the signal is on the side that would change the light; None where it is not.
    _since_s: float | None = field(default=None, repr=False)

    def see(self, value: float, now_s: float) -> None:
        """Take in what the signal is now. Times have to rise."""
        self.value = value
        changing = value < self.green * self.limit if self.red else value >= self.limit
        if not changing:
            self._since_s = None
            return
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (GREEN_AFTER_S if self.red else RED_AFTER_S):
            self.red, self._since_s = not self.red, None


class Lights:
    """All signals of one server, by name. `limits`: what each is red from."""

    def __init__(self, limits: Mapping[str, float]) -> None:
        self._lights = {name: Light(limit, GREEN_FILL if name in FILLS else GREEN) for name, limit in limits.items()}

    def see(self, values: Mapping[str, float], now_s: float) -> None:
        """Take in what the signals are now. Raises KeyError for one that has no limit."""
        for name, value in values.items():
            self._lights[name].see(value, now_s)

    @property
    def red(self) -> tuple[str, ...]:
        """The names of those that are red."""
        return tuple(name for name, light in self._lights.items() if light.red)

    def states(self) -> dict[str, bool]:
        """Whether each is red, by name."""
        return {name: light.red for name, light in self._lights.items()}
