"""EAGLE-2 speculative decoding: the target's own text, faster."""

from .decode import generate
from .drafter import TreeConfig
from .heads import Eagle2Head, Eagle3Config, Eagle3Head, HeadConfig, load_head, save_head
from .hugging_face import attached, custom_generate
from .packed import packed
from .profile import Profile
from .requests import Generation, Statistics
from .static_tree import EAGLE1_CHOICES
from .tune import tune

__all__ = [
    "EAGLE1_CHOICES",
    "Eagle2Head",
    "Eagle3Config",
    "Eagle3Head",
    "Generation",
    "HeadConfig",
    "Profile",
    "Statistics",
    "TreeConfig",
    "attached",
    "custom_generate",
    "generate",
    "load_head",
    "packed",
    "save_head",
    "tune",
]
