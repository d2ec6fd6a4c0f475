"""The report as one HTML page that needs nothing else: no script, no style, font or picture from outside."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from html import escape
from statistics import median

from dsv4.tools.audit.plots import count_map, line_plot
from dsv4.tools.audit.report import FAULT, AuditReport, Finding, TextRun, UnitRecord

_STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .7rem .2rem 0; text-align: left }
td.number { text-align: right; font-variant-numeric: tabular-nums } td { border-top: 1px solid #8884 }
.fault { color: #b3261e; font-weight: 600 } .sound { color: #2e7d4f; font-weight: 600 }
code { font-size: 12.5px; overflow-wrap: anywhere }
svg { width: 100%; height: auto; margin: .3rem 0 } svg text { font-size: 11px; fill: currentColor }
svg .grid { stroke: #8884 } p.under { margin: 0; color: #777; font-size: 13px }
"""
_MAX_LISTED = 500
_INDEX = re.compile(r"^(layers|mtp)\.\d+\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_SHOWN = ("attn.wq_b.weight", "attn.wkv.weight", "attn.wo_b.weight", "ffn.gate.weight", "ffn.experts.w1.weight",
          "ffn.experts.w2.weight", "ffn.experts.w3.weight", "ffn.shared_experts.w1.weight")  # fmt: skip


def audit_page(report: AuditReport) -> str:
    """HTML text."""
    verdict = (
        '<span class="sound">sound</span>'
        if report.is_sound
        else f'<span class="fault">{len(report.faults)} faults</span>'
    )
    against = f", against <code>{escape(report.against)}</code>" if report.against else ""
    sections = [
        f"<h1>Audit of <code>{escape(report.path)}</code>{against}: {verdict}</h1>",
        f"<p>{report.total_bytes:,} bytes in {escape(report.naming or 'unknown')} names, "
        f"read in {report.seconds:.1f} s; peak memory {report.peak_bytes / 2**20:,.0f} MiB.</p>",
        _findings(report.findings),
        *_weights(report.units),
        *_against(report.units),
        *([] if report.text is None else _text(report.text)),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Audit of {escape(report.path)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing to report.</p>"
    ordered = sorted(findings, key=lambda finding: finding.severity != FAULT)
    rows = "\n".join(
        f'<tr><td class="{finding.severity}">{finding.severity}</td><td>{escape(finding.kind)}</td>'
        f"<td><code>{escape(finding.tensor)}</code></td><td>{escape(finding.text)}</td></tr>"
        for finding in ordered[:_MAX_LISTED]
    )
    rest = f"<p>{len(ordered) - _MAX_LISTED} more in the JSON.</p>" if len(ordered) > _MAX_LISTED else ""
    head = "<tr><th></th><th>kind</th><th>tensor</th><th>what</th></tr>"
    return f"<h2>Findings</h2>\n<table>{head}\n{rows}\n</table>{rest}"


def _weights(units: Sequence[UnitRecord]) -> list[str]:
    layers = [unit for unit in units if "." in unit.name]
    if not layers:
        return []
    labels = [unit.name.replace("layers.", "") for unit in layers]
    sizes: dict[str, list[float | None]] = {part: [] for part in _SHOWN}
    for unit in layers:
        by_part: dict[str, list[float]] = defaultdict(list)
        for record in unit.tensors:
            by_part[_EXPERT.sub(".experts.", _INDEX.sub("", record.name))].append(record.rms)
        for part in _SHOWN:
            sizes[part].append(median(by_part[part]) if by_part[part] else None)
    shown = {part.removesuffix(".weight"): values for part, values in sizes.items()}
    lows = [None if unit.routing is None else unit.routing.low for unit in layers]
    highs = [None if unit.routing is None else unit.routing.high for unit in layers]
    scales = {unit.name: unit.scale_counts for unit in layers if unit.scale_counts}
    sections = [
        "<h2>Size of the weights, by layer</h2>",
        '<p class="under">Root mean square; of experts the median. Logarithmic.</p>',
        line_plot(labels, shown, y_label="root mean square by layer", is_log=True),
    ]
    if scales:
        sections += [
            "<h2>Scales, by layer</h2>",
            '<p class="under">How many scales have which log2 (across); darker is more.</p>',
            count_map(scales, x_label="log2 of the scales by layer"),
        ]
    return [
        *sections,
        "<h2>Routers</h2>",
        '<p class="under">Hash layers: smallest and largest share of tokens that name an expert. '
        "Others: range of the bias.</p>",
        line_plot(labels, {"lowest": lows, "highest": highs}, y_label="router shares and biases by layer"),
    ]


def _against(units: Sequence[UnitRecord]) -> list[str]:
    compared = [unit for unit in units if unit.comparisons]
    if not compared:
        return []
    parts: dict[str, list[float | None]] = {"experts": [], "other weights": []}
    for unit in compared:
        for name, is_expert in (("experts", True), ("other weights", False)):
            errors = [one.error for one in unit.comparisons if (".experts." in one.name) is is_expert]
            parts[name].append(max(errors) if errors else None)
    labels = [unit.name.replace("layers.", "") if "." in unit.name else "ends" for unit in compared]
    return [
        "<h2>Against the other checkpoint</h2>",
        '<p class="under">Largest relative error of a weight, by layer.</p>',
        line_plot(labels, parts, y_label="largest relative error by layer"),
    ]


def _text(run: TextRun) -> list[str]:
    labels = [str(layer.layer_idx) for layer in run.layers]
    errors: dict[str, list[float | None]] = {
        "attention alone": [layer.attn_error for layer in run.layers],
        "experts alone": [layer.ffn_error for layer in run.layers],
        "streams so far": [layer.stream_error for layer in run.layers],
        "noise floor": [layer.noise for layer in run.layers],
        "cached rows": [layer.kv_error for layer in run.layers],
        "kernels": [layer.kernel_error for layer in run.layers],
    }
    shares: dict[str, list[float | None]] = {
        "same experts": [layer.router for layer in run.layers],
        "indexer recall": [layer.index_recall for layer in run.layers],
    }
    return [
        f"<h2>On {run.tokens:,} tokens of text</h2>",
        f"<p>Perplexity {run.exact_perplexity:.3f} exact, {run.official_perplexity:.3f} official.</p>",
        '<p class="under">Relative error of official numerics against exact. Logarithmic.</p>',
        line_plot(labels, errors, y_label="relative error by layer", is_log=True),
        '<p class="under">Agreement of official numerics with exact.</p>',
        line_plot(labels, shares, y_label="agreement by layer"),
        '<p class="under">Largest activation in the streams. Logarithmic.</p>',
        line_plot(labels, {"largest": [one.largest for one in run.layers]}, y_label="largest activation", is_log=True),
    ]
