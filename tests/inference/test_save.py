"""grassy.save writes a file from which grassy.load gives the same logits, and refuses what it cannot describe."""

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import nn

import grassy
from grassy.data.run_images import run_recipe
from grassy.models import import_timm
from grassy.runs.weights import read_description, read_weights, weights_file

timm = import_timm()
C = 5
HEADS = [
    ("linear", {"bias": False}),
    ("cosine", {"learnable_scale": True}),
    ("arcface", {"scale": 30.0, "margin": 0.2}),
    ("multi", {"layers": 3}),
    ("softtriple", {"centers": 2}),
    ("subcenter-arcface", {"centers": 3}),
    ("grassmann", {"k": [1, 2, 3, 4, 2]}),
    ("grassmann", {"k": 3, "gamma": "auto", "standardize": True}),
    ("grassmann", {"k": 3, "gamma": 9.0, "learnable_gamma": True, "normalize": False, "riemannian": False}),
]


def a_model(head="grassmann", architecture="test_resnet", options=None, **head_options):
    model = timm.create_model(architecture, num_classes=C, **(options or {}))
    grassy.replace_head(model, head, **head_options)
    return model


def logits(model, size=32):
    with torch.no_grad():
        return model.eval()(torch.linspace(-1, 1, 2 * 3 * size * size).reshape(2, 3, size, size))


