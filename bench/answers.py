"""Quality and delay of a language model's answers: a hundred short questions in conversations.

    antiphon bench answers [--models qwen2.5-coder-0.5b-instruct,qwen2.5-coder-1.5b-instruct] [--rounds 1]

Each question is a separate conversation over /v1/realtime, in text, at temperature 0.6, the default of conversations.
The models answer the same questions in turn, on the same machine. A model is a name from `antiphon pull --list`, a
folder, or URL#MODEL.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

from bench.common import HERE, Server, machine, options, percentile, save, server, show, spread
from bench.driver import CONVERSATION, Session

# Each question, with the words that make an answer right; | separates alternatives.
QUESTIONS = [line.split("\t") for line in (HERE / "questions.txt").read_text(encoding="utf-8").splitlines()]
MODELS = "qwen2.5-coder-0.5b-instruct,qwen2.5-coder-1.5b-instruct"
TASK = "You are on the phone. Answer in one short sentence."


def is_right(answer: str, accepted: str) -> bool:
    """Return whether an answer contains one of the alternatives as whole words, ignoring case."""
    return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer, re.IGNORECASE) for one in accepted.split("|"))


async def answered(front: Server, question: str) -> tuple[str, float, float, int]:
    """Ask one question. Return the answer, the seconds to its first word and to its end, and its number of tokens."""
    fields = {"type": "realtime", "output_modalities": ["text"], "instructions": TASK, "max_output_tokens": 80}
    async with Session(front.url, CONVERSATION, {"session": fields}) as session:
        content = [{"type": "input_text", "text": question}]
        await session.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
        begun = time.monotonic()
        await session.send("response.create")
        ended, done = await session.first(("response.done", "error"), 0, 600)
        if done["type"] == "error":
            raise RuntimeError(done)
        text = "".join(event["delta"] for event in session.of_type("response.output_text.delta"))
        first = [*session.times("response.output_text.delta"), begun][0]
        return text, first - begun, ended - begun, done["response"]["usage"]["output_tokens"]


def measured(model: str, rounds: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a model's row of the table, and all of its answers."""
    given = []
    with server("--language-model", model, "--synthesizer", "none") as front:
        asyncio.run(answered(front, QUESTIONS[0][0]))
        for _ in range(rounds):
            for question, accepted in QUESTIONS:
                text, first_s, took_s, tokens = asyncio.run(answered(front, question))
                given.append(
                    {"question": question, "answer": text, "right": is_right(text, accepted)}
                    | {"first_word_ms": first_s * 1000, "took_ms": took_s * 1000, "tokens": tokens}
                )
        memory = front.rss_mb()
    firsts = [one["first_word_ms"] for one in given]
    row = {
        "model": model.rpartition("/")[2],
        "right": sum(one["right"] for one in given) / rounds,
        **spread(firsts, "first_word", "ms"),
        "answer_p50_ms": percentile([one["took_ms"] for one in given], 50),
        "tokens_a_s": sum(one["tokens"] for one in given) / sum(one["took_ms"] for one in given) * 1000,
        "rss_mb": memory,
    }
    return row, given


def main() -> None:
    parser = options("antiphon bench answers", __doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    rows, answers = [], {}
    for model in args.models.split(","):
        row, answers[row["model"]] = measured(model, args.rounds)
        rows.append(row)
    show("right of 100 answers", rows)
    print(f"\nwritten: {save('answers', {'machine': machine(), 'models': rows, 'answers': answers})}")


if __name__ == "__main__":
    main()
