"""Which models the kernels take: what a launcher would refuse at the first call, said by name before anything is loaded
to a GPU. Widths of quantised layers are checked for both backends elsewhere (`check_widths`)."""

from __future__ import annotations

from dsv4.config import CSA_RATIO, ModelConfig
from dsv4.formats.rows import ENTRY_GROUP
from dsv4.ops.hyper.kernel_streams import NUM_STREAMS
from dsv4.ops.lib.guard import KernelInputError
from dsv4.ops.norm import ROW_CONFIGS
from dsv4.ops.select import MAX_K

HEAD_DIMS = (128, 256, 512)  # whole tiles of a power of two, and at most eight scales
INDEX_HEAD_DIM = 128
MAX_EXPERTS = 4096


def check_shapes(config: ModelConfig) -> None:
    """`KernelInputError` names the first field that no kernel takes, what it may be, and what it is."""
    has_index = CSA_RATIO in config.layer_ratios
    most_columns = max(ROW_CONFIGS)
    for name, is_right, expected in (
        ("hc_mult", config.hc_mult == NUM_STREAMS, NUM_STREAMS),
        ("head_dim", config.head_dim in HEAD_DIMS, f"one of {', '.join(map(str, HEAD_DIMS))}"),
        ("qk_rope_head_dim", config.qk_rope_head_dim == ENTRY_GROUP, ENTRY_GROUP),
        ("index_head_dim", config.index_head_dim == INDEX_HEAD_DIM or not has_index, INDEX_HEAD_DIM),
        ("index_topk", config.index_topk <= MAX_K or not has_index, f"at most {MAX_K}"),
        ("hidden_size", config.hidden_size <= most_columns, f"at most {most_columns}"),
        ("q_lora_rank", config.q_lora_rank <= most_columns, f"at most {most_columns}"),
        ("n_routed_experts", config.n_routed_experts <= MAX_EXPERTS, f"at most {MAX_EXPERTS}"),
    ):
        if not is_right:
            raise KernelInputError(
                f"the kernels need {name} to be {expected}, found {getattr(config, name)}; the TORCH backend takes it"
            )
