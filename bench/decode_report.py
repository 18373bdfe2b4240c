"""From what was measured on each answer to rows per task and way, and to tables."""

import statistics
from collections import Counter, defaultdict

MANAGEMENT = ("tree", "verify", "commit")  # stages of a cycle that run neither network
STAGES = ("draft", "target", *MANAGEMENT)


def summarise(records: list[dict]) -> list[dict]:
    """One row per temperature, task and way, then one per temperature and way: task "mean"."""
    groups = defaultdict(list)
    for record in records:
        for way, found in record["ways"].items():
            pair = (found, record["ways"]["plain"])
            groups[record["temperature"], record["task"], way].append(pair)
    rows = [
        {"temperature": key[0], "task": key[1], "way": key[2], **summary(pairs)}
        for key, pairs in groups.items()
    ]
    of_way = defaultdict(list)
    for row in rows:
        of_way[row["temperature"], row["way"]].append(row)
    return rows + [
        {"temperature": key[0], "task": "mean", "way": key[1], **mean(found)}
        for key, found in of_way.items()
    ]


def summary(pairs: list[tuple[dict, dict]]) -> dict:
    """Of the answers of one task in one way, each beside the plain one."""
    answers, plain = zip(*pairs, strict=True)
    different = sum(answer.get("different", False) for answer in answers)
    ratios = [rate(answer) / rate(other) for answer, other in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios
    row = {
        "answers": len(answers),
        # a text that differs has no speed-up
        "speed_up": None if different else round(rate(*answers) / rate(*plain), 3),
        "speed_up_median": round(statistics.median(ratios), 3),
        "speed_up_quartiles": [round(quartiles[0], 3), round(quartiles[-1], 3)],
        "tokens_per_second": round(rate(*answers), 2),
        "near_ties": sum(answer.get("near_tie", False) for answer in answers),
        "different": different,
    }
    if "cycles" not in answers[0]:
        return row
    accepted, stages = Counter(), Counter()
    for answer in answers:
        accepted.update(dict(enumerate(answer["accepted"])))
        stages.update(answer["stage_seconds"])
    cycles = sum(answer["cycles"] for answer in answers)
    return row | {
        "tau": round(sum(a["cycle_tokens"] for a in answers) / max(cycles, 1), 3),
        "cycles": cycles,
        "accepted": [accepted[n] for n in range(max(accepted, default=-1) + 1)],
        "depth": spread([depth for answer in answers for depth in answer["depths"]]),
        "width": spread([width for answer in answers for width in answer["widths"]]),
        "stage_seconds": {stage: round(spent, 4) for stage, spent in stages.items()},
        "management_share": share(stages),
    }


def mean(rows: list[dict]) -> dict:
    """Over tasks; counts and times are summed."""
    row = {name: sum(task[name] for task in rows) for name in ("answers", "near_ties", "different")}
    speeds = [task["speed_up"] for task in rows]
    row["speed_up"] = None if None in speeds else round(statistics.mean(speeds), 3)
    row["slowest_task"] = None if None in speeds else min(speeds)
    row["fastest_task"] = None if None in speeds else max(speeds)
    if "tau" not in rows[0]:
        return row
    accepted, stages = Counter(), Counter()
    for task in rows:
        accepted.update(dict(enumerate(task["accepted"])))
        stages.update(task["stage_seconds"])
    cycles = sum(task["cycles"] for task in rows)
    return row | {
        "tau": round(statistics.mean(task["tau"] for task in rows), 3),
        "cycles": cycles,
        "accepted": [accepted[n] for n in range(max(accepted, default=-1) + 1)],
        "stage_ms_per_cycle": {
            stage: round(1e3 * spent / max(cycles, 1), 3) for stage, spent in stages.items()
        },
        "management_share": share(stages),
    }


def rate(*answers: dict) -> float:
    """Tokens per second, the prefill included."""
    return sum(a["new_tokens"] for a in answers) / sum(a["seconds"] for a in answers)


def share(stages: dict[str, float]) -> float | None:
    """Of a cycle's time, what goes to the tree; None where a cycle is one stage."""
    if "tree" not in stages:
        return None
    managed = sum(stages.get(stage, 0.0) for stage in MANAGEMENT)
    return round(managed / sum(stages.get(stage, 0.0) for stage in STAGES), 4)


def spread(values: list[int]) -> str:
    """The middle 80 %."""
    if len(values) < 2:
        return ""
    low, _, middle, *_, high = statistics.quantiles(values, n=10, method="inclusive")
    return f"{low:.0f}-{high:.0f}"


def markdown(rows: list[dict], context: dict) -> str:
    """A table of speed-up and tau by task, and one of costs by way, for each temperature."""
    parts = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        chosen = [row for row in rows if row["temperature"] == temperature]
        parts += [f"Temperature {temperature:g}: speed-up over plain decoding, tau", ""]
        parts += [*by_task(chosen), ""]
        parts += [f"Temperature {temperature:g}: by tree, all tasks", "", *by_way(chosen), ""]
    parts.append("; ".join(f"{name} {value}" for name, value in context.items()))
    return "\n".join(parts) + "\n"


def by_task(rows: list[dict]) -> list[str]:
    ways = [way for way in dict.fromkeys(row["way"] for row in rows) if way != "plain"]
    found = {(row["task"], row["way"]): row for row in rows}
    lines = [[task, *(cell(found[task, way]) for way in ways)] for task in tasks_of(rows)]
    return table(["task", *ways], lines)


def cell(row: dict) -> str:
    if row["different"]:
        return f"{row['different']} DIFFER"
    return f"{row['speed_up']:.2f}" + (f", {row['tau']:.2f}" if "tau" in row else "")


def by_way(rows: list[dict]) -> list[str]:
    head = ["tree", "speed-up", "slowest to fastest task", "tau", "cycles by drafts accepted"]
    head += [f"{stage} ms" for stage in STAGES] + ["tree management", "near-ties", "differ"]
    lines = []
    for row in rows:
        if row["task"] == "mean" and "tau" in row:
            spent = row["stage_ms_per_cycle"]
            ends = (row["slowest_task"], row["fastest_task"])
            managed = row["management_share"]
            lines.append(
                [
                    row["way"],
                    "" if row["speed_up"] is None else f"{row['speed_up']:.2f}",
                    "" if None in ends else "{:.2f} to {:.2f}".format(*ends),
                    f"{row['tau']:.2f}",
                    " ".join(map(str, row["accepted"])),
                    *(f"{spent[stage]:.2f}" if stage in spent else "" for stage in STAGES),
                    "" if managed is None else f"{100 * managed:.1f} %",
                    str(row["near_ties"]),
                    str(row["different"]),
                ]
            )
    return table(head, lines)


def tasks_of(rows: list[dict]) -> list[str]:
    return [*dict.fromkeys(row["task"] for row in rows)]


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in (head, rule, *lines)]
