"""One entry point for all benchmarks: `python -m benchmarks NAME [options]`, from a checkout.

Without a name: the list of them. `NAME --help` says what one measures and which options it has. Whole models, drafts,
and servers are measured by `dsv4 bench` on any machine; these need a checkout, most of them a GPU.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType

CASES = {
    "ops": "every op at the shapes of Flash and Pro, against what the chip was measured to do; --compare, --markdown",
    "bits": "random whole models in one go, in pieces and beside another request: equal bits?",
    "trust": "self-test, bits, digests, broken kernels and GPU tests under two assemblers, in one command",
    "model": "four Flash layers: steps, layers, prompts, memory; 43 layers with offloaded experts",
    "step": "a decode step through the engine against the GPU's busy time, by batch and kind of request",
    "timeline": "a decode step kernel by kernel, as the profiler saw it",
    "server": "`dsv4 serve` under load beside the engine alone; CPU time by process",
    "start": "`dsv4 serve FOLDER` alone: its table, memory, phases cold and warm, first token, 256 chats",
    "drafts": "what drafts cost and bring in a step",
    "prefix": "what hits of the prefix cache cost, by tier",
    "rl": "new weights, sleep, routed experts and scores, for trainers; --small on a CPU",
    "ranks": "several ranks on one GPU: bits; a model of their speed",
    "host": "the host's part of a step: allocator, cache, scheduler (CPU)",
    "storm": "`dsv4 serve` among badly behaved clients, with restarts (CPU)",
    "architectures": "every kernel compiled for six architectures, for docs/kernels/architectures.md (CPU)",
    "plots": "tables and pictures of the documents from the records (CPU)",
}  # name -> what it says; `NAME.py` is in this folder or in a room of it


def module_of(name: str) -> ModuleType:
    here = Path(__file__).parent
    path = next(here.rglob(f"{name}.py"))
    return importlib.import_module(".".join(path.relative_to(here.parent).with_suffix("").parts))


def parse(name: str, arguments: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The module of a benchmark and its options; `command` among them is what starts it in another process."""
    module = module_of(name)
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    if not hasattr(module, "main"):
        from benchmarks.runner import add_common_options

        add_common_options(parser, getattr(module, "SECTIONS", ()))
    if hasattr(module, "add_options"):
        module.add_options(parser)
    parser.set_defaults(command=[sys.executable, "-m", "benchmarks", name, *arguments])
    return module, parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__)
        print("\n".join(f"{name:14} {about}" for name, about in CASES.items()))
        return 0
    name, *rest = arguments
    if name not in CASES:
        print(f"benchmarks: no {name!r}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    module, options = parse(name, rest)
    if hasattr(module, "main"):  # no session, or several
        return int(module.main(options) or 0)
    from benchmarks.runner import Session, is_bad

    session = Session(name, options, getattr(module, "line", None))
    module.run(session)
    if hasattr(module, "conclusions"):
        print("\n".join(module.conclusions(session.records)))
    return int(any(map(is_bad, session.records)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
