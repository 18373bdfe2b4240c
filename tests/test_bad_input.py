"""What is wrong with an argument, an option or a file is said by name; nothing is half-written."""

import json
import pickle
import resource
import shutil

import eagle2
import pytest
import torch
from conftest import INTERPRETED, forms_with
from eagle2 import (
    Eagle2Head,
    Eagle3Config,
    Eagle3Head,
    Profile,
    TreeConfig,
    baseline,
    load_head,
    packed,
    save_head,
)
from eagle2.embedded import dequantise
from eagle2.target import Target
from test_cli import folders as model_folders  # noqa: F401
from test_cli import run
from test_ops import call, make_arguments
from tiny import make_eagle3_head, make_head, make_pair, make_target

from eagle2_kernels import layouts, ops
from eagle2_kernels.layouts import from_parents

NAN = float("nan")
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
UNUSED = {"verify": (2, 3, 4), "accept": (2, 3, 4)}  # fields of a tree that they do not look at
FINE = {
    ("compact_kv", 0, "dtype"),  # any, as long as both caches have it
    ("compact_kv", 2, "size"),  # a path of no step
    ("select_leaves", 0, "device"),  # it has but one tensor
    ("tree_attention", 4, "size"),  # no words: all is padding
}
TENSORS = [
    (name, place)
    for name, arguments in make_arguments().items()
    for place, value in enumerate(arguments)
    if isinstance(value, torch.Tensor) and place not in UNUSED.get(name, ())
]


@pytest.mark.parametrize("wrong", ["rank", "dtype", "device", "size", "list"])
@pytest.mark.parametrize(("name", "place"), TENSORS)
def test_every_tensor_of_every_operator(name, place, wrong):
    arguments = [*make_arguments()[name]]
    found = arguments[place]
    arguments[place] = {
        "rank": lambda: found[..., None],
        "dtype": lambda: found.to(torch.complex64),
        "device": lambda: found.to("meta"),
        "size": lambda: found[..., :0],
        "list": lambda: found.tolist(),
    }[wrong]()
    if (name, place, wrong) in FINE:
        return
    if name == "rerank" and (wrong, place) == ("size", 3):
        arguments[place] = found[:0]
    with pytest.raises(ValueError, match=r"^[a-z_.]+: wanted .*got"):
        call(name, arguments)


@pytest.mark.parametrize(
    ("name", "place", "values"),
    [
        ("expand", 2, (-1, 0, 2**40)),
        ("select_leaves", 1, (-1, 0, 2**40)),
        ("enter_level", 3, (-1, 2**40)),
        ("enter_level", 8, (-1, 2**40)),
        ("enter_level", 9, (0, 2**40)),
        ("rerank", 4, (0, -1)),
        ("rerank", 5, (0, -1)),
        ("tree_attention", 8, (0, -1)),
        ("verify", 7, (-1,)),
        ("accept", 13, (-1,)),
    ],
)
def test_every_size_of_every_operator(name, place, values):
    for value in values:
        arguments = [*make_arguments()[name]]
        arguments[place] = value
        with pytest.raises(ValueError, match=r"^[a-z_]+: wanted .*got"):
            call(name, arguments)


WRITTEN = [("compact_kv", 0), ("compact_kv", 1), *(("enter_level", place) for place in range(3))]


@pytest.mark.parametrize(("name", "place"), WRITTEN)
def test_written_elements_that_share_memory(name, place):
    found = make_arguments()[name][place]
    spread = [found[:, :1].expand_as(found), found[..., :1].expand_as(found)]
    spread.append(found.flatten().as_strided(found.shape, (*found.stride()[1:], 1)))
    for overlapping in spread:
        assert overlapping.shape == found.shape
        arguments = [*make_arguments()[name]]
        arguments[place] = overlapping
        with pytest.raises(ValueError, match=r"^[a-z_.]+: wanted memory of its own .*got strides"):
            call(name, arguments)


