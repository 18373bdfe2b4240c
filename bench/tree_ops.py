"""The operators and a whole cycle of tree management, forms side by side against plain torch.

    python bench/tree_ops.py                                  # all of it, about two minutes
    python bench/tree_ops.py --op expand --vocab 151936 --dtype bfloat16 --threads 2 --json FILE

Every form is checked against the reference before it is timed. `public` is the operator as users
call it: checks, dispatch, then the form for the device; `flex` is FlexAttention, asked for by
`--op tree_attention --form triton --form flex`. Times are medians in microseconds.
"""

import itertools
import json
import logging
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import cases
import flex
import torch
import typer
from cycle import cycle
from rich.console import Console
from rich.table import Table
from timing import HostClock, ReplayClock, Shape, WrongResult, context, measure
from tqdm import tqdm

import eagle2_kernels
from eagle2_kernels import ops, reference

FORMS = {
    "reference": reference,
    "cpu": getattr(eagle2_kernels, "cpu", None),
    "triton": getattr(eagle2_kernels, "triton", None),
    "cuda": getattr(eagle2_kernels, "cuda", None),
    "public": eagle2_kernels,
    "flex": flex,
}
# compared unless --form says otherwise
USUAL = {"cpu": ["reference", "cpu", "public"], "cuda": ["reference", "triton", "cuda", "public"]}
BOTH, BIG = ["greedy", "sampled"], {"vocab": [32000, 128256]}
ALL = ["float32", "float16", "bfloat16"]
LETTERS = {"batch": "B", "top_k": "K", "vocab": "V", "nodes": "N", "heads": "H,G,E", "prefix": "P"}
FP32, PAIR, TREE = {"dtype": ["float32"]}, {"threads": [1, 2]}, {"depth": [6], "nodes": [60]}
CACHES = {"heads": [(32, 32, 128), (32, 8, 128)], **FP32}
ATTENTION = {"heads": [(32, 8, 128), (9, 3, 64)], "prefix": [2048], **FP32, **PAIR}
COMPILED = ("sglang_link", "sglang_walk")  # what the compile report knows besides
# operator -> its case, and the axes it ranges over unless the command line says otherwise
OPERATORS = {
    "expand": (
        cases.expand,
        {"vocab": [32000, 49152, 128256, 151936], "dtype": ALL, "warm": [False, True], **PAIR},
    ),
    "select_leaves": (cases.select_leaves, {}),
    "enter_level": (cases.enter_level, {"nodes": [60]}),
    "rerank": (cases.rerank, {**TREE, "batch": [1, 64]}),
    "tree_attention": (cases.tree_attention, {**TREE, "nodes": [60, 16], **ATTENTION}),
    "sample": (cases.sample, {"nodes": [60], **BIG, "law": ["sampled", "filtered"], **FP32}),
    "verify": (cases.verify, {**TREE, "batch": [1, 64]}),
    "accept": (cases.accept, {**TREE, **BIG, "law": BOTH, **FP32}),
    "compact_kv": (cases.compact_kv, {**TREE, **CACHES}),
    "operators": (cases.operators, {**TREE, **BIG, "law": ["greedy"], **CACHES}),
    "cycle": (
        cycle,
        {"depth": [7], "nodes": [60], **BIG, "law": BOTH, "early_stop": [False, True]},
    ),
}


def shapes(name: str, given: dict[str, list], **fixed) -> list[Shape]:
    ranges = {"threads": [1], **({} if name == "cycle" else {"batch": [1]}), **OPERATORS[name][1]}
    ranges |= {axis: values for axis, values in given.items() if values and axis in ranges}
    return [
        Shape(**fixed, **dict(zip(ranges, values, strict=True)))
        for values in itertools.product(*ranges.values())
    ]


def rows_of(name: str, shape: Shape, forms: dict, seconds: float) -> list[dict]:
    """Check, time, and make a row per form; none for a form that lacks the operator."""
    torch.set_num_threads(shape.threads)
    torch.manual_seed(0)
    wanted = ops.OPERATORS if name in ("operators", "cycle") else (name,)
    here = {f: m for f, m in forms.items() if all(hasattr(m, op) for op in wanted)}
    if not here:
        return []
    case = OPERATORS[name][0](shape)
    if shape.warm:
        case = case._replace(sets=case.sets[:1])
    clock = HostClock() if shape.device == "cpu" else ReplayClock()
    times = measure(name, case, reference, here, seconds, clock)
    axes = dict.fromkeys(["batch", "top_k", *OPERATORS[name][1]])
    return [
        {
            "op": name,
            "form": form,
            "device": shape.device,
            "dtype": shape.dtype,
            "shape": {a: getattr(shape, a) for a in axes if a not in ("dtype", "threads")},
            "threads": shape.threads,
            "timing": clock.how(form),
            "median_us": round(times[form], 2),
            "baseline": case.baseline,
            "baseline_us": round(times["baseline"], 2),
            "baseline_timing": clock.how("baseline"),
            "ratio": round(times["baseline"] / times[form], 2),
            "read_us": round(times["read"], 2) if case.read else None,
            "goal": case.goal,
        }
        for form in here
    ]


