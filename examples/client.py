"""Ask a running server with OpenAI's client: a streamed chat, then a choice that the server enforces.

    dsv4 serve                                     # the miniature; --model CHECKPOINT serves another
    python examples/client.py [http://127.0.0.1:8000]

A server with an API key reads it from DSV4_API_KEY; so does this client.
"""

import os
import sys

from openai import OpenAI


def main(address: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{address}/v1", api_key=os.environ.get("DSV4_API_KEY", "none"))
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Tell me of the sea."}]

    for chunk in client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, temperature=0.7, seed=1, stream=True
    ):
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()

    answer = client.chat.completions.create(
        model=model, messages=messages, max_tokens=16, extra_body={"guided_choice": ["calm", "rough"]}
    )
    print("the sea is", answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:2])
