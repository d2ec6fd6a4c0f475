"""The demo model's shape and how it is trained. Frozen; a run writes both into its summary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dsv4.config import DSparkConfig, ModelConfig, RopeScaling


def demo_config(**changes: Any) -> ModelConfig:
    """Flash in miniature: SWA, SWA, CSA, HCA, CSA, HCA, CSA and one MTP block; 13.0 M parameters.

    The indexer chooses 64 of up to 512 entries at 2,048 tokens, so from token 256 on it really selects.
    """
    config = ModelConfig(
        vocab_size=4096, hidden_size=256, num_hidden_layers=7, num_attention_heads=4, head_dim=128,
        qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128, sliding_window=128,
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, routed_scaling_factor=1.5,
        swiglu_limit=10.0, num_hash_layers=2, num_nextn_predict_layers=1, index_n_heads=4, index_head_dim=128,
        index_topk=64, compress_ratios=(0, 0, 4, 128, 4, 128, 4, 0), max_position_embeddings=4096,
        rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=1024),
    )  # fmt: skip
    return replace(config, **changes)


@dataclass(frozen=True, kw_only=True)
class RateSettings:
    """How weights move. progress runs from 0 to 1 over the time budget; shares are of it."""

    peak_rate: float = 2e-3
    final_rate_share: float = 0.02
    warmup_share: float = 0.03
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    bias_step: float = 1e-3  # router bias moves by this towards balance after every step


NOISE_TOKEN = 13  # <｜read_url｜>: in the vocabulary, in no text


def head_config(base: ModelConfig, *, num_layers: int, markov_rank: int, block_size: int = 5) -> ModelConfig:
    """`base` with a DSpark head instead of its MTP block, over its last three layers as published heads are."""
    last = range(base.num_hidden_layers)[-3:]
    dspark = DSparkConfig(
        block_size=block_size, noise_token_id=NOISE_TOKEN, target_layer_ids=tuple(last), markov_rank=markov_rank
    )
    return replace(base, dspark=dspark, compress_ratios=(*base.layer_ratios, *(0,) * num_layers))


@dataclass(frozen=True, kw_only=True)
class HeadSettings(RateSettings):
    """Of learn_drafts.py."""

    num_layers: int = 2
    markov_rank: int = 64
    own_share: float = 0.6  # of the sequences: the model's own continuations; the others are text
    text_sequences: int = 4000
    batch_sequences: int = 24
    anchors: int = 160  # in a sequence
    rate_weight: float = 1.0  # of the share that is not accepted, next to the divergence
    confidence_weight: float = 0.2
    least_weight: float = 0.1  # of a row that drafts hardly ever reach
    final_rate_share: float = 0.0
    weight_decay: float = 0.01
    quantise_from: float = 0.4
    evaluate_every_s: float = 40.0
    seed: int = 30


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RateSettings):
    """Of train.py."""

    sequence_tokens: int = 2048
    batch_sequences: int = 32
    needle_share: float = 0.15
    max_facts: int = 8  # facts in one needle task: from 1 to this
    answer_weight: float = 4.0  # of an answer token in the loss; every other token counts 1
    dropout: float = 0.1  # on sublayer outputs: the corpus is read some thirty times
    select_from: float = 0.25  # before it every compressed entry is attended to, after it the indexer's picks
    quantise_from: float = 0.45
    mtp_weight: float = 0.3
    index_weight: float = 1.0
    evaluate_every_s: float = 40.0
    needle_questions: int = 32  # per evaluation
    seed: int = 20


@dataclass(frozen=True, kw_only=True)
class SecondSettings(TrainSettings):
    """The second run, from what `refrain.py --learn` left: text, facts and refrains together, selecting and quantised
    from the start, at rates that fall to nothing."""

    shapes: tuple[tuple[int, int], ...] = ((24, 768), (14, 1280))  # sequences, tokens; one of them at random every step
    refrain_share: float = 0.4
    needle_share: float = 0.2
    copies: tuple[int, ...] = (8, 12, 16, 16, 24)  # of the refrain; one of them at random for every sequence
    questions: int = 2
    refrain_weight: float = 1.0  # of the mean loss of refrain answers, next to the mean loss of all tokens
    csa_hidden: float = 0.85  # of the sequences with a refrain
    hca_hidden: float = 0.05
    peak_rate: float = 3e-4
    hca_rate: float = 1e-3  # of the attention of HCA layers
    warmup_share: float = 0.04
    final_rate_share: float = 0.0
    select_from: float = 0.0
    quantise_from: float = 0.0
    seed: int = 22


@dataclass(frozen=True)
class Lesson:
    """A part of `refrain.py --learn`: refrains only, CSA entries hidden from all of them."""

    steps: int
    shapes: tuple[tuple[int, int, int], ...]  # sequences, tokens, questions at most; one at random every step
    copies: tuple[int, ...]
    hca_rate: float  # of the attention of HCA layers
    rest_rate: float | None  # of everything else from the first HCA layer on but experts and indexers; None: as it is


# Few copies, or long sequences, from the start: nothing is learned (docs/decisions/miniature.md).
LESSONS = (
    Lesson(steps=130, shapes=((8, 384, 1),), copies=(16, 24), hca_rate=3e-3, rest_rate=3e-4),
    Lesson(
        steps=50, shapes=((8, 384, 1), (4, 640, 3), (2, 1280, 3)), copies=(8, 16, 24), hca_rate=1.5e-3, rest_rate=None
    ),
)
