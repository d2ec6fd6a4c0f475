"""`nearest`: the settings closest to those that do not fit, each tried before it is named. No torch."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dsv4.config import BLOCK_TOKENS, ModelConfig
from dsv4.tools.auto.machine import Machine
from dsv4.tools.auto.settings import Wishes
from dsv4.tools.plan.budget import largest

MOST_NAMED = 3
LEAST_CHUNK = 256
MOST_GPUS = 64
Fits = Callable[[Wishes], bool]


def nearest(
    wishes: Wishes, config: ModelConfig, machine: Machine, fits_in: Callable[[Wishes, Machine], bool]
) -> str:  # fmt: skip
    """A sentence with up to three ways out, the smallest changes first."""

    def fits(others: Wishes) -> bool:
        return fits_in(others, machine)

    found: list[str] = []
    for text, changed in _ways(wishes, config, machine, fits):
        if text not in found and fits(changed):
            found.append(text)
        if len(found) == MOST_NAMED:
            break
    if not found and machine.gpus:
        largest_gpu = max(machine.gpus, key=lambda gpu: gpu.total_bytes)
        idle = replace(largest_gpu, free_bytes=largest_gpu.total_bytes)
        for count in range(len(machine.gpus) + 1, MOST_GPUS + 1):
            if fits_in(replace(wishes, gpus=count), replace(machine, gpus=(idle,) * count)):
                here = f"this machine shows {len(machine.gpus)}"
                return f"No setting fits here: it needs {count} GPUs such as {idle.name}, and {here}"
    if not found:
        return "No setting fits here; `dsv4 plan` says what would hold the model"
    return f"What fits: {'; or '.join(found)}"


def _ways(wishes: Wishes, config: ModelConfig, machine: Machine, fits: Fits) -> Iterator[tuple[str, Wishes]]:
    """One option changed at a time, then two."""
    requests, context = wishes.requests, wishes.context
    fewer = _most_requests(wishes, fits)
    if fewer:
        yield f"--requests {fewer}", replace(wishes, requests=fewer)
    shorter = _longest(wishes, config, fits)
    if shorter:
        yield f"--context {shorter}", replace(wishes, context=shorter)
    if wishes.chunk is not None and wishes.chunk > LEAST_CHUNK:
        smaller = largest(lambda n: fits(replace(wishes, chunk=n * LEAST_CHUNK)), wishes.chunk // LEAST_CHUNK)
        if smaller:
            yield f"--chunk {smaller * LEAST_CHUNK}", replace(wishes, chunk=smaller * LEAST_CHUNK)
    if requests is not None and context is not None:  # neither alone may do
        half = replace(wishes, context=max(BLOCK_TOKENS, context // 2 // BLOCK_TOKENS * BLOCK_TOKENS))
        fewer = _most_requests(half, fits)
        if fewer:
            yield f"--requests {fewer} --context {half.context}", replace(half, requests=fewer)
    if wishes.offload_experts is not None:
        yield "no --offload-experts", replace(wishes, offload_experts=None)
    for gpus in range((wishes.gpus or 1) + 1, len(machine.gpus) + 1):
        more = replace(wishes, gpus=gpus)
        if fits(more):
            yield f"--gpus {gpus}", more
            break
    yield "--memory 1", replace(wishes, memory=1.0)
    if wishes.drafts not in (None, "off"):
        yield "--drafts off", replace(wishes, drafts="off")
    if requests is not None:
        yield "no --requests", replace(wishes, requests=None)
    if machine.gpus and wishes.device != "cpu":
        yield "--device cpu", replace(wishes, device="cpu", offload_experts=None, gpus=None)


def _most_requests(wishes: Wishes, fits: Fits) -> int:
    upper = (wishes.requests or 8) - 1
    return largest(lambda n: fits(replace(wishes, requests=n)), upper)


def _longest(wishes: Wishes, config: ModelConfig, fits: Fits) -> int:
    upper = min(wishes.context or config.max_position_embeddings, config.max_position_embeddings) - 1
    return BLOCK_TOKENS * largest(lambda n: fits(replace(wishes, context=n * BLOCK_TOKENS)), upper // BLOCK_TOKENS)
