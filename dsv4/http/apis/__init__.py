"""The HTTP interfaces: OpenAI's chat, completions and responses, Anthropic's messages; requests and answers."""
