"""Expert choice."""

from dsv4.ops.router.config import GATE_CONFIGS, GateConfig
from dsv4.ops.router.launch import activation_topk, launch_route, route
from dsv4.ops.router.op import activation_topk_ref, route_ref

__all__ = [
    "GATE_CONFIGS", "GateConfig", "activation_topk", "activation_topk_ref", "launch_route", "route", "route_ref",
]  # fmt: skip
