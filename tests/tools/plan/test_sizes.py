"""Bytes, tensors and parameters of checkpoints against the published index files."""

import pytest
from safetensors import safe_open

from dsv4.config import ConfigError, ModelConfig
from dsv4.tools.plan.sizes import EXPERT_FORMATS, count_weights

FLASH, PRO = ModelConfig.flash(), ModelConfig.pro()


@pytest.mark.parametrize(
    ("config", "num_tensors", "total_bytes", "billions", "draft_billions"),
    [(FLASH, 69_187, 159_609_485_896, "284.33", "6.61"), (PRO, 145_116, 864_704_792_696, "1573.00", "25.84")],
)
def test_official_checkpoints(config, num_tensors, total_bytes, billions, draft_billions):
    sizes = count_weights(config)
    assert sizes.num_tensors == num_tensors
    assert sizes.total_bytes == total_bytes
    assert f"{sizes.num_parameters / 1e9:.2f}" == billions
    assert f"{sizes.num_draft_parameters / 1e9:.2f}" == draft_billions
    assert sum(sizes.by_part().values()) == sum(sizes.by_format().values()) == total_bytes


@pytest.mark.parametrize(
    ("config", "num_tensors", "total_bytes", "draft_bytes"),
    [
        (ModelConfig.flash_0731(), 72_317, 166_878_536_440, 10_862_838_300),
        (ModelConfig.pro_0813(), 149_782, 892_727_580_904, 41_979_375_900),
    ],
)
def test_dspark_checkpoints(config, num_tensors, total_bytes, draft_bytes):
    sizes = count_weights(config)
    assert (sizes.num_tensors, sizes.total_bytes) == (num_tensors, total_bytes)
    assert sizes.by_part()["draft blocks"] == draft_bytes


def test_the_draft_block():
    assert count_weights(FLASH).num_tensors - count_weights(FLASH, with_draft=False).num_tensors == 1575
    without = count_weights(FLASH, with_draft=False)
    assert without.num_draft_parameters == 0
    assert "draft blocks" not in without.by_part()
    assert count_weights(FLASH).total_bytes - without.total_bytes == count_weights(FLASH).by_part()["draft blocks"]


def test_other_expert_formats():
    sizes = {experts: count_weights(FLASH, experts) for experts in EXPERT_FORMATS}
    assert len({s.num_parameters for s in sizes.values()}) == 1
    matrices = 43 * 256 * 3  # main layers only: the draft block's experts stay MXFP4
    values = 43 * 256 * 3 * 2048 * 4096
    assert sizes["nvfp4"].total_bytes - sizes["mxfp4"].total_bytes == values // 16 - values // 32 + matrices * 8
    assert sizes["nvfp4"].num_tensors - sizes["mxfp4"].num_tensors == 2 * matrices
    assert sizes["fp8"].num_tensors == sizes["mxfp4"].num_tensors
    assert set(sizes["bf16"].by_format()) == {"BF16", "F32", "I64"}
    # one 4-byte scale per 16384 weights, and one byte a weight
    routed = {t.name: t for t in sizes["fp8"].tensors}
    assert routed["layers.9.ffn.experts.0.w1.weight"].num_bytes == 256 * 2048 * 4096
    assert routed["layers.9.ffn.experts.0.w1.scale"].num_bytes == 256 * 16 * 32 * 4


def test_a_checkpoint_on_disk(request):
    folder = request.config.rootpath / "tests" / "vectors" / "setA" / "model"
    num_tensors = num_bytes = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in list(tensors.keys()):
                tensor = tensors.get_tensor(name)
                num_tensors += 1
                num_bytes += tensor.numel() * tensor.element_size()
    sizes = count_weights(ModelConfig.from_pretrained(folder))
    assert (sizes.num_tensors, sizes.total_bytes) == (num_tensors, num_bytes)


def test_what_cannot_be():
    with pytest.raises(ConfigError, match="experts must be one of mxfp4, nvfp4, fp8, bf16, found 'int4'"):
        count_weights(FLASH, "int4")
    with pytest.raises(ConfigError, match="multiples of 32, found 72"):
        count_weights(ModelConfig.tiny(moe_intermediate_size=72))
