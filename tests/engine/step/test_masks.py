"""Masks of a step: words of many rules, filled together or one by one, and what is taken away from them."""

import numpy as np
import pytest
import torch

from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.schedule.rows import RowsOfStep
from dsv4.engine.step.constraint import ConstraintError, fill_allowed, has_bit, num_words, pack_tokens
from dsv4.engine.step.masks import make_masks
from dsv4.request import SamplingParams

VOCAB_SIZE, EOS = 77, 0


class Group:
    """Fills words of its rules together; remembers how many."""

    def __init__(self):
        self.counts = []

    def allowed(self, rules, words):
        self.counts.append(len(rules))
        failed = {}
        for place, rule in enumerate(rules):
            try:
                words[place] = rule.allowed()
            except ConstraintError as error:
                failed[place] = error
        return failed


class Multiples:
    """Allows multiples of a number; none of 0. Bits behind the vocabulary are set: they do not count."""

    def __init__(self, factor, group=None):
        self.factor = factor
        if group is not None:
            self.group = group

    def allowed(self):
        if self.factor < 0:
            raise ConstraintError("broken")
        ids = np.arange(num_words(VOCAB_SIZE) * 32)
        return pack_tokens((ids % self.factor == 0) | (ids >= VOCAB_SIZE) if self.factor else ids >= VOCAB_SIZE)

    def accept(self, token_id):
        pass

    def rollback(self, count):
        pass


def piece(rule=None, draws=True, **params):
    request = Request.start(
        [5, 6], SamplingParams(max_tokens=9, **params), max_context_tokens=64, eos_token_id=EOS, constraint=rule
    )  # fmt: skip
    return Piece(request, 0, 0, 2, draws)


def rows_of(requests):
    """Of requests that decode, as arrays."""
    none = np.zeros(0, dtype=np.int64)
    ruled = tuple(place for place, one in enumerate(requests) if one.may_have_rules)
    return RowsOfStep(tuple(requests), (), none, none, none, none, ruled=ruled)


def shown(pieces, rows=()):
    """By row that draws, its allowed tokens; and why rows are stuck."""
    plan = StepPlan(tuple(pieces), rows=rows_of([one.request for one in rows]))
    masks = make_masks(plan, VOCAB_SIZE, torch.device("cpu"))
    if masks.rows is None:
        return {}, masks.stuck
    rows = zip(masks.rows.tolist(), masks.words.numpy(), strict=True)
    return {row: {i for i in range(len(words) * 32) if has_bit(words, i)} for row, words in rows}, masks.stuck


def multiples(factor):
    return set(range(0, VOCAB_SIZE, factor))


@pytest.mark.parametrize("kind", ["one by one", "together", "mixed"])
def test_rows_of_rules(kind):
    group = Group() if kind != "one by one" else None
    last = Multiples(7) if kind == "mixed" else Multiples(7, group)
    rules = [Multiples(2, group), Multiples(-1, group), Multiples(0, group), last]
    pieces = [piece(), *map(piece, rules), piece(Multiples(2, group), draws=False), piece()]
    rows = [piece(), piece(Multiples(0, group)), piece(Multiples(3, group), min_tokens=2), piece(min_tokens=1)]
    found, stuck = shown(pieces, rows)
    assert found == {2: multiples(3) - {EOS}, 3: set(range(VOCAB_SIZE)) - {EOS}, 5: multiples(2), 8: multiples(7)}
    assert stuck == {1: "the constraint allows no token", 6: "broken", 7: "the constraint allows no token"}
    if group is not None:
        assert group.counts == ([6] if kind == "together" else [])


def test_what_a_requests_parameters_take_away():
    group = Group()
    pieces = [
        piece(Multiples(2, group), min_tokens=3, stop_token_ids=(4,)), piece(bad_words_ids=((6, 9), (5, 10))),
        piece(Multiples(VOCAB_SIZE, group), min_tokens=1), piece(),
    ]  # fmt: skip
    found, stuck = shown(pieces)
    assert found == {0: multiples(2) - {EOS, 4}, 1: set(range(VOCAB_SIZE)) - {9}}
    assert stuck == {2: "the constraint allows no token"}
    assert group.counts == [2]
    assert shown([piece(), piece()]) == ({}, {})


def test_one_array_for_many_rules_is_filled_in_place():
    words = np.zeros((3, num_words(VOCAB_SIZE)), dtype=np.int32)
    assert fill_allowed([Multiples(factor) for factor in (2, 3, 5)], words, VOCAB_SIZE) == {}
    assert [int(row[0]) & 0b111111 for row in words] == [0b010101, 0b001001, 0b100001]
