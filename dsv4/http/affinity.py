"""Which requests belong to one conversation, for routers that spread requests over several engines.

An engine keeps what it has read of a conversation, so the next turn should go where the last one went. Nothing here
changes an answer: the wrong engine reads more and says the same.
"""

import hashlib
import json
from typing import Any

_NUM_CHARACTERS = 1024  # of a prompt without turns; longer than that, it is the same conversation as long as they agree
_NUM_TOKENS = 256  # the same for a prompt of ids


def conversation_key(body: bytes) -> str | None:
    """A key that all turns of a conversation share; None for a body that is none.

    `prompt_cache_key` where there is one, which is what that field is for. Otherwise `cache_salt` and the first thing
    the user said, as plain text: clients send it as text or in parts, and move their cache marks about. A system
    message does not count. Many conversations have the same one, and some clients put the time into it.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    key = fields.get("prompt_cache_key")
    if not (isinstance(key, str) and key):
        key = _beginning(fields)
    if key is None:
        return None
    named = json.dumps([fields.get("cache_salt"), key], ensure_ascii=True)
    return hashlib.sha256(named.encode("ascii")).hexdigest()


def _beginning(fields: dict[str, Any]) -> str | None:
    turns = next((fields[name] for name in ("messages", "input", "prompt") if fields.get(name)), None)
    if isinstance(turns, list) and isinstance(turns[0], (str, list)):  # several prompts: the first decides
        turns = turns[0]
    if isinstance(turns, str):
        return turns[:_NUM_CHARACTERS] if "prompt" in fields else turns
    if not isinstance(turns, list):
        return None
    if all(isinstance(one, int) for one in turns[:_NUM_TOKENS]):
        return json.dumps(turns[:_NUM_TOKENS])
    said = [one for one in turns if isinstance(one, dict) and one.get("role") == "user"]
    return _text(said[0].get("content")) if said else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)
