"""What a DeepSeek-V4 model is (`ModelConfig`) and what this process may use (`EngineConfig`).

Both are frozen and strict: everything is checked at construction, an unknown key in a config.json is an error, and
nothing is defaulted silently that changes the maths. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dsv4.errors import Dsv4Error

BLOCK_TOKENS = 128  # one logical cache block: lcm of the two compression ratios
CSA_RATIO = 4
HCA_RATIO = 128
MAX_DRAFT_BLOCKS = 64  # far above any release: a larger number is a damaged file
MAX_MTP_DRAFTS = 3  # by one MTP block, which was trained for the first
MAX_DRAFT_TOKENS = 64  # a request may be asked to draft at once
NUM_DSPARK_LAYERS = 3  # of published heads; `compress_ratios` may say otherwise


class ConfigError(Dsv4Error, ValueError):
    """A config.json (or a config built in Python) that cannot describe a DeepSeek-V4 model."""


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN parameters of the compressed layers. There is no mscale: attention is never rescaled."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """Keys of a DSpark draft head, which lives under the names of MTP (`mtp.0`, `mtp.1`, ...) and is not MTP."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Every field of a DeepSeek-V4 config.json that changes the model. Field names are the published keys."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    swiglu_limit: float
    num_hash_layers: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    compress_ratios: tuple[int, ...]
    max_position_embeddings: int
    n_shared_experts: int = 1
    num_nextn_predict_layers: int = 0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = field(default_factory=RopeScaling)
    bos_token_id: int = 0
    eos_token_id: int = 1
    weight_block_size: tuple[int, int] = (128, 128)
    dspark: DSparkConfig | None = None

    def __post_init__(self) -> None:
        _validate_model_config(self)

    # ---- derived ----

    @property
    def layer_ratios(self) -> tuple[int, ...]:
        """Compression ratio of each main layer (the published list also carries the MTP blocks' entries)."""
        return self.compress_ratios[: self.num_hidden_layers]

    @property
    def num_draft_layers(self) -> int:
        """Blocks under `mtp.*`: MTP blocks, or the layers of a DSpark head, which has one ratio for each of them."""
        if self.dspark is None:
            return self.num_nextn_predict_layers
        return len(self.compress_ratios) - self.num_hidden_layers or NUM_DSPARK_LAYERS

    @property
    def max_drafts(self) -> int:
        """Tokens its drafter says in one go, for a request; 0 without one."""
        if self.dspark is not None:
            return self.dspark.block_size
        return MAX_MTP_DRAFTS if self.num_draft_layers else 0

    @property
    def num_spare_ratios(self) -> int:
        """Values of `compress_ratios` for draft blocks that the config does not announce: harmless, worth a word."""
        return max(0, len(self.compress_ratios) - self.num_hidden_layers - self.num_draft_layers)

    # ---- constructors ----

    @classmethod
    def flash(cls) -> ModelConfig:
        """DeepSeek-V4-Flash: 43 layers, 284 B parameters."""
        return cls(
            vocab_size=129280, hidden_size=4096, num_hidden_layers=43, num_attention_heads=64, head_dim=512,
            qk_rope_head_dim=64, q_lora_rank=1024, o_groups=8, o_lora_rank=1024, sliding_window=128,
            n_routed_experts=256, num_experts_per_tok=6, moe_intermediate_size=2048, routed_scaling_factor=1.5,
            swiglu_limit=10.0, num_hash_layers=3, num_nextn_predict_layers=1, index_n_heads=64, index_head_dim=128,
            index_topk=512, max_position_embeddings=1048576, compress_ratios=(0, 0, *(4, 128) * 20, 4, 0),
        )  # fmt: skip

    @classmethod
    def pro(cls) -> ModelConfig:
        """DeepSeek-V4-Pro: 61 layers, 1573 B parameters."""
        return replace(
            cls.flash(), hidden_size=7168, num_hidden_layers=61, num_attention_heads=128, q_lora_rank=1536, o_groups=16,
            n_routed_experts=384, moe_intermediate_size=3072, routed_scaling_factor=2.5, index_topk=1024,
            compress_ratios=(128, 128, *(4, 128) * 29, 4, 0),
        )  # fmt: skip

    @classmethod
    def flash_0731(cls) -> ModelConfig:
        """DeepSeek-V4-Flash-0731 (and Flash-DSpark): Flash with a DSpark head instead of MTP."""
        return cls.flash().with_dspark(noise_token_id=128799, markov_rank=256)

    @classmethod
    def pro_0813(cls) -> ModelConfig:
        """DeepSeek-V4-Pro-0813 (and Pro-DSpark): Pro with a DSpark head instead of MTP."""
        return cls.pro().with_dspark(noise_token_id=128799, markov_rank=512)

    def with_dspark(self, *, noise_token_id: int, markov_rank: int, block_size: int = 5) -> ModelConfig:
        """The same model with a DSpark head that taps its last layers, as published heads do."""
        first = max(self.num_hidden_layers - NUM_DSPARK_LAYERS, 0)
        dspark = DSparkConfig(
            block_size=block_size,
            noise_token_id=noise_token_id,
            target_layer_ids=tuple(range(first, self.num_hidden_layers)),
            markov_rank=markov_rank,
        )
        return replace(self, dspark=dspark, compress_ratios=(*self.layer_ratios, *(0,) * NUM_DSPARK_LAYERS))

    @classmethod
    def tiny(cls, **changes: Any) -> ModelConfig:
        """A few hundred thousand parameters with every mechanism of the model in it, for tests and demos."""
        tiny = cls(
            vocab_size=512, hidden_size=256, num_hidden_layers=5, num_attention_heads=4, head_dim=128,
            qk_rope_head_dim=64, q_lora_rank=128, o_groups=2, o_lora_rank=128, sliding_window=128,
            n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, routed_scaling_factor=1.5,
            swiglu_limit=10.0, num_hash_layers=1, num_nextn_predict_layers=1, index_n_heads=4, index_head_dim=128,
            index_topk=16, max_position_embeddings=16384, compress_ratios=(0, 4, 128, 4, 128, 0),
            rope_scaling=RopeScaling(original_max_position_embeddings=1024),
        )  # fmt: skip
        return replace(tiny, **changes)

    @classmethod
    def from_pretrained(cls, path: str | Path) -> ModelConfig:
        """Read `path/config.json` (or the file itself), in DeepSeek's or Hugging Face's spelling."""
        file = Path(path)
        if not file.exists():
            raise ConfigError(f"{file} does not exist; expected a checkpoint folder or a config.json")
        if file.is_dir():
            file = file / "config.json"
            if not file.exists():
                raise ConfigError(f"{file.parent} has no config.json; is it a checkpoint folder?")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # bad UTF-8, bad JSON, an integer of thousands of digits
            raise ConfigError(f"{file} is not valid JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ConfigError(f"{file} must hold a JSON object, found {type(raw).__name__}")
        try:
            return cls.from_dict(raw)
        except ConfigError as error:
            raise ConfigError(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from the parsed config.json. Unknown keys are an error that names them."""
        from dsv4.config.json_names import parse_model_config  # kept apart: it only knows spellings

        return cls(**parse_model_config(raw))


_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "qk_rope_head_dim",
    "q_lora_rank", "o_groups", "o_lora_rank", "sliding_window", "n_routed_experts", "num_experts_per_tok",
    "moe_intermediate_size", "index_n_heads", "index_head_dim", "index_topk", "max_position_embeddings", "hc_mult",
    "hc_sinkhorn_iters", "n_shared_experts",
)  # fmt: skip
_NOT_NEGATIVE = ("num_hash_layers", "num_nextn_predict_layers", "bos_token_id", "eos_token_id")
_POSITIVE_REAL = (
    "routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta",
)  # fmt: skip


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key given twice is ambiguous."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {shown(key)} is given twice")
        result[key] = value
    return result


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def is_size(value: object, least: int = 1) -> bool:
    """An integer from `least` to what any real model or machine stays far below."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**40


def is_positive_real(value: object) -> bool:
    if isinstance(value, int):  # an integer may be too large for a float
        return is_size(value)
    return isinstance(value, float) and math.isfinite(value) and value > 0


def shown(value: object) -> str:
    """What was found, for an error message: never longer than a line, and never an error of its own."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list nested as deeply
        return f"a value too large to print ({type(value).__name__})"
    return text if len(text) <= 80 else text[:77] + "..."


def _validate_model_config(c: ModelConfig) -> None:
    for name in _POSITIVE:
        value = getattr(c, name)
        _require(is_size(value), f"{name} must be a positive integer, found {shown(value)}")
    for name in _NOT_NEGATIVE:
        value = getattr(c, name)
        _require(is_size(value, 0), f"{name} must be an integer >= 0, found {shown(value)}")
    for name in _POSITIVE_REAL:
        value = getattr(c, name)
        _require(is_positive_real(value), f"{name} must be a positive number, found {shown(value)}")
    _require(c.n_shared_experts == 1, f"n_shared_experts must be 1, found {c.n_shared_experts}")
    _require(
        c.qk_rope_head_dim % 2 == 0 and c.qk_rope_head_dim < c.head_dim,
        f"qk_rope_head_dim must be even and below head_dim {c.head_dim}, found {c.qk_rope_head_dim}",
    )
    _require(
        c.index_head_dim & (c.index_head_dim - 1) == 0 and c.index_head_dim >= c.qk_rope_head_dim,
        f"index_head_dim must be a power of two (Hadamard) and at least qk_rope_head_dim, found {c.index_head_dim}",
    )
    _require(
        c.num_attention_heads % c.o_groups == 0,
        f"o_groups {c.o_groups} must divide num_attention_heads {c.num_attention_heads}",
    )
    _require(
        c.num_experts_per_tok <= c.n_routed_experts,
        f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}",
    )
    _require(
        c.num_hash_layers <= c.num_hidden_layers,
        f"num_hash_layers {c.num_hash_layers} exceeds num_hidden_layers {c.num_hidden_layers}",
    )
    _require(c.sliding_window <= 4096, f"sliding_window must be at most 4096, found {c.sliding_window}")
    _require(c.num_hidden_layers <= 4096, f"num_hidden_layers must be at most 4096, found {c.num_hidden_layers}")
    _require(
        c.num_nextn_predict_layers <= MAX_DRAFT_BLOCKS,
        f"num_nextn_predict_layers must be at most {MAX_DRAFT_BLOCKS}, found {c.num_nextn_predict_layers}",
    )
    for name in ("bos_token_id", "eos_token_id"):
        _require(getattr(c, name) < c.vocab_size, f"{name} {getattr(c, name)} is outside vocab_size {c.vocab_size}")
    _validate_parts(c)


def _validate_parts(c: ModelConfig) -> None:
    """The fields that hold more than one value."""
    blocks, rope, ratios = c.weight_block_size, c.rope_scaling, c.compress_ratios
    _require(
        isinstance(blocks, tuple) and len(blocks) == 2 and all(map(is_size, blocks)),
        f"weight_block_size must be two positive integers, found {shown(blocks)}",
    )
    if rope is not None:
        _require(isinstance(rope, RopeScaling), f"rope_scaling must be a RopeScaling or None, found {shown(rope)}")
        for spec in fields(rope):
            value = getattr(rope, spec.name)
            _require(is_positive_real(value), f"rope_scaling.{spec.name} must be positive, found {shown(value)}")
        _require(
            is_size(rope.original_max_position_embeddings),
            "rope_scaling.original_max_position_embeddings must be an integer, "
            f"found {shown(rope.original_max_position_embeddings)}",
        )
    if c.dspark is not None:
        _validate_dspark(c.dspark, c)
    _require(
        isinstance(ratios, tuple) and all(is_size(ratio, 0) for ratio in ratios),
        f"compress_ratios must be integers, found {shown(ratios)}",
    )
    from dsv4.config.layers import validate_ratios

    validate_ratios(c)


def _validate_dspark(dspark: DSparkConfig, c: ModelConfig) -> None:
    for name, least in (("block_size", 1), ("noise_token_id", 0), ("markov_rank", 1)):
        value = getattr(dspark, name)
        _require(is_size(value, least), f"dspark_{name} must be an integer >= {least}, found {shown(value)}")
    _require(
        dspark.block_size <= MAX_DRAFT_TOKENS,
        f"dspark_block_size must be at most {MAX_DRAFT_TOKENS}, found {dspark.block_size}",
    )
    _require(
        dspark.noise_token_id < c.vocab_size,
        f"dspark_noise_token_id {dspark.noise_token_id} is outside vocab_size {c.vocab_size}",
    )
    targets = dspark.target_layer_ids
    _require(
        all(is_size(layer_idx, 0) and layer_idx < c.num_hidden_layers for layer_idx in targets),
        f"dspark_target_layer_ids must be layers below {c.num_hidden_layers}, found {shown(targets)}",
    )
    _require(
        0 < len(targets) == len(set(targets)),
        f"dspark_target_layer_ids must name at least one layer, and none twice, found {shown(targets)}",
    )