@pytest.mark.parametrize(("head", "options"), HEADS)
def test_a_trained_model_comes_back_with_the_same_logits(head, options, tmp_path):
    model = a_model(head, **options)
    optimizer = grassy.make_optimizer(model, "sgd", lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        grassy.classification_loss(model, torch.randn(4, 3, 32, 32), torch.randint(0, C, (4,))).backward()
        optimizer.step()
    random = torch.get_rng_state()
    grassy.save(model, tmp_path / "model.safetensors")
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training
    again = grassy.load(tmp_path / "model.safetensors")
    assert torch.equal(logits(again), logits(model))
    assert grassy.heads.describe(again.fc) == grassy.heads.describe(model.fc)
    grassy.save(again, tmp_path / "again.safetensors")
    assert read_description(tmp_path / "again.safetensors") == read_description(tmp_path / "model.safetensors")


def test_the_file_says_how_images_are_prepared_as_timm_or_the_caller_does(tmp_path):
    model, file = a_model(k=2), tmp_path / "new" / "model.safetensors"
    grassy.save(model, file)
    about = read_description(file)
    assert (about.model, about.num_classes, about.img_size, about.crop_pct) == ("test_resnet", C, 160, 0.95)
    assert (about.interpolation, about.mean, about.std) == ("bilinear", (0.5,) * 3, (0.5,) * 3)
    assert (about.class_names, about.version) == (None, grassy.__version__)
    names = ["ant", "bee", "cat", "dog", "elk"]
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    prepared = {"crop_pct": 1.0, "crop_mode": "border", "interpolation": "bicubic", "mean": mean, "std": std}
    grassy.save(model, file, names, 64, epoch=3, metrics={"top1": 71.5}, **prepared)
    about = read_description(file)
    assert (about.class_names, about.img_size, about.mean, about.std) == (names, 64, mean, std)
    assert (about.crop_pct, about.crop_mode, about.interpolation) == (1.0, "border", "bicubic")
    assert (about.epoch, about.metrics) == (3, {"top1": 71.5})
    assert grassy.load(file).pretrained_cfg["label_names"] == names


@pytest.mark.parametrize(
    ("prepared", "words"),
    [
        ({"interpolation": "random"}, "interpolation must be one of nearest, bilinear"),
        ({"std": (0, 1, 1)}, r"std\[0\] must be a number from 1e-06"),
        ({"mean": (0.5,)}, "mean must be a list of length 3"),
        ({"crop_pct": 2.1}, "crop_pct must be a number from 0.1 to 2, got 2.1"),
        ({"crop_mode": "middle"}, "crop_mode must be one of"),
        ({"epoch": -1}, "epoch must be an integer from 0"),
        ({"img_size": -8}, "img_size must be an integer from 1"),
        ({"metrics": {"top1": 10**400}}, "metrics must be a mapping to numbers that a float can hold"),
    ],
)
def test_a_file_that_could_not_be_loaded_is_not_written(prepared, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        grassy.save(a_model(k=2), tmp_path / "model.safetensors", **prepared)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@pytest.mark.parametrize("place", ["model.safetensors", "folder"])
def test_a_model_that_sees_the_whole_image_still_does_after_loading(crop_mode, place, tmp_path):
    model = a_model(k=2)
    model.pretrained_cfg["crop_mode"] = crop_mode  # "squash" is that of convnext_tiny.fb_in22k_ft_in1k_384
    grassy.save(model, tmp_path / place)
    assert read_description(weights_file(tmp_path / place)).crop_mode == crop_mode
    again = timm.data.resolve_model_data_config(grassy.load(tmp_path / place))
    assert again == {**timm.data.resolve_model_data_config(model), "input_size": again["input_size"]}
    recipe = run_recipe(read_description(weights_file(tmp_path / place)))
    assert recipe.crop_mode == crop_mode  # with which validate measures


def test_a_crop_larger_than_the_image_is_kept_as_some_models_of_timm_have_it(tmp_path):
    model, file = a_model(k=2), tmp_path / "model.safetensors"
    model.pretrained_cfg["crop_pct"] = 1.15  # that of volo_d4_448
    grassy.save(model, file)
    assert grassy.load(file).pretrained_cfg["crop_pct"] == 1.15


@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_a_backbone_and_a_head_may_be_of_different_precision(dtypes, tmp_path):
    model, file = a_model(k=2), tmp_path / "model.safetensors"
    head, model.fc = model.fc.to(dtypes[1]), nn.Identity()
    model.to(dtypes[0]).fc = head
    grassy.save(model, file)
    assert [weight.dtype for weight in (model.conv1[0].weight, model.fc.weight)] == list(dtypes)
    again = read_weights(file)
    assert {name: tensor.dtype for name, tensor in again.items()} == {
        name: tensor.dtype for name, tensor in model.state_dict().items()
    }
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    grassy.load(file)


@pytest.mark.parametrize("wrap", [torch.compile, grassy.AveragedModel, nn.DataParallel])
def test_what_is_inside_a_wrapper_is_saved(wrap, tmp_path):
    model = a_model(k=2)
    grassy.save(wrap(model), tmp_path / "model.safetensors")
    assert torch.equal(logits(grassy.load(tmp_path / "model.safetensors")), logits(model))


def test_options_of_the_model_must_be_given_and_are_kept(tmp_path):
    file, options = tmp_path / "model.safetensors", {"img_size": 32, "patch_size": 8, "depth": 2}
    model = a_model(architecture="vit_tiny_patch16_224", options=options, k=2)
    with pytest.raises(ValueError, match=r"other weights than timm's vit_tiny_patch16_224 .*pass model_kwargs="):
        grassy.save(model, file)
    assert not file.exists()
    with pytest.raises(ValueError, match=r"the model does not accept images of 224 pixels .*: pass img_size="):
        grassy.save(model, file, model_kwargs=options)
    grassy.save(model, file, img_size=32, model_kwargs=options)
    again = grassy.load(file)
    assert torch.equal(logits(again), logits(model))
    grassy.save(again, file)  # it knows them by now


def test_a_model_with_the_same_weights_but_another_function_is_refused(tmp_path):
    model = a_model(options={"act_layer": nn.SiLU}, k=2)
    with pytest.raises(ValueError, match="other logits than timm's test_resnet with the same weights: pass"):
        grassy.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_models_that_timm_did_not_build_need_a_name(tmp_path):
    model = torchvision.models.resnet18(num_classes=C)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=r"ResNet has no head of grassy's: call grassy.replace_head"):
        grassy.save(model, file)
    grassy.replace_head(model, "grassmann", k=2)
    with pytest.raises(ValueError, match=r"architecture of ResNet is unknown: pass the name of a timm model, such as"):
        grassy.save(model, file)
    with pytest.raises(ValueError, match="timm has no model 'resnet-18'"):
        grassy.save(model, file, architecture="resnet-18")
    with pytest.raises(ValueError, match="other weights than timm's resnet50"):
        grassy.save(model, file, architecture="resnet50")
    grassy.save(model, file, architecture="resnet18")
    assert torch.allclose(logits(grassy.load(file)), logits(model), atol=1e-4)


def test_the_model_that_grassy_adds_to_timm_knows_its_name(tmp_path):
    model = a_model(architecture="resnet18_cifar", k=2)
    grassy.save(model, tmp_path / "model.safetensors", img_size=32)
    assert torch.equal(logits(grassy.load(tmp_path / "model.safetensors")), logits(model))


def test_bad_arguments_are_refused(tmp_path):
    model = a_model(k=2)
    with pytest.raises(ValueError, match=r"path must be a folder or end in \.safetensors, got .*model.pt"):
        grassy.save(model, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="class_names has 6 names, but the head has 5 classes"):
        grassy.save(model, tmp_path / "model.safetensors", list("abcdef"))
    with pytest.raises(ValueError, match="class_names has 2 names, but the head has 5 classes"):
        grassy.save(model, tmp_path / "model.safetensors", ["a", "b"])
    with pytest.raises(ValueError, match="class_names has 'b' more than once"):
        grassy.save(model, tmp_path / "model.safetensors", list("abbcd"))
    with pytest.raises(ValueError, match="class_names has '1' more than once"):
        grassy.save(model, tmp_path / "model.safetensors", [1, "1", 2, 3, 4])
    with pytest.raises(ValueError, match="class_names has '' more than once"):
        grassy.save(model, tmp_path / "model.safetensors", ["", "", "c", "d", "e"])
    model.fc = nn.Sequential(model.fc, type("Mine", (grassy.LinearHead,), {})(C, C))
    with pytest.raises(ValueError, match="Mine is not a registered head"):
        grassy.save(model, tmp_path / "model.safetensors")
    model.fc[1] = grassy.LinearHead(C, C)
    with pytest.raises(ValueError, match="ResNet has heads with different options"):
        grassy.save(model, tmp_path / "model.safetensors")


def test_class_names_of_another_number_of_classes_are_refused_wherever_they_come_from(tmp_path):
    model = timm.create_model("test_resnet", num_classes=3)
    grassy.replace_head(model, "grassmann", k=2)
    model.pretrained_cfg["label_names"] = ["a", "b"]
    with pytest.raises(ValueError, match="class_names has 2 names, but the head has 3 classes"):
        grassy.save(model, tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("names", [dict(enumerate("abcde")), "abcde"], ids=["mapping", "text"])
def test_names_by_number_are_no_list_of_names(names, tmp_path):
    """Of a mapping such as transformers' id2label, the keys would become the names."""
    with pytest.raises(TypeError, match="class_names must be a list with one name per class"):
        grassy.save(a_model(k=2), tmp_path / "model.safetensors", names)


@pytest.mark.distributed
def test_a_sharded_model_is_saved_by_another_function(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = grassy.distributed.shard_head(a_model(k=2), grassy.distributed.mesh("cpu"))
        with pytest.raises(ValueError, match=r"is sharded over processes: save it with grassy\.distributed\."):
            grassy.save(model, tmp_path / "model.safetensors")
    finally:
        dist.destroy_process_group()
