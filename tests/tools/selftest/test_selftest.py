"""The self-test: green on sound kernels, red on planted mistakes, and it names the op that is to blame."""

import json
import sys
from dataclasses import fields, replace

import pytest
import torch

from dsv4.cli.main import main
from dsv4.ops import TORCH, TRITON, OpSet
from dsv4.testing import mistakes
from dsv4.testing.bench import case_modules, load_small_cases
from dsv4.testing.inputs import kernel_device
from dsv4.testing.op_call import ROWS, WRITTEN, implementations
from dsv4.tools.selftest import model as selftest_model
from dsv4.tools.selftest import ops as selftest_ops
from dsv4.tools.selftest.report import Status
from dsv4.tools.selftest.run import SelftestError, SelftestOptions, run_selftest

CHEAP = ("rms_norm", "rms_norm_quant", "append_swa", "accept", "resolve_tokens", "tap_streams", "confidence")
DEVICE = kernel_device()


def run(*ops, **exchanged):
    return run_selftest(DEVICE, SelftestOptions(is_quick=True, ops=ops, backend=TRITON.with_ops(**exchanged)))


def failed(report):
    """(part, op) of everything red."""
    return {(check.part, check.op) for check in report.failures}


def test_every_op_has_a_small_case():
    calls = [case.build(torch.device("meta")).op_call for case in load_small_cases(case_modules())]
    assert all(call is not None for call in calls)
    assert {field.name for field in fields(OpSet)} <= {call.op for call in calls}
    # a sort of (token, choice) pairs has no rows of its own; moe shows it
    assert set(ROWS) == set(implementations()) - {"expert_sort"}
    for call in calls:
        assert set(ROWS[call.op]) & set(call.arguments), call.op
        assert set(WRITTEN.get(call.op, ())) <= set(call.arguments)


def test_sound_kernels_are_green():
    report = run(*CHEAP)
    assert report.is_passed
    assert {check.op for check in report.checks} == set(CHEAP)
    assert {check.part for check in report.checks} == {"oracle", "batch"}
    assert report.is_interpreted == (DEVICE.type == "cpu")
    written = json.loads(json.dumps(report.to_dict()))
    assert written["passed"]
    assert written["failed_ops"] == []


# ---- planted mistakes ----


def rolled(x, weight, eps):
    """Rows in another order."""
    return TRITON.ops.rms_norm(x, weight, eps).roll(1, 0)


def nudged(x, weight, eps):
    """A last bit that depends on the batch. It is nearer to the oracle than the oracle's own rounding: only rows alone
    can show it."""
    out = TRITON.ops.rms_norm(x, weight, eps)
    if x.shape[0] > 2:
        out.view(torch.int16)[0, 0] += 1
    return out


def astray(rows, window, batch):
    """A row written to another slot."""
    return TRITON.ops.append_swa(rows, window, replace(batch, slots=batch.slots.roll(1)))


def poisoned(hidden, embedded, weight):
    """A result that is no number."""
    out = TRITON.ops.confidence(hidden, embedded, weight)
    return out.masked_fill(torch.arange(len(out), device=out.device) == 1, float("nan"))


@pytest.mark.parametrize(
    ("op", "mistake", "part"),
    [
        ("rms_norm", rolled, "oracle"), ("rms_norm_quant", mistakes.wrong_scale(TRITON.ops), "oracle"),
        ("append_swa", astray, "oracle"),
        ("confidence", poisoned, "oracle"), ("rms_norm", nudged, "batch"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_red(op, mistake, part):
    report = run(op, "accept", **{op: mistake})
    assert (part, op) in failed(report)
    assert part == "oracle" or failed(report) == {(part, op)}
    assert report.ops_with(Status.FAILED) == [op]


def test_a_kernel_that_raises_is_red_and_the_others_go_on():
    def broken(token_ids, slots, last_tokens):
        raise RuntimeError("no such instruction")

    report = run("resolve_tokens", "accept", resolve_tokens=broken)
    assert failed(report) == {("oracle", "resolve_tokens")}
    assert "no such instruction" in report.failures[0].detail
    assert {check.op for check in report.checks if check.status is Status.OK} == {"accept"}


def test_a_kernel_that_does_not_compile_cannot_run():
    class PTXASError(Exception):
        """As Triton names it."""

    def missing(token_ids, slots, last_tokens):
        raise PTXASError("feature requires .target sm_90 or higher")

    report = run("resolve_tokens", resolve_tokens=missing)
    assert report.is_passed
    assert report.ops_with(Status.CANNOT_RUN) == ["resolve_tokens"]


def test_a_lost_device_ends_it():
    def lost(token_ids, slots, last_tokens):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    report = run("accept", "resolve_tokens", resolve_tokens=lost)
    assert [check.detail for check in report.failures][-1] == "the device is lost"
    assert report.ops_with(Status.FAILED) == ["resolve_tokens"]


def test_vectors_are_red_with_a_wrong_scale():
    def doubled(x, weight, out_dtype=None):
        return TORCH.ops.linear(x, weight, out_dtype) * 1.02

    def statuses(backend):
        return {check.status for check in selftest_model.check_vectors(torch.device("cpu"), backend)}

    assert statuses(TORCH) == {Status.OK}
    assert statuses(TORCH.with_ops(linear=doubled)) == {Status.FAILED}


@pytest.mark.slow
def test_the_miniature_is_green_and_shows_what_depends_on_the_batch():
    def nudged(x, weight, eps):
        out = TORCH.ops.rms_norm(x, weight, eps)
        return out if x.shape[0] == 1 else torch.nextafter(out.float(), out.float() + 1).to(out.dtype) * 1.01

    cpu = torch.device("cpu")
    assert {check.status for check in selftest_model.check_model(cpu, None)} == {Status.OK}
    found = {check.name: check.status for check in selftest_model.check_model(cpu, TORCH.with_ops(rms_norm=nudged))}
    assert found["chunks against one go"] is Status.FAILED


# ---- the command ----


def command(monkeypatch, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["selftest", *arguments])
    return end.value.code


def test_the_command_ends_with_0_and_a_table(monkeypatch, capsys):
    assert command(monkeypatch, "--op", "accept", "--op", "resolve_tokens") == 0
    printed = capsys.readouterr().out
    assert "everything is right" in printed
    assert "resolve_tokens" in printed


def test_the_command_ends_with_1_and_the_op_s_name(monkeypatch, capsys):
    def rolled(call, backend):
        found = selftest_ops.compare_with_oracle(call, backend)
        return [replace(measure, value=1.0) for measure in found]

    monkeypatch.setitem(selftest_ops.PARTS, "oracle", rolled)
    assert command(monkeypatch, "--op", "accept", "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["failed_ops"] == ["accept"]
    assert not printed["passed"]


def test_the_command_ends_with_2_where_it_cannot_run(monkeypatch, capsys):
    assert command(monkeypatch, "--op", "multiply") == 2
    assert "no op is called multiply" in capsys.readouterr().err
    monkeypatch.setattr("dsv4.tools.selftest.run.HAS_TRITON", False)
    with pytest.raises(SelftestError, match="Triton is not installed"):
        run("accept")


def test_it_needs_no_server_library_and_no_tests():
    """On a GPU machine neither starlette nor pytest need be installed."""
    import subprocess

    code = (
        "import sys; sys.modules['starlette'] = sys.modules['pytest'] = None\n"
        "from dsv4.cli.main import main\n"
        "main(['selftest', '--op', 'accept', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["passed"]
