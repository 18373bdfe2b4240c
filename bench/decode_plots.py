"""Plots of a run of bench/decode.py: speed-up by task, tau by depth, acceptance by position."""

from collections import defaultdict
from itertools import accumulate
from pathlib import Path

from matplotlib.figure import Figure
from ways import STATIC, way

SEEN = 5  # an answer says something of a position that it reached this often


def draw(records: list[dict], rows: list[dict], folder: Path) -> list[Path]:
    """Write the plots of every temperature as PNG files; return their paths."""
    written = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        mine = [row for row in rows if row["temperature"] == temperature]
        answers = [row for row in records if row["temperature"] == temperature]
        plots = {"speed_up_by_task": speed_up_by_task(mine), "tau_by_depth": tau_by_depth(mine)}
        for name in STATIC:
            if any(name in answer["ways"] for answer in answers):
                plots[f"acceptance_by_position_{name}"] = acceptance_by_position(answers, name)
        for name, figure in plots.items():
            written.append(folder / f"{name}_t{temperature:g}.png")
            figure.savefig(written[-1], dpi=150)
    return written


def speed_up_by_task(rows: list[dict]) -> Figure:
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    tasks = [*dict.fromkeys(row["task"] for row in rows)]
    ways = [name for name in dict.fromkeys(row["way"] for row in rows) if name != "plain"]
    width = 0.8 / max(len(ways), 1)
    for number, name in enumerate(ways):
        found = {row["task"]: row["speed_up"] or 0.0 for row in rows if row["way"] == name}
        places = [place + (number - (len(ways) - 1) / 2) * width for place in range(len(tasks))]
        axes.bar(places, [found.get(task, 0.0) for task in tasks], width, label=name)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("speed-up over plain decoding")
    axes.legend(fontsize="small", ncols=2)
    return figure


def tau_by_depth(rows: list[dict]) -> Figure:
    """Tokens per cycle if every path were cut at a depth, from the accept histograms."""
    figure = Figure(figsize=(6, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        if row["task"] == "mean" and row.get("cycles"):
            taus = cut_taus(row["accepted"])
            axes.plot(range(len(taus)), taus, marker="o", markersize=3, label=row["way"])
    axes.set_xlabel("paths cut at this depth")
    axes.set_ylabel("tau")
    axes.legend(fontsize="small")
    return figure


def cut_taus(accepted: list[int]) -> list[float]:
    """accepted[n] cycles took n drafts: mean of 1 + min(n, depth) for each depth."""
    cycles = sum(accepted)
    reached = [sum(accepted[depth:]) / cycles for depth in range(len(accepted))]
    return [*accumulate(reached)]


def acceptance_by_position(answers: list[dict], name: str) -> Figure:
    """Share of the cycles that accepted a node's parent and then it; a point is an answer.

    The EAGLE-2 paper's figure of why trees should follow the context (section 3.1).
    """
    choices = way(name).config.choices
    rates = defaultdict(list)
    for answer in answers:
        for choice, (reached, taken) in zip(
            choices, answer["ways"][name]["positions"], strict=True
        ):
            if reached >= SEEN:
                rates[choice].append(taken / reached)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    seen = [choice for choice in choices if rates[choice]]
    for place, choice in enumerate(seen):
        axes.plot([place] * len(rates[choice]), rates[choice], ".", color="tab:blue", alpha=0.3)
    if seen:
        spread = [rates[choice] for choice in seen]
        axes.boxplot(spread, positions=range(len(seen)), widths=0.5, showfliers=False)
    axes.set_xticks(range(len(seen)), ["-".join(map(str, c)) for c in seen], rotation=60)
    axes.set_xlabel("position: child ranks from the root")
    axes.set_ylabel("accepted, given the parent")
    axes.set_ylim(0, 1)
    return figure
