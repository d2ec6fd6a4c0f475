"""The trained model: the shipped miniature as transformers' `DeepseekV4ForCausalLM`, in fp32, and its gradient. The
server gets its weights in bf16."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM
from transformers.utils.logging import disable_progress_bar

from dsv4.config import ModelConfig
from dsv4.formats.tensors import dequantize
from dsv4.loader.checkpoint import Checkpoint
from dsv4.loader.names import Role
from dsv4.loader.resolve import plan_load
from dsv4.loader.shipped import find_checkpoint
from dsv4.loader.weights import read_weight

disable_progress_bar()
MAX_WEIGHT = 2.0  # of a token, where trainer and rollout disagree about its probability


def write_start(folder: Path) -> None:
    """The miniature in bf16 and without its drafter: what both sides begin with."""
    source = find_checkpoint(None)
    config = ModelConfig.from_pretrained(source)
    checkpoint = Checkpoint.open(source)
    tensors: dict[str, Tensor] = {}
    for one in plan_load(checkpoint, config).sources:
        if not one.tensor.name.startswith("mtp."):
            weight = read_weight(checkpoint, one, config)
            if one.tensor.role is not Role.TABLE:
                dtype = torch.float32 if one.tensor.role is Role.CONTROL else torch.bfloat16
                weight = dequantize(weight, dtype)  # in bf16 without loss
            tensors[one.tensor.name] = weight.clone()
    raw = json.loads((source / "config.json").read_text())
    del raw["quantization_config"], raw["expert_dtype"]
    raw |= {"num_nextn_predict_layers": 0, "compress_ratios": raw["compress_ratios"][: config.num_hidden_layers]}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    shutil.copy(source / "tokenizer.json", folder)


def load(folder: Path) -> DeepseekV4ForCausalLM:
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    return model.train()


def write_weights(model: DeepseekV4ForCausalLM, folder: Path, start: Path) -> None:
    """A folder that a server may read: complete, or not there."""
    fresh = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    state = {
        name: value.bfloat16() if name.endswith(("weight", "_proj")) else value  # as the server loaded them
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(fresh, state_dict=state)
    shutil.copy(start / "config.json", fresh)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(fresh, folder)


def logprobs(model: DeepseekV4ForCausalLM, rows: list[list[int]], num_prompt: list[int]) -> tuple[Tensor, Tensor]:
    """Of each token behind its prompt, and which places are such tokens: two tensors [rows, longest - 1]."""
    longest = max(map(len, rows))
    ids = torch.zeros(len(rows), longest, dtype=torch.long)  # filled up behind: no earlier row reads that
    is_answer = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    for place, (row, start) in enumerate(zip(rows, num_prompt, strict=True)):
        ids[place, : len(row)] = torch.tensor(row)
        is_answer[place, start - 1 : len(row) - 1] = True
    logits = model(ids, use_cache=False).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0], is_answer


def step(
    model: DeepseekV4ForCausalLM, optimizer: torch.optim.Optimizer, rows: list[list[int]], num_prompt: list[int],
    rollout: list[list[float]], advantages: list[float],
) -> float:  # fmt: skip
    """One step up the policy gradient; returns an estimate of KL(rollout, trainer), in nats a token.

    rollout  the log-probability of each answer's tokens, as the server drew them
    """
    ours, is_answer = logprobs(model, rows, num_prompt)
    chosen = ours[is_answer]
    drawn = torch.tensor([value for one in rollout for value in one])
    counts = is_answer.sum(1)
    advantage = torch.tensor(advantages).repeat_interleave(counts)
    weight = (chosen.detach() - drawn).exp().clamp(max=MAX_WEIGHT)
    loss = -(weight * advantage * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    log_ratio = chosen.detach().double() - drawn.double()
    return float((log_ratio.exp() - 1 - log_ratio).mean())
