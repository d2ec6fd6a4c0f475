"""lm-eval: log-likelihoods through the server."""

import json

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from server_cases import NAME, SERVED, make_llm

from dsv4.text.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.client


def test_lm_eval_scores_as_the_library_does(talker, params, tmp_path):
    """Its log-likelihood of a continuation is `LLM.score`'s, number for number, in a batch and alone."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(byte_tokenizer(SERVED.vocab_size)))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    pairs = [("The sky was", " red and green"), ("a", "b"), ("One, two,", " three"), ("The sky was", " red")]
    library = make_llm(params)
    expected = []
    for context, continuation in pairs:
        (scores,) = library.score(context + continuation, 1)
        tail = scores[len(library.encode(context)) :]
        is_greedy = all(one.token_id == one.top[0][0] for one in tail)
        expected.append((sum(one.logprob for one in tail), is_greedy))
    asked = [Instance("loglikelihood", {}, pair, place) for place, pair in enumerate(pairs)]
    for batch_size in (1, 4):
        model = LocalCompletionsAPI(
            base_url=f"{talker}/v1/completions", model=NAME, tokenizer=str(tmp_path), batch_size=batch_size,
            max_retries=1,
        )  # fmt: skip
        assert model.loglikelihood(asked, disable_tqdm=True) == expected
