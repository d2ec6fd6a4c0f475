"""Which attention and which router every layer has: pure data derived from `ModelConfig.compress_ratios`."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from dsv4.config import CSA_RATIO, HCA_RATIO, MAX_DRAFT_BLOCKS, ConfigError, ModelConfig, shown


class AttentionKind(StrEnum):
    SWA = "swa"  # sliding window only
    CSA = "csa"  # window + indexer-selected entries, one per 4 tokens, overlapping blocks
    HCA = "hca"  # window + every entry, one per 128 tokens


class RouterKind(StrEnum):
    HASH = "hash"  # experts from a table indexed by token id
    DENSE = "dense"  # experts from the gate's scores


MAX_DSPARK_LAYERS = 8

_KIND_OF_RATIO = {0: AttentionKind.SWA, CSA_RATIO: AttentionKind.CSA, HCA_RATIO: AttentionKind.HCA}


@dataclass(frozen=True)
class LayerSpec:
    """One block. `layer_idx` counts main layers first, then the draft blocks (`is_mtp`: `mtp.*` in a checkpoint)."""

    layer_idx: int
    attention: AttentionKind
    router: RouterKind
    is_mtp: bool = False

    @property
    def ratio(self) -> int:
        """Tokens per compressed entry; 0 where the layer keeps none."""
        return {AttentionKind.SWA: 0, AttentionKind.CSA: CSA_RATIO, AttentionKind.HCA: HCA_RATIO}[self.attention]

    @property
    def has_indexer(self) -> bool:
        return self.attention is AttentionKind.CSA


def build_schedule(config: ModelConfig, with_mtp: bool = False) -> tuple[LayerSpec, ...]:
    """The main layers in order; `with_mtp` appends the draft blocks, MTP or DSpark (SWA with score routing)."""
    main = tuple(
        LayerSpec(
            layer_idx=layer_idx,
            attention=_KIND_OF_RATIO[ratio],
            router=RouterKind.HASH if layer_idx < config.num_hash_layers else RouterKind.DENSE,
        )
        for layer_idx, ratio in enumerate(config.layer_ratios)
    )
    mtp = tuple(
        LayerSpec(config.num_hidden_layers + i, AttentionKind.SWA, RouterKind.DENSE, is_mtp=True)
        for i in range(config.num_draft_layers if with_mtp else 0)
    )
    schedule = main + mtp
    validate_schedule(schedule)
    return schedule


def validate_schedule(schedule: Sequence[LayerSpec]) -> None:
    """Reject what cannot be: gaps in the numbering, MTP before main layers, hash routing after score routing."""
    if not schedule:
        raise ConfigError("a schedule needs at least one layer")
    seen_dense = seen_mtp = False
    for expected_idx, layer in enumerate(schedule):
        if layer.layer_idx != expected_idx:
            raise ConfigError(f"layer {expected_idx} of the schedule carries layer_idx {layer.layer_idx}")
        if seen_mtp and not layer.is_mtp:
            raise ConfigError(f"main layer {layer.layer_idx} follows an MTP block")
        if layer.is_mtp and (layer.attention is not AttentionKind.SWA or layer.router is not RouterKind.DENSE):
            raise ConfigError(f"MTP block {layer.layer_idx} must be SWA with score routing, found {layer}")
        if seen_dense and layer.router is RouterKind.HASH:
            raise ConfigError(f"hash-routed layer {layer.layer_idx} follows a score-routed one")
        seen_dense |= layer.router is RouterKind.DENSE
        seen_mtp |= layer.is_mtp


def validate_ratios(config: ModelConfig) -> None:
    """`compress_ratios` holds one value per main layer; what follows is for draft blocks and must be 0.

    A DSpark head has as many layers as values follow. How many follow is not checked against the MTP blocks announced:
    a checkpoint whose draft block was removed often keeps its value, and it changes nothing
    (`config.num_spare_ratios` tells).
    """
    ratios, num_layers = config.compress_ratios, config.num_hidden_layers
    bad = sorted({repr(r) for r in ratios if isinstance(r, bool) or r not in _KIND_OF_RATIO})
    if bad:
        raise ConfigError(f"compress_ratios may hold 0, {CSA_RATIO} and {HCA_RATIO}; found {', '.join(bad[:5])}")
    most = MAX_DRAFT_BLOCKS if config.dspark is None else MAX_DSPARK_LAYERS
    if not num_layers <= len(ratios) <= num_layers + most:
        follows = "draft block" if config.dspark is None else f"layer of the DSpark head, at most {most}"
        raise ConfigError(
            f"compress_ratios has {len(ratios)} values; expected {num_layers} (num_hidden_layers), "
            f"or more with a 0 for each {follows}"
        )
    if any(ratios[num_layers:]):
        found = shown(ratios[num_layers:])
        raise ConfigError(
            f"the values of compress_ratios after the first {num_layers} (num_hidden_layers) belong to draft blocks "
            f"and must be 0, found {found}"
        )
