"""A real host is killed while it answers a stock client behind a door. The client notices only a pause."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.conftest import SMALL, Process, Serve

LIMIT_S = 90


def num_sessions(host: Process) -> float:
    lines = httpx.get(f"{host.url}/metrics", trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("antiphon_sessions{"))


def test_when_its_host_is_killed_in_an_answer_then_a_stock_client_goes_on(serve: Serve, tmp_path: Path) -> None:
    flags = ("--language-model", SMALL, "--state", str(tmp_path))
    hosts = [serve(*flags, clean=False) for _ in range(2)]
    door = serve("--role", "door", "--behind", hosts[0].url, "--behind", hosts[1].url)
    url = door.ws

    async def main() -> list[Any]:
        client = openai.AsyncOpenAI(api_key="none", base_url=f"{url.replace('ws', 'http', 1)}/v1")
        seen: list[Any] = []

        async def until_done(kill: bool) -> Any:
            killed = False
            async for event in connection:
                seen.append(event)
                if kill and not killed and event.type == "response.output_text.delta":
                    killed = True
                    (owner,) = (h for h in hosts if h.popen.poll() is None and num_sessions(h))
                    owner.popen.send_signal(signal.SIGKILL)
                if event.type == "response.done":
                    return event.response
            raise AssertionError("the session has ended")

        async def ask(words: str, *, kill: bool = False) -> Any:
            content = [{"type": "input_text", "text": words}]
            item = {"type": "message", "role": "user", "content": content}
            await connection.conversation.item.create(item=item)  # type: ignore[arg-type]
            await connection.response.create(response={"max_output_tokens": 24})
            return await until_done(kill)

        async with asyncio.timeout(LIMIT_S), client.realtime.connect(model="default") as connection:
            await connection.session.update(session={"type": "realtime", "output_modalities": ["text"]})
            first = await ask("My name is Bruno.")
            assert first.output[0].content[0].text
            cut = await ask("Tell me a long story.", kill=True)
            assert (cut.status, cut.status_details.reason) == ("cancelled", None)
            # The response was requested, so it begins again.
            again = await until_done(kill=False)
            assert again.id != cut.id
            assert (again.status, again.status_details.reason) == ("incomplete", "max_output_tokens")
            await ask("And again?")
        return seen

    seen = asyncio.run(main())
    assert not [event for event in seen if event.type == "error"]
    # Each completed item was completed once. The item that the killed host had begun is deleted without being
    # completed.
    done = [event.item.id for event in seen if event.type == "conversation.item.done"]
    gone = [event.item_id for event in seen if event.type == "conversation.item.deleted"]
    assert len(done) == len(set(done)) == 6
    assert len(gone) == 1
    assert not set(gone) & set(done)
    begun = [event.response.id for event in seen if event.type == "response.created"]
    ended = [event.response.id for event in seen if event.type == "response.done"]
    assert begun == ended
    assert len(set(begun)) == 4
    for host in hosts:
        host.terminate()
        with host.popen:
            host.popen.wait(30)
