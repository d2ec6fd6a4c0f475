"""Whole random models: logits of a prompt in one go, token by token, in chunks, and beside another request; equal bits?

    python -m benchmarks bits --seconds 60      as many models as fit
    python -m benchmarks bits --models 50       exactly so many; what --seconds leave out makes the run red

Models of three layers with widths that are no powers of two and odd numbers of heads, groups, index heads, experts and
choices (dsv4/testing/random_shapes.py). Every fourth has a long prompt, whose one go takes the forms of 512 and more
tokens. A record has the rows that differ in each comparison, and where some do, the first op with a row that differs.
Kernels of eight models are compiled at once, on all cores; they take most of the time. Compiled elsewhere
(`tools/compile_ahead.py models`), they are found in Triton's cache.

`--device cpu` compares the oracles; add `--tokens 40 --models 1`.
"""

import argparse
import time

from benchmarks.records import Record
from benchmarks.runner import Session, free_memory
from dsv4.ops import backend_for
from dsv4.testing.model_cuts import CutModel, compile_models, random_cuts
from dsv4.testing.random_shapes import FAMILY, random_model

TOKENS, LONG_TOKENS = 400, 1100
MOST_MODELS = 56


def num_tokens(number: int, tokens: int = TOKENS, long_tokens: int = LONG_TOKENS) -> int:
    """Of a model's prompt: two of a family have a long one, one for each of its choices of experts."""
    return long_tokens if number % 4 == 3 else tokens


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", type=int, help="all of these must fit; by default as many as do")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the prompt")
    parser.add_argument("--long-tokens", type=int, default=LONG_TOKENS, help="of every fourth model's")


def run(session: Session) -> None:
    options, longest = session.options, 0.0
    numbers = range(options.first, options.first + (options.models or MOST_MODELS))
    for number in numbers[::FAMILY]:
        began = session.elapsed
        if number > options.first and began + longest > options.seconds:
            break
        family = numbers[number - options.first :][:FAMILY]
        session.attempt(f"models {family[0]} to {family[-1]}", compare_family, session, family)
        longest = max(longest, session.elapsed - began)
        free_memory()
    done = sum(record["kind"] == "bits" for record in session.records)
    if options.models is not None and done < options.models:
        error = f"{done} of {options.models} models were compared"
        session.add({"kind": "error", "what": "models that were asked for", "error": error})


def compare_family(session: Session, family: range) -> None:
    backend = backend_for(session.device, "official")
    models = [
        CutModel.random(
            random_model(number),
            num_tokens(number, session.options.tokens, session.options.long_tokens),
            backend,
            session.device,
        )
        for number in family
    ]
    if session.is_cuda:
        began = time.monotonic()
        compile_models(models)
        print(f"[{session.elapsed:6.1f}] kernels of {len(models)} models: {time.monotonic() - began:.1f} s", flush=True)
    for number, model in zip(family, models, strict=True):
        session.add(compare(number, model))


def compare(number: int, model: CutModel) -> Record:
    cuts = random_cuts(len(model.token_ids), number)
    wrong = {name: len(model.differing_rows(cut)) for name, cut in cuts.items()}
    record = {
        "kind": "bits", "model": number, "shape": str(model.shape), "tokens": len(model.token_ids),
        "differing_rows": wrong, "wrong": sum(wrong.values()),
    }  # fmt: skip
    first = next((name for name, count in wrong.items() if count), None)
    return record if first is None else record | {"first": f"{first}: {model.first_difference(cuts[first])}"}


def line(record: Record) -> str:
    return f"model {record['model']}: {record['differing_rows']} of {record['tokens']} rows differ; " + (
        record.get("first") or record["shape"]
    )


def conclusions(records: list[Record]) -> list[str]:
    found = [record for record in records if record["kind"] == "bits"]
    return [f"{len(found)} models, {sum(record['wrong'] > 0 for record in found)} with rows that differ"]
