"""Sparse attention, and the launch that makes everything it reads."""

from dsv4.ops.attention.inputs import attention_inputs, attention_inputs_ref
from dsv4.ops.attention.launch import launch_attention, sparse_attention
from dsv4.ops.attention.op import attend_ref, sparse_attention_ref
from dsv4.ops.attention.plan import PAIRS_PLAN, PLAN, AttentionPlan, pick_plan

__all__ = [
    "PAIRS_PLAN", "PLAN", "AttentionPlan", "attend_ref", "attention_inputs", "attention_inputs_ref",
    "launch_attention", "pick_plan",
    "sparse_attention", "sparse_attention_ref",
]
