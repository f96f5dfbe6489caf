"""Whether a language model as a voter would make the end-of-turn model better: it is asked how likely the user's
message ends behind the transcript.

    python -m bench.turn_taking.voter [--model NAME]

For each transcript of bench/results/turns-pauses.json it computes, in one forward pass, the probability of the token
that ends a message, after the transcript as it is, and of that token or a mark that ends a sentence, after the
transcript without its last mark. The logistic regression is fitted with and without the logits of both, on the fitted
speakers, and compared on the others. Written to bench/results/turns-voter.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from bench.common import machine, save, table
from bench.turn_taking.fit import PRIOR, logistic, weights_of
from bench.turn_taking.pauses import Pause, read
from bench.turn_taking.replay import evidence_of, is_fitted

from antiphon.loading.loader import store_of
from antiphon.settings import load as load_settings
from antiphon.turns.end_of_turn import features

MARKS = (".", "?", "!")


def logits_of_ends(folder: Path, texts: Sequence[str]) -> dict[str, tuple[float, float]]:
    """For each text, the logit of the message's end behind it, and of that or a mark behind it without its mark."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    marks = [tokenizer.encode(m, add_special_tokens=False)[0] for m in MARKS]

    def share(text: str, tokens: list[int]) -> float:
        shown = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        shown = shown[: shown.rindex("<|im_end|>")]
        ids = torch.tensor([tokenizer.encode(shown, add_special_tokens=False)])
        with torch.inference_mode():
            last = model(ids, logits_to_keep=1).logits[0, -1].float().softmax(-1)
        p = min(1 - 1e-6, max(1e-6, float(last[tokens].sum())))
        return math.log(p / (1 - p))

    found = {}
    for i, text in enumerate(texts):
        found[text] = (share(text, [end]), share(text.rstrip(" .?!,;:-\u2026"), [end, *marks]))
        if i % 50 == 0:
            print(i, len(texts), flush=True)
    return found


def auc(scores: np.ndarray, ends: np.ndarray) -> float:
    """The probability that an end has a higher score than a pause inside a turn."""
    above = scores[ends][:, None] - scores[~ends][None, :]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())


def compare(pauses: Sequence[Pause], votes: dict[str, tuple[float, float]]) -> dict[str, Any]:
    """AUC and log loss on the tested speakers, of fits with and without the votes."""
    known = [p for p in pauses if p.text in votes]
    extra = {"vote": (0.0, 1.0), "vote_without_mark": (0.0, 1.0)}
    out: dict[str, Any] = {}
    for name, sound, words, voted in (
        ("sound", True, False, False),
        ("sound and vote", True, False, True),
        ("sound and words", True, True, False),
        ("sound, words, and vote", True, True, True),
    ):
        rows = [features(evidence_of(p, sound=sound, words=words)) for p in known]
        if voted:
            rows = [
                r | dict(zip(extra, np.array(votes[p.text]) / 3, strict=True)) for r, p in zip(rows, known, strict=True)
            ]
        fitted = [i for i, p in enumerate(known) if is_fitted(p.speaker)]
        tested = [i for i, p in enumerate(known) if not is_fitted(p.speaker) and not p.mixed]
        weights = logistic(
            [known[i] for i in fitted], rows=[rows[i] for i in fitted], prior=dict(PRIOR) | extra if voted else PRIOR
        )
        logit = np.array([sum(weights[n] * rows[i][n] for n in weights) for i in tested])
        ends = np.array([known[i].length_s is None for i in tested])
        weight = weights_of([known[i] for i in tested])
        loss = np.logaddexp(0, np.where(ends, -logit, logit))
        out[name] = {
            "auc": round(auc(logit, ends), 3),
            "log_loss": round(float(np.average(loss, weights=weight)), 3),
            "pauses": int((~ends).sum()),
            "ends": int(ends.sum()),
            "weights": weights,
        }
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a language model as a voter for ends of turns.")
    parser.add_argument("--model", default="qwen2.5-coder-0.5b-instruct-fp32")
    args = parser.parse_args()
    pauses = [dataclasses.replace(p, text=p.text.strip()) for p in read()]
    folder = Path(store_of(load_settings().models).home) / "prepared" / args.model
    votes = logits_of_ends(folder, sorted({p.text for p in pauses if p.text.strip(" .?!,;:-\u2026")}))
    figures = compare(pauses, votes)
    rows = [(n, r["auc"], r["log_loss"], r["pauses"], r["ends"]) for n, r in figures.items()]
    table(f"{args.model} as a voter", ("", "AUC", "log loss", "pauses", "ends"), rows)
    print(f"written: {save('turns-voter', {'machine': machine(), args.model: figures})}")


if __name__ == "__main__":
    main()
