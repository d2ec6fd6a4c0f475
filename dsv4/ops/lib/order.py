"""Orders of columns in which two tensor-core instructions sum alike."""

from __future__ import annotations

from dsv4.ops.lib.guard import jit, tl


@jit
def in_product_order(x):
    """[R, C] -> the same columns, of which 16 neighbours are what mma.sync takes at once from an operand after a join:
    of a column's number inside 32, bit 1 moves to the top.

    The compiler gives a thread four neighbours of such an operand where it gives two of others, and an MMA then takes
    of 32 columns first those with bit 1 clear, then those with it set. The order inside the 16 does not matter to a
    sum: products without a join, or of wgmma, over columns in this order give the same bits.
    """
    split = tl.reshape(x, [x.shape[0], x.shape[1] // 32, 2, 4, 2, 2])
    return tl.reshape(tl.permute(split, [0, 1, 4, 2, 3, 5]), [x.shape[0], x.shape[1]])
