"""A campaign: so many generated inputs to every target, with a bystander beside each one."""

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
# Inputs that a bystander reads beside those of the attacked session.
POLITE = 5


@dataclass(frozen=True, slots=True)
class Find:
    """An input that did not hold: what it raised, or that its bystander noticed."""

    target: str
    data: Input
    failure: str


@dataclass(slots=True)
class Report:
    """How many inputs each target was given, and which of them did not hold; of equal failures the first."""

    tried: Counter[str] = field(default_factory=Counter)
    finds: list[Find] = field(default_factory=list)

    def of(self, target: str) -> list[Find]:
        """The finds of one target."""
        return [find for find in self.finds if find.target == target]

    def add(self, find: Find) -> None:
        if (find.target, find.failure) not in {(f.target, f.failure) for f in self.finds}:
            self.finds.append(find)


def run(
    num_inputs: int, seed: int, until: Callable[[], bool] = lambda: False, only: Collection[str] = tuple(TARGETS)
) -> Report:
    """Give so many inputs to the targets in turn, the same for the same seed; fewer where `until` becomes true.

    Each round makes sessions anew, so that one that went deaf does not hide what comes after.
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
    """Attack one new session. A bystander, which is another session in the process, reads a fixed list of inputs while
    it is attacked, and a third one reads them afterwards: both must be told the same.
    """
    polite = random.Random(0)
    asked = [target.draw(polite) for _ in range(min(POLITE, num_inputs))]
    attacked, bystander, told = target.new(), target.new(), []
    data: Input = ""
    for number in range(num_inputs):
        data = target.draw(draw)
        report.tried[name] += 1
        if failure := tried(attacked, data):
            report.add(Find(name, data, failure))
            attacked = target.new()
        if number < len(asked):
            told.append(answer(bystander, asked[number]))
    control = target.new()
    if told != [answer(control, question) for question in asked[: len(told)]]:
        report.add(Find(name, data, "the bystander was told something else"))


def answer(read: Callable[[Input], str], data: Input) -> str:
    """What a session is told of an input, or what it raised."""
    try:
        return read(data)
    except Exception as error:
        return repr(error)


def tried(read: Callable[[Input], str], data: Input) -> str | None:
    """Give one input; what it raised and where, or None where it held."""
    try:
        read(data)
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} at {Path(at.filename).name}:{at.name}"
    return None


def folder_of(target: str) -> Path:
    """Where the corpus keeps the finds of a target."""
    return CORPUS / re.sub(r"\W+", "-", target).strip("-")


def written(find: Find) -> Path:
    """Keep a find: a file of the corpus, named by its target and a digest."""
    data = find.data.encode("utf-8", "surrogatepass") if isinstance(find.data, str) else find.data
    folder = folder_of(find.target)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(data).hexdigest()[:12]
    path.write_bytes(data)
    return path
