"""Loading a model for a command: options checked before anything slow, warnings as notes on the console."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from dsv4.config import EngineConfig, ModelConfig
from dsv4.engine.draft.options import Drafts, draft_limits, why_off
from dsv4.hub import is_hub_name
from dsv4.loader.generation_defaults import FILE_NAME, describe, read_sampling_defaults
from dsv4.loader.header import is_lfs_pointer, pointer_text
from dsv4.loader.shipped import DEFAULT_SHIPPED, find_checkpoint, shipped_names
from dsv4.request import RequestError, SamplingParams
from dsv4.tools.auto.choose import choose_for
from dsv4.tools.auto.machine import read_machine
from dsv4.tools.auto.settings import Wishes
from dsv4.tools.memory_check import check_gpu_memory, check_host_memory, naming_host_memory
from dsv4.tools.plan.targets import PRESETS

if TYPE_CHECKING:
    from dsv4.llm import LLM

_DTYPES = ("float64", "float32", "bfloat16")
_NUMERICS = ("official", "exact")
_ADDRESS = re.compile(r"https?:/+[^/]+/([^/]+/[^/]+)(?:/.*)?")  # a path has one slash where two were typed
_BEGINNING = 24  # bytes that tell a Git LFS pointer
DEFAULT_CONTEXT = 16384
MODEL_HELP = (
    "Checkpoint folder, name on the hub (ORG/NAME, or ORG/NAME@REVISION; downloaded once), or a shipped one. "
    f"Default: {DEFAULT_SHIPPED}, a miniature."
)
_THREADS_HELP = (
    "CPU threads. Default: OMP_NUM_THREADS, or 1 for small models (hidden_size below 2048), else one per core. "
    "Official numerics give the same bits with any number; exact ones may differ in the last bit."
)
_OFFLOAD_HELP = (
    "Experts in host memory: auto fills the GPU with the others; a number, e.g. 64, is how many of each layer stay on "
    "it; off keeps all. Default: auto if they do not fit."
)


def complete_model(incomplete: str) -> list[str]:
    """For shell completion: shipped checkpoints, and folders that hold one."""
    folder = Path(incomplete if incomplete.endswith("/") else Path(incomplete).parent)
    here = [f"{file.parent}" for file in folder.glob("*/config.json")] if folder.is_dir() else []
    return [name for name in (*shipped_names(), *sorted(here)) if name.startswith(incomplete)]


# options that several commands have
ModelArgument = Annotated[
    Path | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, autocompletion=complete_model)
]
ModelOption = Annotated[Path | None, typer.Option("--model", help="As MODEL.", autocompletion=complete_model)]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the hub.")]
NumericsOption = Annotated[
    str,
    typer.Option(
        help="official: quantise where the published code does. exact: quantise nothing but the stored weights."
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option(help="Dtype of --numerics exact: float64, float32 (default) or bfloat16.")
]
DeviceOption = Annotated[
    str, typer.Option(help="Device: auto (GPUs where there are any), cpu, cuda, or cuda:N for one GPU.")
]
GpusOption = Annotated[
    int | None,
    typer.Option(
        help="GPUs that share the model, one process each; on a CPU, processes. Default: all, if it is large."
    ),
]
DraftsOption = Annotated[
    str,
    typer.Option(help="Speculative decoding: draft tokens per step, auto, or off. The output is the same."),
]
OffloadOption = Annotated[str | None, typer.Option(help=_OFFLOAD_HELP)]
IgnoreSelftestOption = Annotated[
    bool, typer.Option("--ignore-selftest", help="Use kernels even if `dsv4 selftest` found wrong results on this GPU.")
]
ThreadsOption = Annotated[int | None, typer.Option(help=_THREADS_HELP)]
TemperatureOption = Annotated[
    float | None, typer.Option(help="0 is greedy. Default: generation_config.json's, else 1.")
]
TopPOption = Annotated[
    float | None,
    typer.Option(help="Nucleus sampling (top-p). Default: generation_config.json's, else 1."),
]


def find_model(
    model: Path | None, console: Console, *, option: Path | None = None, revision: str | None = None
) -> Path:  # fmt: skip
    """The folder a model's name means, given as MODEL or as `option` (--model); downloaded, if it is on a hub. If it
    was left out, a note says what runs instead."""
    model = one_model(model, option)
    if model is not None and (address := _ADDRESS.fullmatch(str(model))):
        raise RequestError(f"{model} is an address: give the model's name on the hub, {address[1]}")
    if model is not None and str(model).lower() in PRESETS and not model.exists():
        raise RequestError(
            f"{str(model)!r} is a preset: an architecture, without weights. `dsv4 plan {model}` plans its memory, "
            f"`dsv4 synth FOLDER --preset {model}` writes a random checkpoint of it; shipped checkpoints: "
            f"{', '.join(shipped_names())}"
        )
    if revision is not None:
        if model is None or not is_hub_name(model) or "@" in str(model):
            raise RequestError(f"--revision needs a name on the hub without one (ORG/NAME), found {model}")
        model = Path(f"{model}@{revision}")
    folder = find_checkpoint(model)
    for file in (folder / "config.json", folder / "tokenizer.json"):
        if file.is_file() and is_lfs_pointer(file.open("rb").read(_BEGINNING)):
            raise RequestError(pointer_text(file))
    if model is None:
        print_note(f"no MODEL, so the shipped {folder.name}: a miniature that continues text, answers nothing", console)
    return folder


def one_model(model: Path | None, option: Path | None) -> Path | None:
    """The model of a command that takes it in two places."""
    if model is not None and option is not None and model != option:
        raise RequestError(f"give one model: MODEL is {model}, --model is {option}")
    return option if model is None else model


def model_name(model: Path | None, folder: Path) -> str:
    """How clients call it: a name on the hub as it was given, else the folder's."""
    if model is not None and is_hub_name(model):
        return str(model).partition("@")[0]
    return folder.resolve().name