@pytest.mark.parametrize(("name", "place"), WRITTEN)
def test_written_elements_in_any_order(name, place):
    """Strides that are not the usual ones, with gaps and turned around, are as good."""
    arguments, wanted = [*make_arguments()[name]], [*make_arguments()[name]]
    found = arguments[place]
    room = torch.zeros((*found.shape[::-1], 2), dtype=found.dtype)[..., 0]
    arguments[place] = room.permute(*reversed(range(found.dim()))).copy_(found)
    call(name, arguments)
    call(name, wanted)
    assert torch.equal(arguments[place], wanted[place])


def test_one_cache_given_twice():
    arguments = [*make_arguments()["compact_kv"]]
    arguments[1] = arguments[0]
    with pytest.raises(ValueError, match="v_cache: wanted memory of its own, .*got k_cache"):
        call("compact_kv", arguments)


@pytest.mark.parametrize(("one_form", "name"), forms_with(*ops.OPERATORS, but=INTERPRETED))
def test_nan_everywhere_is_survived(one_form, name):
    """The same integers as the reference, and no fault, where every float is NaN."""
    arguments = [
        x * NAN if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for x in make_arguments()[name]
    ]
    got = getattr(one_form, name)(*ops.packed(name, arguments))
    wanted = call(name, arguments)
    for one, other in zip(*([x] if torch.is_tensor(x) else x or () for x in (got, wanted)),
                          strict=True):  # fmt: skip
        torch.testing.assert_close(one, other, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda tree: layouts.to_bool(tree, torch.zeros(2), 9), "prefix_len: wanted int32 or"),
        (lambda tree: layouts.to_bool(tree, torch.ones(2).int()), "num_keys: wanted how many"),
        (lambda tree: layouts.to_flashinfer(tree, torch.zeros(3).long(), 9), "prefix_len: wanted"),
        (lambda tree: layouts.to_sglang(tree, torch.zeros(2).long(), 7), "mask_mode: wanted 0, 1"),
        (lambda tree: layouts.to_sglang(tree, torch.zeros(2).long()), "prefix_sum: wanted"),
        (lambda tree: from_parents([[0]], [[1]]), "parents: wanted -1 for node 0 of row 0, got 0"),
        (lambda tree: from_parents([[-1, 1]], [[1, 2]]), "parents: wanted 0..0 for node 1"),
        (lambda tree: from_parents([[-1]], [[1, 2]]), r"tokens: wanted \[1\] entries"),
        (lambda tree: from_parents([[-1]], [[1]], [[]]), r"scores: wanted \[1\] entries"),
    ],
)
def test_layouts(call, message):
    with pytest.raises(ValueError, match=message):
        call(from_parents([[-1, 0], [-1]], [[1, 2], [3]]))


@pytest.fixture(scope="module")
def pair():
    return make_pair(context=1.0)


