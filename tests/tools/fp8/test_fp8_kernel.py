"""The prototype of MXFP4 experts on FP8 tensor cores: it still compiles, and it decodes every nibble exactly."""

from __future__ import annotations

import re

import pytest
import torch

from tools.compiled.compile_check import CompileFailure, reports
from tools.fp8.chains import DECODE, byte_tables
from tools.fp8.experts import Fp8Matrix

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EXPONENTS = range(12)
FULL = 2**32 - 1


@pytest.mark.slow
def test_compiles_without_spills_in_its_loops():
    """Gate and up: down has the same loops."""
    names = {"fp8_experts/gate_up-4096": 32, "fp8_few/gate_up-16": 0, "fp8_few/gate_up-1": 0}  # bytes, between tiles
    found = reports(90, ["tools.fp8.experts"], only=names)
    assert not [report.error for report in found if isinstance(report, CompileFailure)]
    found = [report for report in found if report.kernel.startswith("fp8")]  # others sort
    assert {report.case for report in found} >= names.keys()
    for report in found:
        assert report.uses_wgmma
        assert report.loop_spills == 0
        assert report.spill_bytes <= names.get(report.case, 0)


def permuted(a, b, selector):
    """prmt: bytes of b and a, by the low four nibbles of a selector; with bit 3 the byte's sign eight times."""
    both = (b << 32 | a).to_bytes(8, "little")
    nibbles = [selector >> (4 * i) & 15 for i in range(4)]
    data = [both[nibble & 7] if nibble < 8 else (both[nibble & 7] >> 7) * 255 for nibble in nibbles]
    return int.from_bytes(bytes(data), "little")


PTX = {
    "and.b32": lambda a, b: a & b,
    "prmt.b32": permuted,
    "lop3.b32": lambda a, b, c, table: a & b | c if table == 0xEA else None,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b & FULL,
}


def decoded(word, exponent):
    """The eight bytes of a word, by the kernel's own instructions and tables, as numbers."""
    low, high = byte_tables.fn(8 * exponent)
    registers = {"$2": word & FULL, "$3": low, "$4": high}
    text = getattr(DECODE, "value", DECODE).strip("{} ")
    for line in filter(None, map(str.strip, text.split(";"))):
        operation, *operands = re.split(r"[ ,]+", line)
        if operation != ".reg":
            target, *sources = operands
            values = [registers[name] if name in registers else int(name, 0) for name in sources]
            registers[target] = PTX[operation](*values)
    data = [byte for name in ("$0", "$1") for byte in registers[name].to_bytes(4, "little")]
    return torch.tensor(data, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()


def word_of(codes):
    """Eight E2M1 codes in the kernel's order."""
    signs = (code >> 3 << (8 * i + 7 if i < 4 else 8 * i - 29) for i, code in enumerate(codes))
    return sum((code & 7) << 4 * i for i, code in enumerate(codes)) | sum(signs)


def test_every_code_at_every_place_with_every_scale():
    for exponent in EXPONENTS:
        for first in range(16):
            codes = [(first + 5 * place) % 16 for place in range(8)]
            wanted = [E2M1[code & 7] * (-1) ** (code >> 3) * 2.0 ** (exponent - 5) for code in codes]
            assert decoded(word_of(codes), exponent) == wanted, (codes, exponent)


def test_the_model_knows_the_order_of_words():
    torch.manual_seed(0)
    matrix = Fp8Matrix(1, 64, 128, torch.device("cpu"))
    found = matrix.bytes_of(0, 0, 64).view(64, 4, 2, 4, 4)  # row, q, half, t, i
    for row in (0, 1, 63):
        exponents = matrix.scale[0, 0, 0, row : row + 1].view(torch.uint8)
        for t in range(4):
            for q in range(4):
                numbers = decoded(int(matrix.data[0, 0, 0, row, 4 * t + q]), int(exponents[t]) // 8)
                assert found[row, q, :, t].flatten().tolist() == numbers
