"""The lightning indexer: queries, scores and picks."""

from dsv4.ops.indexer.launch import index_scores, index_topk, launch_index_topk, row_bytes
from dsv4.ops.indexer.op import entry_rows, entry_scores, index_topk_ref, num_visible, turned_queries
from dsv4.ops.indexer.plan import FEW_QUERIES, SCORE_CONFIG, ScoreConfig, score_config

__all__ = [
    "FEW_QUERIES", "SCORE_CONFIG", "ScoreConfig", "entry_rows", "entry_scores", "index_scores", "index_topk",
    "index_topk_ref", "launch_index_topk", "num_visible", "row_bytes", "score_config", "turned_queries",
]
