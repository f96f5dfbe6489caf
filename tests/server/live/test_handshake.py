"""The query of a session's URL: the error for a misspelled parameter, or for an invalid value, names the parameter."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tests.server.scripted import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as (found, _, _):
        yield found


@pytest.mark.parametrize(
    ("query", "code", "param", "meant"),
    [
        ("dialct=vllm", "unknown_parameter", "dialct", "dialect"),
        ("modell=default", "unknown_parameter", "modell", "model"),
        ("resumes=1", "unknown_parameter", "resumes", "resume"),
        ("dialect=vlm", "invalid_value", "dialect", "vllm"),
        ("duplex=on", "invalid_value", "duplex", "true"),
        ("events=GA", "invalid_value", "events", "ga"),
        ("intent=transcribe", "invalid_value", "intent", "transcription"),
    ],
)
def test_a_parameter_that_is_nearly_known_is_refused(url: str, query: str, code: str, param: str, meant: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"{url}/v1/realtime?{query}"):
        pass
    response = refused.value.response
    assert response.status_code == 400
    error = json.loads(response.body)["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert f"'{meant}'" in error["message"]


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/duplex"])
@pytest.mark.parametrize("query", ["call_id=rtc_1", "model=gpt-realtime&call_id="])
def test_when_an_unknown_session_is_to_be_joined_then_no_other_session_begins(url: str, path: str, query: str) -> None:
    with pytest.raises(InvalidStatus) as refused, connect(f"{url}{path}?{query}"):
        pass
    response = refused.value.response
    error = json.loads(response.body)["error"]
    assert (response.status_code, error["code"], error["param"]) == (404, "call_not_found", "call_id")


@pytest.mark.parametrize("query", ["api-version=2024-10-01-preview&deployment=gpt", "duplex=0", "intent=conversation"])
def test_parameters_of_others_are_ignored(url: str, query: str) -> None:
    with connect(f"{url}/v1/realtime?{query}") as socket:
        assert json.loads(socket.recv(10))["type"] == "session.created"
