"""assemblyai's streaming client: turns that the server ends, and turns that the client ends. Its types are strict."""

import os
import sys
import threading
import time

import numpy as np
import soundfile
from assemblyai.streaming import v3

TURNS = int(os.environ.get("TURNS", "100"))
CHUNK = 1600


def client_of(where):
    """The client, under the name that its version has."""
    new = getattr(v3, "RealTimeTranscriber", None)
    if new:
        return (
            new(v3.RealTimeTranscriberOptions(api_key="none", api_host=where)),
            v3.RealTimeEvents,
            v3.RealTimeParameters,
        )
    # The version of 2025 adds the scheme itself.
    options = v3.StreamingClientOptions(api_key="none", api_host=where.removeprefix("wss://"))
    return v3.StreamingClient(options), v3.StreamingEvents, v3.StreamingParameters


def main():
    where = sys.argv[1].replace("http", "ws", 1)
    client, events, parameters = client_of(where)
    turns, errors, counts = [], [], {"Begin": 0, "Turn": 0, "Termination": 0}
    ended = threading.Semaphore(0)

    def on_turn(_, event):
        counts["Turn"] += 1
        if event.end_of_turn and event.turn_is_formatted:
            turns.append(event)
            ended.release()

    def counted(name):
        def count(_, event):
            counts[name] += 1

        return count

    client.on(events.Turn, on_turn)
    client.on(events.Begin, counted("Begin"))
    client.on(events.Termination, counted("Termination"))
    client.on(events.Error, lambda _, error: errors.append(str(error)))
    client.connect(parameters(sample_rate=16_000, speech_model="universal-streaming-english", format_turns=True))
    data, rate = soundfile.read(sys.argv[2], dtype="int16")
    assert rate == 16_000
    speech, pause = np.asarray(data)[:24_000], np.zeros(2 * 16_000, np.int16)
    waits_s = []
    for turn in range(TURNS):
        forced = turn % 2 == 1
        sound = np.concatenate((speech, pause[:4800] if forced else pause))
        for at in range(0, len(sound), CHUNK):
            client.stream(sound[at : at + CHUNK].tobytes())
        sent_s = time.monotonic()
        if forced:
            client.force_endpoint()
        assert ended.acquire(timeout=30), (turn, len(turns), errors)
        waits_s.append(time.monotonic() - sent_s)
    client.disconnect(terminate=True)
    assert not errors, errors
    assert len(turns) >= TURNS
    assert [turn.turn_order for turn in turns] == sorted({turn.turn_order for turn in turns})
    assert all(turn.words and turn.words[0].start <= turn.words[-1].end for turn in turns)
    assert counts["Begin"] == 1
    frames = sum(counts.values())
    print(
        f"assemblyai: {len(turns)} turns, {turns[0].transcript!r}, {sorted(waits_s)[TURNS // 2] * 1000:.0f} ms after "
        f"the last audio (median); {frames} messages, 0 refused"
    )


main()
