"""Recipes and descriptions that are nonsense, enormous or hostile: a working object or one ValueError, soon."""

import json
import os
import pickle
import re
import subprocess
import sys
import time

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import grassy
from grassy import schema
from grassy.models import create_model
from grassy.recipes.files import load_recipe
from grassy.recipes.recipe import Recipe, saved_recipe
from grassy.recipes.safe_yaml import parse_yaml
from grassy.runs.weights import Description, read_description, save_weights

VIT = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
SOON = settings(max_examples=150, deadline=2000, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
HUGE = 10**400  # beyond every float
LEAVES = st.none() | st.booleans() | st.integers() | st.just(HUGE) | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def write(tmp_path):
    def write(text, name="own.yaml"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture(scope="module")
def tensors():
    return create_model("vit_tiny_patch16_224", 3, {"name": "grassmann", "k": 2}, VIT).state_dict()


@pytest.fixture
def checkpoint(tmp_path, tensors):
    """A file of weights whose description is good but for what is changed in it."""

    def checkpoint(weights=None, **changes):
        good = {"model": "vit_tiny_patch16_224", "num_classes": 3, "head": {"name": "grassmann", "k": 2}}
        good |= {"model_kwargs": VIT, "img_size": 8}
        path = tmp_path / "weights.safetensors"
        save_file(dict(weights or tensors), path, metadata={"grassy": json.dumps({**good, **changes})})
        return path

    return checkpoint


# ------------------------------------------------------------------------------------------------ options of timm


class Trap:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("key", ["checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"])
def test_no_file_says_where_timm_fetches_weights_from(write, checkpoint, tmp_path, key):
    (tmp_path / "evil.pth").write_bytes(pickle.dumps(Trap(tmp_path / "trapped")))
    value = str(tmp_path / "evil.pth")
    with pytest.raises(ValueError, match=rf"model_kwargs\.{key} is not accepted"):
        load_recipe(write(f"base: resnet50d-linear\nmodel_kwargs: {{{key}: '{value}'}}\n"))
    with pytest.raises(ValueError, match=rf"model_kwargs\.{key} is not accepted"):
        grassy.load(checkpoint(model_kwargs={**VIT, key: value}))
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("key", ["features_only", "no_jit", "num_classes", "pretrained_strict", "emb_dim"])
def test_an_option_that_is_not_one_of_the_architecture_is_refused_by_name(checkpoint, key):
    with pytest.raises(ValueError, match=f"model vit_tiny_patch16_224 has no option '{key}'"):
        grassy.load(checkpoint(model_kwargs={**VIT, key: 1}))


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("efficientnet_b0", {"bn_momentum": 0.01, "bn_eps": 1e-3}),
        ("regnety_002", {"stem_width": 16}),
        ("xception", {"drop_rate": 0.1}),
        ("resnet18", {"scriptable": True, "exportable": True}),
        ("resnet18_cifar", {"drop_rate": 0.1}),
        ("naflexvit_base_patch16_gap", {"drop_path_rate": 0.1, "embed_dim": 24, "num_heads": 2, "depth": 1}),
        ("swin_tiny_patch4_window7_224", {"drop_path_rate": 0.1}),
        ("swin_base_patch4_window7_224_in22k", {"drop_path_rate": 0.1}),
    ],
)
@pytest.mark.filterwarnings("ignore:Mapping deprecated model name")
def test_what_timm_knows_of_an_architecture_is_accepted(model, options):
    with torch.device("meta"):
        assert create_model(model, 5, {"name": "linear"}, options).num_classes == 5


@pytest.mark.parametrize(
    ("model", "key", "meant"),
    [
        ("resnet18", "bn_momentum", ""),
        ("resnet18", "drop_ratee", ", did you mean 'drop_rate'?"),
        ("maxvit_nano_rw_256", "rel_pos_type", ", did you mean 'rel_pos_dim'?"),  # of its blocks
        ("efficientnet_b0", "drop_connect_rate", ", did you mean 'drop_path_rate'?"),
        ("swin_tiny_patch4_window7_224", "drop_path_ratee", ", did you mean 'drop_path_rate'?"),  # timm ignores it
        ("swin_tiny_patch4_window7_224", "checkpoint_path", ""),
        ("swin_tiny_patch4_window7_224", "num_classses", ""),  # num_classes is no option either
    ],
)
def test_an_option_that_timm_does_not_know_is_named_with_what_may_be_meant(model, key, meant):
    with pytest.raises(ValueError, match=re.escape(f"model {model} has no option '{key}'{meant}; check model_kwargs")):
        create_model(model, 5, {"name": "linear"}, {key: 0.1})


