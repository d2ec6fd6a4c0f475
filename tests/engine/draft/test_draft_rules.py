"""Requests under rules draft too: what a row may draw is what the rule allows behind the drafts before it, and a rule
ends up where its request's own tokens lead, whatever was tried."""

from functools import cache

import numpy as np
import pytest
import torch
from draft_cases import MTP, ForcedDrafts, drafting_llm, plain_llm, prompt_of

from dsv4.engine.request import Request
from dsv4.engine.schedule.plan import Piece, StepPlan
from dsv4.engine.step import masks
from dsv4.engine.step.constraint import ConstraintError, has_bit, pack_tokens
from dsv4.engine.step.masks import make_masks
from dsv4.request import SamplingParams

EOS = MTP.eos_token_id
PROMPT = prompt_of(17)


class Sums:
    """A third of the vocabulary, which one depends on all tokens before; the end, once there are `least`. `fails`: by
    name and number of tokens, what to raise there."""

    def __init__(self, least=100, fails=None):
        self.accepted, self.least, self.fails = [], least, fails or {}
        self.most_tried = 0

    def _fail(self, name, place):
        if (name, place) in self.fails:
            raise self.fails[name, place]

    def allowed(self):
        self._fail("allowed", len(self.accepted))
        found = np.arange(MTP.vocab_size) % 3 == sum(token // 3 for token in self.accepted) % 3
        found[EOS] = len(self.accepted) >= self.least
        return pack_tokens(found)

    def accept(self, token_id):
        self.accepted.append(token_id)
        self._fail("accept", len(self.accepted))

    def rollback(self, count):
        self._fail("rollback", len(self.accepted))
        assert 0 < count <= len(self.accepted)
        self.most_tried = max(self.most_tried, count)
        del self.accepted[-count:]


def sampled(**params):
    return SamplingParams(**{"max_tokens": 8, "seed": 3, "logprobs": 2, "ignore_eos": True, **params})


def serve(llm, requests):
    """(params, rule) each, all with the same prompt -> what came of them: completion, or error and tokens."""
    sequences = [llm.engine.prepare(PROMPT, params, rule) for params, rule in requests]
    for sequence in sequences:
        llm.engine.submit(sequence)
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()
    for sequence in sequences:
        if sequence.constraint is not None and sequence.error is None:
            told = sequence.constraint.accepted
            assert told == sequence.output_ids[: len(told)]
            assert len(told) >= sequence.num_output - 1
    return [(one.error, one.output_ids, one.logprobs, one.finish_reason) for one in sequences]


def kinds():
    """Parameters and a rule each."""
    bias = {EOS: 60.0, 31: 50.0, 32: 49.5}
    return {
        "grammar": (sampled(), Sums()),
        "grammar with an end": (sampled(ignore_eos=False, max_tokens=12, logit_bias={EOS: 9.0}), Sums(least=5)),
        "grammar and penalties": (sampled(frequency_penalty=0.7, repetition_penalty=1.2, temperature=0.0), Sums()),
        "least length": (sampled(min_tokens=6, logit_bias=bias, ignore_eos=False), None),
        "stop ids": (sampled(min_tokens=4, logit_bias=bias, stop_token_ids=(31,)), None),
        "bad words": (sampled(logit_bias={31: 60.0, 32: 59.0}, bad_words_ids=((31, 31), (32, 31, 32), (33,))), None),
        "bad words of a grammar": (sampled(bad_words_ids=((7, 10), (10, 7)), logit_bias={7: 9.0, 10: 9.0}), Sums()),
    }


@cache
def plain(kind):
    return serve(plain_llm(), [kinds()[kind]])[0]


def choice_for(kind, found, drafts, **options):
    return ForcedDrafts(3, drafts, {tuple(PROMPT): [*PROMPT, *found[1]]}, **options)


@pytest.mark.parametrize(
    ("kind", "drafts"), [*((kind, "partly") for kind in kinds()), ("grammar", "random"), ("least length", "random")]
)
def test_what_rules_allow(kind, drafts):
    expected, (params, rule) = plain(kind), kinds()[kind]
    choice = choice_for(kind, expected, drafts)
    llm = drafting_llm("mtp", choice, overlap=drafts == "random")
    assert serve(llm, [(params, rule)]) == [expected]
    if drafts == "partly":
        assert llm.engine.stats().drafts.num_accepted > 0
        assert rule is None or rule.most_tried >= 2


def test_beside_one_another():
    """All of them at once, a free request among them, with another number of drafts in every step."""
    free = sampled(max_tokens=8)
    expected = [*map(plain, kinds()), *serve(plain_llm(), [(free, None)])]
    choice = choice_for("", expected[0], "partly", random_count=True)
    assert serve(drafting_llm("mtp", choice), [*kinds().values(), (free, None)]) == expected


@pytest.mark.parametrize(
    ("fails", "is_told"),
    [
        ({("allowed", 5): ConstraintError("it allows nothing more")}, "it allows nothing more"),
        ({("accept", 5): ConstraintError("it cannot go on")}, "it cannot go on"),
        ({("allowed", 5): ZeroDivisionError("oops")}, "the constraint raised ZeroDivisionError: oops"),
    ],
)
def test_a_rule_that_fails_where_its_request_comes(fails, is_told):
    """At the same token, with the same words, as without drafts."""
    whole = plain("grammar")
    expected = serve(plain_llm(), [(sampled(), Sums(fails=fails))])[0]
    assert (expected[0], expected[1]) == (is_told, whole[1][:5])
    llm = drafting_llm("mtp", choice_for("", whole, "right"))
    assert serve(llm, [(sampled(), Sums(fails=fails)), (sampled(), Sums())]) == [expected, whole]


class Poisoned(Sums):
    """Fails where it is told of one token, which its request never draws."""

    def __init__(self, token_id):
        super().__init__()
        self.token_id = token_id

    def accept(self, token_id):
        super().accept(token_id)
        if token_id == self.token_id:
            raise ConstraintError("poison")


def test_a_rule_that_fails_only_where_it_was_tried():
    expected = plain("grammar")
    other = next(token for token in range(0, MTP.vocab_size, 3) if token not in expected[1] and token != EOS)
    choice = choice_for("", expected, "right")
    offer = choice.offer

    def poison(request, drafts, confidences):
        offer(request, drafts, confidences)
        request.drafts = (other, *request.drafts[1:])

    choice.offer = poison
    rule = Poisoned(other)
    assert serve(drafting_llm("mtp", choice), [(sampled(), rule)]) == [expected]
    assert rule.most_tried == 1, "refused once it was allowed"


def test_a_rule_that_cannot_go_back_fails_its_request_alone():
    whole = plain("grammar")
    fails = {("rollback", place): ConstraintError("no way back") for place in range(40)}
    llm = drafting_llm("mtp", choice_for("", whole, "right"))
    found = serve(llm, [(sampled(), Sums(fails=fails)), (sampled(), Sums())])
    assert found[0][0] == "no way back"
    assert found[0][1] == whole[1][:1]
    assert found[1] == whole


def masks_of(drafts, params=None, rule=None, output=()):
    sequence = Request.start(PROMPT, params or sampled(), max_context_tokens=512, eos_token_id=EOS, constraint=rule)
    sequence.token_ids.extend(output)
    sequence.drafts = tuple(drafts)
    free = Request.start([4], sampled(), max_context_tokens=512, eos_token_id=EOS)
    pieces = [Piece(free, 0, 0, 1, True), Piece(sequence, 1, 17, 1 + len(drafts), True, len(drafts))]
    made = make_masks(StepPlan(tuple(pieces)), MTP.vocab_size, torch.device("cpu"))
    words = dict(zip(made.rows.tolist(), made.words.numpy(), strict=True))
    assert set(words) <= set(range(1, 2 + len(drafts)))
    rows = [
        [token for token in range(MTP.vocab_size) if has_bit(words[row], token)] if row in words else None
        for row in range(1, 2 + len(drafts))
    ]
    return rows, made.stuck


def test_the_mask_of_every_row():
    rule = Sums()
    third = [list(range(start, MTP.vocab_size, 3)) for start in range(3)]
    without_end = [[token for token in ids if token != EOS] for ids in third]
    rows, stuck = masks_of((6, 5, 15), rule=rule)
    assert (rows, stuck, rule.accepted) == ([without_end[place] for place in (0, 2, 0, 2)], {}, [])
    rows, _ = masks_of((6, 4, 12), rule=rule)
    assert rows == [without_end[0], without_end[2], None, None], "4 is refused: what follows does not count"
    rows, stuck = masks_of((6, 5, 15), rule=Sums(fails={("allowed", 2): ConstraintError("no")}))
    assert (rows[2:], stuck) == ([None, None], {3: "no"})
    rows, _ = masks_of((7, 8, 9), sampled(bad_words_ids=((PROMPT[-1], 7), (7, 8, 30), (8, 9, 3))))
    everything = set(range(MTP.vocab_size))
    assert [everything - set(row or ()) for row in rows] == [{7}, everything, everything, everything]
    rows, _ = masks_of((7, 8, 9), sampled(bad_words_ids=((7, 8, 30), (8, 9, 3))))
    assert [everything - set(row) for row in rows] == [set(), set(), {30}, {3}]
    rows, _ = masks_of((7, 8, 9), sampled(min_tokens=4, ignore_eos=False, stop_token_ids=(20,)), output=[5, 5])
    assert [everything - set(row) for row in rows] == [{EOS, 20}, {EOS, 20}, set(), set()]
    rows, _ = masks_of((EOS, 8, 9), sampled(min_tokens=2, ignore_eos=False), output=[5, 5, 5], rule=Sums(least=0))
    assert rows[1:] == [None] * 3, "it ends there"


def test_planted_mistakes_show(monkeypatch):
    """A rule that is not told of drafts, and one that is not taken back."""
    expected, choice = plain("grammar"), choice_for("", plain("grammar"), "partly")
    monkeypatch.setattr(Sums, "rollback", lambda self, count: None)
    with pytest.raises(AssertionError):
        assert serve(drafting_llm("mtp", choice), [(sampled(), Sums())]) == [expected]
    monkeypatch.undo()
    monkeypatch.setattr(masks, "checked_words", lambda rule, vocab_size: Sums().allowed())  # behind every draft
    with pytest.raises(AssertionError):
        assert serve(drafting_llm("mtp", choice), [(sampled(), Sums())]) == [expected]