PROMPT = [[1, 2]]
CALLS = [
    ({"input_ids": []}, "input_ids: wanted one row or more, got none"),
    ({"input_ids": torch.zeros(0, 3).long()}, "input_ids: wanted one row or more"),
    ({"input_ids": [[]]}, "input_ids: wanted 1..127 tokens"),
    ({"input_ids": [1, 2]}, "input_ids: wanted a list of rows"),
    ({"input_ids": "text"}, "input_ids: wanted rows of ids, got 'text'"),
    ({"input_ids": None}, "input_ids: wanted rows of ids, got None"),
    ({"input_ids": [[1.5]]}, "input_ids: wanted a whole number, got 1.5"),
    ({"input_ids": [[3], [1, 61]]}, "input_ids: wanted ids in 0..60, got 61 in row 1"),
    ({"input_ids": [[-1]]}, "input_ids: wanted ids in 0..60, got -1 in row 0"),
    ({"input_ids": torch.tensor([1, 2])}, r"input_ids: wanted shape \[B, T\], got \[2\]"),
    ({"input_ids": torch.tensor([[1.0]])}, "input_ids: wanted whole numbers, .* float32"),
    ({"input_ids": torch.zeros(1, 2).long().to("meta")}, "input_ids: wanted whole numbers, .*meta"),
    ({"input_ids": [[1], 5.5]}, "input_ids, row 1: wanted ids, got float"),
    ({"attention_mask": torch.ones(1, 2)}, "attention_mask: wanted input_ids as a tensor"),
    (
        {"input_ids": torch.ones(1, 2).long(), "attention_mask": [[1, 1]]},
        "attention_mask: wanted a tensor, got list",
    ),
    ({"max_new_tokens": 0}, "max_new_tokens: wanted 1 or more, got 0"),
    ({"max_new_tokens": 2.0}, "max_new_tokens: wanted a whole number, got 2.0"),
    ({"max_new_tokens": None}, "max_new_tokens: wanted a whole number, got None"),
    ({"temperature": NAN}, "temperature: wanted 0.0..inf, got nan"),
    ({"temperature": "hot"}, "temperature: wanted a number or one for each row, got 'hot'"),
    ({"temperature": None}, "temperature: wanted a number or one for each row, got None"),
    ({"temperature": ["hot"]}, "temperature: wanted a number or one for each row, got 'hot'"),
    ({"temperature": torch.tensor(NAN)}, "temperature: wanted 0.0..inf, got nan"),
    ({"min_p": torch.ones(1, 2)}, "min_p: wanted a number or one for each row, got tensor"),
    ({"top_k": 2**31}, "top_k: wanted 0..2147483647"),
    ({"top_k": 1.5}, "top_k: wanted a whole number, got 1.5"),
    ({"top_p": NAN}, "top_p: wanted 0.0..1.0, got nan"),
    ({"min_p": [NAN]}, "min_p: wanted 0.0..1.0, got nan"),
    ({"seed": 2**63}, "seed: wanted -9223372036854775808"),
    ({"seed": 0.5}, "seed: wanted a whole number, got 0.5"),
    ({"eos_token_id": "</s>"}, "eos_token_id: wanted a whole number, got '</s>'"),
    ({"eos_token_id": [1, None]}, "eos_token_id: wanted a whole number, got None"),
    ({"on_commit": 3}, "on_commit: wanted a function, got int"),
    ({"ops": 3}, "ops: wanted a module of operators, got one without"),
    ({"ops": torch}, "ops: wanted a module of operators, got one without"),
]
OF_THE_MODEL = "model: wanted a causal LM .*, got "
OF_TREES = [
    ({"tree": (4, 4, 8)}, "tree: wanted a TreeConfig, got tuple"),
    ({"tree": "auto"}, "tree: wanted a TreeConfig, got str"),
    ({"tree": ()}, "tree: wanted a TreeConfig, got tuple"),
    ({"head": None}, "head: wanted a head as load_head gives it, got NoneType"),
    ({"head": "folder"}, "head: wanted a head as load_head gives it, got str"),
    ({"head": torch.nn.Linear(2, 2)}, "head: wanted a head as load_head gives it, got Linear"),
    ({"model": None}, OF_THE_MODEL + "NoneType"),
    ({"model": "folder"}, OF_THE_MODEL + "str"),
    ({"model": make_target().model}, OF_THE_MODEL + "LlamaModel"),
]


@pytest.mark.parametrize(("changes", "message"), CALLS, ids=lambda value: str(value)[:50])
def test_generate_and_baseline_before_any_pass(pair, monkeypatch, changes, message):
    monkeypatch.setattr(Target, "_forward", None)
    changes = {"input_ids": PROMPT, **changes}
    with pytest.raises(ValueError, match=message):
        eagle2.generate(*pair, **changes)
    with pytest.raises(ValueError, match=message):
        baseline.generate(pair[0], **changes)


