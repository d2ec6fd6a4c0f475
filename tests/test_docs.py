"""The documents: examples run as they stand, links lead somewhere, numbers stand in records, lines end in time."""

import ast
import io
import json
import re
import shlex
import tokenize
from pathlib import Path

import pytest
import torch

from benchmarks import rank_speed, server_goals
from benchmarks.engine import timeline
from benchmarks.engine.model import conclusions
from benchmarks.kernels import ops as kernel_ops
from benchmarks.kernels import plots
from benchmarks.rank_speed import PUBLISHED
from benchmarks.records import read_records
from dsv4.cache.schema import build_cache_schema
from dsv4.cli.main import main
from dsv4.config import EngineConfig, ModelConfig
from dsv4.config.layers import build_schedule
from dsv4.formats.fp8 import fp8_block_quantize
from dsv4.formats.tensors import QuantActivation, QuantFormat, QuantTensor
from dsv4.ops.linear.op import linear_ref
from dsv4.testing import bench
from dsv4.testing.inputs import normal
from dsv4.testing.numeric import assert_close_to_oracle
from dsv4.tools.bench import profile
from tools import doc_tree
from tools.wrap_docs import WIDTH, documents, wrapped

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(document, language):
    """(first line, text) of the fenced blocks of one language."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [(text[: match.start(2)].count("\n"), match[2]) for match in BLOCK.finditer(text) if match[1] == language]


def run_command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert not ended.value.code, arguments


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """A folder with a model called `checkpoint` and a conversation, to run examples in."""
    monkeypatch.chdir(tmp_path)
    run_command("synth", "checkpoint", "--layers", "2")
    (tmp_path / "conversation.json").write_text('[{"role": "user", "content": "Hello"}]')
    return tmp_path


@pytest.mark.parametrize(("document", "least"), [("docs/api.md", 6), ("README.md", 1), ("docs/receipts.md", 1)])
def test_python_examples(workspace, capsys, document, least):
    """The blocks of a document are one program, cut into pieces."""
    found = blocks(document, "python")
    assert len(found) >= least
    names: dict[str, object] = {}
    for line, source in found:
        code = compile("\n" * line + source, str(ROOT / document), "exec")
        exec(code, names)
    if document == "docs/api.md":
        assert all(sum(layer.counts) > 0 for layer in names["counter"].layers()), "the observer was told nothing"
        assert "prompt token 1 is 999999; ids are integers from 0 to 511" in capsys.readouterr().out


def test_commands_of_the_readme(workspace):
    commands = [
        shlex.split(line, comments=True)
        for _, text in blocks("README.md", "")
        for line in text.splitlines()
        if line.startswith("dsv4 ")
    ]
    assert {command[1] for command in commands} >= {"generate", "info", "plan", "render", "synth"}
    words = {"CHECKPOINT": "checkpoint", "FOLDER": "new", "TARGET": "quantised"}
    for command in commands:
        part = ["--op", "rms_norm"] if command[1] == "selftest" else []  # tests/tools/selftest runs all of it
        run_command(*(words.get(word, word) for word in command[1:]), *part)
    assert (workspace / "new" / "config.json").exists()


def anchors(document):
    """Headings as a browser names them."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documents_lead_somewhere():
    links = [
        (document, *target.partition("#")[::2])
        for document in documents()
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", document.read_text(encoding="utf-8"))
    ]
    assert len(links) >= 60
    dead = [(document.name, path) for document, path, _ in links if not (document.parent / path).exists()]
    assert dead == []
    lost = [
        (document.name, path, anchor)
        for document, path, anchor in links
        if anchor and anchor not in anchors((document.parent / path) if path else document)
    ]
    assert lost == []


