"""From what was measured on each answer to rows per task and way, and to tables."""

import statistics
from collections import Counter, defaultdict

MANAGEMENT = ("tree", "verify", "commit")  # stages of a cycle that run neither network
STAGES = ("draft", "target", *MANAGEMENT)


def summarise(records: list[dict]) -> list[dict]:
    """One row per temperature, task and way, then one per temperature and way: task "mean"."""
    tasks, ways = defaultdict(list), defaultdict(list)
    for record in records:
        for way, found in record["ways"].items():
            pair = (found, record["ways"]["plain"])
            tasks[record["temperature"], record["task"], way].append(pair)
            ways[record["temperature"], way].append(pair)
    rows = [
        {"temperature": key[0], "task": key[1], "way": key[2], **summary(pairs)}
        for key, pairs in tasks.items()
    ]
    for (temperature, way), pairs in ways.items():
        key = {"temperature": temperature, "task": "mean", "way": way}
        mine = [row for row in rows if (row["temperature"], row["way"]) == (temperature, way)]
        rows.append({**key, **summary(pairs), **mean(mine)})
    return rows


def summary(pairs: list[tuple[dict, dict]]) -> dict:
    """Of answers in one way, each beside the plain one: medians, and sums of stages."""
    answers = [answer for answer, _ in pairs]
    different = sum(answer.get("different", False) for answer in answers)
    ratios = [rate(answer) / rate(other) for answer, other in pairs]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios
    row = {
        "answers": len(answers),
        # a text that differs has no speed-up; a stall during one answer moves no median
        "speed_up": None if different else round(statistics.median(ratios), 3),
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
    per_cycle = 1e3 / max(cycles, 1)
    return row | {
        "tau": round(sum(a["cycle_tokens"] for a in answers) / max(cycles, 1), 3),
        "cycles": cycles,
        "accepted": [accepted[n] for n in range(max(accepted, default=-1) + 1)],
        "depth": spread([depth for answer in answers for depth in answer["depths"]]),
        "width": spread([width for answer in answers for width in answer["widths"]]),
        "stage_ms": {stage: round(spent * per_cycle, 3) for stage, spent in stages.items()},
        "management_share": share(stages),
    }


def mean(rows: list[dict]) -> dict:
    """What is taken over tasks rather than over answers."""
    speeds = [row["speed_up"] for row in rows]
    if None in speeds:
        return {"speed_up": None}
    found = {
        "speed_up": round(statistics.mean(speeds), 3),
        "slowest_task": min(speeds),
        "fastest_task": max(speeds),
    }
    if "tau" in rows[0]:
        found["tau"] = round(statistics.mean(row["tau"] for row in rows), 3)
    return found


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
    tasks = dict.fromkeys(row["task"] for row in rows)
    lines = [[task, *(cell(found[task, way]) for way in ways)] for task in tasks]
    return table(["task", *ways], lines)


def cell(row: dict) -> str:
    if row["different"]:
        return f"{row['different']} DIFFER"
    return f"{row['speed_up']:.2f}" + (f", {row['tau']:.2f}" if "tau" in row else "")


def by_way(rows: list[dict]) -> list[str]:
    head = ["tree", "tau", "speed-up", "by task", "quartiles of answers"]
    head += ["depth", "width", "cycles by drafts accepted", *(f"{name} ms" for name in STAGES)]
    head += ["tree management", "near-ties", "differ"]
    lines = [costs(row) for row in rows if row["task"] == "mean" and "tau" in row]
    return table(head, lines)


def costs(row: dict) -> list[str]:
    speed, by_task, answers = "", "", ""
    if row["speed_up"] is not None:
        speed = f"{row['speed_up']:.2f}"
        by_task = f"{row['slowest_task']:.2f}-{row['fastest_task']:.2f}"
        low, high = row["speed_up_quartiles"]
        answers = f"{low:.2f}-{high:.2f}"
    spent, managed = row["stage_ms"], row["management_share"]
    return [
        row["way"],
        f"{row['tau']:.2f}",
        speed,
        by_task,
        answers,
        row["depth"],
        row["width"],
        " ".join(map(str, row["accepted"])),
        *(f"{spent[stage]:.2f}" if stage in spent else "" for stage in STAGES),
        "" if managed is None else f"{100 * managed:.1f} %",
        str(row["near_ties"]),
        str(row["different"]),
    ]


def table(head: list[str], lines: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return [f"| {' | '.join(map(str.ljust, line, widths))} |" for line in (head, rule, *lines)]
