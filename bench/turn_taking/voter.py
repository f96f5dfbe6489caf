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
from bench.turn_taking.curve import groups
from bench.turn_taking.fit import PRIOR, logistic, weights_of
from bench.turn_taking.pauses import Pause, read
from bench.turn_taking.replay import evidence_of, is_fitted

from antiphon.loading.loader import store_of
from antiphon.settings import load as load_settings
from antiphon.turns.ending.end_of_turn import features

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
    """AUC and log loss on the tested speakers, of fits with and without the votes, of each group of pauses."""
    known = [p for p in pauses if p.text in votes]
    extra = {"vote": (0.0, 1.0), "vote_without_mark": (0.0, 1.0)}
    fitted = [p for p in known if is_fitted(p.speaker)]
    out: dict[str, Any] = {}
    for name, words, voted in (
        ("sound", False, False),
        ("sound and vote", False, True),
        ("sound and words", True, False),
        ("sound, words, and vote", True, True),
    ):

        def row(p: Pause, words: bool = words, voted: bool = voted) -> dict[str, float]:
            found = features(evidence_of(p, words=words))
            # A third, so that one prior fits these logits and the other features.
            return found | dict(zip(extra, np.array(votes[p.text]) / 3, strict=True)) if voted else found

        prior = dict(PRIOR) | extra if voted else PRIOR
        weights = logistic(fitted, rows=[row(p) for p in fitted], prior=prior)
        for group, (inner, ends) in groups([p for p in known if not is_fitted(p.speaker)]).items():
            tested = [*inner, *ends]
            logit = np.array([sum(value * weights[n] for n, value in row(p).items()) for p in tested])
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
    parser.add_argument("--model", default="qwen2.5-coder-0.5b-instruct-fp32")
    args = parser.parse_args()
    pauses = [dataclasses.replace(p, text=p.text.strip()) for p in read()]
    folder = Path(store_of(load_settings().models).home).expanduser() / "prepared" / args.model
    votes = logits_of_ends(folder, sorted({p.text for p in pauses if p.text.strip(" .?!,;:-\u2026")}))
    figures = compare(pauses, votes)
    for group, methods in figures.items():
        rows = [(n, *r.values()) for n, r in methods.items()]
        table(f"{args.model} as a voter: {group}", ("", "AUC", "log loss", "pauses", "ends"), rows)
    print(f"written: {save('turns-voter', {'machine': machine(), args.model: figures})}")


if __name__ == "__main__":
    main()
