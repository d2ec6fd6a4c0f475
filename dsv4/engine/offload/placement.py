"""Where a model's experts live when they do not all fit on the device: how many slots each layer gets, and which stay.

The arithmetic of device memory that the plan (tools/plan.py) and a model being loaded (llm.py) share: reserves for
workspace, graphs and context, room for slots, and how slots are divided. No torch.
"""

from dataclasses import dataclass

from dsv4.config import CSA_RATIO, EngineConfig, ModelConfig
from dsv4.dist.shares import decode_rows, most_rows
from dsv4.engine.run.bucket_sizes import captured_layers
from dsv4.errors import Dsv4Error

GIB = 2**30
# Measured on an H200 after warm-up and a full load, four Flash layers, three sets of limits (records `memory` of
# benchmarks/results/nvidia-h200-step.jsonl): 0.65 GB of CUDA context and 0.1 of loaded kernels; and loading leaves
# holes in the allocator's memory, in which half of a call's tensors find room
CONTEXT_BYTES = 716 * 2**20
HOLE_BYTES = 1660 * 2**20
GRAPH_BYTES_PER_LAYER = 256 * 2**10  # of one graph: some thirty kernel nodes with their arguments
INDEX_SCORE_ROWS = 256  # queries whose index scores are alive at once
ATTENTION_STATES = 4224  # of 64 heads, stored at once where HCA entries are many (ops/attention)
ATTENTION_RUN_TOKENS = 131_072  # of context, from which on they are
STAGED_EXPERT_LAYERS = 2  # the layer in use and the one being copied
CACHED_EXPERTS_PER_CHOICE = 4  # least slots that come and go, for each expert a token chooses


class OffloadError(Dsv4Error, ValueError):
    """A placement that cannot work."""


@dataclass(frozen=True)
class Placement:
    """Slots of every layer: `num_fixed` for the lowest experts, which stay, `num_cached` for those that come and go."""

    num_fixed: int
    num_cached: int

    @property
    def num_slots(self) -> int:
        return self.num_fixed + self.num_cached

    def check(self, num_experts: int, top_k: int) -> None:
        if min(self.num_fixed, self.num_cached) < 0 or self.num_slots > num_experts:
            raise OffloadError(
                f"expected at most {num_experts} slots, found {self.num_fixed} fixed and {self.num_cached} cached"
            )
        if self.num_cached < min(top_k, num_experts - self.num_fixed):
            raise OffloadError(f"expected cached slots for one token's {top_k} experts, found {self.num_cached}")


def divide_slots(num_slots: int, config: ModelConfig, engine: EngineConfig) -> Placement:
    """Divide a layer's slots into resident and cached ones. The cached ones can hold the experts of one token of every
    request and its drafts, so that decode is captured. A resident expert needs no copy in host memory.
    """
    if num_slots >= config.n_routed_experts:
        return Placement(config.n_routed_experts, 0)
    choices = max(CACHED_EXPERTS_PER_CHOICE, decode_rows(config, engine))
    num_cached = min(num_slots, choices * config.num_experts_per_tok)
    return Placement(num_slots - num_cached, num_cached)


