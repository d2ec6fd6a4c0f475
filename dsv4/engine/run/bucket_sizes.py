"""Which sizes of steps are captured as graphs, and how many layers those hold. No torch."""

from dsv4.config import EngineConfig, ModelConfig

CAPTURED_PROMPT = 128  # tokens: calls up to this size are captured even if `max_requests` is smaller
MAX_DRAFT_BUCKET = 512  # tokens: larger steps with drafts are few, and their logits many


def decode_buckets(max_tokens: int) -> tuple[int, ...]:
    """Powers of two up to `max_tokens`, and `max_tokens` itself: padding at most doubles a call."""
    powers = [1 << bit for bit in range(max_tokens.bit_length()) if 1 << bit < max_tokens]
    return (*powers, max_tokens)


def step_buckets(limits: EngineConfig, max_drafts: int = 0) -> tuple[int, ...]:
    """Up to the tokens of a decode step with its drafts, and up to `CAPTURED_PROMPT`: launched kernel by kernel, a
    short prompt, or what is left of one behind a cached prefix, waits for the host in every layer."""
    num_requests = limits.max_concurrent_requests
    drafted = min(num_requests * (1 + max_drafts), MAX_DRAFT_BUCKET)
    return decode_buckets(max(num_requests, drafted, min(CAPTURED_PROMPT, limits.chunk_tokens)))


def captured_layers(config: ModelConfig, limits: EngineConfig) -> int:
    """Layers in all graphs of all buckets, at most: drafts of every number up to the limit are asked for.

    A bucket has the model's layers. Its drafter's: those of a DSpark head once, whose block serves every number; or an
    MTP block for the step's tokens, and for every number of drafts once for each draft behind the first.
    """
    num_drafts = min(limits.max_draft_tokens, config.max_drafts)
    num_layers = config.num_hidden_layers
    if num_drafts:
        is_block = config.dspark is not None
        num_layers += config.num_draft_layers if is_block else 1 + num_drafts * (num_drafts - 1) // 2
    return len(step_buckets(limits, num_drafts)) * num_layers
