"""`dsv4 bench model --gpus N`: requests through the engine of several ranks. Single calls and layers are one rank's."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dsv4.config import ConfigError, EngineConfig
from dsv4.llm import LLM
from dsv4.loader.shipped import find_checkpoint
from dsv4.tools.bench.model import SECTIONS, Report, Settings, describe_machine, serve_requests
from dsv4.tools.plan.targets import PRESETS


def bench_ranks(
    target: str | None, gpus: int, device: str, settings: Settings, note: Callable[[str], None] = lambda what: None
) -> Report:
    """The section `serving` of a checkpoint on `gpus` ranks."""
    if target is not None and target.lower() in PRESETS:
        raise ConfigError(f"--gpus needs a checkpoint (`dsv4 synth` writes one), found the preset {target!r}")
    if settings.sections not in (SECTIONS, ("serving",)):
        raise ConfigError(f"--gpus measures the section serving, found {', '.join(settings.sections)}")
    folder = find_checkpoint(target)
    limits = EngineConfig(
        max_context_tokens=settings.prompt_tokens + settings.output_tokens,
        max_concurrent_requests=max(settings.concurrencies),
    )
    note(f"starting {gpus} ranks")
    llm = LLM(folder, device=device, engine=limits, gpus=gpus)
    records = []
    try:
        for count in settings.concurrencies:
            note(f"serving, {count} requests on {gpus} ranks")
            served = serve_requests(llm, count, settings.prompt_tokens, settings.output_tokens)
            records.append({**served, "gpus": gpus})
    finally:
        llm.close()
    return Report(folder.name, describe_machine(torch.device(device)), tuple(records))
