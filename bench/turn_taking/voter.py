"""Whether a language model as a voter would make the end-of-turn model better: it is asked how likely the user's
message ends behind the transcript.

    python -m bench.turn_taking.voter [--model NAME]

For each transcript of bench/results/turns-pauses.json it computes, in one forward pass, the probability of the token
that ends a message or a mark that ends a sentence, after the transcript without its last mark, and writes it there.
The logistic regression is fitted with and without it, on the fitted speakers, and compared on the others. Written to
bench/results/turns-voter.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.common import machine, save, table
from bench.turn_taking.curve import groups
from bench.turn_taking.fit import logistic, weights_of
from bench.turn_taking.pauses import PAUSES, Pause, read, write
from bench.turn_taking.replay import evidence_of, is_fitted

from antiphon.loading.loader import store_of
from antiphon.settings import load as load_settings
from antiphon.turns.ending.end_of_turn import features

MODEL = "qwen2.5-coder-0.5b-instruct-fp32"
MARKS = (".", "?", "!")


def votes_of(folder: Path, texts: Sequence[str]) -> dict[str, float]:
    """For each text without its last mark, the probability that the message or its sentence ends behind it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ends = [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    ends += [tokenizer.encode(m, add_special_tokens=False)[0] for m in MARKS]
    found = {}
    for i, text in enumerate(texts):
        shown = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        shown = shown[: shown.rindex("<|im_end|>")]
        ids = torch.tensor([tokenizer.encode(shown, add_special_tokens=False)])
        with torch.inference_mode():
            last = model(ids, logits_to_keep=1).logits[0, -1].float().softmax(-1)
        found[text] = round(float(last[ends].sum()), 6)
        if i % 50 == 0:
            print(i, len(texts), flush=True)
    return found


def auc(scores: np.ndarray, ends: np.ndarray) -> float:
    """The probability that an end has a higher score than a pause inside a turn."""
    above = scores[ends][:, None] - scores[~ends][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def compare(pauses: Sequence[Pause]) -> dict[str, Any]:
    """AUC and log loss on the tested speakers, of fits with and without the vote; of real pauses and of mixed-in ones.
    Pauses without a vote are left out.
    """
    known = [p for p in pauses if p.vote is not None]
    out: dict[str, Any] = {}
    for name, kind in (("sound", (1, 0, 0)), ("sound and words", (1, 1, 0)), ("sound, words and vote", (1, 1, 1))):
        sound, words, vote = map(bool, kind)
        weights = logistic([p for p in known if is_fitted(p.speaker)], sound=sound, words=words, vote=vote)
        for group, (inner, ends) in groups([p for p in known if not is_fitted(p.speaker)]).items():
            tested = [*inner, *ends]
            rows = [features(evidence_of(p, sound=sound, words=words, vote=vote)) for p in tested]
            logit = np.array([sum(weights[n] * r[n] for n in weights) for r in rows])
            is_end = np.array([p.length_s is None for p in tested])
            loss = np.logaddexp(0, np.where(is_end, -logit, logit))
            out.setdefault(group, {})[name] = {
                "auc": round(auc(logit, is_end), 3),
                "log_loss": round(float(np.average(loss, weights=weights_of(tested))), 3),
                "pauses": len(inner),
                "ends": len(ends),
            }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a language model as a voter for ends of turns.")
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args()
    folder = Path(store_of(load_settings().models).home).expanduser() / "prepared" / args.model
    pauses = read()
    votes = votes_of(folder, sorted({bare(p.text) for p in pauses} - {""}))
    pauses = [dataclasses.replace(p, vote=votes.get(bare(p.text))) for p in pauses]
    if args.model == MODEL:
        # The table is fitted to the votes of this one.
        seen = json.loads(PAUSES.read_text(encoding="utf-8"))
        write(PAUSES, seen["recordings"], pauses, [seen["decode_s"]])
    figures = compare(pauses)
    for group, methods in figures.items():
        rows = [(n, *r.values()) for n, r in methods.items()]
        table(f"{args.model} as a voter: {group}", ("", "AUC", "log loss", "pauses", "ends"), rows)
    print(f"written: {save('turns-voter', {'machine': machine(), args.model: figures})}")


def bare(text: str) -> str:
    """The text without the marks at its end."""
    return text.strip().rstrip(" .?!,;:-\u2026")


if __name__ == "__main__":
    main()
