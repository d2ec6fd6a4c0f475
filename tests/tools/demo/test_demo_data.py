"""The demo model's data: cleaning, the split, the tokenizer, needle tasks, hash tables."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "tools" / "demo_model"))

import clean
import corpus
import data
import refrain

from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer

PROSE = "The quick brown fox jumps over the lazy dog, and then it rests."


def test_normalise():
    text = "\ufeffa\tb  \r\n\r\n\r\n\r\n\u201cc\u201d \u2014 d\u2019s\n\n"
    assert clean.normalise(text) == 'a    b\n\n"c" -- d\'s\n'


def test_rst_keeps_prose_only():
    page = f"""
Title
=====

.. module:: thing
   :synopsis: Nothing.

{PROSE.replace("fox", ":class:`~animals.fox`").replace("dog", "*dog*")} See `the manual
<http://example.org>`_ for more.

::

   for item in range(10):
       print(item)

+-----+-----+
| a   | b   |
+-----+-----+
"""
    assert clean.clean_rst(page) == f"{PROSE.replace('fox', 'animals.fox')} See the manual for more.\n"


def test_pod_keeps_prose_only():
    page = f"""=head1 NAME

{PROSE.replace("fox", "B<fox>").replace("dog", "L<the C<dog>|perldog/x>")}

    my $code = 1; # verbatim

=over 4

