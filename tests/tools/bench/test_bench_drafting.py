"""`dsv4 bench drafts`: what it counts, that it notices a token which drafts changed, and what it refuses."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dsv4.cli.bench import bench_app
from dsv4.config import ConfigError
from dsv4.loader.shipped import DSPARK_TWIN, shipped_checkpoint
from dsv4.tools.bench import drafting as bench_drafting
from dsv4.tools.bench.drafting import DraftLoad, DraftsDiffer, measure_drafts
from dsv4.tools.bench.report import acceptance

LOAD = DraftLoad(counts=(2, "off"), temperatures=(0.0, 1.0), prompts=3, prompt_tokens=4, output_tokens=4, concurrency=2)


@pytest.fixture(scope="module")
def report():
    return measure_drafts(DSPARK_TWIN, "cpu", LOAD)


def test_records(report):
    rows = [(record["drafts"], record["temperature"]) for record in report.of("drafts")]
    assert rows == [("off", 0.0), (2, 0.0), ("off", 1.0), (2, 1.0)]  # off once, though it was asked for again
    for record in report.of("drafts"):
        assert record["drafter"] == "dspark"
        assert record["tokens_per_second"] > 0
        assert record["speedup"] == 1.0 or record["drafts"] != "off"
    drafted = report.records[1]
    # every request's first token is drawn from its prompt; each further step gives one and the drafts that came true
    assert 3 * (LOAD.output_tokens - 1) == pytest.approx(drafted["steps"] * drafted["tokens_per_step"], abs=3)
    assert drafted["verified_by_place"][0] == drafted["steps"]
    assert len(acceptance(drafted)) <= 2
    assert all(0 <= share <= 1 for share in acceptance(drafted))
    assert acceptance(report.records[0]) == []


def test_prompts_are_spread_over_the_text(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("And the LORD spake unto Moses, saying, " * 40)
    load = DraftLoad(text=text, prompts=4, prompt_tokens=8)
    prompts = bench_drafting._prompts(shipped_checkpoint(), load)
    assert [len(prompt) for prompt in prompts] == [8] * 4
    text.write_text("And the")
    with pytest.raises(ConfigError, match="expected at least 8 for a prompt"):
        bench_drafting._prompts(shipped_checkpoint(), load)


def test_a_changed_token_is_noticed(monkeypatch):
    go_on = bench_drafting._Run.go_on

    def damaged(self, prompts, first_seed):
        written = go_on(self, prompts, first_seed)
        if self.drafts != "off" and first_seed == 2:
            written[0][2] ^= 1
        return written

    monkeypatch.setattr(bench_drafting._Run, "go_on", damaged)
    small = replace(LOAD, temperatures=(0.0,))
    with pytest.raises(DraftsDiffer, match=r"with drafts=2, temperature=0.0, request 0 wrote token \d+ at place 2"):
        measure_drafts(DSPARK_TWIN, "cpu", small)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_the_command_prints(report, monkeypatch, as_json):
    asked = []
    monkeypatch.setattr(bench_drafting, "measure_drafts", lambda *arguments: asked.append(arguments) or report)
    arguments = ["drafts", DSPARK_TWIN, "--counts", "1,auto", "--prompts", "3", "--temperatures", "0,0.7"]
    ran = CliRunner().invoke(bench_app, [*arguments, "--json"] if as_json else arguments)
    assert ran.exit_code == 0, ran.output
    ((target, device, load, _),) = asked
    assert (target, device, load) == (
        DSPARK_TWIN, "cpu", DraftLoad(counts=(1, "auto"), temperatures=(0.0, 0.7), prompts=3)
    )  # fmt: skip
    if as_json:
        assert json.loads(ran.stdout) == [report.to_dict()]
    else:
        assert "came true, by place" in ran.output


def test_a_difference_ends_with_status_1(monkeypatch):
    def differs(*arguments):
        raise DraftsDiffer("with drafts=1 ...")

    monkeypatch.setattr(bench_drafting, "measure_drafts", differs)
    ran = CliRunner().invoke(bench_app, ["drafts"])
    assert ran.exit_code == 1
    assert "with drafts=1 ...: this is a bug" in ran.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperatures", "0,x"], "--temperatures must be numbers"),
        (["--temperatures", "-1"], "temperature must be a number from 0 to 100"),
        (["--counts", "many"], "--counts must be auto, off or a number of tokens"),
        (["--counts", "6"], "drafts must be at most 5 with this model's DSpark head, found 6"),
    ],
)
def test_what_cannot_be_measured(arguments, message):
    ran = CliRunner().invoke(bench_app, ["drafts", DSPARK_TWIN, *arguments])
    assert isinstance(ran.exception, ValueError)
    assert message in str(ran.exception)
