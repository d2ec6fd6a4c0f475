"""What to do instead of fields that clients send and this server does not support. Any other can only be left out."""

_KEEPS_NOTHING = "this server keeps no answers: send the whole conversation"
_FUNCTIONS_ONLY = "nothing is run here; offer functions"
_ROLLOUTS = "use /generate or /inference/v1/generate (dsv4 serve --rl)"

HINTS = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice, and tool_calls on messages",
    "store": _KEEPS_NOTHING,
    "background": _KEEPS_NOTHING,
    "previous_response_id": _KEEPS_NOTHING,
    "conversation": _KEEPS_NOTHING,
    "mcp_servers": _FUNCTIONS_ONLY,
    "web_search_options": _FUNCTIONS_ONLY,
    "truncation": "prompts are never cut in silence; only disabled is accepted",
    "verbosity": "ask for it in the conversation; only medium is accepted",
    "return_routed_experts": _ROLLOUTS,
    "routed_experts_start_len": _ROLLOUTS,
    "suffix": "the model does not fill gaps; only an empty suffix is accepted",
    "echo": "use /v1/completions",
    "chat_template": "the model has one protocol; use /v1/completions for prompts of your own",
    "encrypted_content": "only who wrote it can read it; leave it out",
}
# of a wrong `type`, by the field it is in
TYPE_HINTS = {
    "tools": _FUNCTIONS_ONLY,
    "tool_choice": _FUNCTIONS_ONLY,
    "content": "this model reads text only; leave it out",
}


def why_refused(name: str) -> str:
    """What to say about a field that is not supported, or not with the value it has."""
    return f"this server does not support it: {HINTS.get(name, 'leave it out; /openapi.json has the fields it takes')}"