def test_the_table_of_clients_has_the_versions_that_are_tried():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8").partition("## Clients that were tried")[2]
    shown = set(re.findall(r"^\| ([a-zA-Z_ -]+ \d+\.\d+) \|", text.partition("\n## ")[0], re.MULTILINE))
    programs = json.loads((ROOT / "tests" / "clients" / "requirements" / "package.json").read_text())["dependencies"]
    names = {"@anthropic-ai/claude-code": "Claude Code", "@openai/codex": "Codex"}
    tried = {(names[name], version.rpartition(".")[0]) for name, version in programs.items()}
    for file in (ROOT / "tests" / "clients" / "requirements").glob("*.txt"):
        tried |= set(re.findall(r"^([a-z_-]+)(?:\[.*\])?==(\d+\.\d+)", file.read_text(encoding="utf-8"), re.MULTILINE))
    beside = ("torch", "hypothesis", "pytest", "mcp", "requests", "httpx", "transformers")
    assert shown == {f"{name} {version}" for name, version in tried if name not in beside}


def test_lines_end_in_time():
    """Tables and pictures cannot wrap; code has the width of code. `python tools/wrap_docs.py` repairs prose."""
    long = []
    for document in documents():
        text = document.read_text(encoding="utf-8")
        prose = BLOCK.sub(lambda block: "\n" * block[0].count("\n"), text)
        for shown, width in ((prose, WIDTH), (text, 120)):
            lines = enumerate(shown.splitlines(), 1)
            long += [f"{document.name}:{n}" for n, line in lines if len(line) > width and line[:1] not in ("|", "!")]
    assert long == []


def test_wrapping_keeps_what_is_no_prose():
    long = "word " * 40
    kept = f"# {long}\n\n| {long}|\n\n```text\n{long}\n* {long}\n```\n\nshort\nlines\n"
    assert wrapped(kept) == kept
    assert wrapped(f"* one\n* {long}\n  two\n1. three\n").split() == [
        "*",
        "one",
        "*",
        *long.split(),
        "two",
        "1.",
        "three",
    ]
    assert all(len(line) <= WIDTH for line in wrapped(f"* {long}\n").splitlines())
    assert wrapped(f"* {long}\n").splitlines()[1].startswith("  word")


def test_the_measured_page_shows_the_records():
    """Renewed by `python -m benchmarks ops --markdown`."""
    records = read_records(ROOT / "benchmarks" / "results" / "nvidia-h200.jsonl")
    expected = kernel_ops.markdown(bench.load_cases(bench.case_modules()), records)
    assert (ROOT / "docs" / "kernels" / "measured.md").read_text(encoding="utf-8") == expected


def test_pages_and_pictures_of_kernels_show_the_records():
    """Renewed by `python -m benchmarks plots`."""
    written = plots.documents()
    assert [path.name for path, text in written.items() if path.read_text(encoding="utf-8") != text] == []
    assert all(len(text) < 100_000 for path, text in written.items() if path.suffix == ".svg")
    pages = [path for path in written if plots.NUMBERS_HEAD in written[path]]
    assert len(pages) == len(bench.case_modules())


# ---- pages ----

MAX_PAGES = 15


def test_pages_are_few():
    """Besides docs/kernels and docs/decisions."""
    assert len(list((ROOT / "docs").glob("*.md"))) <= MAX_PAGES


def test_every_decision_is_in_the_index_and_short():
    folder = ROOT / "docs" / "decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    records = sorted(path for path in folder.glob("*.md") if path.name != "README.md")
    assert [path.name for path in records if f"| [{path.stem}]({path.name}) |" not in index] == []
    texts = {path.name: path.read_text(encoding="utf-8") for path in records}
    assert [name for name, text in texts.items() if text.count("\n") > 60] == []
    assert [name for name, text in texts.items() if not re.match(r"# .+\n\n20\d\d-\d\d-\d\d", text)] == []


# Not the words of this field. Pages, help texts and error messages say it plainly: what happens, and to what.
BANNED = (
    "so many", "of so much", "nobody", "somebody", "everybody", "told", "those who", "who copies", "by thought",
    "mend", "mends", "mended", "make no sense", "makes no sense", "what came of", "what comes of", "can trust",
    "as it should be",
)  # fmt: skip
BANNED_PHRASE = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)


