"""The model's weights as plain data, in the checkpoint's own grouping. Filled by `dsv4.loader`, read by `dsv4.model`.

`Weight` is a tensor or a `QuantTensor`; everything else is a tensor whose dtype is given below. D hidden size,
n streams, H heads, E routed experts, I expert width.
"""

from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from dsv4.formats.layouts import ShuffledTensor
from dsv4.formats.tensors import Weight
from dsv4.ops.linear import LinearBundle

Item = TypeVar("Item")


class OnInput(NamedTuple, Generic[Item]):
    """One item for each weight that meets an attention sublayer's input: the weight, its product, a dtype.

    SWA layers have the first two, HCA layers four, CSA layers all.
    """

    latent: Item
    kv: Item
    compressor_kv: Item | None = None
    compressor_gate: Item | None = None
    index_kv: Item | None = None
    index_gate: Item | None = None
    index_weights: Item | None = None


class OnLatent(NamedTuple, Generic[Item]):
    """The same for the query latent; the indexer's on CSA layers."""

    q: Item
    index_q: Item | None = None


@dataclass
class HyperParams:
    """One hyper-connection. fp32: fn [2n + n*n, n*D] (n rows in a head), base [rows], scale [3] (1 in a head)."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass
class CompressorParams:
    """wkv, wgate bf16 [w, D]; ape fp32 [ratio, w]; norm bf16 [Dc]; w = 2 Dc with overlap (CSA), else Dc (HCA)."""

    wkv: Weight
    wgate: Weight
    ape: Tensor
    norm: Tensor


@dataclass
class IndexerParams:
    """wq_b [Hi * Di, q_lora_rank]; weights_proj bf16 [Hi, D]; its own compressor of width Di."""

    wq_b: Weight
    weights_proj: Weight
    compressor: CompressorParams


@dataclass
class AttentionParams:
    """Names as in the checkpoint. sink fp32 [H]; compressor on CSA and HCA layers, indexer on CSA layers.

    `on_input` and `on_latent` are the weights that share an input, in the order the model asks for them; a bundle of
    them, where one was built (model/prepare.py), takes their place and is one launch.
    """

    wq_a: Weight
    q_norm: Tensor
    wq_b: Weight
    wkv: Weight
    kv_norm: Tensor
    wo_a: Weight | ShuffledTensor
    wo_b: Weight
    sink: Tensor
    compressor: CompressorParams | None
    indexer: IndexerParams | None
    input_bundle: LinearBundle | None = None
    latent_bundle: LinearBundle | None = None

    @property
    def on_input(self) -> tuple[Weight, ...]:
        """Those there are, in the order of `OnInput`."""
        weights = [self.wq_a, self.wkv]
        if self.compressor is not None:
            weights += [self.compressor.wkv, self.compressor.wgate]
        if self.indexer is not None:
            weights += [self.indexer.compressor.wkv, self.indexer.compressor.wgate, self.indexer.weights_proj]
        return tuple(weights)

    @property
    def on_latent(self) -> tuple[Weight, ...]:
        """Those there are, in the order of `OnLatent`."""
        return (self.wq_b,) if self.indexer is None else (self.wq_b, self.indexer.wq_b)


@dataclass
class ExpertParams:
    """w1 (gate), w3 (up) [I, D] and w2 (down) [D, I]; routed experts are stacked in front: [E, I, D], [E, D, I]."""

    w1: Weight
    w2: Weight
    w3: Weight

    @property
    def matrices(self) -> Any:
        """What the `moe` op is given."""
        return self.w1, self.w2, self.w3


@dataclass
class MoeParams:
    """gate bf16 [E, D]; bias fp32 [E] on score-routed layers; tid2eid int64 [vocab, k] on hash-routed ones."""

    gate: Weight
    bias: Tensor | None
    tid2eid: Tensor | None
    experts: ExpertParams
    shared: ExpertParams


@dataclass
class BlockParams:
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: HyperParams
    hc_ffn: HyperParams
    attn: AttentionParams
    ffn: MoeParams


@dataclass
class HeadParams:
    """The collapse of the streams and the final norm; the vocabulary projection is shared."""

    hc: HyperParams
    norm: Tensor


@dataclass
class MtpParams:
    """One multi-token-prediction block: mixes the next token's embedding into the streams, then a block and a head."""

    e_proj: Weight
    h_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    block: BlockParams
    head: HeadParams


@dataclass
class DSparkParams:
    """A DSpark head: main_proj [D, taps * D] and main_norm [D] make a context vector of the target's taps; ordinary
    blocks; the head behind them; markov_w1, markov_w2 bf16 [vocab, r]; confidence bf16 [1, D + r].
    """

    main_proj: Weight
    main_norm: Tensor
    blocks: list[BlockParams]
    head: HeadParams
    markov_w1: Tensor
    markov_w2: Tensor
    confidence: Tensor


@dataclass
class ModelParams:
    """The main model, and the drafter its checkpoint came with: MTP blocks, or a DSpark head, or neither.

    formats: of each parameter by its name, as it was loaded (loader/resolve.py): updates must have the same.
    """

    embed: Tensor
    lm_head: Tensor
    layers: list[BlockParams]
    head: HeadParams
    mtp: list[MtpParams]
    dspark: DSparkParams | None = None
    formats: dict[str, Any] = field(default_factory=dict)

    @property
    def draft_blocks(self) -> list[BlockParams]:
        """The blocks behind the main layers, in the order of the schedule."""
        return [draft.block for draft in self.mtp] if self.dspark is None else self.dspark.blocks
