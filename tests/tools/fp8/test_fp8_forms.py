"""Both forms of MXFP4 experts on FP8 tensor cores, compiled for a Hopper and run on a CPU, against the model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("emulated_forms.py")


def emulated(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parents[3])
    run = subprocess.run([sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("tokens", ["6", pytest.param("1 2 16 17 64", marks=pytest.mark.slow)])
def test_both_forms_have_the_bits_of_the_model(tokens):
    for found in emulated(*tokens.split()).values():
        for form in ("few", "many"):
            hidden, parts = found[f"{form}, hidden"], found[f"{form}, parts"]
            assert hidden["hidden"][0] == hidden["scales"][0] == parts["parts"][0] == 0, (form, found)
            assert hidden["hidden"][1] == 128 * hidden["scales"][1] > 0
            assert parts["parts"][1] == 256 * hidden["scales"][1]
        assert found["equal"], "the forms' bits"
        assert sum(found["pairs of experts"]) == hidden["scales"][1], "all pairs were compared"


def test_every_planted_mistake_is_seen():
    found = emulated("planted")["planted"]
    assert found.pop("unchanged") == found.pop("large") == [0, 768]
    assert found.pop("no_wait_for_stages").startswith("all warps wait")
    assert sorted(found) == ["first_step_last", "no_promotion", "no_wait_for_products", "second_product_first"]
    for name, (num_wrong, _) in found.items():
        assert num_wrong > 0, name