def spoken_texts(source):
    """(line, text) of every literal in a raised error or an option's help."""
    for node in ast.walk(ast.parse(source)):
        spoken = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(node, ast.keyword) and node.arg == "help":
            spoken = node.value
        for part in ast.walk(spoken) if spoken is not None else ():
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                yield part.lineno, part.value


def test_pages_use_no_banned_phrase():
    found = [
        (document.name, number, match[0])
        for document in documents()
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1)
        for match in BANNED_PHRASE.finditer(line)
    ]
    assert found == []


def test_help_and_errors_use_no_banned_phrase():
    found = [
        (str(file.relative_to(ROOT)), line, match[0])
        for file in sorted((ROOT / "dsv4").rglob("*.py"))
        for line, text in spoken_texts(file.read_text(encoding="utf-8"))
        for match in BANNED_PHRASE.finditer(text)
    ]
    assert found == []


def written_texts(source):
    """(line, text) of every comment and of every docstring's line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            yield from enumerate(token.string.splitlines(), token.start[0])


def test_comments_use_no_banned_phrase():
    found = [
        (str(file.relative_to(ROOT)), line, match[0])
        for file in sorted((ROOT / "dsv4").rglob("*.py"))
        for line, text in written_texts(file.read_text(encoding="utf-8"))
        for match in BANNED_PHRASE.finditer(text)
    ]
    assert found == []


def test_the_rule_for_phrases_finds_them():
    source = 'raise A(f"nobody has {x}")\nOption(help="Run so many.")\nplain = "somebody"\n'
    assert [text for _, text in spoken_texts(source)] == ["nobody has ", "Run so many."]
    assert all(BANNED_PHRASE.search(text) for _, text in spoken_texts(source))
    assert BANNED_PHRASE.search("a commended toldo") is None
    commented = 'def f():\n    """One.\n\n    Two."""\n    return "three"  # four\n'
    assert [(line, text.strip()) for line, text in written_texts(commented)] == [
        (2, '"""One.'), (3, ""), (4, 'Two."""'), (5, "# four")
    ]  # fmt: skip


ANNOTATED = "docs/kernels/annotated.md"


def test_the_annotated_kernel_quotes_its_source():
    source = (ROOT / "dsv4" / "ops" / "linear" / "kernel_wide.py").read_text(encoding="utf-8")
    lines = {line.strip() for line in source.splitlines()}
    quoted = [(start, line.strip()) for start, text in blocks(ANNOTATED, "python") for line in text.splitlines()]
    assert len(quoted) >= 20
    assert [(start, line) for start, line in quoted if line not in lines] == []


def test_the_annotated_kernel_computes_what_the_page_says():
    """The page's torch program: a reordering of exact products, so as close as the number format allows."""
    ((_, program),) = blocks(ANNOTATED, "py")
    names: dict[str, object] = {"torch": torch}
    exec(program, names)
    x = QuantActivation.of(normal((5, 384), torch.float32, 1))
    weight = QuantTensor(
        *fp8_block_quantize(normal((256, 384), torch.float32, 2), (128, 128), True), QuantFormat.FP8_BLOCK
    )
    scale = x.scale.view(torch.float8_e8m0fnu).float()
    found = names["fp8_linear"](x.codes, scale, weight.data, weight.scale)
    rows, columns = x.dequantize().double(), weight.dequantize(torch.float64)
    oracles = {torch.bfloat16: linear_ref(x, weight), torch.float64: rows @ columns.T}
    assert_close_to_oracle(found, oracles.__getitem__)


# ---- a step over both streams ----