@pytest.mark.parametrize(("changes", "message"), OF_TREES, ids=lambda value: str(value)[:50])
def test_whatever_takes_a_model_a_head_or_a_tree(pair, monkeypatch, changes, message):
    monkeypatch.setattr(Target, "_forward", None)
    given = {"model": pair[0], "head": pair[1], **changes}
    model, head, tree = (given.get(name) for name in ("model", "head", "tree"))
    with pytest.raises(ValueError, match=message):
        eagle2.generate(**given, input_ids=PROMPT)
    with pytest.raises(ValueError, match=message), eagle2.attached(model, head, tree):
        pass
    if "model" in changes:
        with pytest.raises(ValueError, match=message):
            baseline.generate(model, PROMPT)
    else:
        with pytest.raises(ValueError, match=message):
            eagle2.custom_generate(head, tree)
    if "tree" not in changes:
        for function in (
            lambda: eagle2.tune(model, head, PROMPT),
            lambda: Profile.find(model, head),
        ):
            with pytest.raises(ValueError, match=message):
                function()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": None}, "prompts: wanted rows of ids, got None"),
        ({"prompts": []}, "prompts: wanted one row or more, got none"),
        ({"prompts": [1, 2]}, "prompts: wanted a list of rows"),
        ({"prompts": [[61]]}, "prompts: wanted ids in 0..60, got 61"),
        ({"rows": 1.5}, "rows: wanted a whole number, got 1.5"),
        ({"rounds": 0}, "rounds: wanted 1 or more, got 0"),
        ({"max_new_tokens": None}, "max_new_tokens: wanted a whole number, got None"),
        ({"progress": 5}, "progress: wanted a function, got int"),
    ],
)
def test_tune_before_it_measures(pair, monkeypatch, changes, message):
    monkeypatch.setattr(Target, "_forward", None)
    with pytest.raises(ValueError, match=message):
        eagle2.tune(*pair, **{"prompts": PROMPT, **changes})


LAYERS = "eagle_aux_hidden_state_layer_ids"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, "vocab_size: wanted a whole number, got None"),
        ({"draft_vocab_size": "x"}, "draft_vocab_size: wanted a whole number, got 'x'"),
        ({"target_hidden_size": -4}, "target_hidden_size: wanted 1 or more, got -4"),
        ({"max_position_embeddings": 0.5}, "max_position_embeddings: wanted a whole number"),
        ({"rms_norm_eps": NAN}, "rms_norm_eps: wanted a positive number, got nan"),
        ({"rope_theta": "x"}, "rope_theta: wanted a positive number, got 'x'"),
        ({"draft_temperature": None}, "draft_temperature: wanted a positive number, got None"),
        ({"rope_scaling": 2.0}, "rope_scaling: wanted its type and factors by name, got float"),
        ({"qkv_bias": "no"}, "qkv_bias: wanted true or false, got str"),
        ({"norm_before_fc": 3}, "norm_before_fc: wanted true or false, got int"),
        ({LAYERS: 5}, f"{LAYERS}: wanted layers in ascending order, got int"),
        ({LAYERS: [0.5, 2]}, f"{LAYERS}: wanted a whole number, got 0.5"),
        ({LAYERS: [-1, 2]}, f"{LAYERS}: wanted 0 or more, got -1"),
        ({LAYERS: []}, f"{LAYERS}: wanted layers in ascending order, got"),
    ],
)
def test_shapes_of_heads(changes, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**{**dict.fromkeys(SIZES, 8), **changes})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda head, path: Eagle2Head(None), "config: wanted HeadConfig, got NoneType"),
        (lambda head, path: Eagle3Head(head.config), "config: wanted Eagle3Config, got HeadConfig"),
        (lambda head, path: load_head(None), "path: wanted the folder of a head, got NoneType"),
        (lambda head, path: load_head(path, "float16"), "dtype: wanted torch.float32, .*'float16'"),
        (lambda head, path: save_head(None, path), "head: wanted an Eagle2Head or Eagle3Head, got"),
        (lambda head, path: save_head(head, 5), "path: wanted a folder, got int"),
        (lambda head, path: save_head(head, path, torch.int8), "dtype: wanted .* got torch.int8"),
        (
            lambda head, path: save_head(head, path, layout="gguf"),
            "layout: wanted published or speculators, got 'gguf'",
        ),
        (lambda head, path: Profile.read(5), "path: wanted a file, got int"),
        (lambda head, path: packed((head, head)).__enter__(), "modules: wanted networks"),
        (lambda head, path: TreeConfig.static(5), "choices: wanted paths of child ranks"),
        (lambda head, path: TreeConfig(choices=5), "choices: wanted paths of child ranks"),
        (lambda head, path: TreeConfig.auto("x"), "profile: wanted what Profile.find"),
        (lambda head, path: TreeConfig(profile="x"), "profile: wanted what Profile.find"),
    ],
)
def test_heads_profiles_and_trees(pair, tmp_path, call, message):
    with pytest.raises(ValueError, match=message):
        call(pair[1], tmp_path / "head")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1.5,), "top_k: wanted a whole number, got 1.5"),
        ((NAN,), "top_k: wanted a whole number, got nan"),
        ((4, 0), "depth: wanted 1 or more, got 0"),
        ((4, 2, -5), "num_nodes: wanted 1 or more, got -5"),
        ((4, 2, None), "num_nodes: wanted a whole number, got None"),
        ((10**9, 1), "top_k, depth: wanted trees of 1,048,576 candidates"),
        ((4, 10**9), "top_k, depth: wanted trees of 1,048,576 candidates"),
    ],
)
def test_tree_config(sizes, message):
    with pytest.raises(ValueError, match=message):
        TreeConfig(*sizes)


