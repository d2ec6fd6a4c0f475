"""Reading this machine: its driver's library, compiled here; and a model that is loaded as planned."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from rich.console import Console

from dsv4.cli.main import main
from dsv4.cli.serve import command as command_module
from dsv4.config import EngineConfig, ModelConfig
from dsv4.formats.trees import storages_of
from dsv4.http.processes.supervisor import Supervisor
from dsv4.llm import LLM
from dsv4.loader.files import find_tensors
from dsv4.loader.write.synth import write_checkpoint
from dsv4.tools import model_loading
from dsv4.tools.auto import machine as machine_module
from dsv4.tools.auto import nvml
from dsv4.tools.auto.choose import choose
from dsv4.tools.auto.machine import Accelerator, Machine, read_machine
from dsv4.tools.auto.settings import Wishes
from dsv4.tools.plan.budget import WeightBytes

GIB = 2**30
# two GPUs, the first of them used; `FAILS` is the status of the start
DRIVER = r"""
#include <stdio.h>
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory;
int nvmlInit_v2(void) { return FAILS; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "?"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned idx, void **handle) { *handle = (void *)(size_t)(idx + 1); return 0; }
int nvmlDeviceGetUUID(void *handle, char *text, unsigned length) {
  snprintf(text, length, "GPU-%zu-abc", (size_t)handle); return 0; }
