"""The wire side of a connection. Its commands and frames are collected until a test reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from antiphon.events.transcription import AppendAudio
from antiphon.protocols.connection import Command, Event, WireConnection
from antiphon.protocols.wire import Frame


class Gathered:
    """Collects the commands and frames of `wire`. Forwards all other attributes to `wire`."""

    def __init__(self, wire: WireConnection | Any) -> None:
        self.wire = wire
        self._commands: list[Command] = []
        self._frames: list[Frame] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def open(self) -> None:
        self._frames += self.wire.open()
        # The commands of the opening are returned with the first input.
        self._commands += self.wire.feed(AppendAudio(np.zeros(0, np.float32))).commands[:-1]

    def receive(self, data: str | bytes) -> None:
        received = self.wire.feed(data)
        self._commands += received.commands
        self._frames += received.answers

    def send(self, event: Event) -> None:
        self._frames += self.wire.send(event)

    def closed(self) -> None:
        self._frames += self.wire.close()

    def commands(self) -> list[Command]:
        taken, self._commands = self._commands, []
        return taken

    def frames(self) -> list[Frame]:
        taken, self._frames = self._frames, []
        return taken
