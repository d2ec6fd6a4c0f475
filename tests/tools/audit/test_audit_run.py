"""The audit as its user sees it: exit status, JSON, page, a run that was killed, a text, and memory."""

import json
import shutil
from dataclasses import asdict
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from audit_cases import audit, faults, poke, trimmed
from typer.testing import CliRunner

from dsv4.cli.audit import audit_page
from dsv4.cli.main import app, main
from dsv4.loader.checkpoint import CheckpointError
from dsv4.loader.shipped import shipped_checkpoint
from dsv4.tools.audit import run
from dsv4.tools.audit.report import UnitRecord
from dsv4.tools.audit.run import AuditOptions, audit_checkpoint

NAME = "layers.2.ffn.experts.3.w1.scale"


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    return trimmed(tmp_path_factory.mktemp("mini") / "sound", "flash-mini", 3)


@pytest.fixture
def broken(mini, tmp_path):
    folder = shutil.copytree(mini, tmp_path / "broken")
    poke(folder, NAME, lambda array: array.__setitem__((0, 0), 255))
    return folder


def call(*arguments):
    return CliRunner().invoke(app, ["audit", *map(str, arguments)])


def test_exit_status_and_output(mini, broken, tmp_path):
    sound = call(mini)
    assert sound.exit_code == 0, sound.output
    assert "sound by itself" in sound.output
    assert "only with --against" in sound.output
    assert "and what the other has" in call(mini, "--against", mini).output
    found = call(broken, "--html", tmp_path / "page.html")
    assert found.exit_code == 1
    assert f"fault scale not finite: {NAME}" in found.output
    assert "1 fault" in found.output
    assert "1 faults" not in found.output
    assert NAME in (tmp_path / "page.html").read_text()
    as_json = call(broken, "--json")
    assert as_json.exit_code == 1
    report = json.loads(as_json.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert report["is_sound"] is False
    assert [finding["tensor"] for finding in report["findings"] if finding["severity"] == "fault"] == [NAME]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a folder"),
        ([".", "--against", "nowhere"], "has no config.json"),
        (["flash-mini", "--text", "nowhere.txt"], "No such file"),
        (["flash-mini", "--text", "pyproject.toml", "--max-tokens", "1"], "--max-tokens must be at least 2"),
        (["flash-mini", "--against", "pyproject.toml"], "is not the JSON of an audit"),
    ],
)
def test_what_cannot_run_ends_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["audit", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_shipped_miniatures_are_sound():
    for name in ("flash-mini", "flash-mini-dspark", "flash-mini-nvfp4"):
        assert faults(audit(shipped_checkpoint(name))) == []


def test_records_survive_json(mini):
    for unit in audit(mini).units:
        assert msgspec.convert(json.loads(json.dumps(asdict(unit))), UnitRecord, str_keys=True) == unit


class Stop(BaseException):
    """Stands for a kill."""


def test_a_killed_audit_goes_on(broken, tmp_path, monkeypatch):
    progress = tmp_path / "audit.progress"
    progress.touch()  # killed before its first word
    whole = audit(broken)
    done = []
    real = run._audit_unit

    def counted(name, *rest):
        done.append(name)
        if len(done) == 3:
            raise Stop
        return real(name, *rest)

    monkeypatch.setattr(run, "_audit_unit", counted)
    with pytest.raises(Stop):
        audit(broken, resume=progress)
    with progress.open("ab") as stream:
        stream.write(b'{"name": "layers.1", "ten')  # a line cut short by the kill
    again = audit(broken, resume=progress)
    assert len(done) == 3 + len(whole.units) - 2  # two units were not read again
    assert json.dumps(again.to_dict()["units"]) == json.dumps(whole.to_dict()["units"])
    assert again.findings == whole.findings
    assert not progress.exists()


def test_a_progress_file_of_other_files_is_refused(mini, broken, tmp_path, monkeypatch):
    progress = tmp_path / "audit.progress"
    monkeypatch.setattr(run, "_audit_unit", lambda *rest: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        audit(mini, resume=progress)
    with pytest.raises(CheckpointError, match="belongs to the audit of other files"):
        audit(broken, resume=progress)
    progress.write_text("no json\n")
    with pytest.raises(CheckpointError, match="is not a progress file"):
        audit(mini, resume=progress)


class Outside(HTMLParser):
    """Collects everything a page would fetch, and checks that tags close."""

    def __init__(self):
        super().__init__()
        self.fetched, self.open = [], []

    def handle_starttag(self, tag, attrs):
        self.fetched += [value for key, value in attrs if key in ("src", "href", "srcset")]
        if tag != "meta":
            self.open.append(tag)
        assert tag not in ("script", "link", "iframe", "img")

    def handle_endtag(self, tag):
        if tag != "meta":
            assert self.open.pop() == tag


def test_the_page_stands_alone(broken, mini):
    report = audit(broken, against=mini, token_ids=list(range(2, 40)))
    page = audit_page(report)
    parser = Outside()
    parser.feed(page)
    assert parser.fetched == []
    assert parser.open == []
    assert "official against exact" in page
    assert NAME in page
    report.path = "<script>alert(1)</script>"
    assert "<script>" not in audit_page(report)


def test_a_text_runs_layer_by_layer(mini):
    ids = list(range(2, 282))
    report = audit_checkpoint(mini, AuditOptions(token_ids=ids))
    assert faults(report) == [("no language", "the whole model")]  # three layers of seven, ids in a row
    assert report.text is not None
    assert [layer.attention for layer in report.text.layers] == ["swa", "swa", "csa"]
    for layer in report.text.layers:
        assert 0.001 < layer.attn_error < 0.1
        assert 0.001 < layer.ffn_error < 0.1
        assert 0 < layer.noise < layer.stream_error
        assert 0.005 < layer.kv_error < 0.2
        assert layer.router > 0.9
    assert report.text.layers[2].index_recall > 0.9

    from dsv4.llm import LLM
    from dsv4.tools.evaluate import negative_log_likelihood

    for numerics in ("exact", "official"):
        llm = LLM(mini, numerics=numerics)
        loss = negative_log_likelihood(llm.logits(ids), ids) / (len(ids) - 1)
        found = getattr(report.text, f"{numerics}_perplexity")
        assert torch.isclose(torch.tensor(loss).exp(), torch.tensor(found), rtol=1e-6)


def test_a_layer_that_gives_no_numbers_is_named(mini, tmp_path):
    folder = shutil.copytree(mini, tmp_path / "copy")
    poke(folder, "layers.1.attn_norm.weight", lambda array: array.__setitem__(3, 0x7FC0), "u2")
    report = audit(folder, token_ids=list(range(2, 20)))
    assert ("not a number", "layers.1") in faults(report)
    assert len(report.text.layers) == 2  # nothing after it can be judged


def test_a_source_and_its_quantisation_are_compared_layer_by_layer(mini):
    other = shipped_checkpoint("flash-mini-nvfp4")
    report = audit(mini, against=other)
    assert {kind for kind, _ in faults(report)} == {"missing"}  # the layers that were cut off
    errors = [one.error for unit in report.units for one in unit.comparisons if ".experts." in one.name]
    assert 0.1 < min(errors) < max(errors) < 0.2
