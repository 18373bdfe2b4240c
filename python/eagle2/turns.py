"""Rows that transformers' logits processors and stopping criteria judge, one token at a time."""

import copy
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PrefixConstrainedLogitsProcessor,
    StoppingCriteriaList,
)

from eagle2_kernels import Tree

from .prompts import token_rows
from .ranks import agree
from .requests import Generation, Statistics


class Turns:
    """What `Requests` and the operators `sample` and `accept` are to the loop, for `generate`.

    Every token is chosen as transformers chooses it: the processors see the row's own ids, padding
    included, and float32 logits, then argmax or one draw of torch.multinomial, then the stopping
    criteria. They are called once for each token that is said and for no other, in order.

    Args:
        input_ids: [B, T], left-padded.
        attention_mask: [B, T], or None where there is no padding.
        logits_processor, stopping_criteria, generation_config: as `generate` prepared them.
        put: called with each new token [1].
        group: the ranks that have to say the same, if there are several.
    """

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        put: Callable[[Tensor], None] | None,
        group: "dist.ProcessGroup | None" = None,
    ):
        self.prompts = token_rows(input_ids, attention_mask)
        self.width = input_ids.shape[1]
        self.ids = [row[None] for row in input_ids]
        self.processors = [logits_processor]
        if len(self.ids) > 1:
            self.processors = [
                LogitsProcessorList(of_row(processor, row) for processor in logits_processor)
                for row in range(len(self))
            ]
        self.criteria, self.put, self.group = stopping_criteria, put, group
        self.do_sample = generation_config.do_sample
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.limit = stopping_criteria.max_length - self.width
        self.ends: list[int | None] = [None] * len(self.ids)  # new tokens when a criterion held
        wanted = generation_config.return_dict_in_generate
        self.scores: list[Tensor] | None = (
            [] if wanted and generation_config.output_scores else None
        )
        self.logits: list[Tensor] | None = (
            [] if wanted and generation_config.output_logits else None
        )

    def __len__(self) -> int:
        return len(self.ids)

    def said(self, row: int) -> int:
        return self.ids[row].shape[1] - self.width

    @property
    def done(self) -> bool:
        return not any(self.remaining(row) for row in range(len(self)))

    def remaining(self, row: int) -> int:
        """New tokens a row may still get.

        Without an end token a row that has ended goes on until all have, as in transformers.
        """
        if self.ends[row] is not None and self.pads:
            return 0
        limit = self.limit if None in self.ends else max(self.ends)
        return max(limit - self.said(row), 0)

    def capacity(self, num_nodes: int) -> int:
        return max(map(len, self.prompts)) + self.limit + num_nodes

    def commit(self, row: int, tokens: list[int]) -> int:
        """The tokens have been said already."""
        return len(tokens)

    def generation(self, statistics: Statistics) -> Generation:
        rows = [ids[0, self.width :].tolist() for ids in self.ids]
        statistics.new_tokens = sum(map(len, rows))
        return Generation(rows, [""] * len(rows), statistics)

    def say(self, row: int, logits: Tensor) -> int:
        """Choose the next token of a row from the target's logits [V]."""
        ids = self.ids[row]
        logits = logits[None].to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self.processors[row](ids, logits)
        for kept, values in ((self.scores, scores), (self.logits, logits)):
            if kept is not None:
                kept.append(values)
        if self.do_sample:
            token = torch.multinomial(scores.softmax(-1), 1)[0]
        else:
            token = scores.argmax(-1)
        (token,) = agree((token,), self.group)
        self.ids[row] = ids = torch.cat((ids, token[None]), 1)
        shown = None if self.scores is None else tuple(self.scores)
        if self.criteria(ids, shown).all() and self.ends[row] is None:
            self.ends[row] = self.said(row)
        if self.put:
            self.put(token.cpu())
        return int(token)

    def sample(self, logits: Tensor, *_) -> Tensor:
        """The operator, for rows of one node [B, 1, V]."""
        tokens = [self.say(row, logits[row, 0]) for row in range(len(self))]
        return torch.tensor(tokens, device=logits.device)[:, None]

    def accept(self, tree: Tree, logits: Tensor, *rest) -> tuple[Tensor, ...]:
        """The operator: from the root, say a token and step to the child that carries it."""
        depth, rows = rest[-1], len(self)
        path = torch.full((rows, depth + 1), -1, dtype=torch.int32)
        said, bonus = torch.full((rows, depth + 1), -1), torch.full((rows,), -1)
        parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
        for row, count in enumerate(tree.num_nodes.tolist()):
            node, step = (0 if count else None), 0
            while node is not None:
                path[row, step] = node
                said[row, step] = bonus[row] = token = self.say(row, logits[row, node])
                if step == depth or self.remaining(row) == 0:
                    break
                born = zip(parents[row][:count], tokens[row][:count], strict=True)
                children = (child for child, pair in enumerate(born) if pair == (node, token))
                node, step = next(children, None), step + 1
        accept_length = (path[:, 1:] >= 0).sum(1).to(torch.int32)
        return tuple(result.to(logits.device) for result in (path, accept_length, bonus, said))


def of_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    """A processor as the row meets it when it is judged alone."""
    if isinstance(getattr(processor, "prompt_ignore_length", None), Tensor):
        processor = copy.copy(processor)
        processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    return processor
