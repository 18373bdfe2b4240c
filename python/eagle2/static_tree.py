"""Trees of one shape: their paths, checked, and the tree that EAGLE-1 was published with."""

from collections.abc import Iterable, Sequence

from .checks import one_of

Path = tuple[int, ...]  # child ranks from the root down: (0, 1) = second child of the best child


def checked_choices(choices: Iterable[Sequence[int]]) -> tuple[Path, ...]:
    """The paths of a static tree in level order, each but once and after its parent.

    Raises:
        ValueError: no path, an empty one, a negative rank, a path given twice or without its
            parent.
    """
    one_of("choices", choices, Iterable, "paths of child ranks such as [[0], [1], [0, 0]]")
    paths = [path_of(choice) for choice in choices]
    known = set(paths)
    if not paths:
        raise ValueError("choices: wanted one path or more, got none")
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: wanted {[*path[:-1]]} too, the parent of {[*path]}")
    if len(known) < len(paths):
        twice = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"choices: wanted each path once, got {[*twice]} twice")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def path_of(choice: Sequence[int]) -> Path:
    wanted = "choices: wanted paths of child ranks 0, 1, ... such as [0, 1]"
    try:
        path = tuple(choice)
    except TypeError:
        raise ValueError(f"{wanted}, got {choice!r}") from None
    if not path or not all(isinstance(rank, int) and rank >= 0 for rank in path):
        raise ValueError(f"{wanted}, got {choice!r}")
    return path


def grown(children: Sequence[Sequence[int]]) -> tuple[Path, ...]:
    """Paths of the tree whose nodes have so many children: one list per level, from the root on.

    A node has its best children; nodes of a level that the list does not reach have none.
    """
    paths: list[Path] = []
    level: list[Path] = [()]
    for counts in children:
        level = [
            (*path, rank)
            for path, count in zip(level, counts, strict=False)
            for rank in range(count)
        ]
        paths += level
    return tuple(paths)


# 25 nodes on five levels (EAGLE, arXiv 2401.15077; `mc_sim_7b_63` of the authors' choices.py)
EAGLE1_CHOICES = grown([[4], [3, 2, 2, 1], [3, 2, 2, 1], [3], [2]])