int nvmlDeviceGetName(void *handle, char *text, unsigned length) { strncpy(text, "NVIDIA H200", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *handle, memory *found) {
  found->total = 140ull << 30; found->free = ((size_t)handle == 1 ? 20ull : 139ull) << 30; return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  *handle = (void *)(size_t)(uuid[4] - '0'); return uuid[3] == '-' ? 0 : 2; }
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
  *mhz = (type == 1 ? 1700 : 3000) + (size_t)handle; return 0; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { *milliwatts = 612500; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) { *major = 9; *minor = 0; return 0; }
"""
FIRST = Accelerator("NVIDIA H200", 140 * GIB, 20 * GIB, 90, "GPU-1-abc")
SECOND = Accelerator("NVIDIA H200", 140 * GIB, 139 * GIB, 90, "GPU-2-abc")


def compiled(folder, monkeypatch, fails=0):
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    source, library = folder / "driver.c", folder / f"driver{fails}.so"
    source.write_text(DRIVER, encoding="utf-8")
    subprocess.run([compiler, "-shared", "-fPIC", f"-DFAILS={fails}", "-o", library, source], check=True)
    monkeypatch.setattr(nvml, "LIBRARY", str(library))


def test_what_the_driver_says(tmp_path, monkeypatch):
    compiled(tmp_path, monkeypatch)
    assert nvml.read_gpus({}) == (FIRST, SECOND)
    assert nvml.read_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == (SECOND,)
    assert nvml.read_gpus({"CUDA_VISIBLE_DEVICES": "GPU-2"}) == (SECOND,)
    assert nvml.read_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert nvml.LoadMeter("GPU-2-abc").read() == {"sm_mhz": 1702, "memory_mhz": 3002, "watts": 612.5}
    with pytest.raises(nvml.NoDriver, match="could not open 2"):
        nvml.LoadMeter("2")
    compiled(tmp_path, monkeypatch, fails=18)
    with pytest.raises(nvml.NoDriver, match="could not start: Driver/library version mismatch"):
        nvml.read_gpus({})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, [0, 1, 2]), ("2,0", [2, 0]), ("0,7,1", [0]), ("-1", []), ("", []), ("0,0", []), ("1, 2", [1, 2]),
        ("GPU-b", [1]), ("GPU-", []), ("MIG-x", []), ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_which_gpus_cuda_shows(text, found):
    assert nvml.visible(text, ["GPU-a", "GPU-b", "GPU-c"]) == found


def test_this_machine_and_why_it_has_no_gpu(tmp_path, monkeypatch):
    driver = tmp_path / "nvidiactl"
    monkeypatch.setattr(machine_module, "DRIVER_FILE", driver)
    monkeypatch.setattr(machine_module.importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert read_machine().why_no_gpu == "this machine has no NVIDIA GPU"
    assert read_machine().host_bytes > 0
    driver.touch()
    assert read_machine().why_no_gpu == "torch 2.13.0+cpu is built without CUDA"
    monkeypatch.setattr(machine_module.importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(machine_module.importlib.util, "find_spec", lambda name: None)
    assert "Triton is not installed" in read_machine().why_no_gpu
    monkeypatch.setattr(machine_module.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(nvml, "LIBRARY", "libnothing-of-the-kind.so.1")
    assert read_machine().why_no_gpu == "libnothing-of-the-kind.so.1 of NVIDIA's driver is not installed"
    compiled(tmp_path, monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    assert read_machine().gpus == (FIRST, SECOND)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "cuda:N is the driver's N-th"
    idle = read_machine().as_if_idle()
    assert (idle.gpus[0].free_bytes, idle.host_bytes) == (140 * GIB, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    found = read_machine()
    assert (found.gpus, found.why_no_gpu) == ((), "CUDA_VISIBLE_DEVICES=7 hides every GPU")


def test_reading_the_machine_loads_no_torch():
    program = (
        "import sys; from dsv4.tools.auto.choose import choose; from dsv4.tools.auto.machine import read_machine\n"
        "from dsv4.tools.auto import nvml; read_machine(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("auto") / "tiny", ModelConfig.tiny(), seed=1)


def test_what_is_loaded_is_what_was_planned(folder):
    """For a GPU with room for little more than the model: weights and cache, to the byte of their tensors' sum."""
    config = ModelConfig.tiny()
    sizes = WeightBytes.of(find_tensors(folder).values(), config)
    gpu = Accelerator("small", 2750 * 2**20, 2750 * 2**20)
    found = choose(config, sizes, Wishes(chunk=256, requests=4), Machine((gpu,)))
    assert found.planned["total"] <= 0.92 * gpu.total_bytes < found.planned["total"] + 2**20
    llm = LLM(folder, engine=found.limits, drafts=found.drafts)
    cache = sum(pool.nbytes for pool in llm.cache._pools()) + llm.cache.schema.table_bytes
    held = sum(one.nbytes() for one in storages_of(llm.model.weights))
    assert abs(cache - found.planned["cache"]) <= 0.01 * found.planned["cache"]
    assert abs(held - found.planned["weights"]) <= 0.01 * found.planned["weights"]


def test_what_dsv4_serve_says_on_such_machines(tmp_path, monkeypatch, capfd):
    """The command itself, up to its processes: a busy GPU, one that is missing, none at all."""
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "DSV4_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Supervisor, "run", lambda self: 0)
    monkeypatch.setattr(command_module.logging.config, "dictConfig", lambda settings: None)

    def serve(*options):
        with pytest.raises(SystemExit) as ended:
            main(["serve", "flash-mini", "--port", "0", *options])
        return ended.value.code, capfd.readouterr().err

    monkeypatch.setattr(machine_module, "DRIVER_FILE", tmp_path / "no-driver")
    code, said = serve("--device", "cuda")
    assert (code, said) == (
        2, "dsv4: error: --device cuda: this machine has no NVIDIA GPU; leave --device out to use the CPU\n"
    )  # fmt: skip
    code, said = serve()
    assert code == 0
    assert re.search(r"^device +cpu .* this machine has no NVIDIA GPU$", said, re.MULTILINE)

    monkeypatch.setattr(machine_module, "DRIVER_FILE", tmp_path)
    monkeypatch.setattr(machine_module.importlib.metadata, "version", lambda name: "2.13.0+cu130")
    monkeypatch.setattr(machine_module.importlib.util, "find_spec", lambda name: object())
    compiled(tmp_path, monkeypatch)
    code, said = serve()
    assert code == 0
    assert re.search(r"^device +cuda:1: 1 x NVIDIA H200, 140.0 GiB +--device, --gpus ", said, re.MULTILINE)
    assert re.search(r"^busy +GPU 0: 20.0 GiB of 140.0 GiB are free +CUDA_VISIBLE_DEVICES ", said, re.MULTILINE)
    code, said = serve("--gpus", "3")
    assert (code, said) == (2, "dsv4: error: --gpus 3: this machine shows 2\n")
    code, said = serve("--requests", "100000000")
    assert code == 2
    assert re.search(r"but the GPU has 128.8 GiB free \(--memory 0.92\). What fits: --requests \d+; or ", said)


def test_other_commands_go_where_a_server_would(folder, monkeypatch, capsys):
    """Their limits are their own: a chat does not fill a GPU."""
    second = Accelerator("NVIDIA H200", 140 * GIB, 139 * GIB, 90, "GPU-2-abc")
    monkeypatch.setattr(model_loading, "read_machine", lambda: Machine((FIRST, second), host_bytes=GIB))
    limits = EngineConfig(max_context_tokens=1024, max_concurrent_requests=1)
    console = Console(stderr=True, soft_wrap=True)
    found = model_loading.place_model(model_loading.ModelSettings(folder=str(folder), limits=limits), console)
    assert (found.device, found.gpus, found.offload_experts) == ("cuda:1", 1, None)
    said = capsys.readouterr().err
    assert "note: device: cuda:1: 1 x NVIDIA H200, 140.0 GiB" in said
    assert "note: busy: GPU 0: 20.0 GiB of 140.0 GiB are free" in said
    on_cpu = model_loading.ModelSettings(folder=str(folder), limits=limits, device="cpu")
    found = model_loading.place_model(on_cpu, console)
    assert (found.device, capsys.readouterr().err) == ("cpu", "")
