"""The command `calibrate`: confidence against acceptance, as a table and a figure."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .calibrate import Bin, Confidences, confidences, with_draft_temperature
from .engine import Engine
from .options import Head, MaxNewTokens, Model, Seed, Threads
from .packed import packed
from .text import encode, read_prompts
from .whole_file import whole


def calibrate(
    prompts: Annotated[
        Path,
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="JSON lines with a 'prompt', or 'turns' whose first is taken.",
        ),
    ],
    model: Model = None,
    head: Head = None,
    tree: Annotated[str | None, typer.Option(help="TOP_K,DEPTH,NUM_NODES, e.g. 10,6,60.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="The target's; 0 = greedy.")] = 0.0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 128,
    limit: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Draw the figure, a PNG.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Write the temperature into the head's config.json.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, no table.")] = False,
    threads: Threads = None,
) -> None:
    """Hold a head's confidence against what the target accepts, and fit its draft temperature.

    Decodes the prompts twice, as the head is and at the temperature fitted to the first run. The
    temperature changes which candidates the trees keep, never the text.
    """
    if apply and head is None:
        raise ValueError(
            "--apply: wanted --head, the one to write to; the embedded one stays as is"
        )
    if plot and not plot.parent.is_dir():
        raise ValueError(f"--plot: wanted a file in a folder that is there, got {plot}")
    figure = import_figure() if plot else None
    engine = Engine(model, head, tree, threads)
    rows = [encode(engine.tokenizer, text) for text in read_prompts(None, prompts)[:limit]]
    options: dict[str, Any] = {
        "tree": engine.tree,
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    with packed(engine.model, engine.head):
        before = confidences(engine.model, engine.head, rows, **options)
        fitted = engine.head.config.draft_temperature * before.fit()
        warm = with_draft_temperature(engine.head, fitted)
        after = confidences(engine.model, warm, rows, **options)
    runs = {engine.head.config.draft_temperature: before, fitted: after}
    if as_json:
        print(json.dumps([report(*run) for run in runs.items()]))
    else:
        show(runs)
    if plot:
        draw(figure, runs, plot)
    if apply and head is not None:
        write_temperature(head, fitted)


def report(draft_temperature: float, run: Confidences) -> dict:
    bins = [
        {**each._asdict(), **({} if each.children else {"confidence": None, "acceptance": None})}
        for each in run.bins()
    ]
    return {
        "draft_temperature": draft_temperature,
        "expected_calibration_error": run.error(),
        "tau": run.tau,
        "bins": bins,
    }


def show(runs: dict[float, Confidences]) -> None:
    table = Table(title="drafted children by confidence, and the share that the target accepts")
    table.add_column("confidence", no_wrap=True)
    for temperature in runs:
        for name in (f"at {temperature:.2f}", "mean", "accepted"):
            table.add_column(name, justify="right")
    for pair in zip(*(run.bins() for run in runs.values()), strict=True):
        table.add_row(f"{pair[0].low:.2f}-{pair[0].high:.2f}", *sum(map(cells, pair), []))
    Console(highlight=False).print(table)
    for temperature, run in runs.items():
        print(
            f"draft temperature {temperature:.3f}: expected calibration error {run.error():.4f}, "
            f"tau {run.tau:.3f}"
        )


def cells(each: Bin) -> list[str]:
    means = (each.confidence, each.acceptance)
    return [str(each.children), *(f"{mean:.3f}" if each.children else "" for mean in means)]


def import_figure():
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib; get it by: pip install matplotlib") from None
    return Figure()


def draw(figure, runs: dict[float, Confidences], path: Path) -> None:
    axes = figure.subplots()
    axes.plot((0, 1), (0, 1), color="grey", linewidth=1, label="as sure as right")
    for temperature, run in runs.items():
        bins = [each for each in run.bins() if each.children]
        points = [each.confidence for each in bins], [each.acceptance for each in bins]
        axes.plot(*points, marker="o", label=f"draft temperature {temperature:.2f}")
    axes.set(xlabel="confidence of the head", ylabel="accepted by the target")
    axes.legend()
    with whole(path) as fresh:
        figure.savefig(fresh, format="png", dpi=150)


def write_temperature(head: Path, temperature: float) -> None:
    path = head / "config.json"
    config = {**json.loads(path.read_text()), "draft_temperature": temperature}
    with whole(path) as fresh:
        fresh.write_text(json.dumps(config, indent=2) + "\n")
