"""A `Plan` as tables for a terminal."""

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from dsv4.tools.plan.plan import OffloadForecast, Plan
from dsv4.tools.plan.targets import GIB


def print_plan(plan: Plan, console: Console) -> None:
    """Weights, cache, one GPU's budget, what fits where, and the summary line."""
    lines = [Text(plan.summary, style="bold")]
    if plan.forecast is not None:
        lines.append(Text(_forecast_line(plan.forecast, plan.config.n_routed_experts)))
    tables = [_weights(plan), _cache(plan), _budget(plan), _fits(plan)]
    console.print(Group(*tables, *([_capacities(plan)] if plan.capacities else []), *lines))


def _forecast_line(forecast: OffloadForecast, num_experts: int) -> str:
    """One line: where the experts are, what moves, how fast that is."""
    where = (
        f"Offloaded experts: {forecast.num_slots} of {num_experts} a layer on the device "
        f"({forecast.num_fixed} for good), {_size(forecast.host_bytes)} in host memory"
    )
    speed = (
        f"{forecast.bytes_per_token / 1e6:,.0f} MB a token at {forecast.host_speed / 1e9:g} GB/s: about "
        f"{forecast.tokens_per_second:.0f} tokens/s at batch 1"
    )
    unknown = "" if forecast.read_speed is not None else " at most (the GPU's own read speed is not known)"
    return f"{where}; {speed}{unknown}."


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for idx, column in enumerate(columns):
        table.add_column(column, justify="right" if idx else "left", no_wrap=True)
    return table


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:,.2f} {name}"
    return f"{num_bytes} B"


def _weights(plan: Plan) -> Table:
    table = _table(f"{plan.name}: weights ({plan.experts} experts)", "part", "bytes", "size")
    for part, num_bytes in plan.weights.by_part().items():
        table.add_row(part, f"{num_bytes:,}", _size(num_bytes))
    table.add_section()
    for name, num_bytes in plan.weights.by_format().items():
        table.add_row(f"of it {name}", f"{num_bytes:,}", _size(num_bytes))
    table.add_section()
    table.add_row("total", f"{plan.weights.total_bytes:,}", _size(plan.weights.total_bytes))
    return table


def _cache(plan: Plan) -> Table:
    schema, engine = plan.schema, plan.engine
    requests, context = engine.max_concurrent_requests, engine.max_context_tokens
    table = _table(f"KV cache ({engine.index_key_format} index keys)", "what", "bytes", "size")
    table.add_row("a token", f"{float(schema.bytes_per_token):,}", "")
    for name, num_bytes in (
        ("a request: window", schema.window_bytes_per_request),
        ("a request: window positions", schema.position_bytes_per_request),
        ("a request: compressor state", schema.state_bytes_per_request),
        ("a snapshot of a prefix", schema.bytes_per_snapshot),
        (f"{schema.num_snapshots} snapshots (prefix cache)", schema.snapshot_cache_bytes),
        (f"{requests} requests of {context} tokens", schema.total_bytes),
    ):
        table.add_row(name, f"{num_bytes:,}", _size(num_bytes))
    return table


def _budget(plan: Plan) -> Table:
    budget = plan.budget
    table = _table(f"One of {plan.gpus} GPU{'s' if plan.gpus > 1 else ''}", "what", "bytes", "size")
    for name, num_bytes in (
        ("weights", budget.weights),
        ("KV cache", budget.cache),
        (f"workspace, chunks of {plan.engine.chunk_tokens:,} (reserve)", budget.workspace),
        *([("exchange (reserve)", budget.exchange)] if plan.gpus > 1 else []),
        ("CUDA graphs (reserve)", budget.graphs),
        ("CUDA context (reserve)", budget.context),
        ("total", budget.total),
    ):
        table.add_row(name, f"{num_bytes:,}", _size(num_bytes))
    if budget.host:
        table.add_section()
        whose = ", of all GPUs" if plan.gpus > 1 else ""
        table.add_row(f"host memory for experts{whose}", f"{budget.host:,}", _size(budget.host))
    return table


def _fits(plan: Plan) -> Table:
    requests = plan.engine.max_concurrent_requests
    contexts = [context for context, _ in plan.fits[0].max_requests]
    title = f"Requests that fit on {plan.gpus} GPU{'s' if plan.gpus > 1 else ''}, by context"
    names = [_tokens(context) for context in contexts]
    table = _table(title, "GPU", "GiB", *names, f"context of {requests}", "needs")
    for fit in plan.fits:
        counts = [str(count) if count else "-" for _, count in fit.max_requests]
        longest = f"{fit.max_context_tokens:,}" if fit.max_context_tokens else "-"
        needed = "-" if fit.min_gpus is None else str(fit.min_gpus)
        table.add_row(fit.gpu.name, f"{fit.gpu.usable_bytes / GIB:g}", *counts, longest, needed)
    return table


def _capacities(plan: Plan) -> Table:
    title = f"Tokens of KV cache on several {plan.fits[0].gpu.name}"
    table = _table(title, "GPUs", "dsv4: DP attention + EP", "tensor parallel", "times")
    for one in plan.capacities:
        times = f"{one.tokens / one.tensor_parallel_tokens:.1f}" if one.tensor_parallel_tokens else "-"
        table.add_row(str(one.gpus), f"{one.tokens:,}", f"{one.tensor_parallel_tokens:,}", times)
    return table


def _tokens(count: int) -> str:
    if count % 2**20 == 0:
        return f"{count // 2**20}M"
    return f"{count // 2**10}K" if count % 2**10 == 0 else str(count)
