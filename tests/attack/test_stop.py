"""SIGTERM to a server that is loading, or has open files and sessions: what its clients get, and how it ends."""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.scripted_server import LIMIT_S, ScriptedServer, scripted_server
from tests.attack.test_files import wav

pytestmark = pytest.mark.server
FILE = wav(16_000, 1600)


class Posted(threading.Thread):
    """A request to transcribe a file. `status` and `text` are from its response."""

    def __init__(self, server: ScriptedServer, prompt: str, **fields: str) -> None:
        super().__init__(daemon=True)
        self._request: dict[str, Any] = {
            "url": f"{server.url}/v1/audio/transcriptions",
            # The file is silent, so with speech detection it would not reach the transcriber.
            "data": {"model": "default", "prompt": prompt, "chunking_strategy": "null", **fields},
            "files": {"file": ("a.wav", FILE)},
        }
        self.status, self.text = 0, ""
        self.start()

    def run(self) -> None:
        response = httpx.post(timeout=LIMIT_S, **self._request)
        self.status, self.text = response.status_code, response.text

    def done(self) -> tuple[int, str]:
        self.join(LIMIT_S)
        return self.status, self.text


def test_when_models_load_then_sigterm_ends_the_server_at_once_and_it_never_says_ready(tmp_path: Path) -> None:
    with scripted_server(tmp_path, loads="slowly") as server:
        began_s = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert time.monotonic() - began_s < 5
        assert "ready" not in server.popen.stdout.read()


def test_when_files_are_under_way_then_the_drain_finishes_them_and_refuses_new_ones(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--drain-s", "60") as server:
        file = Posted(server, "wait")
        server.until_ready("sessions", 1)
        server.popen.send_signal(signal.SIGTERM)
        server.until_ready("status", "draining")
        status, text = Posted(server, "").done()
        assert (status, json.loads(text)["error"]["message"]) == (503, "the server is shutting down")
        while file.is_alive():
            # The signal has no effect before the transcriber waits for it.
            server.popen.send_signal(signal.SIGUSR1)
            file.join(0.1)
        status, text = file.done()
        assert (status, json.loads(text)["text"]) == (200, "Begun. Done.")
        assert server.exit_code() == 0


def test_when_the_drain_begins_before_a_file_has_arrived_whole_then_the_file_is_finished_too(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--drain-s", "60") as server:
        fields = {"model": "default", "chunking_strategy": "null"}
        request = httpx.Request(
            "POST", f"{server.url}/v1/audio/transcriptions", data=fields, files={"file": ("a.wav", FILE)}
        )
        body, connection = request.read(), http.client.HTTPConnection(request.url.netloc.decode(), timeout=LIMIT_S)
        with closing(connection):
            connection.putrequest("POST", request.url.path)
            for name in ("content-type", "content-length"):
                connection.putheader(name, request.headers[name])
            connection.endheaders(body[:100])
            server.until_ready("sessions", 1)
            server.popen.send_signal(signal.SIGTERM)
            server.until_ready("status", "draining")
            connection.send(body[100:])
            response = connection.getresponse()
            assert (response.status, json.load(response).get("text")) == (200, "Begun. Done.")
        assert server.exit_code() == 0


def test_when_files_are_not_finished_in_time_then_each_is_told_so_and_the_process_ends_with_0(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--drain-s", "0.5") as server:
        whole, stream = Posted(server, "hang"), Posted(server, "wait", stream="true")
        server.until_ready("sessions", 2)
        server.until('antiphon_running_jobs{lane="files"} 1.0')
        began_s = time.monotonic()
        server.popen.send_signal(signal.SIGTERM)
        status, text = whole.done()
        assert (status, json.loads(text)["error"]["code"]) == (503, "server_shutting_down")
        status, text = stream.done()
        last = json.loads(text.strip().rpartition("data: ")[2])
        assert (status, last["error"]["code"]) == (200, "server_shutting_down")
        # The worker hangs. The process ends without waiting for it, and does not abort.
        assert server.exit_code() == 0
        assert time.monotonic() - began_s < 10


def test_when_a_second_sigterm_comes_then_the_drain_ends_now(tmp_path: Path) -> None:
    with scripted_server(tmp_path, "--drain-s", "600") as server:
        file = Posted(server, "wait")
        server.until_ready("sessions", 1)
        server.popen.send_signal(signal.SIGTERM)
        server.until_ready("status", "draining")
        server.popen.send_signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert file.done()[0] == 503