def made_up_launches(second_stream):
    """Three steps of 100, 120 and 110 us, and the beginning of a fourth; a layer's two hyper-connections, twice."""
    launches = []
    for start in (1000.0, 1100.0, 1220.0, 1330.0):
        launches += [
            profile.Launch(name, start + after, duration, stream)
            for name, after, duration, stream in (
                ("_resolve_kernel", 0, 2, 7), ("hyper_kernel", 3, 5, 7), ("linear_kernel", 10, 15, 7),
                ("_compress_pair_kernel", 15, 5, second_stream), ("hyper_many_kernel", 22, 8, 7),
                ("hyper_kernel", 32, 8, 7), ("topk_short_kernel", 40, 4, 7), ("hyper_kernel", 50, 5, 7),
                ("hyper_kernel", 60, 5, 7), ("Memcpy DtoH (Device -> Pinned)", 62, 6, 20),
            )
        ]  # fmt: skip
    return launches[::-1]


@pytest.mark.parametrize("second_stream", [13, 7])
def test_a_profile_becomes_a_timeline(second_stream):
    step = timeline.step_record(made_up_launches(second_stream), batch=1, context=2048, wall_us=99.0)
    assert step["lengths_us"] == [100, 110, 120]
    assert step["length_us"] == 110
    assert step["busy_us"] == 2 + 5 + 20 + 12 + 5 + 8  # overlaps count once
    kernels = step["kernels"]
    assert [kernel[:3] for kernel in kernels[:2]] == [["_resolve_kernel", 0, 2], ["hyper_kernel", 3, 5]]
    lanes = dict(zip([kernel[0] for kernel in kernels], plots.lanes_of(kernels), strict=True))
    assert lanes.pop("_compress_pair_kernel") == plots.BESIDE
    assert lanes.pop("Memcpy DtoH (Device -> Pinned)") == plots.COPIES
    assert set(lanes.values()) == {plots.MAIN}
    assert plots.one_layer(kernels, 1) == (40, 65)
    assert plots.one_layer(kernels, 2) is None
    record = {"model": "flash-2", "schedule": ["swa", "csa"], "steps": [step], "gpu": "none", "commit": "0" * 40}
    assert json.loads(timeline.as_text(record)) == record
    drawn = plots.timeline(record)
    assert "layer 1 (CSA), 25 us" in drawn
    assert f'fill="{plots.STEP_FAMILIES["indexer"]}"><title>topk_short' in drawn


def test_kernel_names_of_a_profile():
    gather = "void at::native::(anonymous namespace)::gather<16, at::Tuple<int, 2> >(char*, f(int))"
    assert profile.plain_name(gather) == "gather"
    assert profile.plain_name("_draw_kernel") == "_draw_kernel"
    assert {"_attend_kernel": "attention", "topk_long_kernel": "indexer"}.items() <= plots.kernel_families().items()


def test_the_tree_of_the_architecture_page_is_that_of_the_package():
    """Renewed by `python tools/doc_tree.py`."""
    text = doc_tree.PAGE.read_text(encoding="utf-8")
    assert text == doc_tree.with_tree(text, ROOT / "dsv4")


def test_every_package_says_what_it_holds():
    silent = [file for file in (ROOT / "dsv4").rglob("__init__.py") if not doc_tree.first_sentence(file)]
    assert silent == []


# ---- numbers of the README and of docs/speed.md ----

BY_HAND = [  # no record yet
    "74.8 s",  # H200, 16 cores, commit 4b19d12: the miniature's first start
    "55.5 s",  # kernels of it
    "0.1 s",  # 78df77b: the table of all tokens
]
PUBLISHED_ALONE = "1.72 ms"  # SGLang, 4 x H200, one request, DSpark; docs/cluster.md has it too

UNIT = r"(?:us|ms|s|x|%|tokens/s|requests/s|TFLOP/s|TB/s|[KMG]i?B|bytes|tokens a second)"
NUMBER = re.compile(rf"(?<![\w.,])\d[\d,.]*(?: (?:/|to) \d[\d,.]*)* ?{UNIT}(?![\w/])")


def slashed(values, form="{:,.0f}"):
    return " / ".join(form.format(value) for value in values)


