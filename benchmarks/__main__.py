"""One entry point for all benchmarks: `python -m benchmarks NAME [options]`, from a checkout.

Without a name: the list of them. `NAME --help` says what one measures and which options it has. Whole models, drafts,
and servers are measured by `dsv4 bench` on any machine; these need a checkout, most of them a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import sys

CASES = {
    "ops": "every op at the shapes of Flash and Pro, against what the chip was measured to do; --compare, --markdown",
    "bits": "random whole models in one go, in pieces and beside another request: equal bits?",
    "trust": "self-test, bits, digests, broken kernels and GPU tests under two assemblers, in one command",
    "model": "four Flash layers: steps, prompts, memory, bits; Hugging Face's beside them; 43 layers offloaded",
    "step": "a decode step through the engine against the GPU's busy time, by batch and kind of request",
    "timeline": "a decode step kernel by kernel, as the profiler saw it",
    "server": "`dsv4 serve` under load beside the engine alone; CPU time by process",
    "start": "`dsv4 serve FOLDER` alone: its table, memory, phases cold and warm, first token, 256 chats",
    "drafts": "what drafts cost and bring in a step",
    "prefix": "what hits of the prefix cache cost, by tier",
    "ranks": "several ranks on one GPU: bits; a model of their speed",
    "host": "the host's part of a step: allocator, cache, scheduler (CPU)",
    "storm": "`dsv4 serve` among badly behaved clients, with restarts (CPU)",
    "architectures": "every kernel compiled for six architectures; writes docs/architectures.md (CPU)",
    "plots": "tables and pictures of the documents from the records (CPU)",
}  # name -> what it says
OWN_OPTIONS = ("ops", "trust", "storm", "architectures", "plots")  # no session: `main(arguments)` of their own


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        print("\n".join(f"{name:14} {about}" for name, about in CASES.items()))
        return 0
    name, *rest = arguments
    if name not in CASES:
        print(f"benchmarks: no {name!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    module = importlib.import_module(f"benchmarks.{name}")
    if name in OWN_OPTIONS:
        return int(module.main(rest) or 0)
    from benchmarks.runner import Session, add_common_options, is_bad

    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_common_options(parser, getattr(module, "SECTIONS", ()))
    if hasattr(module, "add_options"):
        module.add_options(parser)
    session = Session(name, parser.parse_args(rest), getattr(module, "line", None))
    module.run(session)
    if hasattr(module, "conclusions"):
        print("\n".join(module.conclusions(session.records)))
    return int(any(map(is_bad, session.records)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
