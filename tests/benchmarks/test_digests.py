"""Digests of what cases compute: the same twice, another for another bit, and a comparison that names the case."""

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks.kernels import digests
from benchmarks.kernels.digests import digest, digest_of_case
from dsv4.ops import TRITON
from dsv4.testing.cases import indexer
from dsv4.testing.inputs import kernel_device


def write(path, *options):
    device = ("--device", kernel_device().type)
    return entry.main(
        ["ops", "--digests", "--op", "rms_norm", "--op", "tap_streams", *device, "--out", str(path), *options]
    )


def test_every_bit_and_its_place_count():
    values = torch.randn(5, 7)
    others = (values.to(torch.bfloat16), values.view(7, 5), values.view(torch.int32))
    known = {digest(one) for one in (values, *others)}
    for place in range(values.numel()):
        other = values.clone()
        other.view(torch.int32).view(-1)[place] ^= 1
        known.add(digest(other))
    known |= {digest(values.flip(0)), digest(values.roll(1, 1)), digest((values, values)), digest(values[:0])}
    assert len(known) == 43
    assert digest(values.T.contiguous().T) == digest(values) == digest({"a": [values]})
    nan = torch.full((2,), float("nan"))
    assert digest(nan) == digest(-nan)


def test_a_part_at_a_time_is_all_at_once(monkeypatch):
    values = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    whole = digest(values)
    monkeypatch.setattr(digests, "_PART", 64)
    assert digest(values) == whole


def test_a_changed_bit_is_shown_with_its_case(tmp_path, capsys, monkeypatch):
    assert write(tmp_path / "old.jsonl") == 0
    assert write(tmp_path / "same.jsonl") == 0

    def nudged(x, weight, eps):
        out = TRITON.ops.rms_norm(x, weight, eps)
        out.view(torch.int16)[-1, -1] += 1
        return out

    with monkeypatch.context() as patch:
        patch.setattr(digests, "TRITON", TRITON.with_ops(rms_norm=nudged))
        assert write(tmp_path / "new.jsonl") == 0
    capsys.readouterr()
    assert entry.main(["ops", "--compare", str(tmp_path / "old.jsonl"), str(tmp_path / "same.jsonl")]) == 0
    assert capsys.readouterr().out.endswith("0 cases timed, 0 slower; 3 with digests, 0 with other bits\n")
    assert entry.main(["ops", "--compare", str(tmp_path / "old.jsonl"), str(tmp_path / "new.jsonl")]) == 1
    lines = capsys.readouterr().out.splitlines()
    changed = [line.split()[0] for line in lines if line.endswith("BITS CHANGED")]
    assert {name.split("/")[0] for name in changed} == {"rms_norm"}
    assert lines[-1] == f"0 cases timed, 0 slower; 3 with digests, {len(changed)} with other bits"


def test_what_a_call_leaves_unwritten_is_not_digested(monkeypatch):
    """Scores of entries that a token does not see, and of tokens that see no more than are picked."""
    case = indexer._case(2, 5, 300, "fp4", False, heads=4, top_k=74)  # of five tokens the last sees 75 entries
    empty, found = torch.empty, set()
    for value in (1, 2):
        monkeypatch.setattr(torch, "empty", lambda *a, value=value, **options: empty(*a, **options).fill_(value))
        found.add(digest_of_case(case, kernel_device()))
    assert len(found) == 1


@pytest.mark.skipif(kernel_device().type != "cpu", reason="the oracles' digests are of the CPU")
def test_oracles_have_digests_of_their_own(tmp_path, capsys):
    assert write(tmp_path / "kernels.jsonl") == 0
    assert write(tmp_path / "oracles.jsonl", "--oracle") == 0
    assert entry.main(["ops", "--compare", str(tmp_path / "kernels.jsonl"), str(tmp_path / "oracles.jsonl")]) == 2
    assert "expected records of one chip, found 'CPU interpreter' and 'CPU oracles'" in capsys.readouterr().err
