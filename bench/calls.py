"""Counts function calls of a language model: `python -m bench.calls [--url URL] [--model NAME] [SERVE FLAGS]`.

The prompts (`bench/call_prompts`) are spoken sentences: a hundred about a home, or, with `--prompts errands`, fifty
others that were not used while calls were developed. Each prompt has the same six tools and `tool_choice: auto`. Most
prompts need one call, the others none. Each is sent once, without randomness, to `/v1/chat/completions`: of a server
that is started for it, or of the server at `--url`.

- right: one call of the right tool, with the arguments that the prompt gives. wrong: any other call. missed: no call.
- unwanted: a call for a prompt that needs none.
- reported: a reply with JSON or a tag of a call left in its text, which a voice would read out.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from contextlib import nullcontext
from typing import Any

import httpx
from bench.common import HERE, RESULTS, Server, machine, options, save, server, show, spread

PROMPTS = HERE / "call_prompts"

MAX_TOKENS = 96
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
    client: httpx.AsyncClient, model: str, said: str, prompts: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """Send one prompt. Return the reply's message, and its time in seconds."""
    messages = [{"role": "system", "content": prompts["instructions"]}, {"role": "user", "content": said}]
    tools = [{"type": "function", "function": tool} for tool in prompts["tools"]]
    body = {"model": model, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": MAX_TOKENS}
    began = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message, time.perf_counter() - began


async def run(url: str, model: str, prompts: dict[str, Any]) -> dict[str, Any]:
    """Send all prompts, one after another, and count the results."""
    counts: dict[str, int] = dict.fromkeys(("right", "wrong", "missed", "unwanted", "reported"), 0)
    took: list[float] = []
    replies: list[dict[str, Any]] = []
    asked = [*prompts["wanted"], *({"said": said, "tool": "", "arguments": {}} for said in prompts["unwanted"])]
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        for one in asked:
            name, said = one["tool"], one["said"]
            message, seconds = await ask(client, model, said, prompts)
            calls, text = message.get("tool_calls") or [], message.get("content") or ""
            took.append(seconds)
            if not name:
                verdict = "unwanted" if calls else ""
            elif not calls:
                verdict = "missed"
            else:
                verdict = "right" if len(calls) == 1 and fits(calls[0], name, one["arguments"]) else "wrong"
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
    parser.add_argument("--instructions", help="a system message, instead of the set's")
    parser.add_argument("--name", default="", help="name of the figures in the results; without it, they are not saved")
    parser.add_argument("--show", action="store_true", help="print each reply that is not right")
    args, flags = parser.parse_known_args()
    prompts = prompts_of(args.prompts)
    prompts["instructions"] = args.instructions or prompts["instructions"]
    with nullcontext(Server(args.url, None)) if args.url else server(*flags) as asked:  # type: ignore[arg-type]
        found = asyncio.run(run(asked.url, args.model, prompts))
    counts = found["counts"]
    if args.show:
        for reply in found["replies"]:
            if reply["verdict"] not in ("", "right") or LEFT.search(reply["text"]):
                print(reply["verdict"] or "reported", "|", reply["said"], "|", reply["calls"], "|", reply["text"][:200])
    wanted, unwanted = len(prompts["wanted"]), len(prompts["unwanted"])
    heads = (f"calls right of {wanted}", "wrong", "missed", f"unwanted of {unwanted}", "left in the text")
    row = dict(zip(heads, counts.values(), strict=True))
    show("Function calls", [row | {key: round(found[key], 2) for key in ("p50_s", "p95_s")}])
    if args.name:
        path = RESULTS / "calls.json"
        kept = json.loads(path.read_text()) if path.exists() else {"runs": {}}
        about = {"flags": flags, "prompts": args.prompts, "instructions": prompts["instructions"]}
        kept["runs"][args.name] = about | found
        save("calls", kept | {"machine": machine()})


if __name__ == "__main__":
    main()