def test_weights_are_fetched_only_if_the_user_says_so(write, checkpoint):
    path = write("base: resnet50d-linear\nmodel_kwargs: {pretrained: true}\n")
    with pytest.raises(ValueError, match=r"give pretrained=true"):
        load_recipe(path)
    with pytest.raises(ValueError, match=r"give pretrained=true"):
        load_recipe(path, ["model_kwargs={drop_rate: 0.1}"])
    assert load_recipe(path, ["model_kwargs.pretrained=true"]).model_kwargs == {"pretrained": True}
    assert load_recipe("resnet50d-linear", ["model_kwargs.pretrained=true"]).model_kwargs == {"pretrained": True}
    assert load_recipe(path, fields={"model_kwargs": {"pretrained": True}}).model_kwargs == {"pretrained": True}
    with pytest.raises(ValueError, match=r"give pretrained=true"):
        load_recipe(path, fields={"model_kwargs": {"drop_rate": 0.1}})
    assert load_recipe(path, ["model_kwargs.pretrained=false"]).model_kwargs == {"pretrained": False}
    grassy.load(checkpoint(model_kwargs={**VIT, "pretrained": True}))  # it has its own: nothing is fetched


# ------------------------------------------------------------------------------------------------ recipes

#: Nine times nine times nine ...
LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{i + 1}: &a{i + 1} [{','.join([f'*a{i}'] * 9)}]\n" for i in range(9))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "its aliases expand to more than 10,000 values"),
        ("lr: &a [*a]", "an alias refers to a value that contains it"),
        ("lr: 1\nlr: 2\n", "the key 'lr' comes twice"),
        ("head: {k: 1, k: 2}\n", "the key 'k' comes twice"),
        ("head: {0: 1, 0: 2}\n", "the key 0 comes twice"),
        ("head: {'': 1, '': 2}\n", "the key '' comes twice"),
        ("a: &a {x: 1, x: 2}\nb: {<<: *a}\n", "the key 'x' comes twice"),
        ("head: " + "[" * 100 + "]" * 100, "nested more than 30 deep"),
        ("head: " + "[" * 100_000, "nested too deeply"),
        ("x" * 2**20 + "y", "more than 1,048,576 bytes"),
        (b"description: \xff\xfe", "is not UTF-8"),
        ("lr: !!python/object/apply:os.system [true]", "not YAML"),
        (f"epochs: {'9' * 5000}", "not YAML"),
        ("lr: 2001-99-99", "month must be in"),
        ("epochs: 99999999999999999999", "epochs must be at most 1000000"),
        ("batch_size: 99999999999", "batch_size must be at most"),
        ("img_size: 100000", "img_size must be at most 4096"),
        ("crop_pct: 1.0e-9", "crop_pct must be at least 0.1"),
        ("crop_pct: 2.1", "crop_pct must be at most 2"),
        (f"lr: {HUGE}", "lr must be a number"),
        (f"mean: [{HUGE}, 1, 1]", "mean must be a number"),
        (f"base: resnet50-grassmann\nepochs: {HUGE}", "epochs must be at most 1000000"),
        (f"base: swin-t-grassmann\nwarmup_epochs: {HUGE}\nepochs: 2", "warmup_epochs must be a number"),
        ("base: resnet50-grassmann\ndecay_milestones: [.inf]\nepochs: 10", "decay_milestones must be an integer"),
        ("opt_kwargs: {betas: [.inf]}", "recipe.opt_kwargs.betas must be a number"),
        ("opt_kwargs: {betas: [[[[1]]]]}", "recipe.opt_kwargs.betas must be plain values"),
        ("workers: 100000", "workers must be at most"),
        ("aa: rand-n99999999-m9", "aa must be a policy of timm without numbers beyond"),
        ("aa: rand-m99999999999999999999", "aa must be a policy"),
        ("head: {name: grassmann, gamma: 1.0e+308}", "head.gamma must be"),
        ("head: {name: grassmann, k: 99999999999999999999}", "head"),
        ("model_kwargs: {depth: 1000000000}", "model_kwargs.depth must be an integer"),
    ],
)  # fmt: skip
def test_a_hostile_recipe_is_refused_in_one_sentence(write, text, words):
    begin = time.monotonic()
    with pytest.raises((ValueError, TypeError), match=words):
        load_recipe(write(text))
    assert time.monotonic() - begin < 10