def print_note(text: str, console: Console) -> None:
    console.print(f"dsv4: note: {text}", markup=False, highlight=False, soft_wrap=True)


def check_tokenizer(folder: Path, purpose: str) -> None:
    """A tokenizer that is missing is said before the weights are read."""
    if not (folder / "tokenizer.json").is_file():
        raise RequestError(f"{folder} has no tokenizer.json; {purpose} needs one")


def with_defaults(
    params: SamplingParams, options: dict[str, float | None], folder: Path, console: Console
) -> SamplingParams:
    """`params` with the options that were given, and the checkpoint's defaults for those that were not. A note says
    what the checkpoint changes."""
    given = {name: value for name, value in options.items() if value is not None}
    defaults = {name: value for name, value in read_sampling_defaults(folder).items() if name not in given}
    changed = {name: value for name, value in defaults.items() if value != getattr(params, name)}
    if changed:
        print_note(f"{FILE_NAME} gives {describe(changed)}", console)
    return replace(params, **given, **defaults)  # type: ignore[arg-type]


def engine_limits(config: ModelConfig, *, context: int | None, requests: int, chunk: int | None = None) -> EngineConfig:
    """Limits of a command; a context that was not given is the model's, up to `DEFAULT_CONTEXT`."""
    chosen = min(DEFAULT_CONTEXT, config.max_position_embeddings) if context is None else context
    limits = EngineConfig(max_context_tokens=chosen, max_concurrent_requests=requests)
    return limits if chunk is None else replace(limits, max_chunk_tokens=chunk)


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RequestError(f"{option} must be one of {', '.join(choices)}, found {value!r}")


def check_numerics(numerics: str, dtype: str | None) -> None:
    """`--numerics` and `--dtype`, before torch is loaded."""
    check_choice("--numerics", numerics, _NUMERICS)
    if dtype is not None:
        check_choice("--dtype", dtype, _DTYPES)
        if numerics != "exact":
            raise RequestError(f"--dtype {dtype} needs --numerics exact; official numerics always compute in bfloat16")


def parse_offload(text: str | None) -> str | int | None:
    """`--offload-experts`, before torch is loaded; what the model can have is checked with its config."""
    if text in (None, "auto", "off"):
        return text
    if not (text.isascii() and text.isdigit()):
        raise RequestError(f"--offload-experts must be auto, off or a number of experts a layer, found {text!r}")
    return int(text)


def parse_drafts(text: str, option: str = "--drafts") -> Drafts:
    """`option`, before torch is loaded; what the model can have is checked with its config."""
    if text in ("auto", "off"):
        return "auto" if text == "auto" else "off"
    if not (text.isascii() and text.isdigit()):
        raise RequestError(f"{option} must be auto, off or a number of tokens, found {text!r}")
    return int(text)


