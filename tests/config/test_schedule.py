"""Which attention and which router every layer has, for the published models and for schedules that cannot be."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4.config import ConfigError, ModelConfig
from dsv4.config.layers import AttentionKind, LayerSpec, RouterKind, build_schedule, validate_schedule

SWA, CSA, HCA = AttentionKind.SWA, AttentionKind.CSA, AttentionKind.HCA
HASH, DENSE = RouterKind.HASH, RouterKind.DENSE


def layers_of(schedule, kind):
    return [layer.layer_idx for layer in schedule if layer.attention is kind and not layer.is_mtp]


def test_flash_layers():
    schedule = build_schedule(ModelConfig.flash())
    assert len(schedule) == 43
    assert layers_of(schedule, SWA) == [0, 1]
    assert layers_of(schedule, CSA) == list(range(2, 43, 2))
    assert layers_of(schedule, HCA) == list(range(3, 42, 2))
    # the last ratio of the published list is the MTP block's: layer 42 is not a sliding-window layer
    assert schedule[42].attention is CSA


def test_pro_layers():
    schedule = build_schedule(ModelConfig.pro())
    assert len(schedule) == 61
    assert layers_of(schedule, SWA) == []
    assert layers_of(schedule, CSA) == list(range(2, 61, 2))
    assert layers_of(schedule, HCA) == [0, 1, *range(3, 60, 2)]


@pytest.mark.parametrize("config", [ModelConfig.flash(), ModelConfig.pro()], ids=["flash", "pro"])
def test_first_three_layers_are_hash_routed(config):
    assert [layer.router for layer in build_schedule(config)] == [HASH] * 3 + [DENSE] * (config.num_hidden_layers - 3)


def test_mtp_blocks_come_last_and_only_when_asked_for():
    config = ModelConfig.flash()
    assert not any(layer.is_mtp for layer in build_schedule(config))
    schedule = build_schedule(config, with_mtp=True)
    assert schedule[:43] == build_schedule(config)
    assert schedule[43:] == (LayerSpec(43, SWA, DENSE, is_mtp=True),)


def test_mtp_blocks_without_ratios_of_their_own():
    """Hugging Face lists no ratio for the MTP blocks; the schedule is the same."""
    config = ModelConfig.tiny()
    bare = replace(config, compress_ratios=config.layer_ratios)
    assert build_schedule(bare, with_mtp=True) == build_schedule(config, with_mtp=True)


@pytest.mark.parametrize(("kind", "ratio", "has_indexer"), [(SWA, 0, False), (CSA, 4, True), (HCA, 128, False)])
def test_ratio_and_indexer_of_each_kind(kind, ratio, has_indexer):
    layer = LayerSpec(0, kind, DENSE)
    assert layer.ratio == ratio
    assert layer.has_indexer is has_indexer


@given(st.lists(st.sampled_from([0, 4, 128]), min_size=1, max_size=12), st.data())
def test_any_ratios_give_the_schedule_they_spell(ratios, data):
    num_hash = data.draw(st.integers(0, len(ratios)))
    num_mtp = data.draw(st.integers(0, 2))
    config = ModelConfig.tiny(
        num_hidden_layers=len(ratios),
        num_hash_layers=num_hash,
        num_nextn_predict_layers=num_mtp,
        compress_ratios=(*ratios, *[0] * num_mtp),
    )
    schedule = build_schedule(config, with_mtp=True)
    assert [layer.layer_idx for layer in schedule] == list(range(len(ratios) + num_mtp))
    assert [layer.ratio for layer in schedule] == [*ratios, *[0] * num_mtp]
    assert [layer.router is HASH for layer in schedule] == [i < num_hash for i in range(len(schedule))]
    assert [layer.is_mtp for layer in schedule] == [i >= len(ratios) for i in range(len(schedule))]


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ([], "at least one layer"),
        ([LayerSpec(1, SWA, DENSE)], "layer 0 of the schedule carries layer_idx 1"),
        ([LayerSpec(0, SWA, DENSE), LayerSpec(2, SWA, DENSE)], "layer 1 of the schedule carries layer_idx 2"),
        ([LayerSpec(0, SWA, DENSE, is_mtp=True), LayerSpec(1, CSA, DENSE)], "main layer 1 follows an MTP block"),
        ([LayerSpec(0, CSA, DENSE, is_mtp=True)], "MTP block 0 must be SWA with score routing"),
        ([LayerSpec(0, SWA, HASH, is_mtp=True)], "MTP block 0 must be SWA with score routing"),
        ([LayerSpec(0, SWA, DENSE), LayerSpec(1, SWA, HASH)], "hash-routed layer 1 follows a score-routed one"),
    ],
)
def test_impossible_schedules_are_named(schedule, message):
    with pytest.raises(ConfigError, match=message):
        validate_schedule(schedule)