def test_a_million_dimensions_need_no_memory_before_there_is_a_model(write):
    recipe = load_recipe(write("head: {name: grassmann, k: 1000000}"))
    with pytest.raises(ValueError, match="k"):
        create_model("vit_tiny_patch16_224", 3, recipe.head, VIT)
    assert Recipe(head={"name": "grassmann", "k": [8] * 100_000}).head["k"][:2] == [8, 8]


def test_a_long_chain_of_bases_is_refused(write):
    for number in range(2000):
        write(f"base: {number + 1}.yaml\n", f"{number}.yaml")
    with pytest.raises(ValueError, match="a chain of more than 20 bases"):
        load_recipe(write("base: 0.yaml\n"))


def test_a_fifo_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "own.yaml")
    with pytest.raises(ValueError, match=r"own\.yaml is not a regular file"):
        load_recipe(tmp_path / "own.yaml")


def test_recipes_are_utf8_whatever_the_locale(write):
    path = write("description: Größe γ\n")
    code = f"from grassy.recipes.files import load_recipe; print(ascii(load_recipe({str(path)!r}).description))"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ascii("Größe γ")


def test_aliases_that_stay_small_are_fine(write):
    recipe = load_recipe(write("mean: &grey [0.5, 0.5, 0.5]\nstd: *grey\n"))
    assert recipe.mean == recipe.std == (0.5, 0.5, 0.5)


def test_merge_keys_take_over_what_a_mapping_does_not_say_itself():
    text = "base: &base {x: 1, y: 1}\nouter:\n  a: &a {<<: *base, x: 2}\nb: {<<: *a}\nc: {<<: [*a, *base], y: 3}\n"
    found = parse_yaml(text, "here")
    assert found["outer"]["a"] == found["b"] == {"x": 2, "y": 1}
    assert found["c"] == {"x": 2, "y": 3}


@pytest.mark.slow
def test_many_keys_are_compared_soon():
    text = "".join(f"key{number}: 1\n" for number in range(60_000))
    begin = time.monotonic()
    with pytest.raises(ValueError, match="the key 'key0' comes twice"):
        parse_yaml(f"{text}key0: 2\n", "here")
    assert time.monotonic() - begin < 20


@SOON
@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_is_parsed_or_refused(text):
    message = "here is "
    try:
        parse_yaml(text if isinstance(text, str) else text.decode("utf-8", "replace"), "here")
    except ValueError as error:
        message = str(error)
    assert message.startswith("here is ")


@SOON
@given(st.dictionaries(st.sampled_from(sorted(Recipe.__dataclass_fields__)), VALUES, max_size=3))
def test_any_values_are_a_recipe_or_refused(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("recipe") / "own.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    try:
        recipe = load_recipe(path)
    except (ValueError, TypeError):
        return
    assert Recipe(**recipe.to_dict()) == recipe


# ------------------------------------------------------------------------------------------------ descriptions


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("interpolation", value) for value in ("no", 3, None, ["bilinear"])),
        *(("mean", value) for value in (1, [1, 2], ["a", "b", "c"], [0.1, 0.2, float("nan")], {"r": 1})),
        *(("std", value) for value in ([0, 0, 0], [1, 1, float("inf")])),
        *(("crop_pct", value) for value in (0, -1, 1e-9, "1", float("nan"), 5)),
        *(("img_size", value) for value in (0, -8, 10**9, 8.5, "8", True)),
        *(("num_classes", value) for value in (0, 10**12, 1.5, None)),
        *(("class_names", value) for value in ({"a": 1}, "abc", [1, 2, 3])),
        *(("head", value) for value in ([], {}, {"name": 3}, {"name": "grassmann", "gamma": 1e308})),
        *(("model_kwargs", value) for value in ([], {"depth": 10**9}, {"depth": [[[[[[1]]]]]]}, {"pretrained": "x"})),
        *(("recipe", value) for value in ([], "x")),
        ("metrics", {"top1": HUGE}),
        ("model", 3),
    ],
)
def test_a_field_of_a_description_that_is_nonsense_is_named(checkpoint, name, value):
    with pytest.raises(ValueError, match=f"a description that cannot be read: .*{name}"):
        read_description(checkpoint(**{name: value}))


