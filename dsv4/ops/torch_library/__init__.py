"""The kernels as `torch.ops.dsv4.*`: usable under `torch.compile` and from other engines. Importing this package
registers them.

    import dsv4.ops.torch_library
    torch.ops.dsv4.rms_norm(x, weight, 1e-6)

Names, argument order and meaning are those of the launchers in `dsv4.ops`. Schemas know tensors and numbers only, so
dataclasses are spelled out (a `QuantActivation` is codes and scale, a `TokenBatch` its tensors), and where a launcher
returns None the op returns a tensor of no elements. Results alias neither arguments nor each other. ops.py has the
table of ops, define.py makes an op from a launcher, weights.py spells out weights.

Not differentiable. `custom_op`, not `triton_op`: the latter cannot be compiled in Triton's interpreter.
"""

from dsv4.ops.torch_library.ops import OPS

__all__ = ["OPS"]
