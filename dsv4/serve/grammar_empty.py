"""Grammars that nothing can be written for: `start: "a" start` never comes to an end.

A rule has a text if one of its alternatives has, and an alternative if all of its parts have. What is not understood
here (intersections, imports, nested languages) counts as having one: a grammar is refused only for certain.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r]+|//[^\n]*|\#[^\n]*)
    |(?P<line>\n)
    |(?P<atom>"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\s]*>)
    |(?P<number>\d+)
    |(?P<name>[?!]?[A-Za-z_][A-Za-z0-9_.]*)
    |(?P<statement>%[a-z]+)
    |(?P<sign>->|\.\.|[|()\[\]{}?*+&~:,.=@-])""",
    re.VERBOSE,
)
_MOST_RULES = 500  # larger ones are left to the compiler
_MOST_NESTED = 100
_ANY = ("any",)  # has a text, whatever it is

Node = tuple[Any, ...]


class _NotUnderstood(Exception):
    pass


def is_empty_grammar(lark: str) -> bool:
    """Whether no text at all follows a grammar in Lark's notation (its rule `start`)."""
    try:
        rules = _parse(lark)
    except _NotUnderstood:
        return False
    if "start" not in rules or len(rules) > _MOST_RULES:
        return False
    filled: set[str] = set()  # rules known to have a text; grows until nothing is added
    while True:
        found = {name for name, body in rules.items() if name not in filled and _has_text(body, filled, rules)}
        if not found:
            return "start" not in filled
        filled |= found


def _has_text(node: Node, filled: set[str], rules: Mapping[str, Node]) -> bool:
    kind = node[0]
    if kind == "name":
        return node[1] in filled or node[1] not in rules
    if kind == "any":
        return True
    have = (_has_text(one, filled, rules) for one in node[1])
    return any(have) if kind == "or" else all(have)


def _parse(lark: str) -> dict[str, Node]:
    """Each rule's alternatives."""
    rules: dict[str, Node] = {}
    for name, tokens in _definitions(_tokens(lark)).items():
        reader = _Reader(tokens)
        rules[name] = reader.alternatives(0)
        if reader.next() is not None:
            raise _NotUnderstood
    return rules


def _tokens(lark: str) -> list[tuple[str, str]]:
    """(kind, text) of everything but blanks; line ends are kept. Statements take the rest of their line, or their
    braces."""
    found: list[tuple[str, str]] = []
    place = 0
    while place < len(lark):
        match = _TOKEN.match(lark, place)
        if match is None:
            raise _NotUnderstood
        place, kind = match.end(), str(match.lastgroup)
        if kind == "statement":
            found.append((kind, match[0]))
            brace = re.compile(r"\s*\{").match(lark, place)
            place = _end_of_braces(lark, brace.end()) if brace is not None else _end_of_line(lark, place)
        elif kind != "blank":
            found.append((kind, match[0]))
    return found


def _end_of_line(text: str, place: int) -> int:
    end = text.find("\n", place)
    return len(text) if end < 0 else end


def _end_of_braces(text: str, place: int) -> int:
    """Where the braces close that were opened before `place`; those in strings do not count."""
    depth = 1
    for match in re.compile(r'"(?:\\.|[^"\\])*"|[{}]').finditer(text, place):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    raise _NotUnderstood


def _definitions(tokens: list[tuple[str, str]]) -> dict[str, list[str]]:
    """Name -> the tokens of its body. A definition begins a line: a name, what may be said of it, a colon."""
    bodies: dict[str, list[str]] = {}
    body: list[str] | None = None
    place, is_first = 0, True
    while place < len(tokens):
        kind, text = tokens[place]
        if kind == "line":
            is_first = True
            place += 1
            continue
        colon = _colon_after(tokens, place) if is_first and kind == "name" else None
        is_first = False
        if colon is not None:
            name = text.lstrip("?!").partition(".")[0]
            if name in bodies:
                raise _NotUnderstood
            body = bodies[name] = []
            place = colon + 1
            continue
        if kind == "statement":
            if text in ("%json", "%regex", "%lark"):
                kind = "atom"
            else:
                body, place = None, place + 1
                continue
        if body is None:
            raise _NotUnderstood
        body.append('""' if kind == "atom" else text)
        place += 1
    return bodies


def _colon_after(tokens: list[tuple[str, str]], place: int) -> int | None:
    """The colon of a definition that begins here: after the name, a priority or attributes in brackets."""
    place += 1
    if place < len(tokens) and tokens[place][1] == "[":
        while place < len(tokens) and tokens[place][1] != "]":
            place += 1
        place += 1
    while place < len(tokens) and (tokens[place][0] in ("number", "line") or tokens[place][1] == "."):
        place += 1
    return place if tokens[place : place + 1] == [("sign", ":")] else None


class _Reader:
    """Recursive descent over one body."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0

    def next(self) -> str | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def alternatives(self, depth: int) -> Node:
        if depth > _MOST_NESTED:
            raise _NotUnderstood
        branches = [self._sequence(depth)]
        while self.next() == "|":
            self._take()
            branches.append(self._sequence(depth))
        return ("or", tuple(branches))

    def _take(self) -> str:
        token = self.next()
        if token is None:
            raise _NotUnderstood
        self._place += 1
        return token

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        is_certain = True
        while (token := self.next()) not in (None, "|", ")", "]"):
            if token == "->":
                self._take()
                self._take()
                continue
            if token in ("&", "~"):  # an intersection, or what does not match: may be empty, may be not
                self._take()
                is_certain = False
                continue
            parts.append(self._repeated(self._atom(depth)))
        return ("and", tuple(parts)) if is_certain else _ANY

    def _atom(self, depth: int) -> Node:
        token = self._take()
        if token in ("(", "["):
            inner = self.alternatives(depth + 1)
            if self._take() != (")" if token == "(" else "]"):
                raise _NotUnderstood
            return inner if token == "(" else _ANY
        if token == '""':
            if self.next() == "..":
                self._take()
                self._take()
            return _ANY
        if token.lstrip("?!")[:1].isalpha() or token[:1] == "_":
            return ("name", token)
        raise _NotUnderstood

    def _repeated(self, node: Node) -> Node:
        while (token := self.next()) in ("?", "*", "+", "{", "~"):
            following = self._tokens[self._place + 1 : self._place + 2]
            if token == "~" and not (following and following[0].isdigit()):
                break
            self._take()
            if token in ("?", "*"):
                node = _ANY
            elif token != "+":
                least = self._take()
                if not (least.isdigit() or least == ","):
                    raise _NotUnderstood
                node = _ANY if least == "," or int(least) == 0 else node
                self._skip_count(token)
        return node

    def _skip_count(self, opening: str) -> None:
        """The rest of `{2,5}` or `~2..5`."""
        if opening == "{":
            while self._take() != "}":
                pass
        elif self.next() == "..":
            self._take()
            self._take()
