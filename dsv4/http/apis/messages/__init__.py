"""`POST /v1/messages`, Anthropic's interface to a conversation."""
