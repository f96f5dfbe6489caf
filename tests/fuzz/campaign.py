"""A campaign: generated inputs for every target, with a bystander session next to each attacked session."""

from __future__ import annotations

import hashlib
import random
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.targets import TARGETS, Input, Target

CORPUS = Path(__file__).parent / "corpus"
# Number of inputs that a bystander reads while the attacked session reads its own.
POLITE = 5


@dataclass(frozen=True, slots=True)
class Find:
    """An input that failed. It raised an error, or its bystander noticed it."""

    target: str
    data: Input
    failure: str


@dataclass(slots=True)
class Report:
    """The number of inputs of each target, and the failures. Of equal failures, only the first is kept."""

    tried: Counter[str] = field(default_factory=Counter)
    finds: list[Find] = field(default_factory=list)

    def of(self, target: str) -> list[Find]:
        """Return the failures of one target."""
        return [find for find in self.finds if find.target == target]

    def add(self, find: Find) -> None:
        if (find.target, find.failure) not in {(f.target, f.failure) for f in self.finds}:
            self.finds.append(find)


def run(
    num_inputs: int, seed: int, until: Callable[[], bool] = lambda: False, only: Collection[str] = tuple(TARGETS)
) -> Report:
    """Run `num_inputs` inputs, with the targets in turn. Ends earlier if `until` returns true.

    The same seed gives the same inputs. Each round makes new sessions, so that a session that no longer reacts does not
    hide later failures.
    """
    report = Report()
    draws = {name: random.Random(f"{seed} {name}") for name in only}
    while sum(report.tried.values()) < num_inputs:
        for name, draw in draws.items():
            if until():
                return report
            target = TARGETS[name]
            if target.per_round >= 1 or draw.random() < target.per_round:
                one_session(name, target, draw, max(1, int(target.per_round)), report)
    return report


def one_session(name: str, target: Target, draw: random.Random, num_inputs: int, report: Report) -> None:
    """Attack one new session.

    A bystander, which is another session in the process, reads a fixed list of inputs during the attack. A third
    session reads the same list afterwards. Both must give the same answers.
    """
    polite = random.Random(0)
    asked = [target.draw(polite) for _ in range(min(POLITE, num_inputs))]
    attacked, bystander, reported = target.new(), target.new(), []
    data: Input = ""
    for number in range(num_inputs):
        data = target.draw(draw)
        report.tried[name] += 1
        if failure := tried(attacked, data):
            report.add(Find(name, data, failure))
            attacked = target.new()
        if number < len(asked):
            reported.append(answer(bystander, asked[number]))
    control = target.new()
    if reported != [answer(control, question) for question in asked[: len(reported)]]:
        report.add(Find(name, data, "the bystander got another answer"))


def answer(read: Callable[[Input], str], data: Input) -> str:
    """Return a session's answer to an input, or the error it raised."""
    try:
        return read(data)
    except Exception as error:
        return repr(error)


def tried(read: Callable[[Input], str], data: Input) -> str | None:
    """Run one input. Return the error that it raised and where, or None if it passed."""
    try:
        read(data)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(at.filename).name}:{at.name}"
    return None


def folder_of(target: str) -> Path:
    """Return the folder of the corpus for a target's failures."""
    return CORPUS / re.sub(r"\W+", "-", target).strip("-")


def written(find: Find) -> Path:
    """Write a failure to the corpus, as a file in the target's folder. A digest is its name."""
    data = find.data.encode("utf-8", "surrogatepass") if isinstance(find.data, str) else find.data
    folder = folder_of(find.target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    return path
