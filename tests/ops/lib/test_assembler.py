"""Which assembler Triton uses, as the environment and the architecture choose it."""

import pytest

from dsv4.ops.lib.assembler import assembler_of, ptxas_version
from dsv4.ops.lib.guard import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")


@pytest.fixture
def said(tmp_path, monkeypatch):
    """Makes a ptxas that says this, for every architecture."""

    def make(text):
        file = tmp_path / "ptxas"
        file.write_text(f"#!/bin/sh\necho '{text}'\n")
        file.chmod(0o755)
        for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
            monkeypatch.setenv(name, str(file))

    ptxas_version.cache_clear()
    yield make
    ptxas_version.cache_clear()


def test_the_one_that_triton_brings():
    assert assembler_of((9, 0)) == f"ptxas {ptxas_version(90)}"
    assert len(ptxas_version(90).split(".")) == 3


def test_another_one_by_the_environment(said):
    said("Cuda compilation tools, release 13.9, V13.9.42")
    assert assembler_of((9, 0)) == assembler_of((10, 0)) == "ptxas 13.9.42"


def test_what_says_nothing_is_an_error(said):
    said("release 13.9")
    with pytest.raises(ValueError, match=r"expected a version such as V12\.8\.93"):
        ptxas_version(90)
