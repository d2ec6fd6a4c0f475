"""The literal strings of the chat protocol, read once from `protocol.json`, the only place where they are written."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """Markers (each one token of the official tokenizer) and templates (ordinary text with markers inside)."""

    bos: str
    eos: str
    user: str
    assistant: str
    latest_reminder: str
    think_open: str
    think_close: str
    dsml: str
    tasks: Mapping[str, str]
    tools_block: str
    response_format_block: str
    tool_call: str
    parameter: str
    tool_calls: str
    tool_calls_block_name: str
    tool_result: str
    reasoning_effort: Mapping[str, Mapping[str, str]]

    @property
    def markers(self) -> tuple[str, ...]:
        """Every string that is one token when the protocol writes it."""
        roles = (self.bos, self.eos, self.user, self.assistant, self.latest_reminder)
        return (*roles, self.think_open, self.think_close, self.dsml, *self.tasks.values())


def load_protocol() -> Protocol:
    """Read the package's `protocol.json`."""
    raw = json.loads(resources.files("dsv4.text").joinpath("protocol.json").read_text(encoding="utf-8"))
    tokens = raw.pop("tokens")
    tasks = MappingProxyType(tokens.pop("tasks"))
    effort = MappingProxyType({name: MappingProxyType(texts) for name, texts in raw.pop("reasoning_effort").items()})
    raw.pop("about")
    return Protocol(**tokens, **raw, tasks=tasks, reasoning_effort=effort)


PROTOCOL = load_protocol()
