"""`dsv4 eval`: perplexity and agreement of the numerics on a text. Registered by `dsv4.cli.main`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsv4.loader.shipped import shipped_text
from dsv4.tools.model_loading import ModelArgument, ModelOption, RevisionOption, find_model

if TYPE_CHECKING:
    from dsv4.tools.evaluate import Evaluation

MISSING_MATPLOTLIB = "--plot needs matplotlib; install it with: pip install matplotlib"


def eval_command(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    revision: RevisionOption = None,
    text: Annotated[
        Path | None, typer.Option(help="A UTF-8 text file. Default: one the shipped models never saw.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of the text to use.")] = 4096,
    context: Annotated[int, typer.Option(help="Tokens per context; each starts anew.")] = 1024,
    decode_tokens: Annotated[int, typer.Option(help="Tokens for decode against prefill; 0 leaves it out.")] = 192,
    device: Annotated[str, typer.Option(help="Device: cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw them into this PNG (needs matplotlib).")] = None,
) -> None:
    """Measure the effect of the numerics: perplexity of a text, agreement of experts and of indexer picks.

    The text is cut into contexts and runs through the model three times: exact (weights dequantised, fp32), official
    (every rounding of the published code), and official with FP8 index keys. Printed: perplexity of each, and by layer
    how often official chose the same experts and index entries as exact. Then prefill against token-by-token decode.
    It computes on the CPU by default (--device). It does not measure the quality of answers.

    Without --text, on Shakespeare and King James text that was held out when the shipped models were trained.

    \b
    Examples:
      dsv4 eval --max-tokens 2048
      dsv4 eval ./checkpoint --text book.txt --plot book.png
    """
    from dsv4.text.tokenizer import Tokenizer
    from dsv4.tools.evaluate import EvaluationError, evaluate, total_tokens

    if plot is not None:
        _require_matplotlib()
    folder, file = (
        find_model(model, Console(stderr=True), option=model_option, revision=revision),
        shipped_text() if text is None else text,
    )
    try:
        words = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"{file} is not UTF-8 text: {error}") from error
    token_ids = Tokenizer.from_pretrained(folder).encode(words)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=total_tokens(min(max_tokens, len(token_ids)), decode_tokens))

        def advance(mode: str, tokens: int) -> None:
            bar.update(task, advance=tokens, description=mode)

        result = evaluate(
            folder, token_ids, max_tokens=max_tokens, context=context, decode_tokens=decode_tokens, device=device,
            advance=advance,
        )  # fmt: skip
    if as_json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        print_evaluation(result, Console())
    if plot is not None:
        plot_evaluation(result, plot)


def print_evaluation(result: Evaluation, console: Console) -> None:
    """Two tables: modes, then layers."""
    modes = Table(title=f"{result.tokens:,} tokens in {result.contexts} contexts")
    for heading in ("numerics", "perplexity", "against exact", "tokens/s"):
        modes.add_column(heading, justify="left" if heading == "numerics" else "right")
    base = result.modes[0].perplexity
    for mode in (*result.modes, *result.decode):
        is_main = mode in result.modes
        change = f"{100 * (mode.perplexity / base - 1):+.2f} %" if is_main else ""
        name = mode.name if is_main else f"official, {mode.name} ({mode.predictions + 1} tokens)"
        modes.add_row(name, f"{mode.perplexity:.4f}", change, f"{mode.predictions / max(mode.seconds, 1e-9):.1f}")
    console.print(modes)
    layers = Table(title="official against exact")
    for heading in ("layer", "attention", "same experts", "indexer recall"):
        layers.add_column(heading, justify="right" if heading != "attention" else "left")
    for layer in result.layers:
        never = "chose nothing" if layer.attention == "csa" else ""  # every entry there was could be picked
        recall = never if layer.index_recall is None else f"{100 * layer.index_recall:.2f} %"
        layers.add_row(str(layer.layer_idx), layer.attention, f"{100 * layer.router:.2f} %", recall)
    console.print(layers)


def plot_evaluation(result: Evaluation, file: Path) -> None:
    """Perplexity by mode on the left, agreement by layer on the right."""
    _require_matplotlib()
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.barh([mode.name for mode in result.modes], [mode.perplexity for mode in result.modes])
    left.set_xlabel("perplexity")
    left.invert_yaxis()
    places = [layer.layer_idx for layer in result.layers]
    right.plot(places, [layer.router for layer in result.layers], marker="o", label="same experts")
    recalls = [(layer.layer_idx, layer.index_recall) for layer in result.layers if layer.index_recall is not None]
    if recalls:
        right.plot(*zip(*recalls, strict=True), marker="s", linestyle="none", label="indexer recall")
    right.set_xlabel("layer")
    right.set_ylim(0, 1.02)
    right.legend()
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ValueError(MISSING_MATPLOTLIB)
