"""A model whose threads have ended or hang: what /ready, /metrics and the callers show."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from antiphon.engine.lane import MAX_RESTARTS, Lane
from antiphon.engine.model_thread import ModelThread
from antiphon.errors import ModelError, ModelLost
from antiphon.loading.loaded import LoadedModels
from antiphon.server import run
from antiphon.server.metrics import Metrics
from antiphon.server.watches import declare_stalled, watch_models
from antiphon.settings import Settings
from tests.attack.scripted_server import scripted_server
from tests.attack.test_stop import Posted
from tests.server.scripted import serving


def test_when_workers_end_again_and_again_then_ready_is_503_and_says_which_model_and_why() -> None:
    def work(jobs: list[int]) -> list[int]:
        raise SystemExit("out of luck")

    lane: Lane[int, int] = Lane("transcriber", work)
    with serving(lanes=(lane,)) as (url, _, _):
        http = url.replace("ws", "http", 1)
        for _ in range(MAX_RESTARTS):
            with pytest.raises(ModelError, match="its worker ended"):
                lane.submit(1).result(10)
            assert httpx.get(f"{http}/ready").status_code == 200
        with pytest.raises(ModelLost):
            lane.submit(1).result(10)
        answer = httpx.get(f"{http}/ready")
        assert answer.status_code == 503
        assert answer.json()["status"] == "model_lost"
        assert answer.json()["lost"] == {"transcriber": "its worker ended with SystemExit: out of luck"}
        assert httpx.get(f"{http}/health").status_code == 200
    lane.close()


def test_when_a_step_is_older_than_the_limit_then_only_its_model_is_lost_and_its_callers_are_told() -> None:
    gate, entered = threading.Event(), threading.Event()

    def hang() -> None:
        entered.set()
        assert gate.wait(10)

    async def main() -> None:
        hung, idle = ModelThread("engine"), ModelThread("vocoder")
        workers = {"language": hung, "synthesizer": idle}
        call = asyncio.ensure_future(hung.call(hang))
        await asyncio.to_thread(entered.wait, 10)
        assert declare_stalled(workers, 3600) == {}
        assert declare_stalled(workers, 0) == {}
        reported = asyncio.Event()
        watching = asyncio.create_task(watch_models(workers, 1e-9, reported.set))
        await asyncio.wait_for(reported.wait(), 10)
        watching.cancel()
        with pytest.raises(ModelLost, match="a step has run for more than"):
            await asyncio.wait_for(call, 10)
        assert await idle.call(lambda: 1) == 1
        metrics = Metrics()
        metrics.watch((), lambda: 0.0, None, workers)
        assert b'antiphon_model_alive{worker="language"} 0.0' in metrics.text()
        assert b'antiphon_model_alive{worker="synthesizer"} 1.0' in metrics.text()
        gate.set()
        hung.close()
        idle.close()

    asyncio.run(main())


def test_when_a_model_is_lost_and_the_server_is_to_exit_then_it_ends_with_an_error_that_names_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane: Lane[int, int] = Lane("transcriber", list)
    loaded = LoadedModels(None, None, None, None, None, None, None, None, (), (lane,))
    monkeypatch.setattr(run, "load", lambda *_: loaded)
    server = replace(Settings().server, port=0, exit_on_model_loss=True)
    serve = run.serve(replace(Settings(), server=server), lambda _: lane.fail("its device is gone"))
    with pytest.raises(ModelLost, match="the model transcriber is lost: its device is gone"):
        asyncio.run(asyncio.wait_for(serve, 20))


@pytest.mark.server
def test_when_a_worker_dies_under_a_file_then_its_sender_is_told_and_the_next_file_is_served(tmp_path: Path) -> None:
    with scripted_server(tmp_path) as server:
        died = Posted(server, "die").done()
        assert (died[0], json.loads(died[1])["error"]["code"]) == (500, "processing_error")
        assert Posted(server, "").done()[0] == 200
        assert server.ready()["status"] == "ready"
        server.until('antiphon_lane_restarts_total{lane="files"} 1.0')
