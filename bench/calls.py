"""Function calls of a language model, counted: `python -m bench.calls [--url URL] [--model NAME] [SERVE FLAGS]`.

Prompts as they are spoken (`bench/call_prompts`: a hundred about a home, or with `--prompts errands` fifty others that
were not looked at while calls were made to work), each with the same six tools and `tool_choice: auto`: for most of
them one call is right, for the others none is wanted. Each is asked once, without randomness, over
`/v1/chat/completions` of a server that is started for it, or of the one at `--url`.

- right: one call of the right tool, whose arguments are what was said. wrong: another call. missed: no call.
- unwanted: a call where none was asked for.
- told: a reply in which JSON or a tag of a call is left in the text, which a voice would read out.
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
# What a reply that was meant as a call leaves in its text.
LEFT = re.compile(r'\{\s*"|tool_call|</?tools?>|function_call')


def prompts_of(name: str) -> dict[str, Any]:
    """A set: `instructions`; `tools`; `wanted`: what is said, the tool and, by name, a pattern of each argument that
    is right; `unwanted`: what is said that asks for no call.
    """
    found: dict[str, Any] = json.loads((PROMPTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def fits(call: dict[str, Any], name: str, expected: dict[str, str]) -> bool:
    """Whether a call is the one that was asked for."""
    if call["function"]["name"] != name:
        return False
    try:
        arguments = json.loads(call["function"]["arguments"])
    except ValueError:
        # It was longer than a reply may be.
        return False
    return all(re.search(p, str(arguments.get(key, "")), re.IGNORECASE) for key, p in expected.items())


async def ask(
    client: httpx.AsyncClient, model: str, said: str, prompts: dict[str, Any]
) -> tuple[dict[str, Any], float]:
    """The reply's message, and the seconds that it took."""
    messages = [{"role": "system", "content": prompts["instructions"]}, {"role": "user", "content": said}]
    tools = [{"type": "function", "function": tool} for tool in prompts["tools"]]
    body = {"model": model, "messages": messages, "tools": tools, "temperature": 0, "max_tokens": MAX_TOKENS}
    began = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message, time.perf_counter() - began


async def run(url: str, model: str, prompts: dict[str, Any]) -> dict[str, Any]:
    """Ask everything, one after another, and count."""
    counts: dict[str, int] = dict.fromkeys(("right", "wrong", "missed", "unwanted", "told"), 0)
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
            counts["told"] += bool(LEFT.search(text))
            if verdict:
                counts[verdict] += 1
            heard = [c["function"] for c in calls]
            replies.append({"said": said, "wanted": name, "verdict": verdict, "calls": heard, "text": text})
    return {"counts": counts, **spread(took), "replies": replies}


def main() -> None:
    parser = options("python -m bench.calls", __doc__)
    parser.add_argument("--url", help="a server that runs; none: one is started with the further flags")
    parser.add_argument("--model", default="default")
    parser.add_argument(
        "--prompts", default="home", choices=("home", "errands"), help="which set of bench/call_prompts"
    )
    parser.add_argument("--instructions", help="another system message than the set's")
    parser.add_argument(
        "--name", default="", help="what the figures are called in the results; none: they are not kept"
    )
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
                print(reply["verdict"] or "told", "|", reply["said"], "|", reply["calls"], "|", reply["text"][:200])
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
