"""What passes cost on a device and how drafts fare: measured by `eagle2 tune`, kept as JSON."""

import dataclasses
import hashlib
import json
import os
import platform
import sys
from pathlib import Path

import numpy as np
import torch
from platformdirs import user_cache_path
from transformers import PreTrainedModel

from .checks import one_of, read_json
from .networks import Head
from .target import check_model
from .whole_file import whole

LARGEST = sys.float_info.max


@dataclasses.dataclass(frozen=True)
class Profile:
    """Costs and expectations that `TreeConfig.auto` sizes trees by; D levels, K children, N nodes.

    Attributes:
        setting: what it holds for: model, head, device, dtype, threads, packed weights.
        versions: of the libraries that were measured.
        rows: numbers of rows that were measured, from 1 up.
        target_seconds: of a target pass over so many rows.
        draft_seconds: of a draft step over so many rows.
        trust: [D], nodes accepted of a level over the sum of exp(path score) there.
        offspring: [D][K], mean probability that the head gives the children of a leaf, best first.
        gains: [D][N], accepted nodes to expect of the best 1, 2, ... nodes, root included, of trees
            with 1, 2, ... levels.
    """

    setting: dict[str, str | int | bool]
    versions: dict[str, str]
    rows: list[int]
    target_seconds: list[float]
    draft_seconds: list[float]
    trust: list[float]
    offspring: list[list[float]]
    gains: list[list[float]]

    def __post_init__(self):
        for name in ("setting", "versions"):
            need(name, isinstance(getattr(self, name), dict), "an object", getattr(self, name))
        for name in ("rows", "target_seconds", "draft_seconds", "trust"):
            need(name, numbers(getattr(self, name)), "finite numbers", getattr(self, name))
        for name in ("offspring", "gains"):
            table = getattr(self, name)
            good = isinstance(table, list) and len(table) == len(self.trust)
            good = good and all(map(numbers, table)) and len({len(row) for row in table}) == 1
            need(name, good, f"{len(self.trust)} rows of finite numbers, of one length", table)
        rising = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        need("rows", self.rows[0] == 1 and rising, "1 and then ever larger numbers", self.rows)
        for name in ("target_seconds", "draft_seconds"):
            costs = getattr(self, name)
            need(name, len(costs) == len(self.rows), f"{len(self.rows)} of them", costs)
            rising = all(a <= b for a, b in zip(costs, costs[1:], strict=False))
            need(name, costs[0] > 0 and rising, "positive times that do not fall", costs)

    @property
    def top_k(self) -> int:
        return len(self.offspring[0])

    @property
    def depth(self) -> int:
        return len(self.trust)

    def target(self, rows: int | np.ndarray) -> float | np.ndarray:
        """Seconds of a target pass."""
        return cost(rows, self.rows, self.target_seconds)

    def draft(self, rows: int | np.ndarray) -> float | np.ndarray:
        """Seconds of a draft step."""
        return cost(rows, self.rows, self.draft_seconds)

    def fixed(self, batch: int) -> tuple[int, int, float]:
        """Depth and nodes of the best trees of one size, and the tokens per second they promise."""
        gains = np.array(self.gains)[:, : self.most_nodes(batch)]
        depths = np.arange(1, self.depth + 1)[:, None]
        nodes = np.arange(1, gains.shape[1] + 1)
        seconds = self.draft(batch) + (depths - 1) * self.draft(batch * self.top_k)
        pace = batch * (1 + gains) / (seconds + self.target(batch * nodes))
        depth, count = np.unravel_index(pace.argmax(), pace.shape)
        return int(depth) + 1, int(count) + 1, float(pace[depth, count])

    def most_nodes(self, batch: int) -> int:
        """Nodes per row of the largest pass that was measured.

        Raises:
            ValueError: not even two for so large a batch.
        """
        if self.rows[-1] < 2 * batch:
            raise ValueError(
                f"profile: wanted {2 * batch} rows or more for a batch of {batch}, got "
                f"{self.rows[-1]}; make one by: eagle2 tune --rows {64 * batch}"
            )
        return self.rows[-1] // batch

    def write(self, path: Path) -> None:
        """All of it or nothing appears."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as fresh:
            fresh.write_text(json.dumps(dataclasses.asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Profile":
        """The profile of a file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it is no profile, or what is wrong with it by its name.
        """
        one_of("path", path, (str, os.PathLike), "a file")
        fields = read_json(Path(path))
        names = {field.name for field in dataclasses.fields(cls)}
        if fields.keys() != names:
            raise ValueError(f"{path}: wanted a profile with {sorted(names)}, got {sorted(fields)}")
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    @classmethod
    def find(cls, model: PreTrainedModel, head: Head) -> "Profile":
        """The profile that `eagle2 tune` left in the user's cache folder for this pair, as it runs.

        Device, dtype, threads and whether weights are `packed` are those of the moment.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged.
        """
        check_model(model)
        one_of("head", head, Head, "a head as load_head gives it")
        setting = setting_of(model, head)
        path = place(setting)
        if not path.exists():
            known = ", ".join(f"{name} {value}" for name, value in setting.items())
            raise FileNotFoundError(f"no profile for {known}; make one by: eagle2 tune")
        return cls.read(path)


def need(name: str, good: bool, wanted: str, got) -> None:
    if not good:
        raise ValueError(f"{name}: wanted {wanted}, got {str(got)[:80]}")


def numbers(values) -> bool:
    """Whether these are one number or more, all finite and none below 0."""
    return (
        isinstance(values, list)
        and len(values) > 0
        and all(
            isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= LARGEST
            for x in values
        )
    )


def cost(rows: int | np.ndarray, known: list[int], seconds: list[float]) -> float | np.ndarray:
    """Between measured rows along a line; above them along the line from the first to the last."""
    beyond = np.maximum(np.asarray(rows) - known[-1], 0)
    slope = (seconds[-1] - seconds[0]) / max(known[-1] - known[0], 1)
    return np.interp(rows, known, seconds) + beyond * slope


def setting_of(model: PreTrainedModel, head: Head) -> dict[str, str | int | bool]:
    """What a profile of this pair depends on."""
    config, lm_head = model.config, model.get_output_embeddings()
    weight = lm_head.weight
    gpu = weight.device.type == "cuda"
    own = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "model": f"{type(model).__name__} {shape(model)}",
        "layers": config.num_hidden_layers,
        "head": f"{head.config.kind} {shape(head)}",
        "draft_vocabulary": head.config.draft_size,
        "device": torch.cuda.get_device_name(weight.device) if gpu else own,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "threads": 0 if gpu else torch.get_num_threads(),
        "packed": "forward" in lm_head.__dict__,
    }


def shape(module: PreTrainedModel | Head) -> str:
    """Width, and how many weights: e.g. 576 wide, 134515008 weights."""
    count = sum(weight.numel() for weight in module.parameters())
    return f"{module.config.hidden_size} wide, {count} weights"


def place(setting: dict[str, str | int | bool]) -> Path:
    name = hashlib.sha256(json.dumps(setting, sort_keys=True).encode()).hexdigest()[:16]
    return user_cache_path("eagle2") / "profiles" / f"{name}.json"
