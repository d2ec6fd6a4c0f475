"""Every row of the two tables of docs/checkpoints.md: what loads, with which note, and what is refused, and why."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from loader_cases import SMALL, header_of, stored

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
    entries, position = {}, 0
    for name, part in header.items():
        end = position + part.nbytes
        entries[name] = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(entries).encode()
    with (path / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + position - cut)
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

# row of the document: headers, config, part of the note (None: no note)
LOADS = {
    "official Flash, Pro: FP8 with MXFP4 experts": (OFFICIAL, RAW, None),
    "official, MXFP4 codes stored as U8": (as_u8(OFFICIAL), RAW, None),
    "Base: FP8 experts, FP32 scales": (header_of(SMALL, "fp8"), config_to_dict(SMALL, "fp8"), None),
    "0731, 0813: a DSpark draft head under `mtp.*`": (DRAFT_HEAD, DRAFT_HEAD_RAW, None),
    "ModelOpt NVFP4": (header_of(SMALL, "nvfp4"), RAW | {"quantization_config": MODELOPT}, None),
    "ModelOpt NVFP4, draft experts still MXFP4": (
        header_of(SMALL, "nvfp4", "mxfp4"),
        RAW | {"quantization_config": MODELOPT},
        None,
    ),
    "BF16, nothing quantised": (header_of(SMALL, "bf16"), config_to_dict(SMALL, "bf16"), None),
    "Hugging Face, as `save_pretrained` writes it": (renamed(Naming.HF_SAVED), config_to_dict(SMALL, "bf16"), None),
    "Hugging Face module names, experts stacked": (renamed(Naming.HF), config_to_dict(SMALL, "bf16"), None),
    "block scales named `weight_scale_inv`": (inverse_names(OFFICIAL), RAW, None),
    "draft block removed, its 0 left in `compress_ratios`": (
        NO_DRAFT,
        RAW | {"num_nextn_predict_layers": 0},
        "ends with 1 value(s) for draft blocks",
    ),
    "draft tensors present, `num_nextn_predict_layers` 0": (
        OFFICIAL,
        RAW | {"num_nextn_predict_layers": 0, "compress_ratios": [0, 4, 128]},
        "mtp.* tensors are there: skipped",
    ),
    "draft block announced, no draft tensors": (NO_DRAFT, RAW, None),
    "`eos_token_id` a list of one": (OFFICIAL, RAW | {"eos_token_id": [1]}, None),
    "keys of V3 that say what V4 is (`n_group` 1, ...)": (
        OFFICIAL,
        RAW | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "moe_layer_freq": 1},
        None,
    ),
    "keys about training or software (`aux_loss_alpha`, ...)": (
        OFFICIAL,
        RAW | {"aux_loss_alpha": 0.001, "seq_aux": True, "tokenizer_class": "x", "ep_size": 1},
        None,
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


# row: every (headers, config, further arguments of `folder_of`, part of the message)
REFUSED = {
    "DeepSeek-V4.1, the vision model": [
        (OFFICIAL, RAW | {"model_type": "deepseek_v41"}, {}, "this is a DeepSeek-V4.1 model"),
        (OFFICIAL, RAW | {"text_config": {}}, {}, "this is a DeepSeek-V4.1 model"),
    ],
    "an unknown key": [(OFFICIAL, RAW | {"attention_gain": 2}, {}, "unknown keys: attention_gain")],
    "a key given twice": [
        (OFFICIAL, {}, {"text": json.dumps(RAW)[:-1] + ', "vocab_size": 64}'}, "'vocab_size' is given twice")
    ],
    "tied embeddings": [(OFFICIAL, RAW | {"tie_word_embeddings": True}, {}, "tie_word_embeddings must be False")],
    "`eos_token_id` a list of several": [
        (OFFICIAL, RAW | {"eos_token_id": [1, 2]}, {}, "SamplingParams.stop_token_ids")
    ],
    "compressed-tensors, GPTQ, AWQ, bitsandbytes": [
        (
            OFFICIAL,
            RAW | {"quantization_config": {"quant_method": method}},
            {},
            "quant_method must be 'fp8' or 'modelopt'",
        )
        for method in ("compressed-tensors", "gptq", "awq", "bitsandbytes")
    ],
    "block scales stored as U8": [
        (
            with_changes(OFFICIAL, **{f"{EXPERT}.scale": stored("s", "U8", 32, 2)}),
            RAW,
            {},
            f"{EXPERT}.scale is U8, expected",
        )
    ],
    "hash tables that are not I64": [
        (with_changes(OFFICIAL, **{"layers.0.ffn.gate.tid2eid": stored("t", "I32", 64, 2)}), RAW, {}, "tid2eid is I32")
    ],
    "experts of one matrix in two formats": [
        (
            {name: part for name, part in OFFICIAL.items() if not name.startswith(EXPERT)}
            | {name: part for name, part in header_of(SMALL, "nvfp4").items() if name.startswith(EXPERT)},
            RAW,
            {},
            f"mixed formats (1): {EXPERT}.weight is nvfp4",
        )
    ],
    "a scale without its weight, a weight without its scale": [
        (with_changes(OFFICIAL, **{f"{EXPERT}.scale": None}), RAW, {}, f"missing (1): {EXPERT}.scale"),
        (with_changes(OFFICIAL, **{f"{EXPERT}.weight": None}), RAW, {}, f"unexpected (1): {EXPERT}.scale"),
    ],
    "a DSpark head without `dspark_*` keys": [(DRAFT_HEAD, RAW, {}, "but its config has no dspark_* keys")],
    "an MTP block with `dspark_*` keys": [(OFFICIAL, DRAFT_HEAD_RAW, {}, "a DSpark head has no such tensors")],
    "a DSpark head of which a tensor is missing": [
        (with_changes(DRAFT_HEAD, **{"mtp.1.attn.wkv.weight": None}), DRAFT_HEAD_RAW, {}, "mtp.1.attn.wkv.weight")
    ],
    "a draft block's ratio that is not 0": [
        (OFFICIAL, RAW | {"compress_ratios": [0, 4, 128, 4]}, {}, "belong to draft blocks and must be 0")
    ],
    "a tensor missing, unexpected or misshapen": [
        (with_changes(OFFICIAL, **{"norm.weight": None}), RAW, {}, "missing (1): norm.weight"),
        (OFFICIAL | {"x": stored("x", "F32", 1)}, RAW, {}, "unexpected (1): x"),
        (
            with_changes(OFFICIAL, **{"norm.weight": stored("n", "BF16", 63)}),
            RAW,
            {},
            "norm.weight is [63], expected [64]",
        ),
    ],
    "more experts or layers than the headers can hold": [
        (OFFICIAL, RAW | {"n_routed_experts": 2147483648}, {}, "n_routed_experts 2147483648 in 4 blocks"),
        (OFFICIAL, RAW | {"n_routed_experts": 2**40 - 1}, {}, "the headers hold"),
        (OFFICIAL, RAW | {"num_nextn_predict_layers": 2**31}, {}, "num_nextn_predict_layers must be at most 64"),
        (renamed(Naming.HF), config_to_dict(SMALL, "bf16") | {"n_routed_experts": 2147483648}, {}, "the headers hold"),
        (
            with_changes(
                renamed(Naming.HF), **{"model.layers.1.mlp.experts.down_proj": stored("d", "BF16", 2**31, 0, 32)}
            ),
            config_to_dict(SMALL, "bf16") | {"n_routed_experts": 2147483648},
            {},
            "the headers hold",
        ),
    ],
    "a cut or overwritten file, an index that contradicts it": [(OFFICIAL, RAW, {"cut": 1}, "is truncated: tensor")],
}


@pytest.mark.parametrize("row", REFUSED)
def test_is_refused(row, tmp_path):
    for header, config, further, message in REFUSED[row]:
        with pytest.raises((ConfigError, CheckpointError)) as caught:
            load(folder_of(tmp_path, header, config, **further))
        assert message in str(caught.value)


@pytest.mark.parametrize("name", ["model-Q4_K.gguf", "pytorch_model.bin"])
def test_other_files_are_no_checkpoint(name, tmp_path):
    (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    with pytest.raises(CheckpointError, match=f"holds neither {INDEX_FILE} nor any .safetensors file"):
        load(tmp_path)


def test_an_index_that_contradicts_its_file(tmp_path):
    folder_of(tmp_path, OFFICIAL, RAW)
    (tmp_path / INDEX_FILE).write_text(
        json.dumps({"weight_map": dict.fromkeys([*OFFICIAL, "more"], "model.safetensors")})
    )
    with pytest.raises(CheckpointError, match="places more in a shard that does not hold it"):
        load(tmp_path)


def test_the_document_has_exactly_these_rows():
    rows = [line.split("|")[1].strip() for line in DOCUMENT.read_text().splitlines() if line.startswith("| ")]
    loads, refused = rows[1 : rows.index("checkpoint", 1)], rows[rows.index("checkpoint", 1) + 1 :]
    assert loads == list(LOADS)
    assert set(refused[: len(REFUSED) + 1]) == {*REFUSED, "GGUF, PyTorch pickles"}
