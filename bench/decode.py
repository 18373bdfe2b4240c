"""Speculative against plain decoding on real prompts, as the tables of the EAGLE-2 paper.

    python bench/decode.py                                   # the prompts beside this file
    python bench/decode.py --prompts FOLDER --every 4 --turns 1 --tree 10,6,60 --tree 3,4,6
    python bench/decode.py --temperature 0 --temperature 1 --ablate --out results

Trees are TOP_K,DEPTH,NUM_NODES (top_k 1 is a chain), eagle1 or static5, which are static, or auto,
once `eagle2 tune` has run. Every answer is checked against plain decoding before a figure is
printed. Runs are interleaved: plain, each tree, and transformers' own generate take turns on every
prompt, in an order that rotates.
With --out a run that was stopped goes on where it was, and tables and plots are written.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from decode_report import markdown, summarise
from eagle2 import baseline, embedded, load_head, packed
from eagle2.near_ties import part
from eagle2.requests import Sampling
from eagle2.target import Target
from eagle2.text import encode
from questions import Question, Records, encode_turn, read_questions
from timing import context
from tqdm import tqdm
from ways import USUAL, Way, ways

PROMPTS = Path(__file__).with_name("prompts.jsonl")


class Bench:
    """A target, its head, and what they are measured with.

    Args:
        model, head, tokenizer: who answers.
        trees: name -> way of decoding.
        law: max_new_tokens and seed.
        with_transformers: time its own greedy generate too.
    """

    def __init__(self, model, head, tokenizer, trees: dict[str, Way], law: dict, with_transformers):
        self.model, self.head, self.tokenizer = model, head, tokenizer
        self.target, self.trees, self.law = Target(model), trees, law
        self.with_transformers = with_transformers

    def measure(self, questions: list[Question], temperatures: list[float], records: Records):
        """Answer every turn of every question that the records lack, in every way."""
        work = [
            (temperature, question, turn)
            for temperature in temperatures
            for question in questions
            for turn in range(len(question.turns))
        ]
        for number, (temperature, question, turn) in enumerate(tqdm(work, "turns", disable=None)):
            key = {
                "temperature": temperature,
                "task": question.task,
                "question_id": question.question_id,
            }
            if records.find(**key, turn=turn):
                continue
            earlier = [records.find(**key, turn=before)["answer"] for before in range(turn)]
            row = encode_turn(self.tokenizer, question.turns[: turn + 1], earlier)
            found = self.answer(row, temperature, number)
            text = self.tokenizer.decode(found["plain"].pop("tokens"), skip_special_tokens=True)
            records.add({**key, "turn": turn, "prompt": len(row), "answer": text, "ways": found})

    def answer(self, row: list[int], temperature: float, number: int) -> dict[str, dict]:
        """What each way did on one prompt; `number` says which begins."""
        law = {**self.law, "temperature": temperature}
        runs = {"plain": lambda: self.plain(row, law)}
        for name, way in self.trees.items():
            runs[name] = lambda way=way: self.speculative(way, row, law)
        if self.with_transformers and temperature == 0:
            runs["transformers"] = lambda: self.transformers(row)
        names = [*runs]
        names = names[number % len(names) :] + names[: number % len(names)]
        found = {name: runs[name]() for name in names}
        plain = found["plain"]["tokens"]
        sampling = Sampling.of(1, temperature, seed=law["seed"], device=self.target.device)
        for name in self.trees:
            parting = part(self.target, row, plain, found[name].pop("tokens"), sampling)
            found[name]["near_tie"] = bool(parting and parting.near_tie)
            found[name]["different"] = bool(parting and not parting.near_tie)
        return {name: found[name] for name in runs}

    def plain(self, row, law) -> dict:
        started = time.perf_counter()
        run = baseline.generate(self.model, [row], **law)
        return timed(run, time.perf_counter() - started)

    def speculative(self, way: Way, row, law) -> dict:
        cycles = []

        def keep(tree, path):
            cycles.append((tree.depths.clone(), tree.num_nodes.clone(), path.clone()))

        started = time.perf_counter()
        run = way.generate(self.model, self.head, row, on_cycle=keep, **law)
        found = timed(run, time.perf_counter() - started)
        statistics, shapes = run.statistics, [shape_of(*cycle[:2]) for cycle in cycles]
        found |= {
            "cycles": statistics.cycles,
            "cycle_tokens": statistics.cycle_tokens,
            "accepted": statistics.accept_histogram,
            "depths": [depth for depth, _ in shapes],
            "widths": [width for _, width in shapes],
        }
        if way.config.choices:
            found["positions"] = positions(way.config, cycles)
        return found

    def transformers(self, row) -> dict:
        ids = torch.tensor([row], device=self.target.device)
        started = time.perf_counter()
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.law["max_new_tokens"],
            do_sample=False,
        )
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "new_tokens": out.shape[1] - len(row)}


def timed(run, seconds: float) -> dict:
    stages = {stage: round(spent, 5) for stage, spent in run.statistics.stage_seconds.items()}
    return {
        "seconds": round(seconds, 5),
        "new_tokens": run.statistics.new_tokens,
        "stage_seconds": stages,
        "tokens": run.tokens[0],
    }


def shape_of(depths, num_nodes) -> tuple[int, int]:
    """Depth and largest level of a tree."""
    depths = depths[0, : int(num_nodes[0])]
    return int(depths.max()), int(depths.bincount().max())


def positions(config, cycles) -> list[list[int]]:
    """For each node of a static tree: in how many cycles its parent was accepted, and itself."""
    choices = config.choices
    reached, taken = [0] * len(choices), [0] * len(choices)
    for _, num_nodes, path in cycles:
        if int(num_nodes[0]) < config.num_nodes:
            continue  # near the end of an answer, a part of the tree
        accepted = {(), *(choices[node - 1] for node in path[0].tolist() if node > 0)}
        for place, choice in enumerate(choices):
            reached[place] += choice[:-1] in accepted
            taken[place] += choice in accepted
    return [[*counts] for counts in zip(reached, taken, strict=True)]


def main(
    prompts: Annotated[Path, typer.Option(help="JSON lines, or a folder of them.")] = PROMPTS,
    every: Annotated[int, typer.Option(help="Take every n-th prompt: 4 = those held out.")] = 1,
    limit: Annotated[int | None, typer.Option(help="Most prompts per task.")] = None,
    turns: Annotated[int | None, typer.Option(help="Most turns per prompt; default: all.")] = None,
    tree: Annotated[list[str], typer.Option(help="See above; repeatable.")] = [*USUAL],  # noqa: B006
    ablate: Annotated[
        bool, typer.Option(help="Every dynamic tree less value, rerank, both.")
    ] = False,
    model: Annotated[Path | None, typer.Option(help="Default: the embedded model.")] = None,
    head: Annotated[Path, typer.Option(help="Default: its head.")] = embedded.HEAD,
    max_new_tokens: int = 128,
    temperature: Annotated[list[float], typer.Option(help="Repeatable; 0 = greedy.")] = [0.0],  # noqa: B006
    seed: int = 0,
    threads: int = 2,
    with_transformers: Annotated[bool, typer.Option(help="Time generate() at T=0 too.")] = False,
    pack: Annotated[bool, typer.Option(help="Lay weights out for oneDNN first.")] = True,
    device: Annotated[str, typer.Option(help="Where model and head go.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write rows here.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to go on in and to write to.")] = None,
) -> None:
    torch.set_num_threads(threads)
    target, tokenizer = embedded.load_target(model)
    target = target.to(device)
    draft = load_head(head, target.dtype).to(device)
    law = {"max_new_tokens": max_new_tokens, "seed": seed}
    facts = context() | {
        "transformers": transformers.__version__,
        "model": target.config.name_or_path.rpartition("/")[2],
        "head": head.name,
        "prompts": prompts.name,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": device,
        "threads": threads,
        "packed": pack and device == "cpu",
        **law,
    }
    if out:
        from decode_plots import draw  # matplotlib is an extra: miss it now, not at the end

        out.mkdir(parents=True, exist_ok=True)
    questions = read_questions(prompts, every, limit, turns)
    warm = encode(tokenizer, "Hello")
    with packed(target, draft) if facts["packed"] else contextlib.nullcontext():
        trees = ways(tree, ablate, target, draft)
        facts["trees"] = [*trees]
        records = Records(out / "answers.jsonl" if out else None, facts)
        for way in trees.values():
            way.generate(target, draft, warm, max_new_tokens=8)
        bench = Bench(target, draft, tokenizer, trees, law, with_transformers)
        bench.measure(questions, temperature, records)
    rows = summarise(records.rows)
    tables = markdown(rows, facts)
    print(tables)
    result = json.dumps({"context": facts, "rows": rows}, indent=1) + "\n"
    if json_file:
        json_file.write_text(result)
    if out:
        (out / "results.json").write_text(result)
        (out / "table.md").write_text(tables)
        draw(records.rows, rows, out)
    if any(row["different"] for row in rows):
        raise SystemExit("some text differs from plain decoding by more than rounding")


if __name__ == "__main__":
    typer.run(main)
