"""Counts function calls of a language model: `python -m bench.calls [--turns N [--mixed]] [--url URL] [SERVE FLAGS]`.

The prompts (`bench/call_prompts`) are spoken sentences: a hundred about a home, or, with `--prompts errands`, fifty
others that were not used while calls were developed. Each prompt has the same six tools and `tool_choice: auto`. Most
prompts need one call, the others none. Each is sent once, without randomness, to `/v1/chat/completions` of a server
that is started for it, or of the server at `--url`. With `--over realtime`, each is sent in a conversation of
`/v1/realtime` that begins with the same messages.

With `--turns N`, the prompts that need a call are asked in conversations of N turns. After each turn the model gets the
right call, with a result, and answers in words, which become part of the conversation. The counts are then by the turn.
With `--mixed`, every second turn is a prompt that needs no call. Half of the conversations begin with such a prompt.

- right: one call of the right tool, with the arguments that the prompt gives. wrong: any other call. missed: no call.
- unwanted: a call for a prompt that needs none.
- reported: a reply with JSON or a tag of a call left in its text, which a voice would read out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter, defaultdict
from contextlib import nullcontext
from typing import Any

import httpx
import websockets
from bench.common import HERE, RESULTS, Server, machine, options, save, server, show, spread

PROMPTS = HERE / "call_prompts"

MAX_TOKENS = 96
# What the tools of both sets of prompts return in a conversation.
GIVEN = defaultdict(
    lambda: "Done.",
    get_weather="15 degrees and cloudy.",
    get_stock_price="212 dollars.",
)
# Signs in a reply's text that it was meant as a call.
LEFT = re.compile(r'\{\s*"|tool_call|</?tools?>|function_call')


def prompts_of(name: str) -> dict[str, Any]:
    """Return a set of prompts: `instructions`, `tools`, `wanted` and `unwanted`.

    `wanted` has for each prompt the tool and, by argument name, a pattern for the right value. `unwanted` has the
    prompts that need no call.
    """
    found: dict[str, Any] = json.loads((PROMPTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def fits(call: dict[str, Any], name: str, expected: dict[str, str]) -> bool:
    """Return whether a call names the right tool and has the right arguments."""
    if call["function"]["name"] != name:
        return False
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        # The reply was truncated.
        return False
    return all(re.search(p, str(arguments.get(key, "")), re.IGNORECASE) for key, p in expected.items())


async def ask(
    client: httpx.AsyncClient, model: str, messages: list[dict[str, Any]], prompts: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Send the messages after the instructions. Return the reply's message, and its time in seconds."""
    if client.base_url.scheme.startswith("ws"):
        return await ask_in_conversation(str(client.base_url).rstrip("/"), model, messages, prompts)
    messages = [{"role": "system", "content": prompts["instructions"]}, *messages]
    tools = [{"type": "function", "function": tool} for tool in prompts["tools"]]
    body = {"model": model, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": MAX_TOKENS}
    began = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message, time.perf_counter() - began


async def ask_in_conversation(
    url: str, model: str, messages: list[dict[str, Any]], prompts: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Send the messages as the items of a new conversation of a server, which `url` names with the scheme ws.

    Return the response as a message, and its time in seconds.
    """
    tools = [{"type": "function", **tool} for tool in prompts["tools"]]
    session = {"type": "realtime", "output_modalities": ["text"], "instructions": prompts["instructions"]}
    events = [{"type": "session.update", "session": session | {"tools": tools, "max_output_tokens": MAX_TOKENS}}]
    events += [{"type": "conversation.item.create", "item": item} for each in messages for item in items_of(each)]
    async with websockets.connect(f"{url}/v1/realtime?model={model}", max_size=None) as socket:
        for event in events:
            await socket.send(json.dumps(event))
        began = time.perf_counter()
        await socket.send(json.dumps({"type": "response.create"}))
        while (event := json.loads(await socket.recv()))["type"] != "response.done":
            if event["type"] == "error":
                raise RuntimeError(event["error"]["message"])
    output = event["response"]["output"]
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    calls = [{"function": {k: item[k] for k in ("name", "arguments")}} for item in output if "call_id" in item]
    return {"content": text, "tool_calls": calls}, time.perf_counter() - began


def items_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message of chat completions as items of a conversation."""
    role, text = message["role"], message["content"]
    if role == "tool":
        return [{"type": "function_call_output", "call_id": message["tool_call_id"], "output": text}]
    kind = "input_text" if role == "user" else "output_text"
    items = [{"type": "message", "role": role, "content": [{"type": kind, "text": text}]}] if text else []
    calls = message.get("tool_calls", ())
    return items + [{"type": "function_call", "call_id": call["id"], **call["function"]} for call in calls]


def verdict_of(message: dict[str, Any], name: str, arguments: dict[str, str]) -> str:
    """Return the verdict on a reply to a prompt that needs a call of `name`."""
    calls = message.get("tool_calls") or []
    if not calls:
        return "missed"
    return "right" if len(calls) == 1 and fits(calls[0], name, arguments) else "wrong"


async def converse(
    url: str, model: str, prompts: dict[str, Any], turns: int, most: int, *, mixed: bool
) -> dict[str, Any]:
    """Hold conversations of `turns` turns, `most` at most, and return the verdicts of each turn.

    Each turn asks a prompt that needs a call. If `mixed`, every second turn asks one that needs none.
    """
    wanted, unwanted = prompts["wanted"], prompts["unwanted"]
    # Neighbours in the list need the same tool. A conversation takes distant ones, each beginning at another tool.
    stride = len(wanted) // turns
    by_turn: list[Counter[str]] = [Counter() for _ in range(turns)]
    replies: list[dict[str, Any]] = []
    # The first prompt of each conversation, and whether its first turn needs no call.
    begins = [(first, words) for first in range(stride) for words in ((False, True) if mixed else (False,))][:most]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for first, words in begins:
            messages: list[dict[str, Any]] = []
            for turn in range(turns):
                at = first + (turn + first) % turns * stride
                if mixed and (turn % 2 == 0) == words:
                    one = {"tool": "", "said": unwanted[at % len(unwanted)], "arguments": {}}
                else:
                    one = wanted[at]
                name, said, expected = one["tool"], one["said"], one["arguments"]
                messages.append({"role": "user", "content": said})
                reply, _ = await ask(client, model, messages, prompts)
                heard = [c["function"] for c in reply.get("tool_calls") or []]
                without = "unwanted" if heard else "in words"
                verdict = verdict_of(reply, name, expected) if name else without
                by_turn[turn][verdict] += 1
                text = reply.get("content") or ""
                replies.append(
                    {"turn": turn + 1, "said": said, "wanted": name, "verdict": verdict, "calls": heard, "text": text}
                )
                # The conversation goes on as if the reply had been right.
                if name:
                    arguments = json.dumps({key: readable(pattern) for key, pattern in expected.items()})
                    function = {"name": name, "arguments": arguments}
                    call = {"id": f"call_{turn}", "type": "function", "function": function}
                    messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": GIVEN[name]})
                    reply, _ = await ask(client, model, messages, prompts)
                messages.append({"role": "assistant", "content": reply.get("content") or "Done."})
    return {"turns": [dict(counts) for counts in by_turn], "conversations": len(begins), "replies": replies}


def readable(pattern: str) -> str | int:
    """Return a value that a pattern of an argument matches."""
    text = re.sub(r"[\\^$?*+()\[\]]", "", pattern.split("|")[0]).strip()
    return int(text) if text.isdigit() else text


async def run(url: str, model: str, prompts: dict[str, Any]) -> dict[str, Any]:
    """Send all prompts, one after another, and count the results."""
    counts: dict[str, int] = dict.fromkeys(("right", "wrong", "missed", "unwanted", "reported"), 0)
    took: list[float] = []
    replies: list[dict[str, Any]] = []
    asked = [*prompts["wanted"], *({"said": said, "tool": "", "arguments": {}} for said in prompts["unwanted"])]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for one in asked:
            name, said = one["tool"], one["said"]
            message, seconds = await ask(client, model, [{"role": "user", "content": said}], prompts)
            calls, text = message.get("tool_calls") or [], message.get("content") or ""
            took.append(seconds)
            unwanted = "unwanted" if calls else ""
            verdict = verdict_of(message, name, one["arguments"]) if name else unwanted
            counts["reported"] += bool(LEFT.search(text))
            if verdict:
                counts[verdict] += 1
            heard = [c["function"] for c in calls]
            replies.append({"said": said, "wanted": name, "verdict": verdict, "calls": heard, "text": text})
    return {"counts": counts, **spread(took), "replies": replies}


def main() -> None:
    parser = options("python -m bench.calls", __doc__)
    parser.add_argument("--url", help="a running server; by default, one is started with the further flags")
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--prompts", default="home", choices=("home", "errands"), help="which set of bench/call_prompts"
    )
    parser.add_argument("--turns", type=int, default=0, help="ask in conversations of this many turns")
    parser.add_argument("--mixed", action="store_true", help="every second turn needs no call, with --turns")
    parser.add_argument("--conversations", type=int, default=1000, help="most conversations, with --turns")
    parser.add_argument("--over", default="chat", choices=("chat", "realtime"), help="which of the server's APIs")
    parser.add_argument("--instructions", help="a system message, instead of the set's")
    parser.add_argument("--name", default="", help="name of the figures in the results; without it, they are not saved")
    parser.add_argument("--show", action="store_true", help="print each reply that is not right")
    args, flags = parser.parse_known_args()
    prompts = prompts_of(args.prompts)
    prompts["instructions"] = args.instructions or prompts["instructions"]
    with nullcontext(Server(args.url, None)) if args.url else server(*flags) as asked:  # type: ignore[arg-type]
        url = asked.url.replace("http", "ws", 1) if args.over == "realtime" else asked.url
        found = asyncio.run(
            converse(url, args.model, prompts, args.turns, args.conversations, mixed=args.mixed)
            if args.turns
            else run(url, args.model, prompts)
        )
    if args.show:
        for reply in found["replies"]:
            if reply["verdict"] not in ("", "right", "in words") or LEFT.search(reply["text"]):
                shown = (reply.get("turn", 1), reply["verdict"] or "reported", reply["said"], reply["calls"])
                print(*shown, reply["text"][:200], sep=" | ")
    if args.turns:
        rows = [
            {"turn": number}
            | {verdict: counts.get(verdict, 0) for verdict in ("right", "wrong", "missed", "unwanted", "in words")}
            for number, counts in enumerate(found["turns"], 1)
        ]
        show("Function calls by turn", rows)
    else:
        wanted, unwanted = len(prompts["wanted"]), len(prompts["unwanted"])
        heads = (f"calls right of {wanted}", "wrong", "missed", f"unwanted of {unwanted}", "left in the text")
        row = dict(zip(heads, found["counts"].values(), strict=True))
        show("Function calls", [row | {key: round(found[key], 2) for key in ("p50_s", "p95_s")}])
    if args.name:
        path = RESULTS / "calls.json"
        kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
        about = {"flags": flags, "prompts": args.prompts, "instructions": prompts["instructions"]}
        kept["runs"][args.name] = about | found
        save("calls", kept | {"machine": machine()})


if __name__ == "__main__":
    main()
