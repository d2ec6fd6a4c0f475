"""The byte tokenizer of synthetic checkpoints: every byte has its token, and text survives the way there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.text.byte_tokenizer import MIN_VOCAB_SIZE, byte_tokenizer
from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import Tokenizer, TokenizerError

SMALLEST = Tokenizer(byte_tokenizer(MIN_VOCAB_SIZE), "smallest")
LARGE = Tokenizer(byte_tokenizer(4096), "large")


@given(st.text(max_size=20))
def test_one_token_per_byte_and_back(text):
    for tokenizer in (SMALLEST, LARGE):
        ids = tokenizer.encode(text)
        assert ids == [2 + byte for byte in text.encode("utf-8")]
        assert tokenizer.decode(ids) == text


def test_markers():
    assert SMALLEST.special_id(PROTOCOL.bos) == 0
    assert SMALLEST.special_id(PROTOCOL.eos) == 1
    assert {LARGE.token_bytes(LARGE.special_id(marker)).decode() for marker in PROTOCOL.markers} == set(
        PROTOCOL.markers
    )
    assert SMALLEST.vocab_size == MIN_VOCAB_SIZE
    assert LARGE.vocab_size <= 4096
    assert 0 not in LARGE.encode(PROTOCOL.bos), "text from outside cannot forge a marker"


def test_a_vocabulary_too_small():
    with pytest.raises(TokenizerError, match=f"needs a vocabulary of {MIN_VOCAB_SIZE}, found 257"):
        byte_tokenizer(257)
