"""`antiphon replay DIR`: runs a recorded session again on the current build, and prints the differences.

The client's messages and audio are sent at their recorded times, through the same code as those of a socket. Ids in
the client's messages are translated to those of the new run. The language model's answers are sampled at random, so
they are printed but not compared.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from antiphon.errors import StoreError
from antiphon.events.transcription import AppendAudio
from antiphon.loading.loader import load, store_of
from antiphon.protocols.dialects import dialect_of
from antiphon.protocols.opening import Opening
from antiphon.recording.tape import RecordedAudio, RecordedEvent, RecordedTurn, Tape, turns
from antiphon.server.credentials import Caller
from antiphon.server.live.open_wire import context_of, prepare_voices
from antiphon.server.live.realtime import LiveRealtime
from antiphon.server.metrics import Metrics
from antiphon.server.state import ServerState
from antiphon.settings import Settings

# The session continues for this time after the recording's last entry, to finish the client's requests. In seconds.
TAIL_S = 3.0
# The fields of RecordedTurn whose times are printed for both runs.
STAGES = ("transcribed", "asked", "first_text", "first_sound", "done")
# Suffixes of event types. How many such events a run has depends on how text or audio was split into chunks.
CHUNKED_EVENTS = (".delta", "sound", "rate_limits.updated")
# Events about the client's connection, which does not break in a replay.
CONNECTION_EVENTS = frozenset({"session.resumed", "session.replaced"})


@dataclass(slots=True)
class _RecordedClient:
    """A recorded client as a transport (transports/transport.py). It returns the recorded messages at their times, and
    keeps the events that the session sends.
    """

    # The recording.
    tape: Tape
    # Always None: this transport does not play audio itself.
    playback: None = None
    # The events that the session sent.
    out: list[RecordedEvent] = field(default_factory=list)
    # The start of the replay, in monotonic seconds.
    begun_s: float = field(default_factory=time.monotonic)
    _at: int = 0
    _old_ids: list[str] = field(default_factory=list)
    _new_ids: list[str] = field(default_factory=list)

    async def receive(self) -> str | bytes | AppendAudio | None:
        entries = self.tape.entries
        while self._at < len(entries):
            entry = entries[self._at]
            self._at += 1
            if isinstance(entry, RecordedEvent):
                _collect_ids(json.loads(entry.text), self._old_ids)
                continue
            await anyio.sleep(max(0.0, self.begun_s + entry.at_s - time.monotonic()))
            if isinstance(entry, RecordedAudio):
                return AppendAudio(self.tape.input_pcm[entry.start : entry.start + entry.num_samples])
            return self._translated(entry.text)
        await anyio.sleep(max(0.0, self.begun_s + self.tape.duration_s + TAIL_S - time.monotonic()))
        return None

    async def send(self, data: str | bytes) -> None:
        text = data if isinstance(data, str) else data.decode()
        _collect_ids(json.loads(text), self._new_ids)
        event = RecordedEvent(time.monotonic() - self.begun_s, text)
        if event.type == "response.output_audio.delta":
            event = RecordedEvent(event.at_s, '{"type":"sound"}')
        self.out.append(event)

    async def close(self, code: int, reason: str) -> None:
        return

    def _translated(self, text: str) -> str:
        for old, new in zip(self._old_ids, self._new_ids, strict=False):
            text = text.replace(f'"{old}"', f'"{new}"')
        return text


def _collect_ids(event: object, seen: list[str]) -> None:
    """Add the ids of items and responses in an event to `seen`, in the order of their first appearance."""
    if isinstance(event, dict):
        for key, value in event.items():
            if (
                key in ("id", "item_id", "response_id")
                and isinstance(value, str)
                and value.startswith(("item_", "resp_"))
            ):
                if value not in seen:
                    seen.append(value)
            else:
                _collect_ids(value, seen)
    elif isinstance(event, list):
        for value in event:
            _collect_ids(value, seen)


async def replay(settings: Settings, folder: Path) -> int:
    """Run the recording in `folder` again, in real time, and print the differences. Returns their number.

    Raises StoreError, ModelError, SettingsError.
    """
    tape = Tape.read(folder)
    if tape.facts.redaction != "off":
        raise StoreError(f"{folder} has silence in place of speech (--record-redact): there is nothing to replay")
    models = await anyio.to_thread.run_sync(load, settings, store_of(settings.models))
    try:
        await models.warm()
        state = ServerState(settings, Metrics(), models)
        opening = msgspec.json.decode(tape.facts.opening, type=Opening)
        await prepare_voices(state, Caller(), opening.session)
        wire = dialect_of(opening).connect(opening, context_of(state, Caller()))
        frames = wire.open()
        client = _RecordedClient(tape)
        print(f"playing {tape.duration_s:.1f} s of {folder.name} …", file=sys.stderr)
        await LiveRealtime(state, Caller(), wire, client, first_frames=frames).run()
    finally:
        models.close()
    return compare(tape.outputs(), client.out)


def compare(old: list[RecordedEvent], new: list[RecordedEvent]) -> int:
    """Print how two runs differ in their turns, transcripts, statuses and order of events. Returns the number of
    differences. Times are printed but not compared.
    """
    then, now = turns(old), turns(new)
    differences = 0
    if len(then) != len(now):
        print(f"turns: {len(then)} then, {len(now)} now")
        differences += 1
    for k, (a, b) in enumerate(zip(then, now, strict=False), 1):
        for name in ("transcript", "status"):
            if getattr(a, name) != getattr(b, name):
                differences += 1
                print(f"turn {k} {name}\n  then: {getattr(a, name)}\n  now:  {getattr(b, name)}")
        if a.answer != b.answer:
            print(f"turn {k} answer (drawn by chance)\n  then: {a.answer}\n  now:  {b.answer}")
    old_order, new_order = _event_order(old), _event_order(new)
    if old_order != new_order:
        differences += 1
        pairs = zip(old_order, new_order, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(old_order), len(new_order)))
        print(f"order of events, from number {at}")
        print(f"  then: {old_order[at : at + 5]}\n  now:  {new_order[at : at + 5]}")
    print(f"\n{'from the end of the turn, ms':<30}{'then':>10}{'now':>10}")
    for stage in STAGES:
        print(f"{stage.replace('_', ' '):<30}{_delay(then, stage):>10}{_delay(now, stage):>10}")
    print(f"\n{differences} difference{'' if differences == 1 else 's'}")
    return differences


def _event_order(outputs: list[RecordedEvent]) -> list[str]:
    """Return the events' types in order, without repetitions and without types whose number varies between runs."""
    types = (e.type for e in outputs)
    kept = (t for t in types if t not in CONNECTION_EVENTS and not t.endswith(CHUNKED_EVENTS))
    return [name for name, _ in groupby(kept)]


def _delay(side: list[RecordedTurn], stage: str) -> str:
    took = [getattr(t, stage) - t.ended for t in side if t.ended is not None and getattr(t, stage) is not None]
    return f"{statistics.median(took) * 1000:.0f}" if took else "-"
