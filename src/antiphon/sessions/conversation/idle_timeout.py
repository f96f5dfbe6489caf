"""Waits for the user to speak after a response was heard, and says when nobody has for too long."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from antiphon.events.conversation import ConversationConfig


class IdleTimeout:
    """The idle timeout of one conversation. Call `open` first, `begin` when a response has ended, `stop` when speech
    begins, and `close` at the end.

    - `left_s`: returns the seconds of sent audio that are still to be played; the time counts from their end.
    - `is_busy`: returns whether somebody speaks or is answered, or an item is being read: the timeout comes later then.
    - `heard_s`: returns the seconds of audio that were listened to so far.
    - `on_silence`: is awaited with `heard_s` at the beginning of the silence.
    """

    def __init__(
        self,
        left_s: Callable[[], float],
        is_busy: Callable[[], bool],
        heard_s: Callable[[], float],
        on_silence: Callable[[float], Awaitable[None]],
    ) -> None:
        self._left_s, self._is_busy, self._heard_s = left_s, is_busy, heard_s
        self._on_silence = on_silence
        self._scope: anyio.CancelScope | None = None
        # Speech has begun that may turn out to be none.
        self._is_held = False
        self._group: anyio.abc.TaskGroup | None = None

    def open(self, group: anyio.abc.TaskGroup) -> None:
        """Wait in tasks of `group` from now on."""
        self._group = group

    def begin(self, config: ConversationConfig) -> None:
        """Wait anew, unless the configuration has no such timeout, or none for its turn detection. Returns at once."""
        self.stop()
        self._is_held, vad = False, config.transcription.vad
        if self._group and config.idle_timeout_ms is not None and vad and vad.eagerness is None:
            scope = self._scope = anyio.CancelScope()
            self._group.start_soon(self._wait, config.idle_timeout_ms / 1000, scope)

    def stop(self) -> None:
        """Stop waiting, until `begin` or `go_on`."""
        if self._scope:
            self._scope.cancel()
            self._scope, self._is_held = None, True

    def go_on(self, config: ConversationConfig) -> None:
        """Wait anew if `stop` has ended a wait: the speech that it was stopped for was none. Returns at once."""
        if self._is_held and not self._is_busy():
            self.begin(config)

    def close(self) -> None:
        """Wait no more."""
        self.stop()
        self._group = None

    async def _wait(self, timeout_s: float, scope: anyio.CancelScope) -> None:
        with scope:
            await anyio.sleep(self._left_s())
            since_s, is_over = self._heard_s(), False
            while not is_over:
                await anyio.sleep(timeout_s)
                is_over = not self._is_busy()
            self._scope = None
            await self._on_silence(since_s)
