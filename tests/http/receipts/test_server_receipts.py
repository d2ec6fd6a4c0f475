"""Answers name what made them; a server's record, run again in other batches, gives the same bits."""

import base64
import json
import shutil
import struct
from dataclasses import replace

import pytest
import torch
from msgspec.structs import replace as with_fields
from receipt_cases import ask_all, mixed_requests, small_checkpoint
from safetensors.torch import load_file, save_file
from server_cases import make_llm, start_server

from dsv4.config import EngineConfig
from dsv4.engine import fingerprint
from dsv4.llm import LLM
from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.tools.receipts.files import RecordFile, read_record
from dsv4.tools.receipts.lines import Answer, parse_line
from dsv4.tools.receipts.recorder import Recorder, header_of
from dsv4.tools.receipts.replay import run_again

NUM_REQUESTS = 16
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=8)


def open_record(path):
    return RecordFile(path, max_bytes=2**24, num_files=2)


def load(folder, **options):
    return LLM(folder, **{"engine": LIMITS, **options})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return small_checkpoint(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="module")
def record(checkpoint, tmp_path_factory):
    """A record of every kind of request, from a live server."""
    path = tmp_path_factory.mktemp("record") / "receipts.jsonl"
    llm = load(checkpoint)
    server = start_server(llm, Recorder(open_record(path), header_of(llm)))
    statuses = ask_all(server.url, mixed_requests(NUM_REQUESTS, "tiny"))
    assert set(statuses) == {200}
    server.wait_until_free()
    server.stop()
    return path


def test_the_record_is_whole(record, checkpoint):
    entries = list(read_record([record]))
    receipts = [receipt for _, _, receipt in entries]
    assert len({receipt.request_id for receipt in receipts}) == NUM_REQUESTS
    assert len(receipts) > NUM_REQUESTS, "some have several answers"
    assert {receipt.route for receipt in receipts} == {
        "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
    }  # fmt: skip
    assert {receipt.finish for receipt in receipts} == {"stop", "length"}
    assert all("logprobs" in receipt.digests for receipt in receipts), "asked for or not"
    assert any(receipt.grammar for receipt in receipts)
    assert any(receipt.num_output == 0 for receipt in receipts)
    assert not any(receipt.changed for receipt in receipts)
    _, header, _ = entries[0]
    assert header.model == str(checkpoint.resolve())
    assert {"layers.0", "layers.1", "config.json", "tokenizer.json"} <= set(header.parts)


@pytest.mark.parametrize(
    "options",
    [("--batch", 1, "--no-prefix-cache"), ("--batch", 3, "--chunk", 37)],
    ids=["alone", "in other pieces"],
)
def test_it_gives_the_same_bits(record, dsv4, options):
    ended = dsv4("replay", record, *options)
    assert ended.code == 0, ended.out + ended.err
    assert "the same tokens and log-probabilities, bit for bit" in ended.out
    assert "not the same" not in ended.err


def test_other_weights_are_named(record, checkpoint, dsv4, tmp_path):
    """One value of one layer, away from the samples that a fingerprint takes."""
    folder = shutil.copytree(checkpoint, tmp_path / "changed")
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    norm = tensors["layers.1.ffn_norm.weight"]
    norm[5] = norm[5] * 2 + 1
    save_file(tensors, file)
    ended = dsv4("replay", record, "--model", folder, "--limit", 6, "--json")
    report = json.loads(ended.out)
    assert ended.code == 1
    assert not report["is_same"]
    assert [change["what"] for change in report["changes"]] == ["checkpoint (layers.1)"]
    first = report["differences"][0]
    assert first["kind"] in ("tokens", "log-probabilities")
    assert first["token"] is not None
    assert "not the same checkpoint (layers.1)" in ended.err


def test_other_kernels_are_named(record, dsv4, monkeypatch):
    """Other code that happens to give the same bits is the same result, and is told."""
    monkeypatch.setattr(fingerprint, "_libraries", lambda device: ["torch 9.9"])
    ended = dsv4("replay", record, "--limit", 3)
    assert ended.code == 0
    assert "not the same libraries" in ended.err
    assert "torch 9.9 now" in ended.err
    assert "not the same kernel version" in ended.err
    assert "not the same checkpoint" not in ended.err


def test_other_numerics_are_named(record, dsv4):
    ended = dsv4("replay", record, "--limit", 6, "--numerics", "exact")
    assert ended.code == 1
    assert "not the same numerics: official in the record, exact.float32 now" in ended.err
    assert "differ; not the same: numerics" in ended.out


def other_seed(line):
    line["params"].update(seed=5)


def other_temperature(line):
    line["params"].update(seed=5, temperature=1.5)


def other_token(line):
    line["output"][-1] = 200


