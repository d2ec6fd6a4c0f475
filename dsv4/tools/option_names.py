"""Names of options: what other servers call ours, and what an error calls a field that an option sets. No torch."""

import errno
import re

_GPUS = "use --gpus N (experts and requests are divided among them)"
_ALWAYS = "leave it out, it is always on"
_BUILT_IN = "leave it out, DeepSeek-V4's format is built in"
# vLLM's, and SGLang's where they differ
FOREIGN_OPTIONS = {
    "--tensor-parallel-size": _GPUS, "-tp": _GPUS, "--tp": _GPUS, "--tp-size": _GPUS, "--data-parallel-size": _GPUS,
    "-dp": _GPUS, "--dp": _GPUS, "--pipeline-parallel-size": _GPUS, "--enable-expert-parallel": _GPUS,
    "--ep-size": _GPUS, "--max-model-len": "use --context", "--context-length": "use --context",
    "--gpu-memory-utilization": "use --memory", "--mem-fraction-static": "use --memory",
    "--served-model-name": "use --name", "--max-num-seqs": "use --requests", "--max-running-requests": "use --requests",
    "--max-num-batched-tokens": "use --chunk", "--chunked-prefill-size": "use --chunk",
    "--cpu-offload-gb": "use --offload-experts auto", "--model-path": "give MODEL itself, without an option",
    "--speculative-config": "use --drafts auto", "--speculative-algorithm": "use --drafts auto",
    "--download-dir": "set HF_HOME to the folder", "--hf-token": "set HF_TOKEN", "--root-path": "use --allowed-host",
    "--api-server-count": "use --front-ends", "--uvicorn-log-level": "use --log-format",
    "--enable-prefix-caching": _ALWAYS, "--enable-chunked-prefill": _ALWAYS, "--async-scheduling": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS, "--enforce-eager": "leave it out, graphs change no bit",
    "--tool-call-parser": _BUILT_IN, "--reasoning-parser": _BUILT_IN, "--chat-template": _BUILT_IN,
    "--trust-remote-code": "leave it out, no code of a checkpoint is run",
    "--quantization": "leave it out, the checkpoint says it", "--load-format": "leave it out, safetensors are read",
    "--kv-cache-dtype": "leave it out, the model's own rows are kept",
    "--tokenizer": "put tokenizer.json into the checkpoint's folder",
}  # fmt: skip

# fields of EngineConfig and ServerConfig: the options that set them
_FIELDS = {
    "max_context_tokens": "--context", "max_concurrent_requests": "--requests", "max_chunk_tokens": "--chunk",
    "max_draft_tokens": "--drafts", "allowed_hosts": "--allowed-host", "api_key": "--api-key",
    "max_connections": "--max-connections", "max_output_tokens": "--max-tokens", "max_waiting": "--max-waiting",
    "drain_seconds": "--drain-seconds", "log_format": "--log-format", "verify_hits": "--verify-hits",
    "cache_dir": "--cache-dir", "cache_host_bytes": "--cache-host-gib", "cache_disk_bytes": "--cache-disk-gib",
    "offload_experts": "--offload-experts", "profile_dir": "--profile-dir",
}  # fmt: skip
_FIELD = re.compile(rf"(?<![\w.'\"-])({'|'.join(_FIELDS)})(?!\w)")
_ALREADY = re.compile(r" \(--[\w-]+ on the command line\)")  # for readers of an error in Python
_BEGINNING = re.compile(
    "^(host|port|name|gpus|device|drafts|numerics|experts|temperature|seed|stop|top_k|top_p|min_p|repetition_penalty|"
    "max_tokens) (?=must|is|needs)"
)


def error_text(error: BaseException) -> str:
    """An error as a command prints it: one paragraph, fields under the names of their options."""
    text = " ".join(str(error).splitlines())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        text += ": the disk that the command writes to is full"
    text = _ALREADY.sub("", text)
    text = _BEGINNING.sub(lambda found: f"--{found[1].replace('_', '-')} ", text)
    return _FIELD.sub(lambda found: _FIELDS[found[1]], text)
