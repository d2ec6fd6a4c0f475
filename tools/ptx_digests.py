"""Whether a change of kernels changed what is generated for them: digests of the PTX of benchmark cases.

    python tools/ptx_digests.py record [--arch 90] [--keep FOLDER] FILE [MODULE ...]
    python tools/ptx_digests.py compare BEFORE AFTER                     lists the kernels that differ

Modules are those of dsv4/testing/cases, all by default. `--keep` also writes the PTX, by digest, to be compared.
A digest leaves out what is no code: line numbers, debug sections, the names of the kernel and its parameters, and
parameters that no instruction reads. So a function can be renamed, moved or commented, and the digests of its cases
stay. Nothing is assembled and no GPU is needed; a module takes a minute or two on one core.
"""

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
os.environ.pop("TRITON_INTERPRET", None)
sys.path.insert(0, str(Path(__file__).parents[1]))


def normalised(ptx: str) -> str:
    """PTX without comments, line information and names."""
    lines = [re.sub(r"//.*", "", line).rstrip() for line in ptx.splitlines()]
    text = "\n".join(line for line in lines if line and not re.match(r"\s*\.(loc|file)\b", line))
    text = re.sub(r"\.section\s+\.debug_\w+\s*\{.*?\n\t?\}", "", text, flags=re.DOTALL)
    entry = re.search(r"\.entry (\w+)\(.*?\)\n", text, re.DOTALL)
    assert entry is not None, "PTX without an entry"
    head, body = text[: entry.start()], text[entry.end() :]
    # parameters by the order in which they are read: one that nobody reads may come and go
    names = dict.fromkeys(re.findall(rf"\b{entry[1]}_param_\d+\b", body))
    numbers = {name: f"param_{i}" for i, name in enumerate(names)}
    return head + re.sub(rf"\b{entry[1]}_param_\d+\b", lambda name: numbers[name[0]], body)


def record(modules: list[str], arch: int, folder: Path | None) -> dict[str, list[list[str]]]:
    """By case: digest, kernel name, number of warps and bytes of shared memory of every launch, in order."""
    import torch

    from dsv4.testing.bench import case_modules, load_cases
    from tools.compiled.compile_check import make_no_binaries, offline

    found: dict[str, list[list[str]]] = {}
    make_no_binaries()
    for case in load_cases(modules or case_modules()):
        with offline(arch) as compiled:
            case.build(torch.device("meta")).call()
        found[case.key] = []
        for kernel in compiled:
            text, about = normalised(kernel.asm["ptx"]), kernel.metadata
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            found[case.key].append([digest, about.name, str(about.num_warps), str(about.shared)])
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{digest}.ptx").write_text(text, encoding="utf-8")
    return found


def compare(before: dict[str, list[list[str]]], after: dict[str, list[list[str]]]) -> int:
    """Print what differs; the number of cases that do."""
    common = before.keys() & after.keys()
    different = 0
    for key in sorted(common):
        codes = [[(launch[0], *launch[2:]) for launch in side[key]] for side in (before, after)]
        if codes[0] != codes[1]:
            different += 1
            print(f"{key}: {before[key]} -> {after[key]}")
    print(f"{len(common)} cases: {len(common) - different} equal, {different} different")
    for name, lone in (("before", before.keys() - after.keys()), ("after", after.keys() - before.keys())):
        if lone:
            print(f"only {name}: {', '.join(sorted(lone))}")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="compile cases and write their digests to FILE")
    recording.add_argument("file", type=Path)
    recording.add_argument("modules", nargs="*", help="modules of cases, as dsv4.testing.cases.moe")
    recording.add_argument("--arch", type=int, default=90)
    recording.add_argument("--keep", type=Path, help="a folder for the PTX of every digest")
    comparing = commands.add_parser("compare", help="list the cases whose code differs")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        digests = record(arguments.modules, arguments.arch, arguments.keep)
        arguments.file.write_text(json.dumps(digests, indent=1), encoding="utf-8")
        return 0
    sides = [json.loads(path.read_text(encoding="utf-8")) for path in (arguments.before, arguments.after)]
    return 1 if compare(*sides) else 0


if __name__ == "__main__":
    sys.exit(main())
