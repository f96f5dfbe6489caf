"""An SGLang server on a real socket, without a model; the counterpart of scripted_vllm.py.

Its sessions are trees of requests, by the rules of SGLang 0.5.23 (`managers/session_controller.py`). That source was
read but not run.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from tests.remote.engine.scripted_vllm import ScriptedVllm, send, write


@dataclass(eq=False)
class Node:
    """A request of a session. `rows`: its rows, including its tokens so far."""

    name: str
    rows: list[int]
    children: list[Node] = field(default_factory=list)

    def forget(self, known: dict[str, Node]) -> None:
        for child in self.children:
            child.forget(known)
        del known[self.name]


class ScriptedSglang(ScriptedVllm):
    """An SGLang server whose answers a test scripts.

    - `bos`: the token that begins texts. It is removed from the start of the rows that are added to a session.
    - `sessions`: the requests of each open session by their names.
    - `sent`: the bodies of requests for more than one token, as received; `prompts` has all rows of them.
    """

    def __init__(self, *args: Any, incremental: bool = False, **options: Any) -> None:
        super().__init__(*args, **options)
        self.bos, self.incremental = self.eos, incremental
        self.sessions: dict[str, dict[str, Node]] = {}
        self.sent: list[dict[str, Any]] = []

    def restart(self, model: str) -> None:
        super().restart(model)
        self.sessions.clear()

    async def _answer(self, path: str, headers: dict[str, str], data: bytes, writer: asyncio.StreamWriter) -> None:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            await send(writer, 401, {"error": {"message": "Unauthorized"}})
        elif path == "/open_session":
            name = json.loads(data)["session_id"]
            assert name not in self.sessions
            self.sessions[name] = {}
            await send(writer, 200, json.dumps(name))
        elif path == "/close_session":
            self.sessions.pop(json.loads(data)["session_id"], None)
            await send(writer, 200, "")
        elif path == "/generate":
            body = json.loads(data)
            prompt, node = self._placed(body)
            if prompt is None:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
                await write(writer, {"error": {"message": "Invalid request session id"}})
                return
            if body["sampling_params"]["max_new_tokens"] > 1:
                self.sent.append(body)
            await self._tokens(self._flat(body) | {"prompt": prompt, "node": node}, headers, writer)
        elif path in ("/v1/models", "/tokenize"):
            await super()._answer(path, headers, data, writer)
        else:
            await send(writer, 404, {"detail": "Not Found"})

    def _flat(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body in vLLM's form."""
        out = body["sampling_params"] | {"cache_salt": body["extra_key"], "model": self.model}
        out["max_tokens"] = out["max_new_tokens"]
        if "json_schema" in out:
            out["structured_outputs"] = {"json": out["json_schema"]}
        elif "ebnf" in out:
            out["structured_outputs"] = {"grammar": out["ebnf"]}
        return out

    def _placed(self, body: dict[str, Any]) -> tuple[list[int] | None, Node | None]:
        """Return all rows of a request, and its node; None if its session or parent is unknown."""
        rows, wanted = body["input_ids"], body.get("session_params")
        assert rows
        if wanted is None:
            return rows, None
        known = self.sessions.get(wanted["id"])
        if known is None:
            return None, None
        parent = None
        assert wanted["replace"]
        if wanted["rid"] is None:
            known.clear()
        elif (parent := known.get(wanted["rid"])) is None:
            return None, None
        if parent:
            for child in parent.children:
                child.forget(known)
            parent.children.clear()
            rows = rows[1:] if rows[0] == self.bos else rows
            rows = [*(parent.rows[: wanted["offset"]] if wanted["offset"] else parent.rows), *rows]
        node = Node(body["rid"], list(rows))
        assert node.name not in known
        known[node.name] = node
        if parent:
            parent.children.append(node)
        return rows, node

    def _event(self, chat: list[dict[str, Any]], body: dict[str, Any], rows: list[int], ends: str | None) -> Any:
        if body["node"]:
            body["node"].rows = list(rows)
        given = rows[len(body["prompt"]) :]
        meta = {
            "id": "1",
            "finish_reason": {"type": ends} if ends else None,
            "prompt_tokens": len(body["prompt"]),
            "completion_tokens": len(given),
            "cached_tokens": self._cached(body["cache_salt"], body["prompt"]),
        }
        return {"text": "", "output_ids": given[-1:] if self.incremental else given, "meta_info": meta}

    def _last(self, chat: list[dict[str, Any]], body: dict[str, Any], rows: list[int], cached: int) -> Any:
        return None

    async def _fail(self, kind: str, chat: list[dict[str, Any]], writer: asyncio.StreamWriter) -> None:
        meta = {"finish_reason": None, "prompt_tokens": 1, "completion_tokens": 1_000_000}
        match kind:
            case "miscount":
                await write(writer, {"output_ids": [1], "meta_info": meta})
            case "no ids":
                await write(writer, {"output_ids": "12", "meta_info": meta})
            case _:
                await super()._fail(kind, chat, writer)