def other_end(line):
    line["finish"] = "stop" if line["finish"] == "length" else "length"


def other_bit(line):
    packed = bytearray(base64.b64decode(line["logprobs"]))
    packed[-4] ^= 1
    line["logprobs"] = base64.b64encode(packed).decode()


def forge(line):
    """Digests that fit what the line now says, for whoever would like it to have happened."""
    receipt = parse_line(json.dumps(line).encode())
    values = struct.unpack(f"<{len(receipt.output)}f", base64.b64decode(line["logprobs"]))
    answer = Answer(
        prompt=receipt.prompt, params=replace(receipt.sampling(), logprobs=0), output=receipt.output,
        finish=receipt.finish, logprobs=tuple(TokenLogprobs(0, value, ()) for value in values),
    )  # fmt: skip
    line["digests"] |= {name: one for name, one in answer.digests().items() if name != "params"}
    line["params"]["logprobs"], line["digests"]["params"] = 0, answer.digests()["params"]
    line["digests"].pop("top_logprobs", None)


def test_differences_say_where_first(record, dsv4, tmp_path):
    """Four requests changed with digests that fit, and a seed without."""
    lines = record.read_text().splitlines()
    free = [number for number, line in enumerate(lines) if '"grammar"' not in line and '"output":[' in line]
    free = [number for number in free if json.loads(lines[number])["num_output"] > 1][:5]
    changes = [other_temperature, other_token, other_end, other_bit, other_seed]
    for number, change in zip(free, changes, strict=True):
        content = json.loads(lines[number])
        change(content)
        if number != free[-1]:
            forge(content)
        lines[number] = json.dumps(content)
    copy = tmp_path / "edited.jsonl"
    copy.write_text("\n".join(lines[: free[-1] + 2]) + "\n")
    ended = dsv4("replay", copy, "--json")
    differences = json.loads(ended.out)["differences"]
    assert ended.code == 1
    assert [one["line"] for one in differences] == [number + 1 for number in free]
    warm, token, end, bit, unfit = differences
    assert (warm["kind"], token["kind"], end["kind"]) == ("tokens", "tokens", "finish")
    assert "is 200 in the record" in token["text"]
    assert token["token"] == len(json.loads(lines[free[1]])["output"]) - 1
    assert (bit["kind"], bit["token"]) == ("log-probabilities", len(json.loads(lines[free[3]])["output"]) - 1)
    assert "0x" in bit["text"]
    assert (unfit["kind"], unfit["text"]) == ("changed", "its seed was changed after it was recorded; not run")
    shown = dsv4("replay", copy)
    assert "5 differ; nothing else that is known to decide bits differs" in shown.out


def test_what_cannot_run_says_why(record, dsv4, tmp_path, checkpoint):
    (tmp_path / "empty").write_text("")
    (tmp_path / "words").write_text("hello\n")
    (tmp_path / "header").write_text(record.read_text().splitlines()[0] + "\n")
    for arguments, why in {
        (tmp_path / "none",): "none",
        (tmp_path / "empty",): "not a record",
        (tmp_path / "words",): "not a record",
        (tmp_path / "header",): "no request in it",
        (tmp_path,): "directory",
        (record, "--batch", 0): "--batch must be at least 1",
        (record, "--numerics", "best"): "--numerics must be one of",
        (record, "--model", tmp_path / "none"): "config.json",
    }.items():
        ended = dsv4("replay", *arguments)
        assert ended.code == 2, arguments
        assert why in ended.err
        assert "Traceback" not in ended.err
    lines = record.read_text().splitlines()
    (tmp_path / "torn").write_text("\n".join(lines[:4]) + "\n" + lines[4][:60])
    ended = dsv4("replay", tmp_path / "torn")
    assert ended.code == 0
    assert "torn:5: it is truncated" in ended.out
    assert "3 requests" in ended.out


def test_hashes_alone(checkpoint, record, dsv4, tmp_path):
    """They prove an answer to whoever has the question."""
    path = tmp_path / "hashes.jsonl"
    llm = load(checkpoint)
    server = start_server(llm, Recorder(open_record(path), header_of(llm, hashes_only=True)))
    seeded = [(route, body) for route, body in mixed_requests(NUM_REQUESTS, "tiny") if "seed" in body][:5]
    ask_all(server.url, seeded)
    server.stop()
    assert not any(word in path.read_text() for word in ("harbour", '"prompt":[', '"output":['))
    ended = dsv4("replay", path)
    assert ended.code == 2
    assert "--content" in ended.err
    ended = dsv4("replay", path, "--content", record)
    assert ended.code == 0, ended.out + ended.err
    receipts = [receipt for _, _, receipt in read_record([path])]
    assert f"{len(receipts)} requests" in ended.out
    lines = path.read_text().splitlines()
    wrong = json.loads(lines[1])
    wrong["digests"]["output"] = "0" * 32
    path.write_text("\n".join([lines[0], json.dumps(wrong), *lines[2:]]) + "\n")
    ended = dsv4("replay", path, "--content", record)
    assert ended.code == 1
    assert "hashes alone do not say where" in ended.out