def test_a_tree_far_larger_than_the_context_is_cut(pair):
    wanted = baseline.generate(pair[0], PROMPT, max_new_tokens=9).tokens
    tree = TreeConfig(3, 2, 10**9)
    assert eagle2.generate(*pair, PROMPT, max_new_tokens=9, tree=tree).tokens == wanted


def spoil(text):
    """A way to write the config anew."""
    return lambda folder: (folder / "config.json").write_text(text)


def with_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


def cut(share):
    def change(folder):
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    return change


def as_bin(data):
    def change(folder):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(data)

    return change


def with_index(text):
    def change(folder):
        (folder / "model.safetensors").rename(folder / "part.safetensors")
        (folder / "model.safetensors.index.json").write_text(text)

    return change


class Hostile:
    """Unpickled, it writes a file."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return (open, (self.place, "w"))


FILES = [
    (spoil('{"a":'), r"config\.json: wanted JSON"),
    (spoil("[1]"), r"config\.json: wanted a JSON object, got list"),
    (with_config(hidden_size="x"), r"config\.json: hidden_size: wanted a whole number, got 'x'"),
    (with_config(num_attention_heads=0), r"num_attention_heads: wanted 1 or more, got 0"),
    (with_config(num_key_value_heads=-2), r"num_key_value_heads: wanted 1 or more, got -2"),
    (cut(0.5), r"model\.safetensors: damaged or cut short"),
    (cut(0.001), r"model\.safetensors: damaged or cut short"),
    (cut(0), r"model\.safetensors: damaged or cut short"),
    (as_bin(b""), r"pytorch_model\.bin: damaged or cut short"),
    (as_bin(b"hello"), r"pytorch_model\.bin: "),
    (as_bin(pickle.dumps([1, 2])), r"pytorch_model\.bin: "),
    (with_index("{}"), r"index\.json: wanted a weight_map"),
    (
        with_index('{"weight_map": {"fc.weight": "../part.safetensors"}}'),
        "names of files beside it",
    ),
    (with_index('{"weight_map": {"fc.weight": "gone.safetensors"}}'), "gone.safetensors: wanted"),
    (lambda folder: (folder / "config.json").unlink(), r"config\.json"),
    (lambda folder: (folder / "model.safetensors").unlink(), "wanted model.safetensors or"),
    (lambda folder: shutil.rmtree(folder), r"config\.json"),
]


@pytest.mark.parametrize("number", range(len(FILES)))
def test_files_of_a_head(number, tmp_path, monkeypatch, capsys):
    change, message = FILES[number]
    save_head(make_head(make_target()), tmp_path / "head")
    change(tmp_path / "head")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_head(tmp_path / "head")
    gone = not (tmp_path / "head").exists()
    for command in (["inspect", tmp_path / "head"], ["convert", tmp_path / "head", tmp_path / "o"]):
        assert run(monkeypatch, *command) == (2 if gone else 1)
        shown = capsys.readouterr().err
        assert "Invalid value for 'folder'" in shown if gone else shown.startswith("eagle2: ")
        assert "Traceback" not in shown
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("zipped", [False, True])
def test_code_in_a_weight_file_is_not_run(tmp_path, zipped):
    save_head(make_head(make_target()), tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").unlink()
    file, proof = tmp_path / "head" / "pytorch_model.bin", tmp_path / "proof"
    torch.save({"fc.weight": Hostile(str(proof))}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: wanted tensors alone"):
        load_head(tmp_path / "head")
    assert not proof.exists()


def test_a_head_of_another_target(model_folders, monkeypatch, capsys, tmp_path):  # noqa: F811
    other = make_target(hidden_size=64, num_hidden_layers=7)
    for make in (make_head, make_eagle3_head):
        save_head(make(other), tmp_path / make.__name__)
        options = [*model_folders[:2], "--head", tmp_path / make.__name__]
        assert run(monkeypatch, "generate", "w1", *options) == 1
        shown = capsys.readouterr().err
        assert "head: wanted hidden_size=32 as the target has, got 64" in shown
        assert shown.count("\n") == 1


@pytest.mark.parametrize("bytes_left", [0, 100])
def test_a_gguf_file_cut_short(tmp_path, bytes_left):
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00\x00"[:bytes_left] + bytes(bytes_left))
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever its reader says
        dequantise(tmp_path / "cut.gguf", tmp_path / "cache" / "model")
    assert [*(tmp_path / "cache").iterdir()] == []


@pytest.fixture
def full_disk():
    """No file can grow beyond 4 kB, which is what a full disk looks like to who writes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_convert_onto_a_full_disk(full_disk, tmp_path, monkeypatch, capsys):
    save_head(make_head(make_target()), tmp_path / "head")
    full_disk()
    assert run(monkeypatch, "convert", tmp_path / "head", tmp_path / "out") == 1
    shown = capsys.readouterr().err
    assert shown.startswith("eagle2: ")
    assert "Traceback" not in shown
    assert not [*tmp_path.glob("out/*")]


