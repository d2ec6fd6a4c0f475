"""Inputs that look for trouble: NaN wherever nothing may read, odd strides, odd sizes, wild magnitudes.

`kernel_device()` is where kernels run: the GPU, or the CPU through Triton's interpreter. The same tests serve both.
"""

import torch
from torch import Tensor


def kernel_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def elementwise_block() -> int:
    """Values per program in elementwise test kernels: many in the interpreter, where a program costs the same at any
    size.
    """
    return 1024 if torch.cuda.is_available() else 1 << 16


def whole_blocks(x: Tensor) -> Tensor:
    """x [N] with zeros behind it, up to a multiple of `elementwise_block()`."""
    width = x.element_size()
    padding = -x.numel() % elementwise_block()
    return torch.nn.functional.pad(x.contiguous().view(torch.uint8), (0, padding * width)).view(x.dtype)


def generator(seed: int) -> torch.Generator:
    """Draws on the CPU, so that a GPU run sees the same numbers."""
    return torch.Generator().manual_seed(seed)


def normal(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Standard normal values on the kernel device."""
    return torch.randn(shape, generator=generator(seed)).to(dtype).to(kernel_device())


def wild(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Rows of very different magnitude (2^-20 .. 2^10), single outliers a thousand times their row, both zeros, a
    zero row.

    Finite, and its squares are finite in fp32.
    """
    source = generator(seed)
    values = torch.randn(shape, generator=source)
    rows = values.view(-1, shape[-1])
    rows *= torch.exp2(torch.randint(-20, 11, (rows.shape[0], 1), generator=source).float())
    rows[torch.rand(rows.shape, generator=source) < 0.002] *= 1000.0
    rows[torch.rand(rows.shape, generator=source) < 0.01] = 0.0
    rows[torch.rand(rows.shape, generator=source) < 0.01] = -0.0
    if rows.shape[0] > 2:
        rows[1] = 0.0
    return values.clamp(-60000, 60000).to(dtype).to(kernel_device())


def poison(x: Tensor) -> Tensor:
    """Fill in place with what must never be read: NaN, or all bits set in an integer."""
    if x.dtype.is_floating_point and x.element_size() > 1:
        return x.fill_(float("nan"))
    x.view(torch.uint8).fill_(0xFF)
    return x


def strided(x: Tensor, dim: int = -2) -> Tensor:
    """The same values as a view with gaps of NaN: along `dim` every second slice of a larger tensor is real."""
    dim, shape = dim % x.dim(), list(x.shape)
    shape[dim] = 1 + 2 * shape[dim]
    storage = poison(torch.empty(shape, dtype=x.dtype, device=x.device))
    view = storage.narrow(dim, 1, 2 * x.shape[dim]).unflatten(dim, (x.shape[dim], 2)).select(dim + 1, 0)
    view.copy_(x)
    return view


def transposed(x: Tensor) -> Tensor:
    """The same values with the last two dimensions swapped in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def padded_rows(x: Tensor, num_padding: int) -> Tensor:
    """x with `num_padding` rows of NaN behind it (first dimension): what a padded batch may hold."""
    padding = poison(torch.empty((num_padding, *x.shape[1:]), dtype=x.dtype, device=x.device))
    return torch.cat((x, padding))


def around(tile: int) -> tuple[int, ...]:
    """Sizes one off a tile, and one."""
    return tuple(sorted({1, max(tile - 1, 1), tile, tile + 1}))
