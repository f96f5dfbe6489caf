"""The profiling endpoints, on a real server with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from antiphon.settings import Settings
from tests.adapters import tiny_qwen3_asr as tiny
from tests.conftest import Process, Recording, Serve
from tests.server.scripted import serving

KEY = {"Authorization": "Bearer sesame"}


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def server(serve: Serve, traces: Path, tmp_path: Path) -> Process:
    folder = tiny.write(tmp_path)
    return serve(
        "--transcriber", str(folder), "--weights", "fp32", "--torch-profiler-dir", str(traces), "--api-key", "sesame"
    )


def test_a_trace_has_what_the_models_compute_between_start_and_stop(
    server: Process, traces: Path, recordings: dict[str, Recording]
) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as client:
        for path in ("/start_profile", "/stop_profile"):
            assert client.post(path).status_code == 401
        stopped = client.post("/stop_profile", headers=KEY)
        assert (stopped.status_code, stopped.json()["error"]["message"]) == (409, "No profile is being recorded.")
        assert not traces.exists()

        for _ in range(2):
            started = client.post("/start_profile", headers=KEY)
            assert (started.status_code, started.json()) == (200, {"recording": True, "trace": None})
            again = client.post("/start_profile", headers=KEY)
            assert (again.status_code, again.json()["error"]["message"]) == (409, "A profile is being recorded.")
            recording = next(iter(recordings.values()))
            file = {"file": ("a.wav", recording.path.read_bytes())}
            answer = client.post("/v1/audio/transcriptions", headers=KEY, data={"model": "default"}, files=file)
            assert answer.status_code == 200
            stopped = client.post("/stop_profile", headers=KEY)
            assert stopped.status_code == 200
            trace = Path(stopped.json()["trace"])
            assert trace.parent == traces
            events = json.loads(trace.read_text())["traceEvents"]
            # The model has its own thread. Other threads serve the request and run the profiler.
            assert any(e["name"] in ("aten::linear", "aten::addmm", "aten::mm") for e in events)
        assert len(list(traces.iterdir())) == 2


def test_without_the_setting_both_are_refused() -> None:
    assert not Settings().server.torch_profiler_dir
    with serving() as (url, _, _):
        for path in ("/start_profile", "/stop_profile"):
            answer = httpx.post(url.replace("ws", "http", 1) + path)
            assert answer.status_code == 404
            assert "--torch-profiler-dir" in answer.json()["error"]["message"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = Settings()
    folder = tmp_path / "file" / "traces"
    with serving(settings_with(settings, str(folder))) as (url, _, _):
        answer = httpx.post(url.replace("ws", "http", 1) + "/start_profile")
        assert answer.status_code == 507
        assert str(folder) in answer.json()["error"]["message"]


def settings_with(settings: Settings, folder: str) -> Settings:
    """Return the settings with this folder for traces."""
    return replace(settings, server=replace(settings.server, torch_profiler_dir=folder))