def test_a_checkpoint_onto_a_full_disk_leaves_the_last_one(full_disk, tmp_path):
    from eagle2.training_run import write_checkpoint

    write_checkpoint({"weights": torch.zeros(4)}, tmp_path / "checkpoint.pt")
    kept = (tmp_path / "checkpoint.pt").read_bytes()
    full_disk()
    with pytest.raises(OSError, match=r"checkpoint\.pt: cannot be written"):
        write_checkpoint({"weights": torch.zeros(9000)}, tmp_path / "checkpoint.pt")
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint.pt"]
    assert (tmp_path / "checkpoint.pt").read_bytes() == kept


@pytest.mark.parametrize("command", ["generate", "train"])
def test_ctrl_c(model_folders, monkeypatch, capsys, tmp_path, command):  # noqa: F811
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle2.engine.decode", interrupted)
    monkeypatch.setattr("eagle2.train_cli.write_features", lambda *_, **__: None)
    monkeypatch.setattr("eagle2.train_cli.train_head", interrupted)
    options = ["w1", *model_folders]
    if command == "train":
        (tmp_path / "a.jsonl").touch()
        options = [tmp_path / "a.jsonl", "--out", tmp_path / "head", *model_folders[:2]]
    assert run(monkeypatch, command, *options) == 130
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
