"""Lines of a record: what is written comes back, what was changed is named, what is damaged is said to be."""

import json
import random
from dataclasses import replace

import pytest

from dsv4.request import SamplingParams, TokenLogprobs
from dsv4.tools.receipts import lines

HEADER = lines.Header(
    identity={"checkpoint": "c", "numerics": "official"}, parts={"layers.0": "p"}, model="/m", time="t",
    settings={"max_context_tokens": 64},
)  # fmt: skip
PARAMS = SamplingParams(
    max_tokens=5, temperature=0.1, seed=-(2**63), stop=("sécret",), logit_bias={7: -1.5}, bad_words_ids=((1, 2), (3,)),
    allowed_token_ids=(4, 5), logprobs=1, prompt_logprobs=0, cache_salt="tenant", stop_token_ids=(9,),
)  # fmt: skip
ANSWER = lines.Answer(
    prompt=(111, 222), params=PARAMS, output=(4, 5), finish="stop", grammar='start: "classified"',
    logprobs=(TokenLogprobs(4, -0.5, ((4, -0.5),)), TokenLogprobs(5, float("-inf"), ((4, -0.1),))),
    prompt_logprobs=(None, TokenLogprobs(222, -3.25, ())),
)  # fmt: skip


def written(answer=ANSWER, **options):
    return lines.request_line(
        answer, **{"hashes_only": False, "request_id": "r", "route": "/v1", "choice": 3, **options}
    )


def test_what_is_written_comes_back():
    assert lines.parse_line(lines.header_line(HEADER)) == HEADER
    assert lines.parse_line(lines.gap_line(lines.Gap(12))) == lines.Gap(12)
    receipt = lines.parse_line(written(time="now"))
    assert (receipt.prompt, receipt.sampling(), receipt.output) == (ANSWER.prompt, ANSWER.params, ANSWER.output)
    assert (receipt.grammar, receipt.finish, receipt.num_output) == (ANSWER.grammar, "stop", 2)
    assert (receipt.request_id, receipt.route, receipt.choice, receipt.time) == ("r", "/v1", 3, "now")
    assert receipt.logprob_bits == (lines.float_bits(-0.5), lines.float_bits(float("-inf")))
    assert receipt.digests == ANSWER.digests()
    assert set(receipt.digests) == {
        "prompt", "params", "seed", "grammar", "output", "logprobs", "top_logprobs", "prompt_logprobs",
    }  # fmt: skip
    assert receipt.changed == ()
    assert receipt.has_content
    assert receipt.is_whole


def test_hashes_alone_hold_no_content():
    line = written(hashes_only=True).decode("ascii")
    for word in ("cret", "classified", "tenant", "111", "222", "-1.5", '"output":[', "logit_bias", "stop_token_ids"):
        assert word not in line, word
    receipt = lines.parse_line(line.encode("ascii"))
    assert not receipt.has_content
    assert receipt.output is None
    assert "stop" not in receipt.params
    assert receipt.digests == ANSWER.digests()
    whole = lines.with_content(receipt, lines.parse_line(written()))
    assert (whole.prompt, whole.sampling(), whole.grammar, whole.output) == (
        ANSWER.prompt, ANSWER.params, ANSWER.grammar, None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("prompt", lambda line: line["prompt"].append(1)),
        ("params", lambda line: line["params"].update(temperature=0.2)),
        ("params", lambda line: line["params"]["logit_bias"].update({"7": 1.5})),
        ("seed", lambda line: line["params"].update(seed=1)),
        ("grammar", lambda line: line.update(grammar="start: /x/")),
        ("grammar", lambda line: line["digests"].pop("grammar")),
        ("output", lambda line: line["output"].reverse()),
        ("output", lambda line: line.update(finish="length")),
        ("grammar", lambda line: line.pop("grammar")),
        ("logprobs", lambda line: line.pop("logprobs")),
        ("logprobs", lambda line: line.update(logprobs="B" + line["logprobs"][1:])),
    ],
)
def test_a_part_that_was_changed_is_named(part, change):
    line = json.loads(written())
    change(line)
    assert lines.parse_line(json.dumps(line).encode()).changed == (part,)


def test_parameters_of_another_version():
    """One it does not have yet has its default and is no change; one we do not have cannot be run."""
    line = json.loads(written())
    del line["params"]["priority"]
    line["digests"]["params"] = "other"
    assert lines.parse_line(json.dumps(line).encode()).sampling() == PARAMS
    line["params"]["temperament"] = 3
    with pytest.raises(lines.RecordError, match="temperament"):
        lines.parse_line(json.dumps(line).encode())


def test_every_bit_of_a_logprob_counts():
    base = ANSWER.digests()
    nudged = (ANSWER.logprobs[0]._replace(logprob=-0.5000000596046448), ANSWER.logprobs[1])  # the next fp32
    assert {name for name, one in replace(ANSWER, logprobs=nudged).digests().items() if one != base[name]} == {
        "logprobs", "top_logprobs",
    }  # fmt: skip
    listed = (ANSWER.logprobs[0]._replace(top=((5, -0.5),)), ANSWER.logprobs[1])
    changed = replace(ANSWER, logprobs=listed).digests()
    assert {name for name, one in changed.items() if one != base[name]} == {"top_logprobs"}
    zero, minus = (replace(ANSWER, logprobs=(TokenLogprobs(4, value, ()),) * 2).digests() for value in (0.0, -0.0))
    assert zero["logprobs"] != minus["logprobs"]


def test_damage_is_an_error_of_its_own():
    for line in (lines.header_line(HEADER), written(), lines.gap_line(lines.Gap(1))):
        for end in range(len(line) - 1):
            with pytest.raises(lines.RecordError):
                lines.parse_line(line[:end])
    chance = random.Random(0)
    for _ in range(2000):
        line = bytearray(chance.choice((lines.header_line(HEADER), written(), lines.gap_line(lines.Gap(1)))))
        for _ in range(chance.randint(1, 3)):
            line[chance.randrange(len(line))] = chance.randrange(256)
        try:
            parsed = lines.parse_line(bytes(line))
        except lines.RecordError:
            continue
        assert isinstance(parsed, (lines.Header, lines.Receipt, lines.Gap))
    for odd in (b"[]", b"3", b"null", b'{"kind":"request"}', b'{"kind":[]}', b"[" * 100_000, b'{"kind":"header"}'):
        with pytest.raises(lines.RecordError):
            lines.parse_line(odd)
    edited = json.loads(lines.header_line(HEADER))
    edited["model"] = "/other"
    with pytest.raises(lines.RecordError, match="changed after it was written"):
        lines.parse_line(json.dumps(edited).encode())
    with pytest.raises(lines.RecordError, match="format 2"):
        lines.parse_line(json.dumps({**edited, "format": 2}).encode())
