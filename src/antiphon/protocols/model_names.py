"""Which model names clients may use."""

from __future__ import annotations

from dataclasses import dataclass

# What clients ask for when nobody told them a model: gpt-realtime, gpt-4o-mini-transcribe, whisper-1 ...
HOSTED = ("gpt-", "whisper-1", "tts-1")


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The names a client may use for a model. `loaded`: ids as /v1/models lists them, the first is `default`.

    In the OpenAI dialects the hosted service's own names are served by the loaded model, unless `strict`. `unit_ms`: it takes turns by itself, once
    in so many milliseconds; 0: turns are taken for it.
    """

    loaded: tuple[str, ...]
    strict: bool = False
    unit_ms: int = 0

    def exact(self, name: str) -> str | None:
        """The loaded model of that name (`default` is always one), or None."""
        return self.loaded[0] if name == "default" else name if name in self.loaded else None

    def lenient(self, name: str) -> str | None:
        """As `exact`, and the loaded model for a client's own default name."""
        found = self.exact(name)
        if found or self.strict:
            return found
        return self.loaded[0] if name.startswith(HOSTED) else None
