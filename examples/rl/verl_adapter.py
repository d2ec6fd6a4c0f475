"""dsv4 as a rollout server of verl, which calls a class instead of HTTP: one of these in each rollout worker.

async with AsyncLLM(checkpoint, device="cuda") as llm:
    server = RolloutServer(llm)
    output = await server.generate(prompt_ids, {"temperature": 1.0, "logprobs": True}, request_id="7")
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dsv4 import SamplingParams
from dsv4.async_llm import AsyncLLM
from dsv4.request import FinishReason

_SAME_NAMES = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "seed",
)  # fmt: skip


@dataclass(frozen=True)
class TokenOutput:
    """log_probs: of each token, where they were asked for. stop_reason: "completed", or "aborted": go on with these ids
    as part of the prompt. weight_versions: which weights drew which tokens."""

    token_ids: list[int]
    log_probs: list[float] | None
    routed_experts: Any | None
    stop_reason: str
    weight_versions: tuple[tuple[int, str], ...]


class RolloutServer:
    """`update_weights` between `abort_all_requests` and `resume_generation`, or while nothing runs. With
    `routed_experts` every answer has them, as numbers [tokens but the last, layers, k]."""

    def __init__(self, llm: AsyncLLM, *, routed_experts: bool = False) -> None:
        self._llm = llm
        self._routed_experts = routed_experts
        self._num_seeds = 0

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], request_id: str = ""
    ) -> TokenOutput:  # fmt: skip
        """As many tokens as there is room for, unless `max_tokens` says otherwise. Without a `seed` every call has one
        of its own, in the order of the calls."""
        unknown = set(sampling_params) - {*_SAME_NAMES, "logprobs"}
        if unknown:
            raise ValueError(f"sampling_params: {', '.join(sorted(unknown))} not known here")
        fields = {name: sampling_params[name] for name in _SAME_NAMES if sampling_params.get(name) is not None}
        if "max_tokens" not in fields:
            fields["max_tokens"] = self._llm.llm.cache.limits.max_context_tokens - len(prompt_ids)
        if "seed" not in fields:
            fields["seed"], self._num_seeds = self._num_seeds, self._num_seeds + 1
        wants = bool(sampling_params.get("logprobs"))
        params = SamplingParams(**fields, logprobs=0 if wants else None, routed_experts=self._routed_experts)
        found = (await self._llm.generate(prompt_ids, params))[0]
        return TokenOutput(
            list(found.token_ids), [one.logprob for one in found.logprobs or ()] if wants else None,
            found.routed_experts, "aborted" if found.finish_reason is FinishReason.ABORT else "completed",
            found.weight_versions,
        )  # fmt: skip

    async def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: str | None = None) -> str:
        """Tensors by Hugging Face's names or the official ones, on any device of this process."""
        return await self._llm.update_weights(weights, version=version)

    async def abort_all_requests(self) -> None:
        """What runs ends with what it has; what comes waits for `resume_generation`."""
        await self._llm.pause("abort")

    async def resume_generation(self) -> None:
        await self._llm.resume()

    async def sleep(self) -> None:
        """Give the device memory to the trainer."""
        await self._llm.pause("abort")
        await self._llm.sleep()

    async def wake_up(self) -> None:
        await self._llm.wake()
        await self._llm.resume()
