"""Faults planted in copies of the shipped miniatures: each is found and named by its tensor, and nothing else is."""

import json
import shutil

import numpy as np
import pytest
from audit_cases import FILE, audit, change, faults, poke, trimmed, write_index, write_tensors

from dsv4.config import ModelConfig
from dsv4.loader.write.synth import write_checkpoint

EXPERT = "layers.2.ffn.experts.3"
HASH = "layers.0.ffn.gate.tid2eid"
TOKENS = np.arange(4096)
BF16_NAN, BF16_INF, BF16_HUGE = 0x7FC0, 0x7F80, 0x4974  # the last is about 1e6


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return {
        "mxfp4": trimmed(tmp_path_factory.mktemp("mini") / "mxfp4", "flash-mini"),
        "nvfp4": trimmed(tmp_path_factory.mktemp("mini") / "nvfp4", "flash-mini-nvfp4", 3),
    }


@pytest.fixture
def copy(sound, tmp_path):
    def make(name="mxfp4"):
        return shutil.copytree(sound[name], tmp_path / name)

    return make


def put(place, value):
    return lambda array: array.__setitem__(place, value)


def swap(first, second, suffixes):
    def edit(tensors):
        for suffix in suffixes:
            a, b = tensors[first + suffix], tensors[second + suffix]
            a[2], b[2] = b[2], a[2]

    return edit


def add(place, value):
    def edit(array):
        array[place] = int(array[place]) + value

    return edit


def table_without_7(array):
    array[...] = np.stack((TOKENS % 7, (TOKENS + 1) % 7), 1)


def table_always_7(array):
    array[...] = np.stack((np.full_like(TOKENS, 7), TOKENS % 7), 1)


def copy_part(target, source):
    return lambda tensors: tensors[target].__setitem__(2, tensors[source][2])


def copy_expert(tensors):
    for suffix in (".w2.weight", ".w2.scale"):
        copy_part(EXPERT + suffix, "layers.2.ffn.experts.1" + suffix)(tensors)


def half_convert(tensors):
    tensors[f"{EXPERT}.w1.weight"] = ["BF16", [128, 256], bytes(2 * 128 * 256)]
    del tensors[f"{EXPERT}.w1.scale"]


def random_bytes(array):
    array[...] = np.random.default_rng(0).integers(0, 256, array.shape)


