"""Experts that live in host memory.

`placement.py`: how many slots a layer has on the device, and whose; no torch, so that a plan is instant. `pool.py`: the
slots, the copies, the `moe` over them. `load.py`: from a checkpoint into a pool. `trees.py`: weights of any format as
trees of tensors. Import from these: this file imports none of them.
"""
