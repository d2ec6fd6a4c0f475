"""`POST /v1/chat/completions`, OpenAI's interface to a conversation."""
