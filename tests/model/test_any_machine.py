"""Logits of `official` numerics are the same bits with any instruction set and any number of threads.

Each variant is a process of its own: libraries choose their kernels when they are loaded. The recorded digest, made
with AVX2 kernels, holds for every CPU.
"""

import os
import subprocess
import sys

import pytest

RECORDED = "cd1a6a93886ae30bfb0012bdbc6b120409026b0911bb644d2af73be61c0d5363"
VARIANTS = {
    "two threads": {"OMP_NUM_THREADS": "2"},
    "the least of x86, one thread": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "MKL_CBWR": "COMPATIBLE",
        "OMP_NUM_THREADS": "1",
    },
}
PROGRAM = """
import hashlib
from dsv4 import LLM, SamplingParams
from dsv4.loader.shipped import shipped_text
llm = LLM()
token_ids = llm.encode(shipped_text().read_text(encoding="utf-8")[:2000])[:150]
found = llm.generate(token_ids, SamplingParams(max_tokens=4, temperature=1.0, seed=3, logprobs=2))[0]
drawn = repr((found.token_ids, found.logprobs)).encode()
print(hashlib.sha256(llm.logits(token_ids).numpy().tobytes() + drawn).hexdigest())
"""


@pytest.mark.parametrize("variant", VARIANTS)
def test_bits_are_the_same(variant):
    program = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, env=os.environ | VARIANTS[variant], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == RECORDED
