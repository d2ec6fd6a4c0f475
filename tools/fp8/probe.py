"""Both forms of the prototype on an H200: their bits against each other and the model, their times beside today's form.

python -m tools.fp8.probe                        under a minute where all kernels are compiled
python -m tools.fp8.probe --compile FOLDER       on any machine: all of its kernels, into a folder
dsv4 kernels pack FILE --cache FOLDER            and `dsv4 kernels unpack FILE` on the H200, before the first line
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.tensors import QuantFormat
from dsv4.ops.moe.launch import config_for, launch_moe
from dsv4.testing.cases.moe import random_layer
from tools.fp8 import few
from tools.fp8.experts import FLASH, LIMIT, Call, Fp8Matrix, random_matrices

SIZES = 1, 6, 16, 64, 256, 512, 1024, 4096  # tokens that are timed
LIMITS = {1: 41.0, 16: 333.0, 64: 788.0, 256: 1137.0}  # us at most, or no form for few
CHECKED = 1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64  # tokens whose bits are compared
LOADS = ("even", "skewed", "nine experts", "one expert")
ONE_EXPERT_BYTES = 3 * FLASH.dim * FLASH.width * 17 // 32
BYTES_A_US = 4.63e6  # that an H200 reads
SETS = 8  # calls of a graph, each with experts of its own
Layer = tuple[Any, Any]  # the matrices of today's experts


# ---- bits ----


def checked_call(tokens: int, load: str, device: torch.device) -> Call:
    call = Call.random(tokens, FLASH, device, is_skewed=load == "skewed")
    if load == "nine experts":
        call.experts.remainder_(9).mul_(29)  # some of a token's choices may be one expert
    elif load == "one expert":
        call.experts.fill_(-1)[:, 3] = FLASH.num_experts - 1
    return call


def wrong_bits(matrices: list[Fp8Matrix], device: torch.device) -> Iterator[str]:
    """Of hidden a few codes may differ from the model, whose exponential is torch's."""
    num_codes = num_other = 0
    for load in LOADS:
        for tokens in CHECKED:
            call = checked_call(tokens, load, device)
            is_used = call.experts.flatten() >= 0
            found: list[list[Tensor]] = []
            sorted_few = call.few(matrices, call.sort(few.ROWS))
            for form in (call.many(matrices), sorted_few, call.few(matrices)):
                call.hidden.fill_(127)
                call.parts.fill_(float("nan"))
                for launch in form:
                    launch()
                found.append([part[is_used].clone() for part in (call.hidden, call.hidden_scale, call.parts)])
            for name, parts in zip(("sorted", "as called"), found[1:], strict=True):
                if not all(torch.equal(*pair) for pair in zip(found[0], parts, strict=True)):
                    yield f"{tokens} tokens, {load}: the form for few, {name}, has other bits than that for many"
            expert = int(call.experts.flatten()[is_used][-1]) if is_used.any() else 0
            wrong = call.wrong(matrices, [(expert, 5, True), (expert, 7, False)])
            num_other, num_codes = num_other + wrong["hidden"][0], num_codes + wrong["hidden"][1]
            if wrong["parts"][0]:
                yield f"{tokens} tokens, {load}, expert {expert}: other than the model: {wrong}"
    if num_other > 1e-4 * num_codes:
        yield f"{num_other} of {num_codes} codes of hidden are other than the model"


# ---- times ----


def forms_of(call: Call, matrices: list[Fp8Matrix], layer: Layer) -> dict[str, Callable[[], None]]:
    """Routed experts, each with the sort that it needs; today's up to five tokens with x rounded before."""
    plain, shared = layer

    def today() -> None:
        config = config_for(call.x16, call.experts, plain)
        launch_moe(
            call.x16, call.experts, call.weights, plain, shared, LIMIT, config, has_shared=False, rounded=call.x16
        )

    def run(form: Callable[[list[Fp8Matrix]], list[Callable[[], None]]]) -> None:
        for launch in form(matrices):
            launch()

    return {"today": today, "few": lambda: run(call.few), "many": lambda: run(call.many)}


