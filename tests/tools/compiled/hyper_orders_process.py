"""What test_sum_orders.py needs a process for in which kernels are compiled, not interpreted: the orders of the
hyper-connections' sums at some widths, for one token and for 24, with the tile they have and with the one they had.

    python hyper_orders_process.py        prints one JSON line
"""

import json
from collections import defaultdict

import torch

from dsv4.ops.hyper import launch
from dsv4.ops.lib.launch import next_power_of_2
from dsv4.testing.cases.hyper import SETTINGS, make_inputs
from tools.compiled.compile_check import offline
from tools.compiled.form_orders import only_layouts
from tools.compiled.sum_orders import orders_of


def orders(width, num_tokens):
    x = make_inputs(num_tokens, width, torch.device("meta"))
    with offline(90) as kernels:
        launch.hc_enter(x.streams, *x.mixing, x.norm, SETTINGS, False)
    found = defaultdict(set)
    for order in orders_of(kernels[0].asm["ttgir"]):
        if order.kind != "product":
            found[order.where].add(order.order)
    return {where: sorted(those) for where, those in found.items()}


def main():
    padded, found = launch.padded_splits, {}
    with only_layouts():
        for name, width in (("256", 256), ("384", 384), ("384 unpadded", 384)):
            launch.padded_splits = next_power_of_2 if "unpadded" in name else padded
            found[name] = [orders(width, num_tokens) for num_tokens in (1, 24)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
