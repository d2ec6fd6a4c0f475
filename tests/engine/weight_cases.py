"""One small model with two sets of weights, and what each of them answers."""

from dataclasses import replace

from engine_cases import SMALL
from safetensors.torch import load_file

from dsv4 import LLM, EngineConfig, SamplingParams

CONFIG = replace(SMALL, n_routed_experts=8)
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=3, max_chunk_tokens=64)
PROMPTS = [list(range(3, 43)), [7, 8, 9], [token % 200 for token in range(100, 400)], [5] * 140]
PARAMS = [
    SamplingParams(max_tokens=10, seed=seed, ignore_eos=True, logprobs=2, temperature=float(seed % 2))
    for seed in range(4)
]


def load(folder, **settings):
    return LLM(folder, engine=settings.pop("engine", LIMITS), **settings)


def answers(llm, prompts=PROMPTS, params=PARAMS):
    return [(one.token_ids, one.logprobs) for one in llm.generate(prompts, params)]


def begin(llm, num_tokens, prompts=PROMPTS, params=PARAMS):
    """Requests, one of which has drawn at least so many tokens."""
    outputs = [llm.start(prompt, one)[1] for prompt, one in zip(prompts, params, strict=True)]
    while max(output.num_output for output in outputs) < num_tokens:
        llm.step()
    return outputs


def finish(llm, outputs):
    while not all(output.is_done for output in outputs):
        llm.step()
    return [(one.token_ids, one.logprobs) for one in (output.completion() for output in outputs)]


def tensors(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found
