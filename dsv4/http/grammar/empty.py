r"""Grammars that nothing can be written for: `start: "a" start` never comes to an end.

A rule has a text if one of its alternatives has, and an alternative if all of its parts have. So a rule becomes a word
of T and F, for parts that have a text and parts not known to, and shrinks: `T(F|T)F*` to `TTF*` to `TTT` to T. What is
not understood here (intersections, nested languages) leaves something that is neither: a grammar is refused only for
certain.
"""

import re
from collections.abc import Callable

_LITERAL = re.compile(r'(//|\#)[^\n]*|"(?:\\.|[^"\\\n])*"i?|/(?:\\.|[^/\\\n])+/[a-z]*|<[^>\s]*>')  # 1: a comment
_JSON_OBJECT = re.compile(r"([:,\[]\s*)\{\s*(?:\0\s*:[^{}]*)?\}")  # in another one
_NESTED = re.compile(r"%(?:json|regex|lark)\s*\{[^{}]*\}")
_STATEMENT = re.compile(r"^[ \t]*%(?!json|regex|lark)\w+(?:\s*\{[^{}]*\}|[^\n]*)", re.MULTILINE)
_DEFINITION = re.compile(r"^[ \t]*[?!]?([A-Za-z_]\w*)(?:\[[^\]]*\])?(?:\.\d+)?\s*:", re.MULTILINE)
_COUNT = re.compile(r"~\s*([0-9]+)(?:\s*\.\.\s*[0-9]+)?|\{\s*([0-9]*)\s*(?:,\s*[0-9]*\s*)?\}")  # the least
_RANGE = re.compile(r"\0\s*\.\.\s*\0")
_ALIAS = re.compile(r"->\s*\w+")
_NAME = re.compile(r"[A-Za-z_][\w.]*")
_OPTIONAL, _REPEATED = re.compile(r"[TF]\+*[?*][?*+]*"), re.compile(r"([TF])\++")
_GROUP = re.compile(r"\(([TF|]*)\)")
_TEXT = "\0"  # stands for what has a text
_MOST_RULES, _MOST_NESTED = 100, 100  # larger ones are left to the compiler


def is_empty_grammar(lark: str) -> bool:
    """Whether no text at all follows a grammar in Lark's notation (its rule `start`)."""
    rules = _rules(lark)
    filled: set[str] = set()  # rules that have a text; grows until nothing is added
    while rules is not None:
        before = len(filled)
        for name, body in reversed(rules.items()):  # rules mostly come before those they need
            if name not in filled:
                value = _value(body, lambda part: part in filled or part not in rules)
                if value is None:
                    return False
                if value:
                    filled.add(name)
        if len(filled) == before:
            return "start" not in filled
    return False


def _rules(lark: str) -> dict[str, str] | None:
    """Name -> body, with `_TEXT` for literals; None if that is not understood."""
    text = _LITERAL.sub(lambda found: "" if found[1] else _TEXT, lark)
    text = _settled(text, lambda one: _JSON_OBJECT.sub(rf"\1{_TEXT}", one))
    text = _STATEMENT.sub("%", _NESTED.sub(_TEXT, text))
    first, *definitions = (part.strip("% \t\r\n") for part in _DEFINITION.split(text))
    names, bodies = definitions[::2], definitions[1::2]
    if first or "start" not in names or len(set(names)) < len(names) or len(names) > _MOST_RULES:
        return None
    return dict(zip(names, map(_body, bodies), strict=True))


def _body(text: str) -> str:
    """Counts become `+`, or `?` where there may be none."""
    text = _COUNT.sub(lambda count: "+" if (count[1] or count[2]).strip("0") else "?", text)
    return _ALIAS.sub("", _RANGE.sub(_TEXT, text)).replace("[", "(").replace("]", ")?")


def _value(body: str, has_text: Callable[[str], bool]) -> bool | None:
    """Whether a rule has a text, by what is known of others; None if that is not understood."""
    word = _NAME.sub(lambda name: "T" if has_text(name[0]) else "F", body).replace(_TEXT, "T")
    word = "".join(word.split())
    return {"T": True, "F": False}.get(_settled(f"({word})", _shrunk))


def _shrunk(word: str) -> str:
    word = _REPEATED.sub(r"\1", _OPTIONAL.sub("T", word))
    return _GROUP.sub(lambda group: "T" if any("F" not in one for one in group[1].split("|")) else "F", word)


def _settled(text: str, change: Callable[[str], str]) -> str:
    """`text` changed until it stays the same, but not for ever."""
    for _ in range(_MOST_NESTED):
        before, text = text, change(text)
        if text == before:
            break
    return text
