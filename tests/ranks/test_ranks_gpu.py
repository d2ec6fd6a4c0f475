"""Two ranks that share one GPU, in one another's memory: the tokens of one process, and an end whoever goes first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process_cases import children_of, wait_until_gone

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
SHARED = os.environ | {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",  # torch's own switch
    "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
}
COMMAND = [sys.executable, "-m", "dsv4", "generate", "SCENE I.", "--device", "cuda", "--gpus", "2", "--seed", "3"]


def test_tokens_and_log_probabilities_of_one_process(tmp_path):
    """Without drafts and with them, through graphs; see the benchmark."""
    command = [
        *(sys.executable, "-m", "benchmarks", "ranks", "--section", "engine"),
        *("--out", str(tmp_path / "found.jsonl")),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_that_comes_to_its_end():
    texts = []
    for gpus in ("2", "1"):
        command = [*COMMAND[:-3], gpus, *COMMAND[-2:], "--max-tokens", "24", "--temperature", "0.7"]
        done = subprocess.run(command, capture_output=True, text=True, env=SHARED, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert "warning" not in done.stderr.lower()
        texts.append(done.stdout)
    assert texts[0] == texts[1] != ""


NEW_TENSORS = """
import sys
from pathlib import Path
from safetensors.torch import load_file
from weight_cases import CONFIG, LIMITS, answers
from dsv4 import LLM
from dsv4.loader.write.synth import write_checkpoint

folders = [
    write_checkpoint(Path(sys.argv[1]) / name, CONFIG, seed=seed, device="cuda") for seed, name in enumerate("AB")
]
fresh = [answers(LLM(folder, engine=LIMITS, device="cuda")) for folder in folders]
llm = LLM(folders[0], engine=LIMITS, device="cuda", gpus=2)
found = [answers(llm)]
llm.update_weights(load_file(next(folders[1].glob("*.safetensors")), device="cuda"))
found.append(answers(llm))
llm.close()
assert found == fresh and fresh[0] != fresh[1]
"""


def test_new_tensors(tmp_path):
    """From rank 0 through host memory; captured graphs read them."""
    places = SHARED | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'engine'}"}
    command = [sys.executable, "-c", NEW_TENSORS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=places, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "is_of_rank_1", "code", "said"),
    [
        (signal.SIGKILL, True, 1, "was ended by SIGKILL"),
        (signal.SIGSTOP, True, 1, "has not been heard of for 6 s"),
        (signal.SIGINT, False, 130, ""),
        (signal.SIGKILL, False, -signal.SIGKILL, ""),
    ],
    ids=["a rank killed", "a rank stopped", "interrupted", "the first killed"],
)
def test_nobody_stays(number, is_of_rank_1, code, said):
    """In the middle of a text: whoever is left may stand at a barrier on the GPU."""
    run = subprocess.Popen(
        [*COMMAND, "--max-tokens", "100000", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=SHARED, start_new_session=True,
    )  # fmt: skip
    assert run.stdout.read(1), run.stderr.read().decode()
    (child,) = children_of(run.pid)
    began = time.monotonic()
    os.kill(child if is_of_rank_1 else run.pid, number)
    _, errors = run.communicate(timeout=60)
    seconds = time.monotonic() - began
    wait_until_gone([child])
    name = f"rank 1 (process {child}) " if is_of_rank_1 else ""
    assert name + said in errors.decode()
    assert run.returncode == code
    assert seconds < 10