def table_row(rows: list[dict], forms: dict) -> list[str]:
    """One line for all forms of a case; ratios are those of the last form."""
    by_form, last = {row["form"]: row for row in rows}, rows[-1]
    shape = [f"{LETTERS.get(a, a)}={v}" for a, v in last["shape"].items() if a in LETTERS]
    shape.append(last["shape"].get("law", ""))
    shape += [flag for flag in ("early_stop", "warm") if last["shape"].get(flag)]
    times = [f"{by_form[f]['median_us']:,.1f}" if f in by_form else "missing" for f in forms]
    goal = f">= {last['goal']}" if last["goal"] else ""
    read = f"{last['median_us'] / last['read_us']:.1f}" if last["read_us"] else ""
    line = [last["op"], " ".join(filter(None, shape)), last["dtype"], str(last["threads"]), *times]
    return [*line, f"{last['baseline_us']:,.1f}", f"{last['ratio']:.1f}", goal, read]


def report_compiled(console: Console, json_file: Path | None, *what) -> None:
    """Registers, spills and sizes of the Triton kernels on every target."""
    from compile_report import Row, report

    rows = [*tqdm(report(*what), "compile", unit="kernel", disable=None)]
    table = Table(*Row._fields, box=None)
    for row in rows:
        table.add_row(*map(str, row))
    console.print(table)
    write([row._asdict() for row in rows], json_file)


def write(rows: list[dict], json_file: Path | None) -> None:
    if json_file:
        json_file.write_text(json.dumps({"context": context(), "rows": rows}, indent=1) + "\n")


def of(names: Iterable[str], *more: str):
    """An option that may be given any of these names, or of those that the help leaves out."""
    listed = ", ".join(names)

    def check(given: list[str] | None) -> list[str] | None:
        for name in given or ():
            if name not in names and name not in more:
                raise typer.BadParameter(f"wanted one of {listed}, got {name}")
        return given

    return typer.Option(help=f"Of {listed}.", callback=check)


@torch.inference_mode()
def main(
    op: Annotated[list[str] | None, of(OPERATORS, *COMPILED)] = None,
    form: Annotated[list[str] | None, of(FORMS)] = None,
    device: str = "cpu",
    dtype: Annotated[list[str] | None, of(ALL)] = None,
    batch: list[int] | None = None,
    vocab: list[int] | None = None,
    top_k: int = 10,
    depth: Annotated[list[int] | None, typer.Option(help="Levels. [default: 6; cycle 7]")] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Root included. [default: 60]")] = None,
    heads: Annotated[list[str] | None, typer.Option(help="Of queries, of K and V; size.")] = None,
    prefix: Annotated[list[int] | None, typer.Option(help="[default: 2048]")] = None,
    threads: list[int] | None = None,
    seconds: Annotated[float, typer.Option(help="For each variant of a case.")] = 0.2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write rows here.")] = None,
    compile_report: Annotated[
        bool, typer.Option(help="Instead: compile the Triton kernels for GPUs that are not here.")
    ] = False,
    target: Annotated[
        list[str] | None, typer.Option(help="Of the compile report: sm_90, gfx942, ...")
    ] = None,
    first: Annotated[
        int | None, typer.Option(help="Of the compile report: as many launches of an operator.")
    ] = None,
) -> None:
    """Options that name a shape may be repeated; an operator takes those that concern it."""
    lines, wrong, console = [], [], Console()
    if not console.is_terminal:
        console = Console(width=150)
    if compile_report:
        report_compiled(console, json_file, op, target, first)
        return
    forms = {name: FORMS[name] for name in form or USUAL[torch.device(device).type]}
    for name in [name for name, module in forms.items() if module is None]:
        console.print(f"{name}: missing, {eagle2_kernels.missing_forms[name]}")
        del forms[name]
    given = {"dtype": dtype, "batch": batch, "vocab": vocab, "depth": depth, "nodes": nodes}
    given |= {"heads": [tuple(map(int, h.split(","))) for h in heads or ()], "prefix": prefix}
    table = Table("op", "shape", "dtype", "threads", box=None)
    for column in (*(f"{name} us" for name in forms), "baseline us", "ratio", "goal", "x read"):
        table.add_column(column, justify="right")
    for name in op or OPERATORS:
        if name in COMPILED:
            console.print(f"{name}: missing, it is only compiled")
            continue
        if name == "cycle" and device != "cpu":
            console.print("cycle: missing, its stand-ins for the networks are on the CPU")
            continue
        for shape in shapes(name, {**given, "threads": threads}, device=device, top_k=top_k):
            try:
                rows = rows_of(name, shape, forms, seconds)
            except Exception as error:  # of one case; the others are still worth their time
                if not isinstance(error, WrongResult):
                    traceback.print_exc()
                wrong.append(f"{name}: {error}; {shape}")
                continue
            if rows:
                lines += rows
                table.add_row(*table_row(rows, forms))
                write(lines, json_file)  # whoever ends this process keeps what there is
    console.print(table)
    console.print("ratio: baseline to the last form; x read: the last form to one plain read")
    for name, baseline in dict.fromkeys((row["op"], row["baseline"]) for row in lines):
        console.print(f"baseline of {name}: {baseline}")
    console.print(context())
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    logging.getLogger("eagle2_kernels").setLevel(logging.INFO)  # what a search finds
    typer.run(main)