# what is damaged, how, as which dtype -> the fault, and the tensor it must name (by default the damaged one)
POKED = {
    "scale is NaN": (f"{EXPERT}.w1.scale", put((3, 1), 255), "u1", "scale not finite"),
    "one scale unset": (f"{EXPERT}.w1.scale", put((3, 1), 0), "u1", "unset scale"),
    "all scales unset": (f"{EXPERT}.w2.scale", put(..., 0), "u1", "unset scale"),
    "scale's exponent bit flipped up": (f"{EXPERT}.w3.scale", add((7, 2), 8), "u1", "scale outlier"),
    "scale's exponent bit flipped down": (f"{EXPERT}.w3.scale", add((7, 2), -16), "u1", "scale outlier"),
    "one scale 2^4 too large": (f"{EXPERT}.w2.scale", add((9, 1), 4), "u1", "scale outlier"),
    "FP8 scale left at one": ("layers.1.attn.wq_b.scale", put((2, 0), 127), "u1", "scale outlier"),
    "FP8 scale unset": ("layers.1.attn.wkv.scale", put((0, 1), 0), "u1", "unset scale"),
    "FP8 scale NaN": ("layers.0.attn.wo_a.scale", put((0, 0), 255), "u1", "scale not finite"),
    "FP8 code NaN": ("layers.0.attn.wo_b.weight", put((5, 5), 0x7F), "u1", "not a number"),
    "FP8 weight all zero": ("layers.3.attn.wq_a.weight", put(..., 0), "u1", "all zero"),
    "FP8 rows dead": ("layers.3.ffn.shared_experts.w1.weight", put(slice(0, 2), 0), "u1", "dead rows"),
    "FP8 codes saturated": (
        "layers.2.attn.indexer.wq_b.weight",
        put((slice(None), slice(0, 9)), 0x7E),
        "u1",
        "saturated",
    ),
    "expert's row dead": (f"{EXPERT}.w2.weight", put(17, 0), "u1", "dead rows"),
    "expert's codes random": (f"{EXPERT}.w2.weight", random_bytes, "u1", "random codes"),
    "expert's codes saturated": (f"{EXPERT}.w1.weight", put((slice(None), slice(0, 64)), 0x7F), "u1", "saturated"),
    "expert all zero": (f"{EXPERT}.w1.weight", put(..., 0), "u1", "all zero"),
    "norm with NaN": ("layers.1.attn_norm.weight", put(9, BF16_NAN), "u2", "not a number"),
    "norm with infinity": ("layers.1.ffn_norm.weight", put(9, BF16_INF), "u2", "infinite"),
    "norm all zero": ("layers.0.attn.q_norm.weight", put(..., 0), "u2", "all zero"),
    "norm with an absurd value": ("norm.weight", put(1, BF16_HUGE), "u2", "absurd values"),
    "compressor with NaN": ("layers.2.attn.compressor.wkv.weight", put((0, 3), BF16_NAN), "u2", "not a number"),
    "embedding with NaN": ("embed.weight", put((77, 1), BF16_NAN), "u2", "not a number"),
    "head with an absurd value": ("head.weight", put((5, 5), BF16_HUGE), "u2", "absurd values"),
    "router row dead": ("layers.3.ffn.gate.weight", put(2, 0), "u2", "dead rows"),
    "router rows equal": ("layers.2.ffn.gate.weight", lambda a: put(2, a[5])(a), "u2", "duplicate"),
    "sink NaN": ("layers.0.attn.attn_sink", put(1, np.nan), "f4", "not a number"),
    "hyper-connection's scale infinite": ("layers.1.hc_ffn_scale", put(0, np.inf), "f4", "infinite"),
    "hyper-connection's scale zero": ("layers.1.hc_attn_scale", put(..., 0), "f4", "all zero"),
    "router bias absurd": ("layers.2.ffn.gate.bias", put(4, 900.0), "f4", "absurd router bias"),
    "router bias NaN": ("layers.3.ffn.gate.bias", put(4, np.nan), "f4", "not a number"),
    "position bias infinite": ("layers.3.attn.compressor.ape", put((1, 1), -np.inf), "f4", "infinite"),
    "hash table beyond the experts": (HASH, put((100, 0), 8), "i8", "expert out of range"),
    "hash table negative": ("layers.1.ffn.gate.tid2eid", put((100, 1), -1), "i8", "expert out of range"),
    "hash table names an expert twice": (HASH, lambda a: put((9, 0), a[9, 1])(a), "i8", "expert named twice"),
    "hash table never names an expert": (HASH, table_without_7, "i8", "expert never chosen"),
    "hash table always names an expert": (HASH, table_always_7, "i8", "expert always chosen"),
}


def in_rounds(cases):
    """The cases in few folders, no tensor or its scales twice in one."""
    rounds = []
    for case, (name, *_) in cases.items():
        base = name.rpartition(".")[0]
        for one in rounds:
            if base not in one:
                one[base] = case
                break
        else:
            rounds.append({base: case})
    return [list(one.values()) for one in rounds]


@pytest.mark.parametrize("cases", in_rounds(POKED))
def test_poked(copy, cases):
    folder = copy()
    for case in cases:
        name, edit, dtype, _ = POKED[case]
        poke(folder, name, edit, dtype)
    planted = {(POKED[case][3], POKED[case][0]) for case in cases}
    assert set(faults(audit(folder))) == planted


NVFP4 = {
    "whole matrix's scale wrong": (f"{EXPERT}.w1.weight_scale_2", lambda a: put(0, a[0] * 64)(a), "f4", "size outlier"),
    "whole matrix's scale zero": (f"{EXPERT}.w1.weight_scale_2", put(0, 0), "f4", "bad global scale"),
    "whole matrix's scale negative": (f"{EXPERT}.w2.weight_scale_2", put(0, -1), "f4", "bad global scale"),
    "whole matrix's scale NaN": (f"{EXPERT}.w3.weight_scale_2", put(0, np.nan), "f4", "bad global scale"),
    "group's scale zero": (f"{EXPERT}.w1.weight_scale", put((1, 1), 0), "u1", "zero scale"),
    "group's scale NaN": (f"{EXPERT}.w1.weight_scale", put((1, 1), 0x7F), "u1", "scale not finite"),
    "activation scale zero": (f"{EXPERT}.w2.input_scale", put(0, 0), "f4", "bad input scale"),
}


