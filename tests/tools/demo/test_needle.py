"""The recall tasks of the shipped miniatures: every question is out of the window's reach, and none is squeezed in."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import needle

FACTS = needle.NeedleWords(
    opening=(1,), question=(2,), middle=(3, 4), closing=(5,), names=tuple(range(200, 248)),
    things=tuple(range(300, 364)),
)  # fmt: skip
REFRAIN = needle.RefrainWords(copy=(1, 2), question=(3, 4, 5), closing=(6,), words=tuple(range(100, 164)))


@pytest.mark.parametrize("num_facts", [1, 8])
def test_facts_are_told_once_and_beyond_the_window(num_facts):
    generator = np.random.default_rng(3)
    for _ in range(50):
        ids = np.zeros(1024, dtype=np.int64)
        answers = needle.write_needles(ids, FACTS, generator, num_facts)
        assert len(answers) == num_facts
        for place in answers:
            (fact,) = np.flatnonzero(ids[:place] == ids[place])  # told once before
            assert place - fact > needle.MIN_DISTANCE
            assert ids[place] in FACTS.things
            assert ids[fact - 3] == ids[place - 3] in FACTS.names
    with pytest.raises(ValueError, match="do not fit into 200 tokens"):
        needle.write_needles(np.zeros(200, dtype=np.int64), FACTS, generator, 4)


@pytest.mark.parametrize("copies", [1, 7, 64])
def test_a_refrain_is_sung_and_asked_for_beyond_the_window(copies):
    for seed in range(20):
        ids = np.zeros(1200, dtype=np.int64)
        answers = needle.write_refrain(ids, REFRAIN, np.random.default_rng(seed), copies, 4)
        (sung,) = np.unique(ids[ids >= 100])
        assert all(tuple(ids[place - 3 : place + 1]) == (*REFRAIN.question, sung) for place in answers)
        places = [place for place in np.flatnonzero(ids == sung) if place not in answers]
        assert len(places) == copies
        assert all(tuple(ids[place - 2 : place]) == REFRAIN.copy for place in places)
        assert places[-1] - places[0] < max(needle.PASSAGE, 4 * copies)
        assert np.diff([places[-1], *answers]).min() > needle.MIN_DISTANCE, "farther than the window reaches"
        assert 1 <= len(answers) <= 4


def test_a_refrain_that_does_not_fit_is_refused():
    needed = needle.PASSAGE + needle.MIN_DISTANCE + 5
    generator = np.random.default_rng(0)
    assert needle.write_refrain(np.zeros(needed, dtype=np.int64), REFRAIN, generator, 1, 4) == [needed - 2]
    with pytest.raises(ValueError, match="do not fit"):
        needle.write_refrain(np.zeros(needed - 1, dtype=np.int64), REFRAIN, generator, 1, 4)