def spread(values, form="{:.1f}"):
    return f"{form.format(min(values))} to {form.format(max(values))}"


def recorded_numbers():
    """Every number with a unit that stands in a record, as it must be written."""
    results = ROOT / "benchmarks" / "results"
    ops = read_records(results / "nvidia-h200.jsonl")
    everything = [json.loads(line) for line in (results / "nvidia-h200-model.jsonl").read_text().splitlines()]
    commit = [r["commit"] for r in everything if r["kind"] == "layer"][-1]
    model = [r for r in everything if r["commit"] == commit]
    layers = {(r["attention"], r["batch"]): r for r in model if r["kind"] == "layer" and r["context"] == 2048}
    one = [layers[kind, 1] for kind in ("swa", "hca", "csa")]
    many = [r["times_floor"] for (_, batch), r in layers.items() if batch > 1]
    sums = [re.search(r"batch (\d+), ctx (\d+): ([\d.]+) ms", line) for line in conclusions(model)]
    steps = {(int(found[1]), int(found[2])): float(found[3]) for found in sums if found}
    theirs = [r["ms_per_layer"] for r in everything if r["kind"] == "huggingface" and r.get("batch") == 1]
    stream = [r["tokens_per_second"] for r in everything if r["kind"] == "stream"][-1]
    prefill = next(r for r in model if r["kind"] == "prefill" and r["tokens"] == 8192)["tokens_per_second"]
    experts = [ops[f"moe/flash-nvfp4-{count}"] for count in (1, 16, 64, 256)]
    large = ops["moe/flash-nvfp4-4096"]
    attention = [ops[f"sparse_attention/flash-csa-64k-{batch}"]["median_us"] for batch in (1, 64, 256)]
    engine = [json.loads(line) for line in (results / "nvidia-h200-step.jsonl").read_text().splitlines()]
    plain = [r for r in engine if r["kind"] == "step" and r["requests"] in ("greedy", "top-p 0.9") and not r["watched"]]
    plain = [r for r in plain if r["commit"] == engine[0]["commit"]]
    load = next(r for r in engine if r["kind"] == "load")
    start = next(r for r in engine if r["kind"] == "cold_start")
    hits = [json.loads(line) for line in (results / "nvidia-h200-prefix.jsonl").read_text().splitlines()]
    first = {r["tier"]: r["ms"] for r in hits if r["kind"] == "first_token"}
    flash = ModelConfig.flash()
    schema = build_cache_schema(flash, build_schedule(flash), EngineConfig(index_key_format="fp4"), plain_itemsize=None)
    return [
        f"{slashed(r['ms'] * 1000 for r in one)} us",
        f"{spread([r['times_floor'] for r in one])} x",
        f"{slashed([steps[1, 2048], steps[1, 1 << 20]], '{:.1f}')} ms",
        f"{slashed([steps[batch, 2048] for batch in (16, 64, 256)], '{:.1f}')} ms",
        f"{spread(many)} x",
        f"{spread(theirs)} ms",
        f"{stream:.0f} tokens/s",
        f"{round(prefill, -3):,.0f} tokens/s",
        f"{slashed((r['wall_ms'] for r in plain if r['requests'] == 'greedy'), '{:.2f}')} ms",
        f"{spread([r['wall_over_busy'] for r in plain], '{:.2f}')} x",
        f"{int(load['output_tokens_per_second']):,} tokens/s",
        f"{slashed(first[tier] for tier in ('cold', 'device', 'host', 'disk'))} ms",
        f"{slashed(r['median_us'] for r in experts)} us",
        f"{slashed(r['ceiling_percent'] for r in experts)} %",
        f"{large['flops'] / large['median_us'] / 1e6:.0f} TFLOP/s",
        f"{ops['topk_select/512-of-262144x1']['median_us']:.1f} us",
        f"{slashed(attention)} us",
        f"{start['seconds']:.0f} s",
        f"{float(schema.bytes_per_token)} bytes",
        f"{schema.window_bytes_per_request:,} bytes",
    ]