class ModelSettings(msgspec.Struct, kw_only=True, frozen=True):
    """A model to load. `place_model` decides what is left open: a device `auto`, GPUs None."""

    folder: str
    numerics: str = "official"
    dtype: str | None = None
    device: str = "auto"
    limits: EngineConfig
    offload_experts: str | int | None = None
    drafts: Drafts = "off"
    gpus: int | None = None
    threads: int | None = None
    ignore_selftest: bool = False


def place_model(model: ModelSettings, console: Console) -> ModelSettings:
    """Device, ranks and offloading of a command that has limits of its own, chosen as a server's are."""
    limits, folder = model.limits, Path(model.folder)
    wishes = Wishes(
        device=model.device, gpus=model.gpus, requests=limits.max_concurrent_requests,
        context=limits.max_context_tokens, chunk=limits.max_chunk_tokens, drafts="off",
        offload_experts=model.offload_experts, numerics=model.numerics, limits=limits,
    )  # fmt: skip
    found = choose_for(folder, ModelConfig.from_pretrained(folder), wishes, read_machine(), model.dtype)
    if found.visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = found.visible
    if model.device == "auto" and found.device != "cpu":
        for choice in found.choices:
            if choice.what in ("device", "busy", "experts"):
                print_note(f"{choice.what}: {choice.value} ({choice.why}); {choice.option} changes it", console)
    return msgspec.structs.replace(
        model, device=found.device, gpus=found.gpus, offload_experts=found.offload_experts
    )  # fmt: skip


def check_loading(model: ModelSettings) -> EngineConfig:
    """The limits with room for drafts. What can be refused is refused here, before torch is loaded."""
    config, drafts = ModelConfig.from_pretrained(model.folder), model.drafts
    if model.threads is not None and model.threads < 1:
        raise RequestError(f"--threads must be at least 1, found {model.threads}")
    if model.threads is not None and (model.gpus or 1) > 1:
        raise RequestError("--threads needs --gpus 1: set OMP_NUM_THREADS, which every process obeys")
    if drafts == "auto" and why_off(config, numerics=model.numerics) is not None:
        drafts = "off"
    limits = draft_limits(model.limits, config, drafts)
    if model.device == "cpu":
        check_host_memory(Path(model.folder), config, limits, numerics=model.numerics, dtype=model.dtype)
    return limits


def load_llm(model: ModelSettings, console: Console) -> LLM:
    """The model, with a progress bar; what the loader warns of is printed as a note. Takes minutes, loads torch."""
    config, limits = ModelConfig.from_pretrained(model.folder), check_loading(model)
    numerics, drafts, offload_experts, gpus = model.numerics, model.drafts, model.offload_experts, model.gpus or 1
    obstacle = why_off(config, numerics=numerics)
    if drafts == "auto" and obstacle is not None:
        print_note(f"drafts are off: {obstacle}", console)
        drafts = "off"

    begun = perf_counter()
    import torch  # here, so that commands without a model, and mistakes in the options, are answered at once

    from dsv4.llm import LLM

    seconds = perf_counter() - begun

    if model.device.startswith("cuda") and torch.cuda.is_available() and gpus == 1:
        free, _ = torch.cuda.mem_get_info(torch.device(model.device))
        check_gpu_memory(
            Path(model.folder), config, limits, free, numerics=numerics, dtype=model.dtype,
            keeps_experts=offload_experts is None,
        )  # fmt: skip
    with warnings.catch_warnings(record=True) as notes, naming_host_memory(limits):
        warnings.simplefilter("always")
        llm = LLM(
            model.folder, device=model.device, numerics="exact" if numerics == "exact" else "official",
            dtype=getattr(torch, model.dtype) if model.dtype else None, engine=limits,
            offload_experts=offload_experts, drafts=drafts, gpus=gpus, progress=True,
            ignore_selftest=model.ignore_selftest,
        )  # fmt: skip
    llm.start_seconds = {"libraries": seconds, **llm.start_seconds}
    if model.threads is not None:
        torch.set_num_threads(model.threads)
    texts = [str(note.message) for note in notes]
    if llm.pool is not None:
        placement, where = llm.pool.placement, "the device" if gpus == 1 else "each GPU"
        texts.append(
            f"{placement.num_slots} of {llm.pool.num_experts} experts of each layer on {where} "
            f"({placement.num_fixed} for good), {gpus * llm.pool.host_bytes() / 2**30:,.1f} GiB in host memory"
        )
    elif offload_experts is not None:
        texts.append("all experts fit on the device: none is offloaded")
    for text in texts:
        print_note(text, console)
    return llm