@pytest.mark.parametrize("cases", in_rounds(NVFP4))
def test_poked_nvfp4(copy, cases):
    folder = copy("nvfp4")
    for case in cases:
        poke(folder, *NVFP4[case][:3])
    planted = {
        (kind, f"{EXPERT}.w1.weight" if kind == "size outlier" else name) for name, _, _, kind in map(NVFP4.get, cases)
    }
    assert set(faults(audit(folder))) == planted


PARTS = (".w1.weight", ".w1.scale", ".w2.weight", ".w2.scale", ".w3.weight", ".w3.scale")
W1, W3 = f"{EXPERT}.w1", f"{EXPERT}.w3"
OTHERS = "layers.3.ffn.experts"
CHANGED = {
    "gate and up exchanged": (swap(W1, W3, (".weight", ".scale")), "gate and up swapped", f"{W1}.weight"),
    "two experts exchanged": (swap(f"{OTHERS}.2", f"{OTHERS}.7", PARTS), "experts swapped", f"{OTHERS}.2.w1.weight"),
    "expert copied over another": (copy_expert, "duplicate", f"{EXPERT}.w2.weight"),
    "weight of another layer": (
        copy_part("layers.3.attn.q_norm.weight", "layers.1.attn.q_norm.weight"),
        "duplicate",
        "layers.3.attn.q_norm.weight",
    ),
    "expert's scales left at one": (
        lambda t: t[f"{EXPERT}.w2.scale"].__setitem__(2, b"\x7f" * len(t[f"{EXPERT}.w2.scale"][2])),
        "size outlier",
        f"{EXPERT}.w2.weight",
    ),
    "expert's codes copied, its scales its own": (
        copy_part(f"{EXPERT}.w3.weight", "layers.2.ffn.experts.5.w3.weight"),
        "duplicate",
        "layers.2.ffn.experts.5.w3.weight",
    ),
    "tensor missing": (lambda t: t.pop("layers.1.attn_norm.weight"), "missing", "layers.1.attn_norm.weight"),
    "scale missing": (lambda t: t.pop(f"{W1}.scale"), "missing", f"{W1}.scale"),
    "tensor nobody knows": (lambda t: t.update(extra=["F32", [1], b"1234"]), "unexpected", "extra"),
    "tensor misshapen": (lambda t: t["norm.weight"].__setitem__(1, [2, 128]), "misshapen", "norm.weight"),
    "scales as plain bytes": (lambda t: t[f"{W1}.scale"].__setitem__(0, "U8"), "mistyped", f"{W1}.scale"),
    "expert half converted": (half_convert, "mixed formats", f"{W1}.weight"),
}


@pytest.mark.parametrize("case", CHANGED)
def test_changed(copy, case):
    edit, kind, name = CHANGED[case]
    folder = copy()
    change(folder, edit)
    assert (kind, name) in faults(audit(folder))


def requantised_copy(tensors):
    """Expert 5 in place of 3, every scale doubled and every code halved where that is exact: not a byte is the same."""
    for part in ("w1", "w2", "w3"):
        data, scale = (tensors[f"layers.2.ffn.experts.5.{part}.{kind}"] for kind in ("weight", "scale"))
        codes = np.frombuffer(data[2], np.uint8)
        halved = np.array([0, 0, 1, 2, 2, 3, 4, 5], np.uint8)  # of 0, .5, 1, 1.5, 2, 3, 4, 6
        low, high = (halved[half & 7] | half & 8 for half in (codes & 15, codes >> 4))
        tensors[f"{EXPERT}.{part}.weight"][2] = (low | high << 4).astype(np.uint8).tobytes()
        tensors[f"{EXPERT}.{part}.scale"][2] = (np.frombuffer(scale[2], np.uint8) + 1).astype(np.uint8).tobytes()


def test_an_expert_that_is_nearly_another(copy):
    folder = copy()
    change(folder, requantised_copy)
    assert ("copied expert", "layers.2.ffn.experts.5.w1.weight") in faults(audit(folder))


