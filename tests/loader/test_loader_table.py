"""Every row of the two tables of docs/checkpoints.md: what loads, with which note, and what is refused, and why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from loader_cases import SMALL, entries_of, header_of, stored, write_raw

from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.names import Naming, expected_tensors, stored_names
from dsv4.loader.resolve import plan_load
from dsv4.loader.write.config_file import config_to_dict
from dsv4.loader.write.random_weights import Recipe
from dsv4.loader.write.synth import stored_tensors

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoints.md"
EXPERT = "layers.1.ffn.experts.2.w1"
DSPARK = SMALL.with_dspark(noise_token_id=7, markov_rank=4)
MODELOPT = {
    "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "moe_quant_algo": "NVFP4", "group_size": 16,
    "config_groups": {"group_0": {}}, "ignore": ["attn"], "producer": {"name": "modelopt"}, "kv_cache_scheme": None,
    "quantized_layers": {}, "weight_block_size": [128, 128],
}  # fmt: skip


def folder_of(path, header, config, text=None, cut=0):
    """A checkpoint folder with headers and no data: the files are holes of the right length."""
    entries, num_bytes = entries_of(header)
    file = write_raw(path / "model.safetensors", entries)
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size + num_bytes - cut)
    (path / "config.json").write_text(json.dumps(config) if text is None else text)
    return path


def load(folder):
    with Checkpoint.open(folder) as checkpoint:
        return plan_load(checkpoint, ModelConfig.from_pretrained(folder))


def renamed(naming):
    """BF16 headers in one of Hugging Face's spellings."""
    header, recipe = {}, Recipe(SMALL, "bf16")
    for tensor in expected_tensors(SMALL, with_mtp=False):
        (part,) = stored_tensors(tensor, recipe)
        name = stored_names(tensor, naming)[0]
        if naming is Naming.HF and tensor.expert_idx is not None:
            halves = 1 if ".w2." in tensor.name else 2
            part = replace(part, shape=(SMALL.n_routed_experts, halves * part.shape[0], part.shape[1]))
        header[name] = replace(part, name=name)
    return header


def with_changes(header, **changes):
    """Parts replaced by name; None removes one."""
    result = {name: part for name, part in header.items() if name not in changes or changes[name] is not None}
    return result | {name: part for name, part in changes.items() if part is not None}


def as_u8(header):
    return {name: replace(part, dtype="U8" if part.dtype == "I8" else part.dtype) for name, part in header.items()}


def inverse_names(header):
    return {
        name.replace(".scale", ".weight_scale_inv") if name.endswith(".scale") else name: part
        for name, part in header.items()
    }


OFFICIAL, RAW = header_of(SMALL), config_to_dict(SMALL)
NO_DRAFT = header_of(SMALL, with_mtp=False)
DRAFT_HEAD, DRAFT_HEAD_RAW = header_of(DSPARK), config_to_dict(DSPARK)

BF16_RAW = config_to_dict(SMALL, "bf16")


def loads(header=OFFICIAL, raw=RAW, note=None, **changes):
    """Headers, a config and changes to it, part of the note (None: no note)."""
    return header, raw | changes, note


NO_BLOCKS = {"num_nextn_predict_layers": 0}
LOADS = {
    "official Flash, Pro: FP8 with MXFP4 experts": loads(),
    "official, MXFP4 codes stored as U8": loads(as_u8(OFFICIAL)),
    "Base: FP8 experts, FP32 scales": loads(header_of(SMALL, "fp8"), config_to_dict(SMALL, "fp8")),
    "0731, 0813: a DSpark draft head under `mtp.*`": loads(DRAFT_HEAD, DRAFT_HEAD_RAW),
    "ModelOpt NVFP4": loads(header_of(SMALL, "nvfp4"), quantization_config=MODELOPT),
    "ModelOpt NVFP4, draft experts still MXFP4": loads(
        header_of(SMALL, "nvfp4", "mxfp4"), quantization_config=MODELOPT
    ),
    "BF16, nothing quantised": loads(header_of(SMALL, "bf16"), BF16_RAW),
    "Hugging Face, as `save_pretrained` writes it": loads(renamed(Naming.HF_SAVED), BF16_RAW),
    "Hugging Face module names, experts stacked": loads(renamed(Naming.HF), BF16_RAW),
    "block scales named `weight_scale_inv`": loads(inverse_names(OFFICIAL)),
    "draft block removed, its 0 left in `compress_ratios`": loads(
        NO_DRAFT, note="ends with 1 value(s) for draft blocks", **NO_BLOCKS
    ),
    "draft tensors present, `num_nextn_predict_layers` 0": loads(
        note="mtp.* tensors are there: skipped", compress_ratios=[0, 4, 128], **NO_BLOCKS
    ),
    "draft block announced, no draft tensors": loads(NO_DRAFT),
    "`eos_token_id` a list of one": loads(eos_token_id=[1]),
    "keys of V3 that say what V4 is (`n_group` 1, ...)": loads(
        n_group=1, topk_group=1, first_k_dense_replace=0, moe_layer_freq=1
    ),
    "keys about training or software (`aux_loss_alpha`, ...)": loads(
        aux_loss_alpha=0.001, seq_aux=True, tokenizer_class="x", ep_size=1
    ),
}