@dataclass(frozen=True)
class ModelBytes:
    """What a model's weights take on a device: the routed experts of all blocks, and all else."""

    resident: int
    routed: int
    num_moe_blocks: int

    @property
    def total(self) -> int:
        return self.resident + self.routed

    @property
    def staging(self) -> int:
        """Whole layers of experts, for calls that choose more than there are slots for."""
        return min(self.routed, -(-STAGED_EXPERT_LAYERS * self.routed // self.num_moe_blocks))

    def slot(self, num_experts: int) -> int:
        """One expert of every block."""
        return self.routed // (num_experts * self.num_moe_blocks) * self.num_moe_blocks

    def slots_in(self, spare: int, num_experts: int) -> int:
        """How many experts of every block fit into `spare` bytes."""
        return min(num_experts, max(0, spare) // self.slot(num_experts))


def place_experts(
    config: ModelConfig, engine: EngineConfig, sizes: ModelBytes, cache_bytes: int, usable_bytes: int
) -> Placement | None:
    """As many experts on the device as fit beside everything else; None if all do and none need be offloaded."""
    others = sizes.resident + cache_bytes + reserve_bytes(config, engine)
    if others + sizes.routed <= usable_bytes:
        return None
    spare = usable_bytes - others - sizes.staging
    num_slots = sizes.slots_in(spare, config.n_routed_experts)
    if num_slots < config.num_experts_per_tok:
        raise OffloadError(
            f"the device has {usable_bytes / GIB:.1f} GiB; weights, cache and reserves that cannot be offloaded take "
            f"{(others + sizes.staging) / GIB:.1f} GiB, and the rest must hold one token's "
            f"{config.num_experts_per_tok} experts of every layer, found room for {num_slots}: lower the limits"
        )
    return divide_slots(num_slots, config, engine)


def reserve_bytes(config: ModelConfig, engine: EngineConfig, num_ranks: int = 1) -> int:
    """What one rank needs besides weights and cache."""
    needed = workspace_bytes(config, engine) + graph_bytes(config, engine) + CONTEXT_BYTES
    return needed + exchange_bytes(config, engine, num_ranks)


def workspace_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Memory for the tensors alive at once in a forward call of T = max(chunk, requests x (1 + drafts)) tokens: their
    bytes, or half of them beside `HOLE_BYTES`, whichever is more.

    Per token: the streams before and after a sublayer (BF16), its input, norm and output (BF16) and the FP32 sum of the
    experts; and the larger of attention (queries and outputs of all heads, low-rank query, grouped output, indexer
    queries, picked entries) and experts (gate, up and activation of the chosen and the shared one, and their outputs).
    Then index scores of up to `INDEX_SCORE_ROWS` queries over the longest context (FP32), states of attention over long
    contexts (FP32), and FP32 logits twice for each token that is sampled. For each request, the counts and biases of
    all tokens that its draws may need.
    """
    sampled = engine.max_concurrent_requests * (1 + engine.max_draft_tokens)
    num_tokens = most_rows(config, engine)
    hidden = config.hidden_size
    streams = 2 * 2 * config.hc_mult * hidden + 3 * 2 * hidden + 4 * hidden
    heads = 2 * config.num_attention_heads * config.head_dim
    low_rank = config.q_lora_rank + config.o_groups * config.o_lora_rank
    attention = 2 * (heads + low_rank + config.index_n_heads * config.index_head_dim) + 4 * config.index_topk
    num_experts = config.num_experts_per_tok + config.n_shared_experts
    experts = num_experts * 2 * (3 * config.moe_intermediate_size + hidden)
    scores = 4 * min(num_tokens, INDEX_SCORE_ROWS) * -(-engine.max_context_tokens // CSA_RATIO)
    num_runs = -(-engine.max_context_tokens // ATTENTION_RUN_TOKENS)
    num_states = num_tokens * -(-config.num_attention_heads // 64) * num_runs if num_runs > 1 else 0
    states = 4 * 64 * config.head_dim * min(num_states, ATTENTION_STATES)
    logits = 2 * 4 * sampled * config.vocab_size
    draws = 2 * 4 * engine.max_concurrent_requests * config.vocab_size
    alive = num_tokens * (streams + max(attention, experts)) + scores + states + logits + draws
    return max(alive, alive // 2 + HOLE_BYTES)


def exchange_bytes(config: ModelConfig, engine: EngineConfig, num_ranks: int) -> int:
    """What several ranks need on each, for calls of T tokens a rank (see `workspace_bytes`): N T rows of inputs with
    their routing, T tokens' parts on their way back, and for N T rows at once what the experts make of them: inputs in
    both forms, hidden values, parts. 0 for one rank.
    """
    if num_ranks == 1:
        return 0
    num_tokens, hidden, top_k = most_rows(config, engine), config.hidden_size, config.num_experts_per_tok
    inputs = 2 * hidden + (8 + 4) * top_k  # BF16; int64 ids and FP32 weights
    made = 2 * 2 * hidden + top_k * 2 * (config.moe_intermediate_size + hidden)
    return num_tokens * (num_ranks * (inputs + made) + top_k * 2 * hidden)


def graph_bytes(config: ModelConfig, engine: EngineConfig) -> int:
    """Captured calls, with their drafts; their buffers are the workspace."""
    return captured_layers(config, engine) * GRAPH_BYTES_PER_LAYER
