"""How an op is made from a launcher: its schema from the launcher's signature, its fake from a rule about shapes.

A parameter that a schema knows (tensor, number, dtype) keeps its name. A `Spelling` stands for any other: the fields of
the schema in its place, those that come after all others, and how they are read back. Results are spelled out by type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dsv4.formats.row_store import RowStore
from dsv4.formats.tensors import QuantActivation

SCHEMA_TYPES = {
    "Tensor": "Tensor", "Tensor | None": "Tensor?", "AnyWeight": "Tensor", "float": "float", "int": "SymInt",
    "bool": "bool", "torch.dtype | None": "ScalarType?",
}  # fmt: skip
NUM_TENSORS = {
    "None": 0, "Tensor": 1, "Tensor | None": 1, "QuantActivation": 2, "RowStore": 2, "ExpertOrder": 5, "HyperInput": 6,
}  # fmt: skip
Read = Callable[[SimpleNamespace], Any]


@dataclass(frozen=True)
class Spelling:
    """One argument of a launcher, spelled out for a schema.

    read   the op's arguments by name -> the launcher's argument
    here   the schema's fields in the place of the parameter; `!` after the type: written in place
    after  its fields after all others; those with a default come last
    """

    read: Read
    here: str = ""
    after: str = ""


def _fields(text: str) -> list[str]:
    return [field.strip() for field in text.split(",") if field.strip()]


def schema_of(launcher: Callable[..., Any], spellings: Mapping[str, Spelling]) -> str:
    """The schema without its name."""
    here: list[str] = []
    after: list[str] = []
    signature = inspect.signature(launcher)
    for name, parameter in signature.parameters.items():
        if name in spellings:
            here += _fields(spellings[name].here)
            after += _fields(spellings[name].after)
        else:
            has_default = parameter.default is not inspect.Parameter.empty
            here.append(f"{SCHEMA_TYPES[parameter.annotation]} {name}{f'={parameter.default}' if has_default else ''}")
    ordered = sorted(here + after, key=lambda field: "=" in field)
    fields = [field.replace("Tensor!", f"Tensor(a{place}!)") for place, field in enumerate(ordered)]
    return f"({', '.join(fields)}) -> {_results(signature.return_annotation)}"


def _results(annotation: str) -> str:
    if annotation == "tuple[Tensor, ...]":
        return "Tensor[]"
    parts = _fields(annotation.removeprefix("tuple[").removesuffix("]"))
    count = sum(NUM_TENSORS[part] for part in parts)
    return "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"


def spelled(result: Any, like: Tensor) -> tuple[Tensor, ...]:
    """A launcher's result as tensors; None is a tensor of no elements."""
    if result is None:
        return (like.new_empty(0),)
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, RowStore):
        assert result.scales is not None  # the kernels write quantised rows only
        return result.data, result.scales
    if isinstance(result, QuantActivation):
        return result.codes, result.scale
    parts = result if isinstance(result, tuple) else vars(result).values()
    return tuple(tensor for part in parts for tensor in spelled(part, like))


def define(
    launcher: Callable[..., Any],
    fake: Read,
    spellings: Mapping[str, Spelling] | None = None,
    results: Callable[[Any, SimpleNamespace], Any] | None = None,
) -> Any:
    """Register `launcher` as `dsv4::<its name>`.

    fake     the op's arguments -> empty results
    results  replaces `spelled` where a result shares memory with an argument or with another result
    """
    spellings = spellings or {}
    name, schema = launcher.__name__, schema_of(launcher, spellings)
    arguments = torch._C.parse_schema(name + schema).arguments
    is_nothing, is_one = schema.endswith("-> ()"), schema.endswith("-> Tensor")

    def named(*args: Any, **kwargs: Any) -> SimpleNamespace:
        """Defaults too: the dispatcher leaves trailing ones out."""
        given = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
        return SimpleNamespace(**{a.name: given.get(a.name, a.default_value) for a in arguments})

    def returned(tensors: Any) -> Any:
        if tensors is None or isinstance(tensors, Tensor):
            return tensors
        return tensors[0] if is_one else list(tensors) if schema.endswith("[]") else tuple(tensors)

    def run(*args: Any, **kwargs: Any) -> Any:
        op = named(*args, **kwargs)
        call = {
            parameter: spellings[parameter].read(op) if parameter in spellings else getattr(op, parameter)
            for parameter in inspect.signature(launcher).parameters
        }
        result = launcher(**call)
        if is_nothing:
            return None
        return returned(results(result, op) if results else spelled(result, next(iter(vars(op).values()))))

    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    made = torch.library.custom_op(f"dsv4::{name}", run, mutates_args=written, schema=schema)
    made.register_fake(lambda *args, **kwargs: returned(fake(named(*args, **kwargs))))
    return made
