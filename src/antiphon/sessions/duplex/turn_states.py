"""The table of the turn states that full-duplex clients get. Pure.

    python -m antiphon.sessions.duplex.turn_states     prints the table of docs/wire/duplex.md

A state reflects the latest signal: the user may begin to speak while a response is generated, and a response may begin
while the user speaks. A signal that the table does not list for a state raises LocalProtocolError.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from antiphon.events.duplex import TurnState

TurnSignal = Literal[
    "user_speech_started",
    "user_turn_committed",
    "nothing_said",
    "response_created",
    "playback_started",
    "playback_finished",
    "response_done",
    "barge_in",
    "input_cancelled",
    "input_cleared",
]


# Signals of the client, the user's speech and the model that are possible in any state.
_ALWAYS: dict[TurnSignal, TurnState] = {
    "user_speech_started": "user_speaking",
    "user_turn_committed": "user_committed",
    "response_created": "assistant_generating",
    "barge_in": "barge_in",
    "input_cancelled": "idle",
    "input_cleared": "idle",
}

TURN_STATES: Mapping[TurnState, Mapping[TurnSignal, TurnState]] = MappingProxyType(
    {
        "idle": _ALWAYS | {"nothing_said": "idle"},
        "user_speaking": _ALWAYS,
        "user_committed": _ALWAYS | {"nothing_said": "idle"},
        "assistant_generating": _ALWAYS | {"playback_started": "assistant_playing", "response_done": "idle"},
        "assistant_playing": _ALWAYS | {"playback_finished": "idle"},
        "barge_in": _ALWAYS | {"nothing_said": "idle"},
    }
)
_MEANINGS: Mapping[TurnSignal, str] = MappingProxyType(
    {
        "user_speech_started": "the user speaks",
        "user_turn_committed": "the user's turn has ended",
        "nothing_said": "it had no words, or none could be made out",
        "response_created": "a response begins",
        "playback_started": "its first audio is sent",
        "playback_finished": "all of its audio was acknowledged",
        "response_done": "it has ended without audio",
        "barge_in": "the user takes the floor from a response",
        "input_cancelled": "the client has cancelled the input",
        "input_cleared": "the client has cleared the audio",
    }
)


def as_markdown() -> str:
    """Return the table as Markdown: each signal, its meaning, the states in which it may occur, and the next state."""
    lines = ["| `event` | what it says | from | `turn_state` |", "|---|---|---|---|"]
    for signal in get_args(TurnSignal):
        sources = [state for state, row in TURN_STATES.items() if signal in row]
        (target,) = {TURN_STATES[state][signal] for state in sources}
        shown = "any" if len(sources) == len(TURN_STATES) else ", ".join(f"`{state}`" for state in sources)
        lines.append(f"| `{signal}` | {_MEANINGS[signal]} | {shown} | `{target}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(as_markdown())