@pytest.mark.parametrize("text", ["[" * 100_000, "3", "null", "{", '{"model": "a"}', "[1]", '"x"'])
def test_a_description_that_is_no_description_is_refused(tmp_path, tensors, text):
    save_file(dict(tensors), tmp_path / "x.safetensors", metadata={"grassy": text})
    with pytest.raises(ValueError, match="a description that cannot be read"):
        read_description(tmp_path / "x.safetensors")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e4m3fn])
def test_weights_of_a_strange_kind_are_refused(checkpoint, tensors, dtype):
    strange = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    with pytest.raises(ValueError, match="which is no dtype of weights"):
        grassy.load(checkpoint(strange))


@pytest.mark.parametrize("changes", [{"num_classes": 10**8}, {"head": {"name": "grassmann", "k": 10**6}}])
def test_a_head_that_the_weights_could_never_fill_is_not_built(checkpoint, changes):
    with pytest.raises(ValueError, match="does not hold the weights that it describes"):
        grassy.load(checkpoint(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"head": {"name": "grassmann", "k": [4, 8] * 10_920 + [8]}, "num_classes": 21_841},
        {"model_kwargs": {"layers": [[[1]]]}},
        {"lr": 1e300, "description": "x" * 20_000},
        {"opt": "adamw", "opt_kwargs": {"betas": [0.9, 0.999]}},
    ],
    ids=["dimensions of ImageNet-21k", "nested options", "large values", "options of the optimizer"],
)
def test_every_recipe_comes_back_from_args_yaml_and_from_the_weights(write, tmp_path, changes):
    recipe = Recipe(**changes)
    assert load_recipe(write(yaml.safe_dump(recipe.to_dict()))) == recipe
    about = Description("resnet18", recipe.num_classes or 3, recipe.head, recipe.model_kwargs, recipe=recipe.to_dict())
    save_weights({"weight": torch.ones(1)}, about, tmp_path / "x.safetensors")
    again = read_description(tmp_path / "x.safetensors")
    assert (again.head, again.model_kwargs) == (recipe.head, recipe.model_kwargs)
    assert saved_recipe(again.recipe) == recipe


def test_a_file_that_could_not_be_read_is_not_written(tmp_path):
    about = Description("resnet18", 3, {"name": "linear"}, epoch=-1)
    with pytest.raises(ValueError, match="epoch must be an integer from 0"):
        save_weights({"weight": torch.ones(1)}, about, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_what_a_description_holds_comes_back(tmp_path, tensors):
    about = Description("vit_tiny_patch16_224", 3, {"name": "grassmann", "k": [2, 1, 2]}, VIT, ["a", "b", "ü"], 8)
    save_weights(tensors, about, tmp_path / "x.safetensors")
    assert read_description(tmp_path / "x.safetensors") == about


@SOON
@given(st.dictionaries(st.sampled_from([*schema.DESCRIPTION, "more"]), VALUES, max_size=4))
def test_any_values_are_a_description_or_refused(values):
    good = {"model": "resnet18", "num_classes": 3, "head": {"name": "linear"}}
    try:
        found = schema.check_description({**good, **values})
    except ValueError:
        return
    assert "more" not in found
    assert schema.check_description(found) == found
    Description(**found)


@SOON
@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda data: data.decode("latin-1")))
def test_any_text_is_json_or_refused(text):
    try:
        schema.check_description(schema.parse_json(text))
    except ValueError:
        return
    pytest.fail("no random text has a model, a number of classes and a head")
