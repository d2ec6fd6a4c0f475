"""Generate offline, stream, and score: the log-probabilities of a rollout again, bit for bit.

    python examples/offline.py [CHECKPOINT]        without CHECKPOINT: the miniature that ships with dsv4

`llm.close()` matters only with several GPUs or a cache folder.
"""

import sys

from dsv4 import LLM, SamplingParams

PROMPTS = ["And it came to pass", "SCENE I. A street in Verona."]


def main(path: str | None = None) -> None:
    llm = LLM(path)
    sampled = SamplingParams(max_tokens=12, temperature=0.7, seed=1, logprobs=0)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, sampled), strict=True):
        print(f"{prompt}|{completion.text}| {completion.finish_reason}")

    prompt = llm.encode(PROMPTS[0])
    rollout = llm.generate(prompt, sampled)[0]
    scored = llm.score([*prompt, *rollout.token_ids])[0][len(prompt) :]
    assert [token.logprob for token in scored] == [token.logprob for token in rollout.logprobs]
    print("the scores of", len(scored), "tokens are those of the rollout, bit for bit")

    for piece in llm.stream(PROMPTS[1], SamplingParams(max_tokens=12, temperature=0)):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main(*sys.argv[1:2])