def served_on_a_cpu():
    """What a token costs the host, by the records of a model that costs nothing; short requests."""
    lines = (ROOT / "benchmarks" / "results" / "cpu-server.jsonl").read_text().splitlines()
    chats = [r for r in map(json.loads, lines) if r["load"]["kind"] == "chat"]
    many = next(r for r in chats if r["section"] == "streams" and r["load"]["streams"] == 256)
    short = next(r for r in chats if r["section"] == "short")
    return [f"{many['cpu_us_per_token']:.0f} us", f"{short['requests_per_second']:,.0f} requests/s"]


def served_on_a_gpu():
    lines = (ROOT / "benchmarks" / "results" / "nvidia-h200-server.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def rows_of_goals(records):
    """Goal and "now" of four layers, in the order of the goals: of both kinds of request, where both were measured."""
    rows = []
    for goal in server_goals.GOALS:
        found = [
            goal.value(served, engine)
            for served, engine in server_goals.pairs(records)
            if (served["layers"], served["section"], served["load"]["streams"]) == (4, goal.section, goal.streams)
        ]
        shown = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in sorted(found)]
        rows.append([f"{float(goal.limit):,g}", " to ".join(dict.fromkeys(shown))])
    return rows


def rows_of_loads(records):
    """The engine alone and through HTTP, load by load."""
    found = {
        (r["layers"], r["section"], r["load"]["kind"] if r["kind"] == "serve" else "engine", r["load"]["streams"]): r
        for r in records
    }

    def pick(layers, section, kind, *streams):
        return [found[layers, section, kind, count] for count in streams]

    def speeds(*key):
        return f"{slashed(r['tokens_per_second'] for r in pick(*key))} tokens/s"

    def shares(*key):
        return slashed((r["share_of_engine"] for r in pick(*key)), "{:.2f}")

    def steps(*key):
        return f"{slashed((r['between_tokens_ms']['p50'] for r in pick(*key)), '{:#.3g}')} ms"

    rows = []
    for layers, section, streams in (
        (4, "steady", (256, 1024)), (4, "streams", (1, 16, 64, 256, 1024)), (34, "streams", (1, 16, 64, 256)),
    ):  # fmt: skip
        both = "; completions ".join(shares(layers, section, kind, *streams) for kind in ("chat", "completions"))
        rows.append([speeds(layers, section, "engine", *streams), both])
    rows.append([steps(*key, 1, 16, 64, 256) for key in ((34, "streams", "engine"), (34, "streams", "chat"))])
    for section in ("random", "sharegpt"):
        rows.append([speeds(4, section, "engine", 256), shares(4, section, "chat", 256)])
    both = [pick(4, "short", kind, 512)[0] for kind in ("engine", "chat")]
    rows.append([f"{r['requests_per_second']:,.0f} requests/s" for r in both])
    both = [pick(4, "intruder", kind, 64)[0]["intruder"] for kind in ("engine", "chat")]
    rows.append([f"{one['first_token_ms'] / 1000:.1f} s" for one in both])
    for name, parts in (("between_tokens_ms", ("p50", "p99", "max")), ("between_tokens_otherwise_ms", ("p50", "p99"))):
        rows.append([f"{slashed((one[name][part] for part in parts), '{:.1f}')} ms" for one in both])
    return rows


def said_of_loads(records):
    """Beside the tables: chats one after another, of the README too; what front ends cost."""
    chats = [r for r in records if r["kind"] == "serve" and (r["section"], r["load"]["kind"]) == ("steady", "chat")]
    engine, many = (r for r in records if r["kind"] == "serve_engine" and r["section"] == "steady")
    slow, own = chats[0]["between_tokens_ms"]["p99"], engine["between_tokens_ms"]
    fronts = [
        1e6 * sum(seconds for name, seconds in r["cpu_seconds"].items() if "front_end" in name) / r["output_tokens"]
        for r in chats
    ]
    return [
        f"{chats[0]['tokens_per_second']:,.0f} tokens/s", f"{engine['tokens_per_second']:,.0f} tokens/s",
        f"{slow:.0f} ms, {slow / own['p50']:.1f} steps and {slow / own['p99']:.1f} times", f"{slow:.0f} ms",
        f"{own['p90']:.0f} ms", f"{max(fronts):.0f} us",
        f"{engine['host_ms']['p50']:.2f} / {many['host_ms']['p50']:.0f} ms",
    ]  # fmt: skip


