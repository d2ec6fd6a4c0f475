"""Several nodes: each is a network namespace of this machine, so that ranks reach one another by addresses alone."""

import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest

from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.loader.shipped import find_checkpoint

pytestmark = pytest.mark.processes
NODES = ("dsv4-node-0", "dsv4-node-1")
LIMITS = EngineConfig(max_context_tokens=128, max_concurrent_requests=4)


def ip(*arguments):
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)


@contextmanager
def two_nodes():
    """Joined by one cable: 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2's `ip`, which is not installed")
    try:
        for name in NODES:
            made = ip("netns", "add", name)
            if made.returncode:
                pytest.skip(f"network namespaces cannot be made here: {made.stderr.strip()}")
        cable = ip(
            "link", "add", "dsv4-veth0", "netns", NODES[0], "type", "veth", "peer", "dsv4-veth1", "netns", NODES[1]
        )
        if cable.returncode:
            pytest.skip(f"no cable between network namespaces can be made here: {cable.stderr.strip()}")
        for place, name in enumerate(NODES):
            ip("-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", f"dsv4-veth{place}")
            ip("-n", name, "link", "set", f"dsv4-veth{place}", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        for name in NODES:
            ip("netns", "delete", name)


PROGRAM = """
import json, sys
from dsv4 import LLM, EngineConfig, SamplingParams
from dsv4.loader.shipped import find_checkpoint
limits = EngineConfig(max_context_tokens=128, max_concurrent_requests=4)
llm = LLM(sys.argv[1], gpus=2, engine=limits)
params = [SamplingParams(max_tokens=6, seed=seed, temperature=0.8, logprobs=1) for seed in (3, 4)]
found = llm.generate(["SCENE I.", "And it came to pass"], params)
finished = [llm.engine.own.stats().num_finished, llm.engine.remotes[0].load.stats.num_finished]
print(json.dumps([[one.token_ids, [token.logprob for token in one.logprobs]] for one in found] + [finished]))
"""


def test_two_nodes_give_the_tokens_of_one(tmp_path):
    """One request on each node: the second one lives where rank 0 is not, and its tokens cross the cable."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    with two_nodes():
        runs = [
            subprocess.Popen(
                [
                    "ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
                    "--node-rank", str(place), "--nproc-per-node", "1", "--master-addr", "10.77.0.1",
                    "--master-port", "29531", str(program), str(find_checkpoint(None)),
                ],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"dsv4-veth{place}"},
            )
            for place, name in enumerate(NODES)
        ]  # fmt: skip
        try:
            found = [run.communicate(timeout=120) for run in runs]
        finally:
            for run in runs:
                run.kill()
    assert [run.returncode for run in runs] == [0, 0], [errors[-2000:] for _, errors in found]
    params = [SamplingParams(max_tokens=6, seed=seed, temperature=0.8, logprobs=1) for seed in (3, 4)]
    expected = LLM(engine=LIMITS).generate(["SCENE I.", "And it came to pass"], params)
    *answers, finished = json.loads(found[0][0])
    assert answers == [[list(one.token_ids), [token.logprob for token in one.logprobs]] for one in expected]
    assert finished == [1, 1]
    assert found[1][0] == "", "the other node prints nothing"
