"""How the replacements get into SGLang."""

import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch

from eagle2_kernels.integrations import sglang


def test_the_package_asks_for_no_engine():
    """It imports neither its integrations nor what they plug into; nor do these import one."""
    code = """if True:
        import sys
        import eagle2_kernels.layouts
        assert not [name for name in sys.modules if "integrations" in name and "eagle2" in name]
        import eagle2_kernels.integrations.sglang, eagle2_kernels.integrations.safeailab
        assert not {"eagle2", "transformers", "sglang", "eagle"} & {*sys.modules}
    """
    subprocess.run([sys.executable, "-c", code], check=True)


class Registry:
    def __init__(self):
        self.hooks = {}

    def register(self, target, hook, kind):
        assert kind == "replace"
        self.hooks[target] = hook


@pytest.mark.parametrize(
    ("wanted", "registers"), [("", False), ("other", False), ("other, eagle2_kernels", True)]
)
def test_on_only_when_asked_for(monkeypatch, wanted, registers):
    registry = Registry()
    module = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(REPLACE="replace"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    monkeypatch.setenv("SGLANG_PLUGINS", wanted)
    sglang.register()
    assert registry.hooks == (sglang.REPLACEMENTS if registers else {})


@pytest.mark.parametrize("has_its_own", [False, True])
def test_sampled_verification_on_rocm(monkeypatch, has_its_own):
    """SGLang binds None there and verifies greedily: bound by hand, and the choice replaced."""
    registry, own = Registry(), object()
    utils = SimpleNamespace(tree_speculative_sampling_target_only=own if has_its_own else None)
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(REPLACE="replace"))
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    monkeypatch.setitem(sys.modules, "sglang.srt.speculative", SimpleNamespace(eagle_utils=utils))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setenv("SGLANG_PLUGINS", sglang.PLUGIN)
    sglang.register()
    ours = sglang.tree_speculative_sampling_target_only
    assert utils.tree_speculative_sampling_target_only is (own if has_its_own else ours)
    greedy = registry.hooks["sglang.srt.speculative.eagle_utils._verify_uses_greedy"]
    platform = {"is_cpu": False, "is_hip": True, "is_xpu": False, "use_rejection_sampling": False}
    assert greedy(is_all_greedy=True, **platform) is True
    assert greedy(is_all_greedy=False, **platform) is False
    assert len(registry.hooks) == len(sglang.REPLACEMENTS) + 1


def test_entry_point():
    found = [
        entry for entry in entry_points(group="sglang.srt.plugins") if entry.name == sglang.PLUGIN
    ]
    if not found:
        pytest.skip("the package is not installed, or was before it had this entry point")
    assert [entry.load() for entry in found] == [sglang.register]


def test_hooks_in_the_real_registry(monkeypatch):
    """Where SGLang is here: its own modules get the replacements, stale imports too."""
    pytest.importorskip("sglang.srt.plugins.hook_registry", exc_type=Exception)
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.reset()
    monkeypatch.setenv("SGLANG_PLUGINS", sglang.PLUGIN)
    sglang.register()
    HookRegistry.apply_hooks()
    from sglang.srt.speculative import eagle_utils, eagle_worker_common

    assert {*sglang.REPLACEMENTS} <= HookRegistry._patched
    assert (
        eagle_worker_common.build_tree_kernel_efficient is eagle_utils.build_tree_kernel_efficient
    )
    scores, tokens = [torch.rand(1, 1, 2)], [torch.arange(2)[None]]
    with pytest.raises(ValueError, match="num_draft_token: wanted 3"):
        eagle_utils.organize_draft_results(scores, tokens, [torch.tensor([[-1, 0, 1]])], 9)
    HookRegistry.reset()
