"""Memory that stands for a GPU's: what one process would export and another open, here in one."""

from __future__ import annotations

import torch

from dsv4.engine.weights import cuda_ipc
from dsv4.engine.weights.cuda_ipc import Allocation, SharingFailed

DEVICE = "GPU-0"


class FakeDriver:
    """Each storage is an allocation. `num_open` of those that were opened and not closed."""

    def __init__(self, monkeypatch):
        self.storages, self.num_open, self.is_dead = {}, 0, False
        monkeypatch.setattr(cuda_ipc, "allocation_of", self.allocation_of)
        monkeypatch.setattr(cuda_ipc, "wait_for", lambda device: None)
        monkeypatch.setattr(cuda_ipc, "OpenMemory", lambda handle, device: _Open(self, handle, device))

    def allocation_of(self, tensor):
        storage = tensor.untyped_storage()
        handle = storage.data_ptr().to_bytes(8, "little").ljust(64, b"\0")
        self.storages[handle] = storage
        return Allocation(storage.data_ptr(), storage.nbytes(), handle, DEVICE)

    def trainers(self, tensors):
        """Copies of tensors, in one allocation, and at places that are no multiple of anything but their itemsize."""
        size = sum(one.numel() * one.element_size() + 24 for one in tensors.values())
        memory, at, found = torch.full((size,), 0xFF, dtype=torch.uint8), 8, {}
        for name, one in tensors.items():
            num_bytes, itemsize = one.numel() * one.element_size(), one.element_size()
            at = -(-at // itemsize) * itemsize + itemsize
            found[name] = memory[at : at + num_bytes].view(one.dtype).view(one.shape)
            found[name].copy_(one)
            at += num_bytes
        return found, memory


class _Open:
    def __init__(self, driver, handle, device):
        if driver.is_dead or device != DEVICE or handle not in driver.storages:
            raise SharingFailed("cuIpcOpenMemHandle_v2: invalid argument (1)")
        self._driver = driver
        self.data = torch.empty(0, dtype=torch.uint8).set_(driver.storages[handle])
        driver.num_open += 1

    def close(self):
        self._driver.num_open -= 1
