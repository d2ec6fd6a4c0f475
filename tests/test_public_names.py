"""What a caller imports: exported names, and errors with one base class."""

import ast
import importlib
from pathlib import Path

import pytest

import dsv4
from dsv4 import errors

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "dsv4").rglob("*.py"))


def exception_classes(sources):
    """Names of the classes that are exceptions by their bases, and of those that do not derive from `Dsv4Error`."""
    bases = {}
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [ast.unparse(base).rpartition(".")[2] for base in node.bases]

    def leads_to(name, wanted):
        return wanted(name) or any(leads_to(base, wanted) for base in bases.get(name, ()) if base != name)

    def is_builtin(name):
        kind = getattr(__builtins__, name, None) if not isinstance(__builtins__, dict) else __builtins__.get(name)
        return isinstance(kind, type) and issubclass(kind, BaseException) and not issubclass(kind, Warning)

    found = {name for name in bases if leads_to(name, is_builtin)}
    return found, sorted(name for name in found if not leads_to(name, lambda base: base == "Dsv4Error"))


def test_every_error_of_the_package_has_the_base_class():
    found, others = exception_classes(file.read_text(encoding="utf-8") for file in FILES)
    assert {"ConfigError", "NoFreeSlot", "ClientGone", "RankFailed", "ApiError"} <= found
    assert others == []


def test_the_rule_finds_an_error_without_the_base_class():
    sources = ["class A(ValueError): ...", "class B(Dsv4Error, ValueError): ...", "class C(A): ...", "class D(B): ..."]
    assert exception_classes([*sources, "class W(UserWarning): ...", "class Plain: ..."])[1] == ["A", "C"]


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name != "Dsv4Error"])
def test_errors_that_callers_catch(name):
    kind = getattr(errors, name)
    assert kind.__name__ == name
    assert issubclass(kind, errors.Dsv4Error)
    assert kind.__module__ == errors.DEFINED_IN[name]


@pytest.mark.parametrize("name", [name for name in dsv4.__all__ if name != "__version__"])
def test_exported_names(name):
    assert getattr(dsv4, name) is getattr(importlib.import_module(dsv4.DEFINED_IN[name]), name)
    assert name in dir(dsv4)


@pytest.mark.parametrize("module", [dsv4, errors])
def test_an_unknown_name_is_named(module):
    with pytest.raises(AttributeError, match="has no attribute 'Llm'"):
        _ = module.Llm


def test_lists_of_names_agree():
    assert set(errors.__all__) == {*errors.DEFINED_IN, "Dsv4Error"}
    assert set(dsv4.__all__) == {*dsv4.DEFINED_IN, "__version__"}
    assert (ROOT / "dsv4" / "py.typed").exists()