def test_every_answer_names_what_made_it(live, served_params):
    name = live.llm.identity().name
    assert name.startswith("dsv4-memory-exact.float32-")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for route, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 2}),
        ("/v1/responses", {"model": "tiny", "input": "x", "max_output_tokens": 2}),
        ("/v1/messages", chat),
    ):
        for stream in (False, True):
            answer = live.post(route, {**body, "stream": stream})
            assert answer.headers["x-system-fingerprint"] == name
            if not stream and "completions" in route:
                assert answer.json()["system_fingerprint"] == name
            if stream and "completions" in route:
                events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
                assert {json.loads(event)["system_fingerprint"] for event in events} == {name}


def test_recording_shows_nothing_that_was_not_asked_for(served_params, tmp_path):
    """The same answers as without: log-probabilities that nobody asked for go into the record alone."""
    answers = []
    for is_recording in (False, True):
        llm = make_llm(served_params)
        recorder = Recorder(open_record(tmp_path / "r"), header_of(llm)) if is_recording else None
        server = start_server(llm, recorder)
        found = []
        for route, body in mixed_requests(16, "tiny", most_tokens=3):
            if "seed" in body or body.get("temperature") == 0:
                content = server.post(route, {**body, "stream": False, "request_id": "same"}).json()
                content.pop("created")
                content.pop("usage")
                found.append(content)
        answers.append(found)
        server.stop()
    assert len(answers[0]) > 7
    assert answers[0] == answers[1]


def test_a_client_that_leaves(served_params, tmp_path):
    """What it got until then is recorded, and runs again as far as that."""
    llm, path = make_llm(served_params), tmp_path / "r"
    server = start_server(llm, Recorder(open_record(path), header_of(llm)))
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        for _, _ in zip(range(6), response.iter_lines(), strict=False):
            pass
    server.wait_until_free()
    server.stop()
    ((_, header, receipt),) = read_record([path])
    assert receipt.finish == "disconnected"
    assert 3 <= receipt.num_output < 1500

    def run(one):
        fresh = make_llm(served_params)
        (outcome,) = run_again(fresh, lambda grammar: None, [("f", header, one)])
        assert fresh.engine.stats().num_output_tokens <= receipt.num_output + 1
        assert not fresh.engine.has_work
        assert fresh.cache.num_free_slots == fresh.cache.schema.num_slots
        return outcome[1]

    assert run(receipt) is None
    other = (*receipt.output[:-1], 299)
    fits = Answer(prompt=(), params=SamplingParams(), output=other, finish=receipt.finish).digests()["output"]
    wrong = with_fields(receipt, digests={**receipt.digests, "output": fits}, output=other)
    assert run(wrong).token == receipt.num_output - 1


def test_without_a_server(checkpoint, dsv4, tmp_path):
    """`LLM.generate` by hand: log-probabilities only where they were asked for."""
    path, llm = tmp_path / "offline.jsonl", load(checkpoint)
    asked = [SamplingParams(max_tokens=4, seed=1), SamplingParams(max_tokens=1_000_000, logprobs=2, seed=2)]
    with Recorder(open_record(path), header_of(llm)) as recorder:
        for params, completion in zip(asked, llm.generate(["abc", "x" * 505], asked), strict=True):
            recorder.add(Answer.of(params, completion))
    ended = dsv4("replay", path)
    assert ended.code == 0, ended.out + ended.err
    assert "(1 were recorded without)" in ended.out


def test_a_fingerprint_changes_with_what_decides_bits(checkpoint, monkeypatch, tmp_path):
    llm = load(checkpoint)
    base = llm.identity()
    assert base == llm.identity() == load(checkpoint, engine=EngineConfig(max_context_tokens=64)).identity()
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    assert load(copy).identity() == base, "a folder's name decides nothing"
    exact = load(checkpoint, numerics="exact", dtype=torch.float64).identity()
    assert exact.numerics == "exact.float64"
    assert exact.checkpoint == base.checkpoint
    words = json.loads((copy / "tokenizer.json").read_text())
    (copy / "tokenizer.json").write_text(json.dumps(words, indent=1))
    assert load(copy).identity().checkpoint != base.checkpoint
    monkeypatch.setattr(fingerprint.torch, "get_num_threads", lambda: 7)
    assert llm.identity().processor.endswith(".7t")
    assert llm.identity().name != base.name
