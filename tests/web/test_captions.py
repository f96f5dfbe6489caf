"""The captions of the browser's client, in Node, with a real server over scripted models: each word arrives once, at
the right time, whatever ends, breaks or is unplugged.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import soxr

from antiphon.audio.pcm import to_pcm16
from antiphon.server.state import ServerState
from antiphon.settings import Settings
from tests.scripted import OTHERS, ScriptedVoices, speech, text
from tests.server.scripted import RATE_HZ, serving
from tests.web import node
from tests.web.node import Reported

WORD_MS = 320
pytestmark = node.needs_node


@pytest.fixture(scope="module")
def scripted() -> Iterator[tuple[str, ServerState]]:
    with serving() as (url, state, _):
        yield url.replace("ws", "http", 1), state


def said(first: int, count: int, silence_frames: int = 0) -> tuple[str, str]:
    """Return the step in which the microphone hears these words."""
    pcm = soxr.resample(speech(first, count, silence_frames), 16_000, RATE_HZ, quality="QQ")
    return "hear", b64encode(to_pcm16(np.asarray(pcm, np.float32))).decode()


def reported(url: str, *steps: Sequence[Any]) -> Reported:
    """Run captions with these steps, and return the events that they emit."""
    return node.reported("captions.mjs", "captions.js", url, steps)


def lines(found: Reported) -> list[dict[str, Any]]:
    """Return the final state of the lines that have words."""
    last = {line["id"]: line for kind, line in found if kind == "line"}
    return [line for line in last.values() if line["text"]]


def words(found: Reported) -> str:
    assert all(line["final"] for line in lines(found))
    return " ".join(line["text"] for line in lines(found))


def ends(found: Reported) -> list[str]:
    return [reason for kind, reason in found if kind == "end"]


LISTENS = ("until", "state", {"state": "listening"})
WAITS = ("until", "state", {"state": "waiting"})
END = ("until", "end", {})
BEGIN = (("start",), LISTENS)


@pytest.mark.parametrize(
    ("stop", "reason"),
    [(("stop",), ""), (("stops",), ""), (("unplug",), "the microphone was disconnected")],
)
def test_a_line_that_is_being_said_is_finished_before_the_end(
    stop: Sequence[Any], reason: str, scripted: tuple[str, ServerState]
) -> None:
    found = reported(scripted[0], *BEGIN, said(1, 3, 30), said(5, 4), stop, *((END,) if reason else ()))
    assert words(found) == f"{text(1, 3)} {text(5, 4)}"
    assert ends(found) == [reason]
    assert found[-2:] == [("end", reason), ("done", {"open": False, "stopped": True})]
    last = lines(found)[-1]
    assert last["to"] - last["from"] >= 4 * WORD_MS - 100
    assert not [reported for kind, reported in found if kind == "error"]


@pytest.mark.parametrize(
    "begin",
    [
        pytest.param((), id="nothing was heard"),
        pytest.param((said(0, 1),), id="silence"),
        pytest.param((said(1, 3, 40), ("until", "line", {"final": True})), id="all was finished"),
    ],
)
def test_a_stop_between_lines_says_nothing_more(begin: Sequence[Any], scripted: tuple[str, ServerState]) -> None:
    found = reported(scripted[0], *BEGIN, *begin, ("stop",))
    assert ends(found) == [""]
    assert words(found) == (text(1, 3) if len(begin) == 2 else "")
    assert not [reported for kind, reported in found if kind == "error"]


def test_a_stop_while_they_begin_gives_the_microphone_back(scripted: tuple[str, ServerState]) -> None:
    found = reported(scripted[0], ("begin",), ("stop",), ("until", "refused", {"name": "AbortError"}))
    assert [kind for kind, _ in found] == ["refused", "done"]
    assert found[-1] == ("done", {"open": False, "stopped": True})


def test_lines_have_the_labels_of_their_voices_and_no_label_stands_for_two() -> None:
    final = ("until", "line", {"final": True})
    with serving(speaker_model=ScriptedVoices()) as (url, _, _):
        found = reported(
            url.replace("ws", "http", 1),
            ("options", {"speakers": True}),
            *BEGIN,
            *(said(1, 4, 40), final, said(OTHERS + 1, 4, 40), final, said(11, 4, 40), final),
            # The next session knows no voices.
            *(("cut",), WAITS, LISTENS, said(OTHERS + 11, 4, 40), final, ("stop",)),
        )
    assert [line["speaker"] for line in lines(found)] == ["A", "B", "A", "C"]


@pytest.mark.parametrize("moved", [False, True], ids=["the connection", "the server"])
@pytest.mark.parametrize("cut_after", [0, 1, 3])
def test_what_breaks_is_gone_on_with_and_times_go_on(
    cut_after: int, moved: bool, scripted: tuple[str, ServerState]
) -> None:
    """`cut_after`: the number of words of the second line. Then the server is away while more words are said."""
    with serving() as (other, _, _):
        found = reported(
            scripted[0],
            *BEGIN,
            said(1, 3, 40),
            ("until", "line", {"final": True}),
            *((said(10, cut_after), ("until", "line", {"final": False})) if cut_after else ()),
            *((("at", other.replace("ws", "http", 1)),) if moved else ()),
            ("cut",),
            WAITS,
            said(10 + cut_after, 4 - cut_after, 40),
            said(20, 3),
            LISTENS,
            ("stop",),
        )
    assert words(found) == f"{text(1, 3)} {text(10, 4)} {text(20, 3)}"
    assert ends(found) == [""]
    assert not [reported for kind, reported in found if kind == "lost"]
    # 40 frames of silence, of 32 ms each.
    begins = [0, 3 * WORD_MS + 1280, 7 * WORD_MS + 2560]
    for line, begin_ms in zip(lines(found), begins, strict=True):
        assert line["from"] == pytest.approx(begin_ms, abs=350)
        assert line["from"] < line["to"]


def test_they_go_on_over_the_length_of_a_session() -> None:
    settings = replace(Settings(), server=replace(Settings().server, session_s=0.5))
    expired = ("until", "state", {"state": "waiting", "reason": "session_expired"})
    with serving(settings) as (url, _, _):
        found = reported(
            url.replace("ws", "http", 1), *BEGIN, said(1, 3, 40), expired, said(10, 2), LISTENS, said(12, 3), ("stop",)
        )
    assert words(found) == f"{text(1, 3)} {text(10, 5)}"
    assert ends(found) == [""]
    assert not [reported for kind, reported in found if kind == "error"]


def test_a_stop_while_the_server_is_away_ends_at_once_and_says_what_was_lost(
    scripted: tuple[str, ServerState],
) -> None:
    found = reported(scripted[0], *BEGIN, said(1, 3), ("until", "line", {"from": 0}), ("cut",), WAITS, said(4, 2),
                 ("stops",))  # fmt: skip
    assert words(found) in text(1, 3)
    assert ends(found) == [""]
    assert ("lost", {"from": 3 * WORD_MS, "to": 5 * WORD_MS}) in found


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_key_that_has_run_out_ends_them_with_what_is_wrong(key: str) -> None:
    settings = replace(Settings(), server=replace(Settings().server, api_keys=("none",)))
    with serving(settings) as (url, _, _):
        found = reported(url.replace("ws", "http", 1), *BEGIN, said(1, 3, 40), ("until", "line", {"final": True}),
                     ("key", key), ("cut",), END)  # fmt: skip
    assert words(found) == text(1, 3)
    assert "API key" in ends(found)[0]


def test_a_language_that_the_model_lacks_is_refused_and_another_is_chosen_in_mid_call(
    scripted: tuple[str, ServerState],
) -> None:
    found = reported(scripted[0], ("options", {"language": "German"}), ("start",), ("options", {"language": "en"}),
                 *BEGIN, ("configure", {"language": ""}), ("configure", {"language": "German"}),
                 ("until", "error", {}), ("cut",), LISTENS, said(1, 3), ("stop",))  # fmt: skip
    assert found[0][0] == "refused"
    assert "German" in found[0][1]["message"]
    assert words(found) == text(1, 3)
    assert len([reported for kind, reported in found if kind == "error"]) == 1


def test_final_lines_become_subtitles() -> None:
    lines = [
        {"text": "Hello there.", "from": 0, "to": 1250},
        {"text": "", "from": 1300, "to": 1400},
        {"text": "Not timed.", "from": None, "to": None},
        {"text": "An hour later.", "from": 3_725_006, "to": 3_726_000, "speaker": "B"},
    ]
    module = json.dumps(str(node.CLIENT / "captions.js"))
    code = f"import {{ srt }} from {module}; console.log(srt({json.dumps(lines)}));"
    printed = node.run("--input-type=module", "-e", code)
    assert printed == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello there.\n\n2\n01:02:05,006 --> 01:02:06,000\nB: An hour later.\n\n"
    )
