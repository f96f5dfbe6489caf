"""The rows of words for MiniCPM-o's code decoder: several units at once."""

from __future__ import annotations

import torch

from antiphon.adapters.minicpmo.speech_decoder import TextConditions, UnitWords
from tests.engine.local.operators import Operators


def test_units_that_are_computed_together_have_the_rows_of_each_alone() -> None:
    torch.manual_seed(3)
    model = TextConditions(num_tokens=30, hidden_width=12, width=8, bos=29)
    units = [UnitWords(words, list(torch.randn(len(words), 12))) for words in ((4, 5), (), (7,), (5, 4, 28))]
    together = model(units)
    assert [rows.shape for rows in together] == [(3, 8), (1, 8), (2, 8), (4, 8)]
    for unit, rows in zip(units, together, strict=True):
        torch.testing.assert_close(rows, model([unit])[0])
    table = model.emb_text.weight
    assert all(torch.equal(rows[-1], table[29]) for rows in together)
    # A word's row is its embedding plus its hidden state, projected to a vector of length 1.
    torch.testing.assert_close((together[2][0] - table[7]).norm(), torch.tensor(1.0))


def test_units_without_words_only_ask_for_codes() -> None:
    model = TextConditions(num_tokens=3, hidden_width=4, width=2, bos=2)
    rows = model([UnitWords((), ()), UnitWords((), ())])
    assert all(torch.equal(each, model.emb_text.weight[2:]) for each in rows)


def test_further_units_add_no_operator() -> None:
    model = TextConditions(num_tokens=30, hidden_width=12, width=8, bos=29)
    unit, counts = UnitWords((1, 2), list(torch.randn(2, 12))), []
    for count in (1, 8):
        with Operators() as operators:
            model([unit] * count)
        counts.append(operators.names)
    assert counts[0] == counts[1]
