"""A model small enough to run hundreds of steps, and a way to make it say what a test wants."""

from dataclasses import replace

import torch

from dsv4.config import ModelConfig

# One layer of each kind. The official numerics quantise activations in groups of 128, so no width is smaller.
SMALL = ModelConfig.tiny(
    vocab_size=300, hidden_size=128, num_hidden_layers=3, num_hash_layers=1, compress_ratios=(0, 4, 128, 0),
    num_nextn_predict_layers=1, num_attention_heads=2, q_lora_rank=128, o_lora_rank=64, n_routed_experts=4,
    moe_intermediate_size=128, index_n_heads=2, max_position_embeddings=1024,
)  # fmt: skip

# Enough where only the engine matters, and much faster.
ONE_LAYER = replace(SMALL, num_hidden_layers=1, compress_ratios=(0,), num_nextn_predict_layers=0)

FILLER = 2 + ord(".")


def encode(text):
    """Ids of the byte tokenizer."""
    return [2 + byte for byte in text.encode("utf-8")]


def let_it_say(llm, *answers):
    """A request with seed s gives `answers[s]` (text or ids) token by token, then full stops, whatever its logits."""
    scripts = [encode(answer) if isinstance(answer, str) else list(answer) for answer in answers]

    def sample(logits, rows, state):
        steps = rows.positions + 1 - state.prompt_lens[rows.slots]
        chosen = [
            scripts[seed][step] if step < len(scripts[seed]) else FILLER
            for seed, step in zip(state.seeds[rows.slots].tolist(), steps.tolist(), strict=True)
        ]
        assert len(chosen) == len(logits)
        token_ids = torch.tensor(chosen)
        state.last_tokens[rows.slots] = token_ids
        state.token_counts[rows.slots, token_ids] += 1
        return token_ids

    llm.model.context = replace(llm.model.context, backend=llm.model.context.backend.with_ops(sample=sample))
    return llm


def finish(engine):
    """Steps until nothing is left to do."""
    while engine.has_work:
        engine.step()


def assert_all_free(llm):
    """Nothing is held, and the cache's books agree with the truth."""
    llm.engine.check_integrity()
    assert llm.cache.num_free_slots == llm.cache.schema.num_slots
    assert llm.cache.num_free_blocks == llm.cache.schema.num_blocks
    assert not llm.engine.has_work
