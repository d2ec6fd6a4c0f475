"""The definition (tokenizer.json) of a tokenizer with one token per byte, for synthetic checkpoints."""

from typing import Any

from dsv4.text.protocol import PROTOCOL
from dsv4.text.tokenizer import BYTE_CHARACTERS, TokenizerError

MIN_VOCAB_SIZE = 2 + len(BYTE_CHARACTERS)


def byte_tokenizer(vocab_size: int) -> dict[str, Any]:
    """Ids 0 and 1 are begin and end of sentence, 2 to 257 the bytes, then as many other protocol markers as fit."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise TokenizerError(f"a byte tokenizer needs a vocabulary of {MIN_VOCAB_SIZE}, found {vocab_size}")
    ends = (PROTOCOL.bos, PROTOCOL.eos)
    others = sorted(set(PROTOCOL.markers) - set(ends))
    byte_tokens = {character: 2 + byte for character, byte in BYTE_CHARACTERS.items()}
    markers = {text: idx for idx, text in enumerate(ends)}
    markers |= {text: MIN_VOCAB_SIZE + idx for idx, text in enumerate(others[: vocab_size - MIN_VOCAB_SIZE])}
    added = [
        {"id": idx, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for text, idx in markers.items()
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {**byte_tokens, **markers}, "merges": []},
    }  # fmt: skip
