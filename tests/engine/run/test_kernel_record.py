"""What the engine does with the verdict of a self-test: failed kernels are refused, missing ones served by oracles."""

import pytest
import torch

from dsv4.config import ModelConfig
from dsv4.engine.run import kernel_record
from dsv4.engine.run.kernel_record import KernelRefused, KernelVerdict, allowed_backend, read_verdict, verdict_file
from dsv4.ops import TORCH, TRITON

KEY = {"gpu": "NVIDIA Test 9000", "driver": "1.2", "kernels": "abc", "torch": "2", "triton": "3"}
CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_record, "kernel_key", lambda device: KEY)
    return tmp_path


def allowed(backend, device, *, is_ignored):
    return allowed_backend(backend, device, ModelConfig.tiny(), [], is_ignored=is_ignored)


def keep(failed=(), missing=(), key=KEY):
    return kernel_record.write_verdict(KernelVerdict(key, tuple(failed), tuple(missing)))


def test_without_a_verdict_the_kernels_are_used():
    assert read_verdict(KEY) is None
    assert allowed(TRITON, CUDA, is_ignored=False) is TRITON


def test_a_green_verdict_changes_nothing(home):
    file = keep()
    assert file is not None
    assert file.is_relative_to(home)
    assert file.name.startswith("nvidia-test-9000-")
    assert read_verdict(KEY) == KernelVerdict(KEY, (), ())
    assert allowed(TRITON, CUDA, is_ignored=False) is TRITON


def test_failed_kernels_are_refused_unless_ignored():
    keep(failed=("moe", "rope"))
    with pytest.raises(KernelRefused, match=r"NVIDIA Test 9000: moe, rope;.*--ignore-selftest"):
        allowed(TRITON, CUDA, is_ignored=False)
    assert allowed(TRITON, CUDA, is_ignored=True) is TRITON
    assert allowed(TORCH, CUDA, is_ignored=False) is TORCH, "oracles were not tested"
    assert allowed(TRITON, torch.device("cpu"), is_ignored=False) is TRITON


def test_oracles_serve_where_kernels_cannot_run_and_nothing_is_captured():
    keep(missing=("moe", "hc_pre"))
    backend = allowed(TRITON, CUDA, is_ignored=False)
    assert backend.ops.moe is TORCH.ops.moe
    assert backend.ops.rope is TRITON.ops.rope
    assert backend.layout is TRITON.layout
    assert not backend.can_capture(CUDA)


def test_what_is_missing_at_a_models_shapes_is_added_to_what_is_missing_everywhere():
    """Of one of the two files alone too."""
    own = kernel_record.model_key(CUDA, ModelConfig.tiny(), [])
    keep(missing=("moe",), key=own)
    backend = allowed(TRITON, CUDA, is_ignored=False)
    assert backend.ops.moe is TORCH.ops.moe
    keep(missing=("rope",))
    backend = allowed(TRITON, CUDA, is_ignored=False)
    assert (backend.ops.moe, backend.ops.rope) == (TORCH.ops.moe, TORCH.ops.rope)
    assert not backend.can_capture(CUDA)


@pytest.mark.parametrize("changed", [{"driver": "1.3"}, {"kernels": "abd"}, {"gpu": "NVIDIA Test 9001"}])
def test_another_driver_gpu_or_version_is_asked_anew(monkeypatch, changed):
    keep(failed=("moe",))
    monkeypatch.setattr(kernel_record, "kernel_key", lambda device: KEY | changed)
    assert allowed(TRITON, CUDA, is_ignored=False) is TRITON


@pytest.mark.parametrize("text", ["", "[]", "{", '{"key": {}}', '{"key": {}, "failed": ["moe"], "missing": []}'])
def test_a_damaged_verdict_is_none(text):
    keep(failed=("moe",))
    verdict_file(KEY).write_text(text)
    assert read_verdict(KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(home):
    (home / "dsv4").write_text("a file where the folder should be")
    assert keep() is None
