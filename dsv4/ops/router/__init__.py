"""Expert choice."""

from dsv4.ops.router.launch import activation_topk, launch_route, route
from dsv4.ops.router.op import activation_topk_ref, route_ref
from dsv4.ops.router.plan import GATE_CONFIGS, GateConfig

__all__ = [
    "GATE_CONFIGS", "GateConfig", "activation_topk", "activation_topk_ref", "launch_route", "route", "route_ref",
]
