"""The published Flash config.json in two spellings, to be changed by tests."""


def official(**changes):
    """The published Flash config.json; a value of `...` removes the key."""
    config = {
        "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 0, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000,
        "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20,
        "head_dim": 512, "hidden_act": "silu", "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64,
        "index_topk": 512, "initializer_range": 0.02, "max_position_embeddings": 1048576,
        "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 6, "num_hash_layers": 3,
        "num_hidden_layers": 43, "num_key_value_heads": 1, "num_nextn_predict_layers": 1, "o_groups": 8,
        "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
        "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1", "use_cache": True, "vocab_size": 129280, **changes,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not ...}


def inference(**changes):
    """The same model as DeepSeek's inference/config.json spells it."""
    config = {
        "vocab_size": 129280, "dim": 4096, "moe_inter_dim": 2048, "n_layers": 43, "n_hash_layers": 3, "n_heads": 64,
        "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 6, "score_func": "sqrtsoftplus",
        "route_scale": 1.5, "swiglu_limit": 10.0, "q_lora_rank": 1024, "head_dim": 512, "rope_head_dim": 64,
        "norm_eps": 1e-6, "o_groups": 8, "o_lora_rank": 1024, "window_size": 128, "original_seq_len": 65536,
        "rope_theta": 10000, "rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "index_n_heads": 64,
        "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "n_mtp_layers": 1, "dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4",
        "compress_rope_theta": 160000, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], **changes,
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not ...}
