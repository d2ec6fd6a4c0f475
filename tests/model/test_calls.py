"""How many torch calls a decode step of the miniature makes on a CPU: most of its time, and the same on any machine."""

from torch.utils._python_dispatch import TorchDispatchMode

from dsv4 import LLM, SamplingParams
from dsv4.loader.shipped import shipped_text

MOST_CALLS = 5600  # a step; 5,261 with torch 2.13
NUM_TOKENS = 4  # of which one closes an entry


class Counter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_calls += 1
        return function(*args, **(kwargs or {}))


def calls_for(llm, prompt, num_tokens):
    with Counter() as counter:
        llm.generate(prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    return counter.num_calls


def test_a_step_makes_few_calls():
    llm = LLM()
    prompt = llm.encode(shipped_text().read_text(encoding="utf-8")[:1500])[:200]
    calls_for(llm, prompt, 1)  # operands are made, the prefix is kept
    calls = (calls_for(llm, prompt, 1 + NUM_TOKENS) - calls_for(llm, prompt, 1)) / NUM_TOKENS
    assert 1000 < calls < MOST_CALLS, calls