@pytest.mark.parametrize("row", LOADS)
def test_loads(row, tmp_path):
    header, config, note = LOADS[row]
    plan = load(folder_of(tmp_path, header, config))
    if note is None:
        assert plan.notes == ()
    else:
        assert any(note in text for text in plan.notes), plan.notes
        assert all("\n" not in text and len(text) < 120 for text in plan.notes)


def refused(message, header=OFFICIAL, raw=RAW, further=None, **changes):
    """Part of the message, headers, a config and changes to it, further arguments of `folder_of`."""
    return message, header, raw | changes, further or {}


def changed(name, part):
    return with_changes(OFFICIAL, **{name: part})


STACK = {"model.layers.1.mlp.experts.down_proj": stored("d", "BF16", 2**31, 0, 32)}
NOT_EXPERT = {name: part for name, part in OFFICIAL.items() if not name.startswith(EXPERT)}
NVFP4_EXPERT = {name: part for name, part in header_of(SMALL, "nvfp4").items() if name.startswith(EXPERT)}
REFUSED = {
    "DeepSeek-V4.1, the vision model": [
        refused("this is a DeepSeek-V4.1 model", model_type="deepseek_v41"),
        refused("this is a DeepSeek-V4.1 model", text_config={}),
    ],
    "an unknown key": [refused("unknown keys: attention_gain", attention_gain=2)],
    "a key given twice": [
        refused("'vocab_size' is given twice", further={"text": json.dumps(RAW)[:-1] + ', "vocab_size": 64}'})
    ],
    "tied embeddings": [refused("tie_word_embeddings must be False", tie_word_embeddings=True)],
    "`eos_token_id` a list of several": [refused("SamplingParams.stop_token_ids", eos_token_id=[1, 2])],
    "compressed-tensors, GPTQ, AWQ, bitsandbytes": [
        refused("quant_method must be 'fp8' or 'modelopt'", quantization_config={"quant_method": method})
        for method in ("compressed-tensors", "gptq", "awq", "bitsandbytes")
    ],
    "block scales stored as U8": [
        refused(f"{EXPERT}.scale is U8, expected", changed(f"{EXPERT}.scale", stored("s", "U8", 32, 2)))
    ],
    "hash tables that are not I64": [
        refused("tid2eid is I32", changed("layers.0.ffn.gate.tid2eid", stored("t", "I32", 64, 2)))
    ],
    "experts of one matrix in two formats": [
        refused(f"mixed formats (1): {EXPERT}.weight is nvfp4", NOT_EXPERT | NVFP4_EXPERT)
    ],
    "a scale without its weight, a weight without its scale": [
        refused(f"missing (1): {EXPERT}.scale", changed(f"{EXPERT}.scale", None)),
        refused(f"unexpected (1): {EXPERT}.scale", changed(f"{EXPERT}.weight", None)),
    ],
    "a DSpark head without `dspark_*` keys": [refused("but its config has no dspark_* keys", DRAFT_HEAD)],
    "an MTP block with `dspark_*` keys": [refused("a DSpark head has no such tensors", raw=DRAFT_HEAD_RAW)],
    "a DSpark head of which a tensor is missing": [
        refused("mtp.1.attn.wkv", with_changes(DRAFT_HEAD, **{"mtp.1.attn.wkv.weight": None}), DRAFT_HEAD_RAW)
    ],
    "a draft block's ratio that is not 0": [
        refused("belong to draft blocks and must be 0", compress_ratios=[0, 4, 128, 4])
    ],
    "a tensor missing, unexpected or misshapen": [
        refused("missing (1): norm.weight", changed("norm.weight", None)),
        refused("unexpected (1): x", changed("x", stored("x", "F32", 1))),
        refused("norm.weight is [63], expected [64]", changed("norm.weight", stored("n", "BF16", 63))),
    ],
    "more experts or layers than the headers can hold": [
        refused("n_routed_experts 2147483648 in 4 blocks", n_routed_experts=2**31),
        refused("the headers hold", n_routed_experts=2**40 - 1),
        refused("num_nextn_predict_layers must be at most 64", num_nextn_predict_layers=2**31),
        refused("the headers hold", renamed(Naming.HF), BF16_RAW, n_routed_experts=2**31),
        refused("the headers hold", with_changes(renamed(Naming.HF), **STACK), BF16_RAW, n_routed_experts=2**31),
    ],
    "a cut or overwritten file, an index that contradicts it": [refused("is truncated: tensor", further={"cut": 1})],
}


@pytest.mark.parametrize("row", REFUSED)
def test_is_refused(row, tmp_path):
    for message, header, config, further in REFUSED[row]:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load(folder_of(tmp_path, header, config, **further))
        assert message in str(caught.value)


@pytest.mark.parametrize("name", ["model-Q4_K.gguf", "pytorch_model.bin"])
def test_other_files_are_no_checkpoint(name, tmp_path):
    (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match=f"holds neither {INDEX_FILE} nor any .safetensors file"):
        load(tmp_path)


def test_the_document_has_exactly_these_rows():
    rows = [line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    loads, refused = rows[1 : rows.index("checkpoint", 1)], rows[rows.index("checkpoint", 1) + 1 :]
    assert loads == list(LOADS)
    assert set(refused[: len(REFUSED) + 1]) == {*REFUSED, "GGUF, PyTorch pickles"}