def modelled_numbers(recorded):
    """Calculated from records."""
    served = rank_speed.committed()
    (many,) = (r for r in served if r["kind"] == "rank_served" and r["requests"] == 1024)
    (alone,) = (r for r in served if r["kind"] == "rank_round" and r["drafter"] == "dspark")
    prefill = max(float(n.split()[0].replace(",", "")) for n in recorded if re.fullmatch(r"[\d,]+ tokens/s", n))
    return [
        f"{many['tokens_per_second_per_gpu']:,.0f} tokens/s",
        f"{alone['ms_per_token']:.2f} ms",
        f"{round(prefill * 4 / 43, -3):,.0f} tokens/s",
    ]


def test_numbers_of_the_readme_have_an_origin():
    pages = (BLOCK.sub("", (ROOT / name).read_text(encoding="utf-8")) for name in ("README.md", "docs/speed.md"))
    readme, speed = (" ".join(page.split()) for page in pages)  # a number may end a line, and its unit begin the next
    recorded = recorded_numbers()
    saturated = [value for what, value in PUBLISHED.items() if "saturated" in what]
    published = [f"{spread(saturated, '{:,}')} tokens/s", PUBLISHED_ALONE]
    assert PUBLISHED_ALONE.split()[0] in (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    records = served_on_a_gpu()
    served = [*said_of_loads(records), *(cell for row in rows_of_loads(records) for cell in row), *served_on_a_cpu()]
    known = [*recorded, *modelled_numbers(recorded), *BY_HAND, *published, *served]
    assert [number for number in known if number not in speed] == []
    assert [number for number in NUMBER.findall(speed) + NUMBER.findall(readme) if number not in known] == []


def test_tables_of_a_served_model_are_those_of_the_records():
    """Renewed by hand, from what `python -m benchmarks server` prints at its end."""
    page = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    section = page.partition("## From socket to socket\n")[2].partition("\n## ")[0]
    goals, loads = (part.partition("\n\n")[0].splitlines()[1:] for part in section.split("\n|---")[1:])
    records = served_on_a_gpu()
    for rows, lines, place in ((rows_of_goals(records), goals, 2), (rows_of_loads(records), loads, 1)):
        assert [[cell.strip() for cell in line.strip("|").split("|")[place:]] for line in lines] == rows


def test_the_model_of_four_ranks_is_what_the_page_says():
    """Every number of the table, by `python -m benchmarks.rank_speed`."""
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    rows = []
    for one in rank_speed.committed():
        if one["kind"] == "rank_served":
            times = [one["gpu_ms"], one["links_ms"], one["host_ms"], one["ms"]]
            rows.append([*(f"{time:.2f}" for time in times), f"{one['tokens_per_second_per_gpu']:,.0f} tokens/s"])
        else:
            rows.append([f"{one['gpu_ms']:.2f}", f"{one['ms']:.2f}", f"{one['ms_per_token']:.2f} ms a token"])
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    assert [row for row in rows if not any(set(row) <= set(line) for line in lines)] == []


def test_the_rule_for_numbers_finds_them():
    text = "48 / 300 us, 2.1 to 2.4 x the floor, 93 %, 1,033 us and 37 tokens/s of 512 experts; FP8, 13 million, 2K"
    found = ["48 / 300 us", "2.1 to 2.4 x", "93 %", "1,033 us", "37 tokens/s"]
    assert NUMBER.findall(text) == found
