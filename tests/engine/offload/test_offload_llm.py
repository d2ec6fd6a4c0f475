"""A checkpoint with offloaded experts, from its files to its tokens: the same bits as with all of them resident."""

from dataclasses import replace

import pytest
import torch
from draft_cases import ForcedDrafts, assert_same_drafts
from engine_cases import SMALL, assert_all_free
from test_runner import PiecewiseCapture

from dsv4.cli.main import main
from dsv4.config import EngineConfig
from dsv4.engine.offload import load as offload_load
from dsv4.engine.offload.placement import GIB, OffloadError, Placement, divide_slots
from dsv4.engine.offload.pool import LayerExperts, _Staging
from dsv4.engine.ranks import load as rank_load
from dsv4.engine.run.bucket_sizes import step_buckets
from dsv4.engine.run.runner import Runner
from dsv4.formats.trees import tensors_of
from dsv4.llm import LLM
from dsv4.loader.write.synth import write_checkpoint
from dsv4.ops import TORCH
from dsv4.request import RequestError, SamplingParams
from dsv4.tools.bench.context import build_offloaded
from dsv4.tools.bench.model import Settings, run_bench
from dsv4.tools.plan.plan import plan

CONFIG = replace(SMALL, n_routed_experts=8)
TOP_K = CONFIG.num_experts_per_tok
LIMITS = EngineConfig(max_context_tokens=512, max_concurrent_requests=3, max_chunk_tokens=24)
PROMPTS = [list(range(3, 43)), [7, 8, 9], list(range(100, 120))]
PARAMS = [SamplingParams(max_tokens=8, seed=seed, ignore_eos=True, logprobs=3) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """NVFP4 experts, and MXFP4 ones in the draft block: two kinds of layers in one pool."""
    path = tmp_path_factory.mktemp("offload") / "model"
    return write_checkpoint(path, CONFIG, experts="nvfp4", mtp_experts="mxfp4", shard_bytes=200_000)


@pytest.fixture(scope="module")
def resident(folder):
    return LLM(folder, engine=LIMITS)


@pytest.fixture(scope="module")
def expected(resident):
    return answers(resident)


def answers(llm):
    return [(one.token_ids, one.logprobs) for one in llm.generate(PROMPTS, PARAMS)]


def test_the_resident_model_has_no_pool(resident, expected):
    stats = resident.engine.stats()
    assert resident.pool is None
    assert (stats.num_expert_hits, stats.num_expert_misses, stats.num_expert_bytes) == (0, 0, 0)
    assert len({token_ids for token_ids, _ in expected}) == 3


@pytest.mark.parametrize("slots", [TOP_K, 3, 7, 8])
def test_the_same_tokens_and_logprobs(folder, expected, slots):
    """Chunks of 24 tokens choose more experts than 2 slots hold; decode evicts all the time."""
    llm = LLM(folder, engine=LIMITS, offload_experts=slots)
    assert answers(llm) == expected
    assert_all_free(llm)
    stats = llm.engine.stats()
    assert (stats.num_expert_misses > 0) == (stats.num_expert_bytes > 0) == (slots < 8)
    if slots < 7:
        assert llm.pool.stats.num_staged_layers > 0
    else:
        assert stats.num_expert_hits > 0
    assert llm.pool.placement.num_slots == slots


def test_looking_inside(folder, resident):
    """Calls beside the engine see every row, whatever its last step was; the draft block is offloaded too."""
    llm = LLM(folder, engine=LIMITS, offload_experts=3)
    llm.generate([5], SamplingParams(max_tokens=2))
    ids = PROMPTS[0]
    assert torch.equal(llm.logits(ids), resident.logits(ids))
    assert torch.equal(llm.mtp_logits(ids, [20, 19]), resident.mtp_logits(ids, [20, 19]))
    for one, other in zip(llm.trace(ids[:9]), resident.trace(ids[:9]), strict=True):
        assert torch.equal(one.streams, other.streams)
    seen = []
    llm.engine.observers.append(lambda chosen: seen.append(tuple(chosen.shape)))
    llm.generate([PROMPTS[0]], PARAMS[:1])
    assert {shape[::2] for shape in seen} == {(CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)}
    assert sum(shape[1] for shape in seen) == len(PROMPTS[0]) + PARAMS[0].max_tokens - 1
    assert [layer.following is not None for layer in llm.pool.layers] == [True, True, False, False]
    assert len({layer.kind for layer in llm.pool.layers}) == 2
    llm.engine.check_integrity()


def test_exact_numerics(folder):
    plain, moved = (
        LLM(folder, numerics="exact", engine=LIMITS, offload_experts=slots).generate(PROMPTS, PARAMS)
        for slots in (None, 3)
    )
    assert [one.logprobs for one in moved] == [one.logprobs for one in plain]


def test_preemption_and_abort(folder, expected):
    """Too few blocks for all of them, and one that is dropped half-way."""
    limits = replace(LIMITS, max_chunk_tokens=128)
    llm = LLM(folder, engine=replace(limits, num_blocks=4), offload_experts=3)
    long = [list(range(start, start + 124)) for start in (3, 50, 20)]
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    dropped = llm.engine.add([1, 2, 3], params)
    llm.engine.step()
    llm.engine.abort(dropped)
    found = [one.token_ids for one in llm.generate(long, params)]
    assert llm.engine.stats().num_preemptions > 0
    assert found == [one.token_ids for one in LLM(folder, engine=limits).generate(long, params)]
    assert answers(llm) == expected
    assert_all_free(llm)


# ---- drafts ----


@pytest.fixture(scope="module")
def dspark_folder(tmp_path_factory):
    config = CONFIG.with_dspark(noise_token_id=3, markov_rank=128, block_size=3)
    return write_checkpoint(tmp_path_factory.mktemp("offload") / "dspark", config, experts="nvfp4")


def check_drafts(llm, other, expected):
    """Drafts that come true now and then change nothing, and are those of `other`, whose experts are all resident."""
    truth = {tuple(prompt): [*prompt, *token_ids] for prompt, (token_ids, _) in zip(PROMPTS, expected, strict=True)}
    made = [ForcedDrafts(3, "partly", truth, vocab_size=CONFIG.vocab_size) for _ in range(2)]
    for one, choice in zip((llm, other), made, strict=True):
        one.engine._drafts = choice
        assert answers(one) == expected
        assert one.engine.stats().drafts.num_accepted > 5
    assert_same_drafts(*made)
    assert_all_free(llm)
    llm.engine.check_integrity()


@pytest.mark.parametrize("slots", [TOP_K, pytest.param(7, marks=pytest.mark.slow)])
def test_drafts(folder, expected, slots):
    """The draft block's experts come and go too: a step chooses those of several rows of a request."""
    llm = LLM(folder, engine=LIMITS, offload_experts=slots, drafts=3)
    check_drafts(llm, LLM(folder, engine=LIMITS, drafts=3), expected)
    assert llm.pool.layers[-1]._recent, "the draft block is one of the pool"
    assert llm.engine.stats().num_expert_misses > 0


@pytest.mark.slow
def test_drafts_of_a_dspark_head(dspark_folder):
    expected = answers(LLM(dspark_folder, engine=LIMITS))
    llm, other = (LLM(dspark_folder, engine=LIMITS, offload_experts=slots, drafts="auto") for slots in (3, None))
    check_drafts(llm, other, expected)


SIZES = [
    pytest.param(0, {1, 2, 4, 12}, marks=pytest.mark.slow, id="MTP"),
    pytest.param(4, {1, 2, 4, 12}, id="block of 4"),
    pytest.param(5, {1, 2}, id="block of 5"),
]


@pytest.mark.parametrize(("block_size", "captured"), SIZES)
def test_drafts_in_pieces(tmp_path, block_size, captured):
    """Captured calls are cut at the draft layers too. A bucket is captured if the experts of its largest call always
    fit: with a DSpark head that is the block of all its requests."""
    config = replace(CONFIG, n_routed_experts=32)
    if block_size:
        config = config.with_dspark(noise_token_id=3, markov_rank=128, block_size=block_size)
    folder = write_checkpoint(tmp_path / "model", config)
    llm = LLM(folder, engine=LIMITS, offload_experts=24, drafts=3)
    capture = PiecewiseCapture()
    capture.pool = llm.pool
    runner = llm.engine.runner = Runner(
        llm.model, llm.cache, buckets=(1, 2, 4, 12), use_graphs=True, experts=llm.pool, capture=capture,
        drafting=llm.engine.runner.drafting,
    )  # fmt: skip
    runner.warm_up()
    assert set(runner.captured) == captured
    if 12 in captured:
        other = LLM(folder, engine=LIMITS, drafts=3)
        check_drafts(llm, other, answers(LLM(folder, engine=LIMITS)))
        assert runner.num_replays > runner.num_direct


def test_slots_for_drafts():
    config = replace(CONFIG, n_routed_experts=64)
    assert divide_slots(40, config, replace(LIMITS, max_draft_tokens=3)) == Placement(16, 24), "four rows a request"
    block = config.with_dspark(noise_token_id=3, markov_rank=128, block_size=5)
    assert divide_slots(40, block, replace(LIMITS, max_draft_tokens=2)) == Placement(10, 30), "its block"
    assert divide_slots(40, block, LIMITS) == Placement(32, 8), "without drafts"


# ---- what may be asked for ----


@pytest.mark.parametrize("wanted", [1, 0, -3, 9, 2.5, "many", "", "4", [4], float("nan")])
def test_bad_values(folder, wanted):
    with pytest.raises(OffloadError, match=r"from 2 \(what a token chooses\) to 8 \(all there are\), found"):
        LLM(folder, engine=LIMITS, offload_experts=wanted)


@pytest.mark.parametrize("wanted", [None, False, True, "auto"])
def test_nothing_that_fits_is_offloaded_unasked(folder, wanted):
    assert LLM(folder, engine=LIMITS, offload_experts=wanted).pool is None


def reserved(config):
    """Bytes of everything but slots, and of one expert of every layer."""
    planned = plan(config, LIMITS, gpu="1000", offload_experts=True)
    expert = planned.weights.routed_expert_bytes // config.n_routed_experts
    return planned.budget.total - config.num_experts_per_tok * expert, expert


@pytest.mark.parametrize("room", [2, 12.5])
def test_auto_is_what_the_plan_says(tmp_path, monkeypatch, room):
    config = replace(CONFIG, n_routed_experts=32)
    folder = write_checkpoint(tmp_path / "model", config)
    others, expert = reserved(config)
    usable = others + int(room * expert)
    monkeypatch.setattr(offload_load, "usable_bytes", lambda device: usable)
    llm = LLM(folder, engine=LIMITS, offload_experts="auto")
    forecast = plan(config, LIMITS, gpu=str(usable / GIB), offload_experts=True).forecast
    assert (forecast.num_fixed > 0) == (room > 8)
    assert llm.pool.placement == Placement(forecast.num_fixed, forecast.num_slots - forecast.num_fixed)
    assert llm.pool.placement.num_slots == int(room)
    assert llm.pool.host_bytes() == forecast.host_bytes


def test_no_room_for_one_token(tmp_path, monkeypatch):
    folder = write_checkpoint(tmp_path / "model", CONFIG)
    others, expert = reserved(CONFIG)
    usable = others + 2 * expert
    planned = (plan(CONFIG, LIMITS, gpu=str(size / GIB), offload_experts=True) for size in (usable - 1, usable + 1))
    assert [found.fits[0].fits for found in planned] == [False, True]
    monkeypatch.setattr(offload_load, "usable_bytes", lambda device: usable - 1)
    with pytest.raises(OffloadError, match="one token's 2 experts of every layer, found room for 1: lower the limits"):
        LLM(folder, engine=LIMITS, offload_experts="auto")


def test_too_little_host_memory_is_told_before_loading(folder, monkeypatch):
    monkeypatch.setattr(offload_load, "host_bytes_available", lambda: 1000)
    monkeypatch.setattr(offload_load, "load_params", None)
    with pytest.raises(OffloadError, match=r"offloaded experts need 0.0 GiB of host memory, and 0.0 GiB are available"):
        LLM(folder, engine=LIMITS, offload_experts=3)
    monkeypatch.undo()
    assert LLM(folder, engine=LIMITS, offload_experts=8).pool.host_bytes() == 0


@pytest.mark.parametrize(("wanted", "advice"), [(None, "--offload-experts auto"), (3, "a smaller offload_experts")])
def test_a_full_device_names_the_option(folder, monkeypatch, wanted, advice):
    def fail(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    monkeypatch.setattr(rank_load, "load_params" if wanted is None else "load_offloaded", fail)
    with pytest.raises(RequestError, match=f"no room for the weights .*{advice}.*CUDA out of memory. Tried"):
        LLM(folder, engine=LIMITS, offload_experts=wanted)


def test_slots_are_divided_so_that_decode_is_captured():
    config = replace(CONFIG, n_routed_experts=64)
    many = EngineConfig(max_concurrent_requests=16)
    assert divide_slots(5, config, LIMITS) == Placement(0, 5)
    assert divide_slots(20, config, LIMITS) == Placement(12, 8), "four tokens' choices at least"
    assert divide_slots(40, config, many) == Placement(8, 32), "one token of every request"
    assert divide_slots(64, config, many) == Placement(64, 0)


# ---- mistakes ----


def test_a_stale_slot_is_noticed(folder, expected):
    """Planted: a slot keeps its last tenant's bytes while the books say otherwise."""
    llm = LLM(folder, engine=LIMITS, offload_experts=4)
    assert answers(llm) == expected
    layer = llm.pool.layers[1]
    (first, slot), (_, other) = list(layer._recent.items())[:2]
    for part in tensors_of(layer.stack):
        part[slot] = part[other]
    with pytest.raises(AssertionError, match=f"slot {slot} does not hold expert {first}"):
        llm.engine.check_integrity()


@pytest.mark.parametrize("num_copies", [0, 1, 4])
def test_a_call_cut_short_leaves_no_stale_slot(folder, expected, monkeypatch, num_copies):
    """Ctrl-C while experts are copied: the request is gone, the slots still hold what they say."""
    llm = LLM(folder, engine=LIMITS, offload_experts=3)
    layer, left = llm.pool.layers[1], num_copies

    class Interrupted:
        def __init__(self, part):
            self.part = part

        def __getitem__(self, slot):
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return self.part[slot]

    parts = list(layer._parts)
    layer._parts = [(Interrupted(device_part), host_part) for device_part, host_part in parts]
    with pytest.raises(KeyboardInterrupt):
        llm.generate([5], SamplingParams(max_tokens=2))
    layer._parts = parts
    assert_all_free(llm)
    assert answers(llm) == expected


def test_a_stack_in_use_is_not_filled(folder):
    """A layer staged ahead and not asked for may be found later, when its stack's turn has come again."""
    llm = LLM(folder, engine=LIMITS, offload_experts=3)
    layer = llm.pool.layers[0]
    staging = _Staging(layer, 2)
    assert [staging.take(None), staging.take(0), staging.take(0), staging.take(1)] == [0, 1, 1, 0]
    assert staging.holds(layer) is None
    staging.staged[1] = layer
    assert staging.holds(layer) == 1
    assert staging.take(0) == 1
    assert staging.holds(layer) is None


# ---- around it ----


def test_metrics(folder):
    pytest.importorskip("prometheus_client")
    from dsv4.http.telemetry.metrics import Metrics
    from dsv4.http.telemetry.shared_metrics import SharedMetrics

    llm = LLM(folder, engine=LIMITS, offload_experts=3)
    llm.generate([5, 6, 7], SamplingParams(max_tokens=4))
    stats = llm.engine.stats()
    text = SharedMetrics(Metrics("m"), "m").text(stats).decode()
    for name, value in {
        "hits": stats.num_expert_hits, "misses": stats.num_expert_misses, "bytes_moved": stats.num_expert_bytes,
    }.items():  # fmt: skip
        assert value > 0
        assert f'dsv4_expert_{name}_total{{model_name="m"}} {float(value)}' in text


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return ended.value.code


def test_the_command(folder, capsys):
    options = ("--model", str(folder), "--ids", "5,6,7", "--max-tokens", "8", "--context", "64")
    assert not command("generate", *options)
    plain = capsys.readouterr().out
    assert not command("generate", *options, "--offload-experts", "4")
    shown = capsys.readouterr()
    assert shown.out == plain
    assert "4 of 8 experts of each layer on the device (0 for good)" in " ".join(shown.err.split())
    assert not command("generate", *options, "--offload-experts", "auto")
    assert "all experts fit on the device" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate", "chat", "serve"])
@pytest.mark.parametrize(
    ("value", "message"),
    [("some", "--offload-experts must be auto, off or a number"), ("-1", "must be auto, off or")],
)
def test_mistakes_of_the_command(folder, capsys, name, value, message):
    prompt = ("--ids", "5") if name == "generate" else ()
    assert command(name, *prompt, "--model", str(folder), f"--offload-experts={value}") == 2
    assert message in capsys.readouterr().err


def test_more_slots_than_experts(folder, capsys):
    assert command("generate", "--ids", "5", "--model", str(folder), "--offload-experts=99") == 2
    assert "to 8 (all there are)" in capsys.readouterr().err


def test_a_benchmark_of_a_checkpoint(folder):
    made = build_offloaded(str(folder), placement=Placement(1, 4))
    sections = ("stream", "serving", "memory")
    found = run_bench(made, Settings(contexts=(40,), prompt_tokens=6, output_tokens=3, repeats=3, sections=sections))
    assert not found.of("error")
    (serving,) = found.of("serving")
    assert serving["expert_hits"] + serving["expert_misses"] > 0
    assert serving["expert_bytes"] >= serving["expert_misses"] * made.pool.layers[0].expert_bytes > 0
    assert build_offloaded(str(folder)).pool.placement == Placement(8, 0)
    made.pool.check_integrity()


def test_layers_come_in_any_order():
    pool = offload_load.ExpertPool(Placement(0, 2), 8, TOP_K, TORCH, device="cpu")
    with pytest.raises(AssertionError):
        pool.adopt(LayerExperts(pool, 1, (torch.zeros(4, 4),)))


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [TOP_K, 6])
def test_on_a_gpu(folder, slots):
    """Prepared on the device, decoded from graphs cut at every layer where the experts of all requests fit."""
    whole = LLM(folder, device="cuda", engine=LIMITS)
    llm = LLM(folder, device="cuda", engine=LIMITS, offload_experts=slots)
    assert answers(llm) == answers(whole)
    assert set(llm.engine.runner.captured) == {size for size in step_buckets(LIMITS) if size * TOP_K <= slots}
    assert llm.engine.runner.num_replays > 0
    assert_all_free(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [TOP_K, 7])
def test_drafts_on_a_gpu(folder, dspark_folder, slots):
    """Forced ones, and a drafter's own, from graphs cut at the draft layers where the experts always fit."""
    for path in (folder, dspark_folder):
        expected = answers(LLM(path, device="cuda", engine=LIMITS))
        llm, other = (LLM(path, device="cuda", engine=LIMITS, offload_experts=one, drafts=3) for one in (slots, None))
        assert answers(llm) == expected
        check_drafts(llm, other, expected)
