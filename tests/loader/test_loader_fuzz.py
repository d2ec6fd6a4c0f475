"""Damaged configs, headers and index files: each loads or gives a clear error, within a second."""

import json
import random
import time

import pytest
from loader_cases import SMALL, entries_of, header_of, write_raw

from dsv4.config import ConfigError, ModelConfig
from dsv4.loader.checkpoint import INDEX_FILE, Checkpoint
from dsv4.loader.header import CheckpointError
from dsv4.loader.resolve import plan_load
from dsv4.loader.write.config_file import config_to_dict

FILE = "model-00001-of-00001.safetensors"
MOST_SECONDS = 1.0
HUGE = (2**31, 2**31 - 1, 2**40 - 1, 2**40, 2**63, 2**64, 10**30, -1, -(2**63))
ODD = (
    0, 1, 2, 3, 5, 7, 128, 4096, 1.5, -0.0, 1e308, float("nan"), float("inf"), True, False, None, "", "a" * 5000,
    "\ud800", "\x00", [], {}, [[]], [0] * 5000, {"a": {"b": []}}, [None], ["x"], "fp8", "yarn",
)  # fmt: skip


def nested(depth):
    return "[" * depth + "]" * depth


class Damage:
    """One folder's texts, and random changes to them."""

    def __init__(self, rng):
        self.rng = rng
        experts = rng.choice(("mxfp4", "nvfp4", "fp8", "bf16"))
        self.config = config_to_dict(SMALL, experts)
        self.entries, self.data_bytes = entries_of(header_of(SMALL, experts, with_mtp=rng.random() < 0.7))
        self.index = {"metadata": {"total_size": self.data_bytes}, "weight_map": dict.fromkeys(self.entries, FILE)}
        self.has_index = rng.random() < 0.4
        self.raw = []  # edits of the config's and the header's bytes

    def value(self):
        return self.rng.choice(self.rng.choice((HUGE, ODD)))

    def apply(self):
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            self.rng.choice((
                self.change_config, self.change_config, self.drop_key, self.add_key, self.change_list,
                self.change_entry, self.rename, self.drop_tensor, self.change_index, self.change_bytes,
            ))()  # fmt: skip

    def change_config(self):
        target = self.rng.choice([self.config, self.config, self.config["rope_scaling"] or {}])
        if isinstance(target, dict) and target:
            target[self.rng.choice(list(target))] = self.value()

    def drop_key(self):
        self.config.pop(self.rng.choice(list(self.config)))
        self.config.setdefault("rope_scaling", None)

    def add_key(self):
        known = ("layer_types", "mlp_layer_types", "rope_parameters", "quantization_config", "dspark_block_size", "dim",
                 "partial_rotary_factor", "compress_rates", "n_group", "text_config", "beta_fast", "zzz")  # fmt: skip
        self.config[self.rng.choice(known)] = self.value()

    def change_list(self):
        ratios = self.config.get("compress_ratios")
        if isinstance(ratios, list) and ratios:
            self.rng.choice((
                lambda: ratios.append(self.value()), ratios.pop, lambda: ratios.append(0),
                lambda: ratios.__setitem__(self.rng.randrange(len(ratios)), self.value()),
                lambda: ratios.extend([0] * self.rng.choice((2, 70, 100_000))),
            ))()  # fmt: skip

    def change_entry(self):
        entry = self.entries[self.rng.choice(list(self.entries))]
        key = self.rng.choice(("dtype", "shape", "data_offsets", "extra"))
        if (
            key in ("shape", "data_offsets")
            and isinstance(entry.get(key), list)
            and entry[key]
            and self.rng.random() < 0.7
        ):
            entry[key][self.rng.randrange(len(entry[key]))] = self.value()
        else:
            entry[key] = self.rng.choice(("I8", "U8", "BF16", "F8_E8M0", self.value()))

    def rename(self):
        name = self.rng.choice(list(self.entries))
        other = self.rng.choice(
            (name + ".scale", "model." + name, name.replace("layers.", "layers.9"), name.replace("attn", "self_attn"),
             "mtp.99999999999999999999.x", "mtp.1.norm.weight", "\ud800", "", "a" * 5000, name.replace("w1", "w3"))
        )  # fmt: skip
        self.entries[other] = self.entries.pop(name)

    def drop_tensor(self):
        for name in self.rng.sample(list(self.entries), self.rng.choice((1, 2, len(self.entries) // 2))):
            del self.entries[name]
            if isinstance(self.index.get("weight_map"), dict):
                self.index["weight_map"].pop(name, None)

    def change_index(self):
        self.has_index = True
        kind = self.rng.randrange(5)
        names = list(self.index["weight_map"]) if isinstance(self.index.get("weight_map"), dict) else []
        if kind == 0 or not names:
            self.index["weight_map"] = self.value()
        elif kind == 1:
            self.index["weight_map"][self.rng.choice(names)] = self.rng.choice(
                ("../x", "gone.safetensors", self.value())
            )
        elif kind == 2:
            del self.index["weight_map"][self.rng.choice(names)]
        elif kind == 3:
            self.index["weight_map"]["more"] = FILE
        else:
            self.index = self.rng.choice(({}, [], None, self.index | {"more": 1}))
            self.index = self.index if isinstance(self.index, dict) else {"weight_map": self.index}

    def change_bytes(self):
        self.raw.append((self.rng.choice(("config", "header")), self.rng.randrange(6), self.rng.random()))

    def write(self, folder):
        texts = {"config": json.dumps(self.config).encode(), "header": json.dumps(self.entries).encode()}
        cut = None
        for which, kind, place in self.raw:
            text = texts[which]
            at = int(place * len(text))
            if kind == 0:
                text = text[:at] + bytes([int(place * 7919) % 256]) + text[at + 1 :]
            elif kind == 1:
                text = text[:at]
            elif kind == 2:
                text = text[:at] + nested(int(place * 200_000)).encode() + text[at:]
            elif kind == 3:
                text = text[:at] + b"9" * 5000 + text[at:]
            elif kind == 4:
                text = text[:-1] + b', "vocab_size": 1, "vocab_size": 2}'
            else:
                cut = place
            texts[which] = text
        (folder / "config.json").write_bytes(texts["config"])
        header = texts["header"]
        total = 8 + len(header) + self.data_bytes
        with write_raw(folder / FILE, header).open("r+b") as stream:
            stream.truncate(total if cut is None else int(cut * total))
        index = folder / INDEX_FILE
        index.unlink(missing_ok=True)
        if self.has_index:
            index.write_text(json.dumps(self.index))


def outcome(folder):
    """Whether it loads; else the error's text."""
    try:
        with Checkpoint.open(folder) as checkpoint:
            plan_load(checkpoint, ModelConfig.from_pretrained(folder))
    except (CheckpointError, ConfigError) as error:
        return str(error)
    return "loads"


def check_damaged(folder, cases):
    folder.mkdir()
    outcomes = {"loads": 0, "refused": 0}
    for number in cases:
        damage = Damage(random.Random(number))
        damage.apply()
        damage.write(folder)
        started = time.process_time()
        try:
            text = outcome(folder)
        except Exception as error:
            raise AssertionError(f"case {number} ended in {type(error).__name__}") from error
        assert time.process_time() - started < MOST_SECONDS, f"case {number} took too long"
        assert text.replace("\n", "").isprintable(), f"case {number}: {text!a}"
        assert 20 < len(text) < 4000 or text == "loads", f"case {number}: {text}"
        outcomes["loads" if text == "loads" else "refused"] += 1
    return outcomes


def test_damaged_folders_load_or_are_refused(tmp_path):
    outcomes = check_damaged(tmp_path / "folder", range(300))
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.slow
def test_ten_thousand_damaged_folders(tmp_path):
    print(check_damaged(tmp_path / "folder", range(10_000)))