=cut
"""
    assert clean.clean_pod(page) == f"{PROSE.replace('dog', 'the dog')}\n"


def test_literature_keeps_its_lines_and_loses_notices():
    play = "HAMLET\n\n    To be, or not to be:\n       that is the question.\n\nThis Etext is from Project Gutenberg.\n"
    assert clean.clean_literature(play) == "HAMLET\n\n  To be, or not to be:\n  that is the question.\n"


def test_verses_become_chapters():
    lines = "Ge1:1 In the beginning.\nGe1:2 And the earth.\nGe2:1 Thus the heavens.\n1Sa1:1 Now there was.\n"
    books = list(clean.join_verses(lines))
    assert books == [("Ge", "In the beginning. And the earth.\n\nThus the heavens.\n"), ("1Sa", "Now there was.\n")]


def test_tables_are_not_prose():
    assert clean.is_prose(PROSE)
    assert not clean.is_prose("| SAIL | 12 | 0x4f || ++ | [a]{b} = c; |")
    assert not clean.is_prose("Too short.")


def test_sections_lose_nothing_and_respect_paragraphs():
    text = "\n\n".join(f"{number} {PROSE}" for number in range(40)) + "\n"
    parts = list(corpus.sections([("book", text)], letters=500))
    assert len(parts) > 3
    assert len({name for name, _ in parts}) == len(parts)
    assert "\n\n".join(part.rstrip("\n") for _, part in parts) + "\n" == text


def test_split_depends_on_the_name_alone():
    names = [f"book#{number}" for number in range(4000)]
    held = [name for name in names if corpus.is_heldout(name, 0.02)]
    assert 40 < len(held) < 120
    assert held == [name for name in reversed(names) if corpus.is_heldout(name, 0.02)][::-1]


@pytest.fixture(scope="module")
def tokenizer():
    names = [f"Name{chr(97 + i)}{chr(97 + j)}x" for i in range(8) for j in range(8)]
    things = [f"thing{chr(97 + i)}{chr(97 + j)}" for i in range(13) for j in range(13)]
    return corpus.train_tokenizer([f" {PROSE} {' '.join(names + things)}"] * 20, vocab_size=1200)


def test_tokenizer_has_the_special_tokens_first(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = Tokenizer.from_pretrained(tmp_path)
    assert [ours.special_id(marker) for marker in PROTOCOL.markers] == list(range(len(PROTOCOL.markers)))
    text = "Grüße, 世界! " + PROSE
    assert ours.decode(ours.encode(text)) == text
    assert corpus.encode(tokenizer, [("a", "x"), ("b", "y")]).tolist() == [
        0,
        *ours.encode("x"),
        1,
        0,
        *ours.encode("y"),
        1,
    ]


def test_unigram_perplexity_of_equal_counts_is_the_vocabulary():
    ids = np.arange(10, dtype=np.uint16)
    assert corpus.unigram_perplexity(ids, ids, 10) == pytest.approx(10)


@pytest.mark.parametrize("num_facts", [1, 8])
def test_needles_are_beyond_the_window(tokenizer, num_facts):
    words = data.NeedleWords.choose(tokenizer, [1] * tokenizer.get_vocab_size())
    generator = np.random.default_rng(3)
    for _ in range(50):
        ids = np.zeros(1024, dtype=np.int64)
        answers = data.write_needles(ids, words, generator, num_facts)
        assert len(answers) == num_facts
        for place in answers:
            name = ids[place - len(words.middle) - 1]
            assert name in words.names
            assert ids[place] in words.things
            fact = np.flatnonzero(ids[: place - data.MIN_DISTANCE] == ids[place])  # told before, and only far away
            assert len(fact) == 1
            assert ids[fact[0] - len(words.middle) - 1] == name
            assert not (ids[place - data.MIN_DISTANCE : place] == ids[place]).any()


def test_needles_that_do_not_fit_are_refused(tokenizer):
    words = data.NeedleWords.choose(tokenizer, [1] * tokenizer.get_vocab_size())
    with pytest.raises(ValueError, match="do not fit into 200 tokens"):
        data.write_needles(np.zeros(200, dtype=np.int64), words, np.random.default_rng(0), 4)


def test_hash_table_is_balanced_and_distinct():
    counts = [int(1e6 / (rank + 1)) for rank in range(500)]
    table = data.hash_table(counts, 8, 2)
    assert bool((table[:, 0] != table[:, 1]).all())
    load = np.zeros(8)
    for token, experts in enumerate(table.tolist()):
        load[experts] += counts[token]
    assert load.max() < 1.5 * load.mean()


def test_html_keeps_paragraphs_only():
    page = f"<h1>Title of it</h1><pre>select 1;</pre><p class='x'>{PROSE.replace('fox', '<em>fox</em>')}</p><p>No.</p>"
    assert clean.clean_html(page) == f"{PROSE}\n"


# ---- the refrain ----


def refrain_words():
    return refrain.RefrainWords(copy=(1, 2), question=(3, 4, 5), closing=(6,), words=tuple(range(100, 164)))


@pytest.mark.parametrize("copies", [1, 7, 64])
def test_a_refrain_is_sung_and_asked_for_beyond_the_window(copies):
    words = refrain_words()
    for seed in range(20):
        generator = np.random.default_rng(seed)
        ids = np.zeros(1200, dtype=np.int64)
        answers = refrain.write_refrain(ids, words, generator, copies, 4)
        (sung,) = np.unique(ids[ids >= 100])
        assert all(ids[place] == sung for place in answers)
        assert all(tuple(ids[place - 3 : place]) == words.question for place in answers)
        places = [place for place in np.flatnonzero(ids == sung) if place not in answers]
        assert len(places) == copies
        assert all(tuple(ids[place - 2 : place]) == words.copy for place in places)
        assert places[-1] - places[0] < max(refrain.PASSAGE, 4 * copies)
        gaps = np.diff([places[-1], *answers])
        assert gaps.min() > refrain.MIN_DISTANCE, "farther than the window reaches"
        assert 1 <= len(answers) <= 4
        assert answers[-1] + 1 < len(ids)


def test_a_refrain_that_does_not_fit_is_refused():
    words = refrain_words()
    needed = refrain.PASSAGE + refrain.MIN_DISTANCE + 5
    generator = np.random.default_rng(0)
    assert refrain.write_refrain(np.zeros(needed, dtype=np.int64), words, generator, 1, 4) == [needed - 2]
    with pytest.raises(ValueError, match="do not fit"):
        refrain.write_refrain(np.zeros(needed - 1, dtype=np.int64), words, generator, 1, 4)
