"""All of SGLang's seams in a row: no host reads, one CUDA graph, sound schemas."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from eagle2_kernels.integrations import sglang, sglang_ops


def one_cycle(device="cpu"):
    """Everything that SGLang calls in a cycle, on tensors made beforehand."""
    generator = torch.Generator().manual_seed(8)
    topk, steps, nodes, batch, vocab = 4, 3, 9, 2, 40
    drawn = [torch.rand(batch * topk if i else batch, topk, generator=generator) * 0.2 + 0.01
             for i in range(steps)]  # fmt: skip
    chosen = [torch.randint(vocab, p.shape, generator=generator) for p in drawn]
    probs = torch.rand(batch, nodes, vocab, generator=generator).softmax(-1)
    coins = torch.rand(batch, nodes, generator=generator)
    inputs = [x.to(device) for x in (*drawn, *chosen, probs, coins)]
    drawn, chosen, (probs, coins) = inputs[:steps], inputs[steps : 2 * steps], inputs[2 * steps :]
    hidden = torch.zeros(batch, 4, device=device)
    seq_lens = torch.tensor([5, 7], device=device)
    bonus = torch.tensor([1, 2], device=device, dtype=torch.int32)

    def run():
        scores, states, lists = None, hidden, ([], [], [])
        for i in range(steps):
            _, states, scores, info = sglang.select_top_k_tokens(
                i, drawn[i], chosen[i], states, scores, topk
            )
            for values, entry in zip(lists, info, strict=True):
                values.append(entry)
        drafted = sglang.organize_draft_results(*lists, nodes)
        built = sglang.build_tree_kernel_efficient(
            bonus, *drafted, seq_lens, 12, topk, steps, nodes
        )
        tree = dict(zip(("retrieve_index", "retrieve_next_token", "retrieve_next_sibling"),
                        built[2:5], strict=True))  # fmt: skip
        results = []
        for sampled in (False, True):
            predicts = torch.zeros(batch * nodes, dtype=torch.int32, device=device)
            accept_index = torch.full((batch, steps + 1), -1, dtype=torch.int32, device=device)
            accepted = torch.zeros(batch, dtype=torch.int32, device=device)
            out = {"predicts": predicts, "accept_index": accept_index,
                   "accept_token_num": accepted}  # fmt: skip
            candidates = built[5].view(batch, nodes)
            if sampled:
                sglang.tree_speculative_sampling_target_only(
                    **out, candidates=candidates, **tree, uniform_samples=coins,
                    uniform_samples_for_final_sampling=coins[:, 0], target_probs=probs,
                )  # fmt: skip
            else:
                sglang.verify_tree_greedy_func(
                    **out, candidates=candidates, **tree, target_predict=probs.argmax(-1)
                )
            slots = torch.arange(batch * nodes, device=device)
            pool = SimpleNamespace(move_kv_cache=lambda *moves: results.extend(moves))
            pool.get_kvcache = lambda pool=pool: pool
            sglang.move_accept_tokens_to_target_kvcache(
                SimpleNamespace(seq_lens=seq_lens, out_cache_loc=slots),
                accept_index,
                accepted,
                pool,
            )
            results.extend(out.values())
        return [*drafted, *built, *results]

    return run


def test_no_host_reads():
    """Tensors without values: whoever asks for one fails."""
    real = one_cycle()()
    with FakeTensorMode():
        fake = one_cycle()()
    assert [x.shape for x in fake] == [x.shape for x in real]


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    wanted, run = one_cycle()(), one_cycle("cuda")
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    graph.replay()
    for a, b in zip(got, wanted, strict=True):
        assert torch.equal(a.cpu(), b)


@pytest.mark.parametrize("name", sglang_ops.NAMES)
def test_opcheck(monkeypatch, name):
    calls = []
    operator = getattr(torch.ops.eagle2_sglang, name)
    record = {other: getattr(torch.ops.eagle2_sglang, other) for other in sglang_ops.NAMES}
    record[name] = lambda *args: calls.append(args) or operator(*args)
    monkeypatch.setattr(sglang, "walks", SimpleNamespace(**record))
    one_cycle()()
    torch.library.opcheck(operator, calls[0], test_utils=("test_schema", "test_faketensor"))
