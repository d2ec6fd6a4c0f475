"""Text to token ids and back, through a checkpoint's `tokenizer.json`.

Two encoders are built from the one file. The full one knows the special tokens. The plain one does not: to it
`<｜User｜>` is punctuation and letters, so text from outside cannot forge a turn. `encode_chat` uses the full one for
markers that the chat protocol wrote, and the plain one for everything between them.

Decoding works on bytes (the tokenizer is byte-level), so a character split over tokens is emitted once it is whole,
and incremental decoding is linear and equals decoding all at once.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from dsv4.errors import Dsv4Error
from dsv4.text.chat import ChatOptions, Segment, render_segments
from dsv4.text.protocol import PROTOCOL

_FILE_NAME = "tokenizer.json"
_MARKER = re.compile("|".join(map(re.escape, sorted(PROTOCOL.markers, key=len, reverse=True))))


class TokenizerError(Dsv4Error, ValueError):
    """A tokenizer that is missing or of another kind, or input it cannot take."""


class Tokenizer:
    """A byte-level BPE tokenizer. Nothing is ever added to or cut from the text: no BOS, no EOS, no truncation."""

    def __init__(self, definition: dict[str, Any], source: str) -> None:
        """`definition` is a parsed tokenizer.json, `source` its name in messages."""
        self._source = source
        definition = {**definition, "truncation": None, "padding": None}
        model = definition.get("model")
        if not isinstance(model, dict) or model.get("type") != "BPE":
            found = model.get("type") if isinstance(model, dict) else None
            raise TokenizerError(f"{source}: model.type must be 'BPE', found {found!r}")
        if not _has_byte_level_decoder(definition.get("decoder")):
            raise TokenizerError(f"{source}: decoder must be ByteLevel: dsv4 reads byte-level tokenizers only")
        self._full = self._build(definition)
        self._plain = self._build(_without_added_tokens(definition))
        self._added_ids = {token.content: idx for idx, token in self._full.get_added_tokens_decoder().items()}
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._keeps_length = not definition.get("normalizer")
        # now, not at the first request: a dict of all tokens takes 0.1 s with 129,280 of them
        self._longest = max(map(len, (*self._added_ids, *(model.get("vocab") or ()))), default=1)

    def _build(self, definition: dict[str, Any]) -> tokenizers.Tokenizer:
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(definition))
        except Exception as error:  # the binding raises plain Exception for whatever it cannot read
            raise TokenizerError(f"{self._source}: cannot be read as a tokenizer: {error}") from error

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a checkpoint folder; `TokenizerError` if there is none."""
        path = Path(directory) / _FILE_NAME
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: text cannot be encoded; prompts can be passed as token ids")
        try:
            definition = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(f"{path} is not a JSON file: {error}") from error
        if not isinstance(definition, dict):
            raise TokenizerError(f"{path} must hold an object, found {type(definition).__name__}")
        return cls(definition, str(path))

    @property
    def vocab_size(self) -> int:
        """One more than the highest id that has a token. (The model's vocabulary may be padded beyond it.)"""
        return max(self._full.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def special_id(self, marker: str) -> int:
        """Id of a special token; `TokenizerError` if the tokenizer has none of that text."""
        if marker not in self._added_ids:
            raise TokenizerError(f"{self._source} has no special token {marker!r}")
        return self._added_ids[marker]

    # ---- encoding ----

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Special tokens written in it are ordinary text unless `allow_special`."""
        if not isinstance(text, str):
            raise TokenizerError(f"text must be a string, found {type(text).__name__}")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(f"text is not valid Unicode: lone surrogate at character {error.start}") from error
        encoder = self._full if allow_special else self._plain
        ids: list[int] = encoder.encode(text, add_special_tokens=False).ids
        return ids

    def least_tokens(self, num_characters: int) -> int:
        """Tokens that a text of this many characters has at least, without encoding it: no token is longer than the
        longest. 0 where the tokenizer rewrites text before it cuts it."""
        if not self._keeps_length:
            return 0
        return num_characters // self._longest

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt: markers in markup are special tokens, everything else is ordinary text.

        Text between two markers is encoded in one go wherever it came from, as in the official encoding: a token may
        span the end of a user's text and the start of a template.
        """
        ids: list[int] = []
        run: list[str] = []
        for segment in segments:
            position = 0
            for match in _MARKER.finditer(segment.text) if segment.is_markup else ():
                run.append(segment.text[position : match.start()])
                ids += self.encode("".join(run))
                ids.append(self.special_id(match.group()))
                run = []
                position = match.end()
            run.append(segment.text[position:])
        return ids + self.encode("".join(run))

    # ---- decoding ----

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; none for an id without a token (a model's vocabulary may be padded)."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise TokenizerError(f"a token id must not be negative, found {token_id}")
        token = self._full.id_to_token(token_id) or ""
        try:
            value = bytes(BYTE_CHARACTERS[character] for character in token)
        except KeyError:  # a special token is written as it is
            value = token.encode("utf-8")
        self._bytes[token_id] = value
        return value

    def token_text(self, token_id: int) -> str | None:
        """The text of a token that is whole characters; None for one with a part of a character."""
        if token_id not in self._texts:
            try:
                self._texts[token_id] = self.token_bytes(token_id).decode("utf-8")
            except UnicodeDecodeError:
                self._texts[token_id] = None
        return self._texts[token_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")


class Detokenizer:
    """Incremental `Tokenizer.decode`: what `push` and `flush` return, joined, is the text of all ids pushed.

    A character is returned when its last byte has come; U+FFFD only stands for bytes that no further token can repair.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_inside = False  # a character has begun and is not whole

    def push(self, token_id: int) -> str:
        """The text that becomes certain with this token; often empty inside a character."""
        if not self._is_inside and (text := self._tokenizer.token_text(token_id)) is not None:
            return text
        text = self._decoder.decode(self._tokenizer.token_bytes(token_id))
        self._is_inside = self._decoder.getstate()[0] != b""
        return text

    def flush(self) -> str:
        """The end of the text: an unfinished character as U+FFFD. The detokenizer can then be used anew."""
        self._is_inside = False
        return self._decoder.decode(b"", final=True)


def encode_chat(tokenizer: Tokenizer, messages: Any, options: ChatOptions | None = None) -> list[int]:
    """Prompt ids for messages. Markers inside message content are ordinary text: they cannot forge a turn."""
    return tokenizer.encode_segments(render_segments(messages, options or ChatOptions()))


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE writes every byte as one printable character: itself where printable, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + idx): byte for idx, byte in enumerate(others)}


BYTE_CHARACTERS = _byte_characters()


def _has_byte_level_decoder(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        steps = decoder.get("decoders")
        return isinstance(steps, list) and len(steps) == 1 and _has_byte_level_decoder(steps[0])
    return decoder.get("type") == "ByteLevel"


def _without_added_tokens(definition: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer, unable to produce any added token.

    Dropping the list is not enough: a marker may also stand in the BPE vocabulary, where merges (or the whole-word
    look-up of `ignore_merges`) would still find it.
    """
    added = definition.get("added_tokens") or []
    contents = {
        token["content"] for token in added if isinstance(token, dict) and isinstance(token.get("content"), str)
    }
    model = dict(definition["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict) and not contents.isdisjoint(vocab):
        model["vocab"] = {token: idx for token, idx in vocab.items() if token not in contents}
        merges = [(merge, _merge_parts(merge)) for merge in model.get("merges") or []]
        model["merges"] = [m for m, parts in merges if contents.isdisjoint(parts) and "".join(parts) not in contents]
    return {**definition, "model": model, "added_tokens": []}


def _merge_parts(merge: Any) -> Sequence[str]:
    """A merge is a pair, written as a list or, by older tokenizers, as "left right"."""
    return merge.split(" ") if isinstance(merge, str) else tuple(map(str, merge))