def microseconds(calls: list[Callable[[], None]]) -> float:
    """Of one call: the median of nine runs of a graph of all."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(9):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return sorted(times)[4]


def times(matrices: list[Fp8Matrix], layer: Layer, device: torch.device) -> dict[int, dict[str, float]]:
    print("us of routed experts of Flash, sort included\ntokens   today     few    many   limit   bytes", flush=True)
    found: dict[int, dict[str, float]] = {}
    for tokens in SIZES:
        calls = [Call.random(tokens, FLASH, device) for _ in range(SETS)]
        forms = [forms_of(call, matrices, layer) for call in calls]
        found[tokens] = row = {name: microseconds([one[name] for one in forms]) for name in forms[0]}
        num_experts = sum(len(call.experts.unique()) for call in calls) / SETS
        limit = f"{LIMITS[tokens]:7.0f}" if tokens in LIMITS else "      -"
        floor = num_experts * ONE_EXPERT_BYTES / BYTES_A_US
        print(f"{tokens:6}" + "".join(f" {us:7.1f}" for us in row.values()) + f" {limit} {floor:7.1f}", flush=True)
    return found


def verdict(found: dict[int, dict[str, float]], num_wrong: int) -> str:
    over = [f"{tokens} ({found[tokens]['few']:.1f} of {limit:.0f})" for tokens, limit in LIMITS.items()
            if found[tokens]["few"] > limit]  # fmt: skip
    slower = [str(tokens) for tokens, row in found.items() if min(row["few"], row["many"]) > 1.05 * row["today"]]
    changes = next((tokens for tokens, row in found.items() if row["many"] < row["few"]), None)
    passed = not over and not num_wrong and not slower
    return (
        f"verdict: {'YES' if passed else 'NO'}; wrong bits in {num_wrong} cases; over the limit at: "
        f"{', '.join(over) or 'none'}; slower than 1.05 x today at: {', '.join(slower) or 'none'}; "
        f"the form for many is faster from {changes} tokens on"
    )


# ---- ahead of it ----


def compile_all(folder: Path) -> None:
    """Every launch of both parts, on tensors without memory."""
    from tools.compile_ahead import ARCHITECTURE, record_into
    from tools.compiled.compile_check import offline

    record_into(folder)
    device, names = torch.device("meta"), []
    with offline(ARCHITECTURE) as compiled:
        matrices, layer = random_matrices(FLASH, device), random_layer("flash", QuantFormat.MXFP4, device)
        for tokens in (*CHECKED, *SIZES):
            call = Call.random(tokens, FLASH, device)
            for form in forms_of(call, matrices, layer).values() if tokens in SIZES else (lambda: None,):
                form()
            for launch in (*call.many(matrices), *call.few(matrices), *call.few(matrices, call.sort(few.ROWS))):
                launch()
        names = sorted({f"{kernel.metadata.name} {kernel.hash[:12]}" for kernel in compiled})
    print(f"{len(names)} kernels for sm_{ARCHITECTURE} in {folder}:", *names, sep="\n  ")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=Path, metavar="FOLDER", help="compile all kernels into a folder, run none")
    options: Any = parser.parse_args(arguments)
    if options.compile is not None:
        compile_all(options.compile)
        return
    start = time.monotonic()
    torch.manual_seed(0)
    device, num_wrong = torch.device("cuda"), 0
    matrices = random_matrices(FLASH, device)
    for text in wrong_bits(matrices, device):
        num_wrong += 1
        print(text, flush=True)
    print(f"bits: {len(LOADS) * len(CHECKED)} cases, {num_wrong} wrong; {time.monotonic() - start:.0f} s", flush=True)
    found = times(matrices, random_layer("flash", QuantFormat.MXFP4, device), device)
    print(verdict(found, num_wrong), f"({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    with torch.no_grad(), suppress(KeyboardInterrupt):
        main()
