"""`POST /v1/responses`, OpenAI's newer interface to a conversation."""