def test_a_token_without_an_embedding(copy):
    folder = copy()
    poke(folder, "embed.weight", put(77, 0), "u2")
    assert faults(audit(folder)) == [("dead rows", "embed.weight")]
    file = folder / "tokenizer.json"
    raw = json.loads(file.read_text())
    vocab = raw["model"]["vocab"]
    raw["added_tokens"].append({"id": 77, "content": next(name for name, token in vocab.items() if token == 77)})
    file.write_text(json.dumps(raw))
    assert faults(audit(folder)) == []  # a reserved name: nothing writes it
    file.unlink()
    assert faults(audit(folder)) == []  # a padded vocabulary has rows of zeros


def test_files(copy):
    folder = copy()
    write_index(folder, total_change=4)
    assert faults(audit(folder)) == [("stale index", "model.safetensors.index.json")]
    write_index(folder, lambda names: names.update(ghost=FILE))
    assert [kind for kind, _ in faults(audit(folder))] == ["files"]
    write_index(folder, lambda names: names.pop("norm.weight"))
    report = audit(folder)
    assert [kind for kind, _ in faults(report)] == ["files"]
    assert "norm.weight" in report.faults[0].text
    write_index(folder, lambda names: names.update({"norm.weight": "model-2.safetensors"}))
    assert "model-2.safetensors" in audit(folder).faults[0].text
    (folder / "model.safetensors.index.json").unlink()
    write_tensors(folder, {"norm.weight": ["BF16", [256], bytes(512)]}, "more.safetensors")
    assert "norm.weight" in audit(folder).faults[0].text


def test_cut_file_names_the_tensor(copy):
    folder = copy()
    size = (folder / FILE).stat().st_size
    with (folder / FILE).open("r+b") as stream:
        stream.truncate(size - 1)
    report = audit(folder)
    assert [finding.kind for finding in report.faults] == ["files"]
    assert report.faults[0].tensor.startswith("layers.")
    assert "is truncated" in report.faults[0].text


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [("num_hash_layers", 1, "missing"), ("n_routed_experts", 2**31, "headers"), ("rope_theta", -1, "config")],
)
def test_config(copy, key, value, kind):
    folder = copy()
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {key: value}))
    assert kind in {found for found, _ in faults(audit(folder))}


@pytest.mark.parametrize("text", ["{", '{"model": {"vocab": {"a": 5000}}}', '{"model": 1}'])
def test_tokenizer(copy, text):
    folder = copy()
    (folder / "tokenizer.json").write_text(text)
    assert faults(audit(folder)) == [("tokenizer", "tokenizer.json")]


def test_sound_copies_have_no_fault(sound):
    for folder in sound.values():
        assert faults(audit(folder)) == []


@pytest.mark.parametrize("experts", ["mxfp4", "nvfp4", "fp8", "bf16"])
def test_random_checkpoints_have_no_fault(tmp_path, experts):
    config = ModelConfig.tiny(num_hidden_layers=4, compress_ratios=(0, 4, 128, 4, 0))
    folder = write_checkpoint(tmp_path / "synth", config, experts=experts)
    assert faults(audit(folder)) == []


def test_one_flipped_byte_is_found_against_the_original(copy, sound):
    folder = copy()
    poke(folder, f"{EXPERT}.w1.weight", lambda a: put((40, 11), a[40, 11] ^ 0x30)(a))
    assert faults(audit(folder)) == []  # a code like any other
    report = audit(folder, against=sound["mxfp4"])
    assert faults(report) == [("differs", f"{EXPERT}.w1.weight")]
    assert "first at [40, 23]" in report.faults[0].text


def test_one_flipped_byte_is_found_against_an_earlier_report(copy, sound, tmp_path):
    file = tmp_path / "before.json"
    file.write_text(json.dumps(audit(sound["mxfp4"]).to_dict()))
    folder = copy()
    assert faults(audit(folder, against=file)) == []
    poke(folder, f"{EXPERT}.w1.scale", lambda a: put((40, 1), a[40, 1] + 1)(a))
    assert faults(audit(folder, against=file)) == [("differs", f"{EXPERT}.w1.weight")]
    change(folder, lambda tensors: tensors.pop("norm.weight"))
    assert ("missing", "norm.weight") in faults(audit(folder, against=file))
