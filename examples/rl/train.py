"""Train the shipped miniature by policy gradient on a CPU, to write words without the letter e.

    pip install -e '.[serve]' transformers matplotlib
    python examples/rl/train.py FOLDER --steps 60        # killed? the same command goes on

transformers trains, dsv4 serves rollouts in another process and gets the new weights after every step. Each step
writes a line to FOLDER/record.jsonl; FOLDER/plot.png shows them.
"""

import argparse
import hashlib
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import policy
import torch
from server import Rollout, Server, start_server

PROMPTS = ("And it came to pass", "The king said unto", "In the beginning", "Enter a messenger. ")
LEARNING_RATE = 1e-4


def reward(text: str) -> float:
    """The share of words without an e."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum("e" not in word for word in words) / len(words) if words else 0.0


def advantages(rewards: list[float], group: int) -> list[float]:
    """How much better each answer is than the others to the same prompt, in standard deviations."""
    table = torch.tensor(rewards).view(-1, group)
    spread = table.std(1, keepdim=True) + 1e-4
    return ((table - table.mean(1, keepdim=True)) / spread).view(-1).tolist()


def share_of_equal(rollouts: list[Rollout], scored: list[list[float]]) -> float:
    """Of all tokens: those whose log-probability is the same number again, to the last bit."""
    pairs = [
        pair for one, again in zip(rollouts, scored, strict=True) for pair in zip(one.logprobs, again, strict=True)
    ]
    return sum(first == second for first, second in pairs) / len(pairs)


class Loop:
    """The trained model, its optimiser and the number of steps taken: what a killed run goes on from."""

    def __init__(self, folder: Path, numerics: str) -> None:
        self.folder = folder
        self.start, self.weights, self.state = folder / "start", folder / "weights", folder / "state.pt"
        if not self.start.exists():
            policy.write_start(self.start)
        self.model = policy.load(self.start)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
        self.step = 0
        if self.state.exists():
            found = torch.load(self.state, weights_only=True)
            self.model.load_state_dict(found["model"])
            self.optimizer.load_state_dict(found["optimizer"])
            self.step = found["step"]
        self.weights.mkdir(exist_ok=True)
        self.process, url = start_server(self.start, self.weights, folder / "server.log", numerics)
        self.server = Server(url)
        self.prompts = [self.server.encode(prompt) for prompt in PROMPTS]

    def run(self, num_steps: int, group: int, num_tokens: int) -> None:
        record = self.folder / "record.jsonl"
        lines = record.read_text().splitlines()[: self.step] if record.exists() else []
        record.write_text("".join(f"{line}\n" for line in lines))
        is_resumed = self.step > 0
        while self.step < num_steps:
            found = {"step": self.step, "resumed": is_resumed, **self.once(group, num_tokens)}
            is_resumed = False
            with record.open("a") as file:
                file.write(json.dumps(found) + "\n")
            self.step += 1
            self.save()
            numbers = (
                f"{found['step']:3} reward {found['reward']:.3f}  kl {found['kl']:.1e}  equal {found['equal']:.0%}"
            )
            print(numbers, found["text"].replace("\n", " "), flush=True)

    def once(self, group: int, num_tokens: int) -> dict[str, Any]:
        """New weights to the server, rollouts, their scores, a step."""
        begin = time.perf_counter()
        version = str(self.step)
        policy.write_weights(self.model, self.weights / "now", self.start)
        self.server.update(self.weights / "now", version)
        updated = time.perf_counter()
        prompts = [prompt for prompt in self.prompts for _ in range(group)]
        rollouts = self.server.rollouts(prompts, num_tokens, seed=self.step * len(prompts))
        assert all(one.weight_version == version for one in rollouts)
        drawn = time.perf_counter()
        equal = share_of_equal(rollouts, self.server.score(rollouts))
        scored = time.perf_counter()
        rewards = [reward(one.text) for one in rollouts]
        kl = policy.step(
            self.model, self.optimizer, [[*one.prompt_ids, *one.token_ids] for one in rollouts],
            [len(one.prompt_ids) for one in rollouts], [one.logprobs for one in rollouts], advantages(rewards, group),
        )  # fmt: skip
        drawn_tokens = json.dumps([[one.token_ids, one.logprobs] for one in rollouts])
        seconds = {
            "update": updated - begin, "rollouts": drawn - updated, "scores": scored - drawn,
            "step": time.perf_counter() - scored,
        }  # fmt: skip
        return {
            "reward": round(sum(rewards) / len(rewards), 4), "kl": kl, "equal": equal,
            "tokens": sum(len(one.token_ids) for one in rollouts),
            "digest": hashlib.sha256(drawn_tokens.encode()).hexdigest(),
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "text": rollouts[self.step % len(rollouts)].text,
        }  # fmt: skip

    def save(self) -> None:
        """Complete, or the one before."""
        fresh = self.state.with_suffix(".new")
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, fresh)
        os.replace(fresh, self.state)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def plot(record: Path, image: Path) -> None:
    """Reward, KL and the share of equal log-probabilities; a line where the run was killed and went on."""
    from matplotlib.figure import Figure

    rows = [json.loads(line) for line in record.read_text().splitlines()]
    steps = [row["step"] for row in rows]
    figure = Figure(figsize=(7, 6), layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    series = {
        "reward: words without an e": [row["reward"] for row in rows],
        "KL(rollout, trainer), nats a token": [row["kl"] for row in rows],
        "equal log-probabilities, %": [100 * row["equal"] for row in rows],
    }
    for one, (name, values) in zip(axes, series.items(), strict=True):
        one.plot(steps, values, linewidth=1.2)
        one.set_title(name, fontsize=9, loc="left")
        for row in rows:
            if row["resumed"]:
                one.axvline(row["step"], color="grey", linestyle=":", linewidth=1)
    axes[1].set_yscale("log")
    axes[2].set_ylim(0, 105)
    axes[2].set_xlabel("step (dotted: killed, and gone on)")
    figure.savefig(image, dpi=90)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--group", type=int, default=8, help="answers to each of the four prompts")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--numerics", default="official", choices=("official", "exact"), help="of the server")
    parser.add_argument("--no-plot", action="store_true")
    given = parser.parse_args(arguments)
    given.folder.mkdir(parents=True, exist_ok=True)
    loop = Loop(given.folder, given.numerics)
    try:
        loop.run(given.steps, given.group, given.tokens)
    finally:
        loop.close()
    if not given.no_plot:
        plot(given.folder / "record.jsonl", given.folder / "plot.png")


if __name__ == "__main__":
    main()
