"""dsv4 as another process, and the four requests that the loop sends to it."""

import ctypes
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 300
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Rollout:
    """What the server drew: log-probabilities as it computed them, float32 numbers without loss."""

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    weight_version: str


def start_server(model: Path, weights: Path, log: Path, numerics: str) -> tuple[subprocess.Popen[bytes], str]:
    """`dsv4 serve --rl` on a free port, and its address. It ends with this process, however that ends."""
    command = [
        sys.executable, "-m", "dsv4", "serve", "--model", str(model), "--numerics", numerics, "--port", "0",
        "--requests", "32", "--context", "256", "--rl", "--rl-root", str(weights),
    ]  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, preexec_fn=_end_with_parent)
    deadline = time.monotonic() + _START_SECONDS
    while "running on http" not in (text := log.read_text()):
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the server did not start:\n{text}")
        time.sleep(0.1)
    return process, text.partition("running on ")[2].split()[0]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Server:
    """A client of the routes, in SGLang's words."""

    def __init__(self, url: str) -> None:
        self._url = url

    def encode(self, text: str) -> list[int]:
        return self._post("/tokenize", prompt=text)["tokens"]

    def rollouts(self, prompts: list[list[int]], num_tokens: int, seed: int) -> list[Rollout]:
        """One answer to each prompt; the one at place i is drawn with `seed` + i."""
        params = {"max_new_tokens": num_tokens, "temperature": 1.0, "sampling_seed": seed}
        answers = self._post("/generate", input_ids=prompts, sampling_params=params, return_logprob=True)
        return [
            Rollout(
                prompt, one["output_ids"], [token[0] for token in one["meta_info"]["output_token_logprobs"]],
                one["text"], one["meta_info"]["weight_version"],
            )
            for prompt, one in zip(prompts, answers, strict=True)
        ]  # fmt: skip

    def score(self, rollouts: list[Rollout]) -> list[list[float]]:
        """The log-probabilities of the answers' tokens, computed again as if they were prompts."""
        rows = [[*one.prompt_ids, *one.token_ids] for one in rollouts]
        answers = self._post(
            "/generate", input_ids=rows, sampling_params={"max_new_tokens": 0}, return_logprob=True,
            logprob_start_len=0,
        )  # fmt: skip
        return [
            [token[0] for token in one["meta_info"]["input_token_logprobs"]][len(rollout.prompt_ids) :]
            for one, rollout in zip(answers, rollouts, strict=True)
        ]

    def update(self, folder: Path, version: str) -> None:
        """Without a restart: the server goes on with the weights of a folder."""
        self._post("/update_weights_from_disk", model_path=str(folder.resolve()), weight_version=version)

    def _post(self, path: str, **fields: Any) -> Any:
        body = json.dumps(fields).encode()
        request = urllib.request.Request(self._url + path, body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.read().decode()}") from None
