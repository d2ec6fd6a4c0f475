"""Fields and types that other servers have and this one refuses, and what to do instead. Any other is unknown."""

from __future__ import annotations

import re

_NO_MEDIA = "this model reads text only"
_ONE_SERVER = "it belongs to a cluster of another kind of server"
_KEEPS_NOTHING = "this server keeps no answers: send the whole conversation"
_NO_PLUGIN = "callers' code is not run here"
_NO_HOST = "nothing is run here; offer functions"
_NOT_READABLE = "only who wrote it can read it; leave it out"

REFUSED = {
    "functions": "use tools",
    "function_call": "use tools and tool_choice, and tool_calls on messages",
    "refusal": "there is no place for it in the model's protocol; put the text in content",
    "audio": _NO_MEDIA,
    "image_url": _NO_MEDIA,
    "input_audio": _NO_MEDIA,
    "file": _NO_MEDIA,
    "modalities": _NO_MEDIA,
    "media_io_kwargs": _NO_MEDIA,
    "mm_processor_kwargs": _NO_MEDIA,
    "max_dynamic_patch": _NO_MEDIA,
    "min_dynamic_patch": _NO_MEDIA,
    "use_audio_in_video": _NO_MEDIA,
    "images_config": _NO_MEDIA,
    "return_mm_kwargs": _NO_MEDIA,
    "verbosity": "ask for it in the conversation; only medium is accepted",
    "web_search_options": "there is no search here; offer a tool",
    "store": _KEEPS_NOTHING,
    "previous_response_id": _KEEPS_NOTHING,
    "conversation": _KEEPS_NOTHING,
    "background": _KEEPS_NOTHING,
    "prompt": "stored prompts are not kept here; use instructions",
    "service_tier": "there is one tier: auto or default",
    "suffix": "the model does not fill gaps; only an empty suffix is accepted",
    "use_beam_search": "there is no beam search; use n",
    "length_penalty": "there is no beam search; only 1 is accepted",
    "watermarking": "answers carry no watermark",
    "include_stop_str_in_output": "stop strings are not part of the text; choice.stop_reason names the one that came",
    "no_stop_trim": "stop strings are not part of the text; choice.stop_reason names the one that came",
    "stop_regex": "use stop, or a rule in structured_outputs",
    "skip_special_tokens": "a completion shows every token it has; filter them by return_token_ids",
    "add_special_tokens": "the conversation's rendering adds what belongs there",
    "truncate_prompt_tokens": "prompts are never cut in silence: shorten it, or count with /tokenize first",
    "truncation_side": "prompts are never cut in silence: shorten it, or count with /tokenize first",
    "truncation": "prompts are never cut in silence; only disabled is accepted",
    "logprob_token_ids": "use top_logprobs, or logprobs on /v1/completions",
    "documents": "put the documents into messages",
    "chat_template": "the model has one protocol; use /v1/completions for prompts of your own",
    "echo": "use /v1/completions",
    "input_ids": "use /v1/completions",
    "prompt_embeds": "prompts are text or token ids",
    "separate_reasoning": "reasoning always has its own field; include_reasoning false leaves it out",
    "stream_reasoning": "reasoning streams like everything else; include_reasoning false leaves it out",
    "thinking_token_budget": "thinking is bounded by max_tokens",
    "stream_interval": "every token is sent as it comes; only 1 is accepted",
    "repetition_detection": "use repetition_penalty or frequency_penalty",
    "return_prompt_text": "use /tokenize and /detokenize, or `dsv4 render`",
    "return_token_offsets": "logprobs on /v1/completions has text_offset",
    "return_meta_info": "use usage and logprobs",
    "return_cached_tokens_details": "use usage.prompt_tokens_details",
    "return_hidden_states": "use the Python API",
    "return_routed_experts": "use the Python API",
    "routed_experts_prompt_start": "use the Python API",
    "routed_experts_start_len": "use the Python API",
    "lora_path": "there are no adapters",
    "custom_logit_processor": _NO_PLUGIN,
    "custom_params": _NO_PLUGIN,
    "vllm_xargs": _NO_PLUGIN,
    "custom_labels": "metrics have no labels of callers",
    "session_params": _KEEPS_NOTHING,
    "extra_key": "use cache_salt",
    "ngram_corpus_id": "drafts change no answer and are the server's business",
    "kv_transfer_params": _ONE_SERVER,
    "ec_transfer_params": _ONE_SERVER,
    "bootstrap_host": _ONE_SERVER,
    "bootstrap_port": _ONE_SERVER,
    "bootstrap_room": _ONE_SERVER,
    "routed_dp_rank": _ONE_SERVER,
    "disagg_prefill_dp_rank": _ONE_SERVER,
    "data_parallel_rank": _ONE_SERVER,
    "max_tool_calls": "use parallel_tool_calls false for one call",
    "context_management": "the conversation is read as it is sent",
    "container": _NO_HOST,
    "mcp_servers": _NO_HOST,
    "moderation": "there is no moderation here",
    "disable_additional_properties": "write additionalProperties into the schema",
    "structural_tag": "use tools, or a grammar",
    "include_obfuscation": "streams are not padded; only false is accepted",
    "encrypted_content": _NOT_READABLE,
}
# values of `type`, of parts and tools, without the date that Anthropic's end with
_MEDIA = (
    "image",
    "image_url",
    "input_image",
    "audio",
    "input_audio",
    "video",
    "video_url",
    "document",
    "file",
    "input_file",
)
_HOSTED = (
    "bash", "code_execution", "code_interpreter", "computer", "computer_use_preview", "file_search", "image_generation",
    "local_shell", "mcp", "memory", "shell", "text_editor", "web_fetch", "web_search", "web_search_preview",
)  # fmt: skip
_TYPES = {
    **dict.fromkeys(_MEDIA, _NO_MEDIA),
    **dict.fromkeys(_HOSTED, _NO_HOST),
    "redacted_thinking": _NOT_READABLE,
    "custom": "the model calls functions only",
}


def why_refused(name: str) -> str:
    """What to say about a field that is not supported, or not with the value it has."""
    reason = REFUSED.get(name)
    return "this server does not support it" + (f": {reason}" if reason else "")


def why_type_refused(kind: object) -> str | None:
    """What to say about a part or a tool of a type that others have; None for a type nobody has."""
    reason = _TYPES.get(re.sub(r"_20\d{6}$", "", kind)) if isinstance(kind, str) else None
    return reason and f"this server does not support it: {reason}"
