"""Replacing the classifier of anyone's own module: where it is, what it takes over, and what is refused."""

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

import grassy
from grassy.heads import Head
from grassy.surgery import HeadOnMap

CLASSES = 7


def images(size=32, batch=2):
    return torch.randn(batch, 3, size, size)


def paths_of(model):
    return [path for path, module in model.named_modules() if isinstance(module, Head)]


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 5)

    def forward(self, x):
        return self.fc3(self.fc2(self.fc1(x)).relu())


class Wrapper(nn.Module):
    """A module around another, with names that say nothing."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x):
        for child in self.children():
            x = child(x)
        return x


def headless():
    """A timm backbone, built without classes."""
    return timm.create_model("test_resnet", num_classes=0)


def blocks(width):
    """A Transformer encoder, whose layers contain linear layers of many widths."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 2, 24, batch_first=True), 2)


def norm_and_linear(width, classes):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, classes))


OWN = {
    "sequence": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5), nn.Softmax(-1)), "2"),
    "nested sequence": (lambda: nn.Sequential(nn.Linear(12, 8), nn.Sequential(nn.Linear(8, 5), nn.Dropout())), "1.0"),
    "all-convolutional": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1), nn.Flatten()), "1.head"),
    "chain": (Chain, "fc3"),
    "wrapped chain": (lambda: Wrapper(network=Chain(), loss=nn.CrossEntropyLoss()), "network.fc3"),
    "wrapped timm model": (lambda: Wrapper(net=timm.create_model("test_resnet", num_classes=5)), "net.fc"),
    "on a backbone": (lambda: Wrapper(net=headless(), out=nn.Linear(64, 5)), "out"),
    "after an embedding": (lambda: Wrapper(embed=nn.Linear(12, 8), body=blocks(8), out=norm_and_linear(8, 5)), "out.1"),
    "after another model": (
        lambda: Wrapper(net=timm.create_model("test_resnet", num_classes=9), head=nn.Linear(9, 5)),
        "head",
    ),
    "data parallel": (lambda: nn.DataParallel(Chain()), "module.fc3"),
    "compiled": (lambda: torch.compile(Chain(), backend="eager"), "_orig_mod.fc3"),
    "aside an auxiliary one": (lambda: Wrapper(aux_head=nn.Linear(12, 5), head=nn.Linear(12, 5)), "head"),
    "after attention": (lambda: Wrapper(fc=nn.Linear(12, 5), attention=nn.MultiheadAttention(12, 2)), "fc"),
}


@pytest.mark.parametrize("name", OWN)
def test_the_classifier_of_anyones_own_module_is_found(name):
    build, path = OWN[name]
    model = build()
    head = grassy.replace_head(model, "grassmann", k=2)
    assert paths_of(model) == [path]
    assert model.get_submodule(path) is head
    assert head.num_classes == 5


AMBIGUOUS = {
    "attention weights": (lambda: Wrapper(attention=nn.Linear(8, 1), decoder=norm_and_linear(8, 5)), "attention, deco"),
    "gate": (lambda: Wrapper(gate=nn.Linear(8, 4), experts=nn.ModuleList([nn.Linear(8, 5)])), "gate, experts.0"),
    "classifier before the encoder": (
        lambda: Wrapper(out=nn.Linear(8, 5), encoder=nn.Sequential(nn.Linear(12, 8))),
        "out, encoder.0",
    ),
    "two tasks": (
        lambda: Wrapper(net=timm.create_model("test_resnet", num_classes=9), domain_classifier=nn.Linear(64, 2)),
        "net.fc, domain_classifier",
    ),
    "two models": (
        lambda: Wrapper(
            net=timm.create_model("test_resnet", num_classes=9), head=timm.create_model("test_vit", num_classes=5)
        ),
        "net.fc, head.head",
    ),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_several_possible_classifiers_are_named_and_none_is_replaced(name):
    build, candidates = AMBIGUOUS[name]
    model = build()
    with pytest.raises(ValueError, match=f"several layers could be the classifier.*: {candidates}"):
        grassy.replace_head(model, "grassmann", k=2)
    assert not paths_of(model)


def test_names_of_other_classes_do_not_stay():
    model = timm.create_model("test_resnet", num_classes=5)
    model.pretrained_cfg["label_names"] = ["a", "b", "c", "d", "e"]
    grassy.replace_head(model, "grassmann", k=2)
    assert model.pretrained_cfg["label_names"] == ["a", "b", "c", "d", "e"]
    grassy.replace_head(model, "grassmann", num_classes=3, k=2)
    assert model.pretrained_cfg["label_names"] is None


def test_a_declared_number_of_classes_breaks_a_tie():
    model = Wrapper(head=nn.Linear(12, 5), projection_head=nn.Linear(12, 8))
    model.num_classes = 5
    grassy.replace_head(model, "grassmann", num_classes=3, k=2)
    assert paths_of(model) == ["head"]
    assert model.num_classes == 3


def test_a_classifier_can_be_named():
    model = Wrapper(a=nn.Linear(12, 5), b=nn.Linear(12, 5), c=nn.Conv2d(3, 5, 1))
    for name, path in (("b", "b"), ("c", "c.head"), ("c", "c.head"), ("c.head", "c.head")):
        head = grassy.replace_head(model, "grassmann", classifier=name, k=2)
        assert model.get_submodule(path) is head
    assert paths_of(model) == ["b", "c.head"]
    assert isinstance(model.c, HeadOnMap)


def test_a_classifier_with_two_names_is_replaced_under_both():
    model = Chain()
    model.classifier = model.fc3
    head = grassy.replace_head(model, "grassmann", k=2)
    assert model.classifier is model.fc3 is head


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_and_mode_are_those_of_the_old_layer(dtype, training):
    model = timm.create_model("test_resnet").to(dtype).train(training)
    head = grassy.replace_head(model, "grassmann", k=2)
    assert head.weight.dtype == dtype
    assert head.training is training
    error = grassy.geometry.orthonormality_error(head.weight.double())
    assert error < 16 * torch.finfo(dtype).eps


def test_a_model_on_the_meta_device_gets_a_head_there():
    with torch.device("meta"):
        model = timm.create_model("resnet18")
    head = grassy.replace_head(model, "grassmann", k=2)
    assert head.weight.is_meta
    assert head.weight.shape == (1000, 2, 512)


@pytest.mark.filterwarnings("ignore")
def test_a_replaced_head_compiles():
    model, x, labels = Chain(), torch.randn(4, 12), torch.tensor([0, 1, 2, 3])
    grassy.replace_head(model, "grassmann", k=2)
    compiled = torch.compile(model, backend="aot_eager")
    expected = F.cross_entropy(model(x), labels)
    torch.testing.assert_close(grassy.classification_loss(compiled, x, labels), expected)
    torch.testing.assert_close(F.cross_entropy(compiled(x), labels), expected)


def test_no_request_for_a_loss_outlives_an_exception_in_forward():
    model = timm.create_model("test_resnet")
    head = grassy.replace_head(model, "grassmann", num_classes=CLASSES, k=2)
    with pytest.raises(RuntimeError):
        grassy.classification_loss(model, torch.randn(2, 5, 32, 32), torch.tensor([0, 1]))  # five channels
    assert head.loss_request is None


def fully_convolutional(size):
    return nn.Sequential(nn.AdaptiveAvgPool2d(size), nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_a_head_on_a_map_is_the_convolution_that_it_replaces():
    model, x = fully_convolutional(4), images()
    convolution, expected = model[1], model(x)
    head = grassy.replace_head(model, "linear")
    head.load_state_dict({"weight": convolution.weight.flatten(1), "bias": convolution.bias})
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("size", [1, 4])
def test_a_margin_head_on_a_map_takes_the_target_of_its_image_at_every_location(size):
    model, x, labels = fully_convolutional(size), images(), torch.tensor([3, 1])
    head = grassy.replace_head(model, "arcface")
    at_every_location = labels[:, None, None].expand(2, size, size)
    logits = head(model[0](x).movedim(1, -1), at_every_location).mean((1, 2))
    torch.testing.assert_close(grassy.classification_loss(model, x, labels), F.cross_entropy(logits, labels))


def test_a_head_with_a_loss_of_its_own_needs_a_map_of_one_location():
    model, x, labels = fully_convolutional(1), images(), torch.tensor([3, 1])
    head = grassy.replace_head(model, "softtriple", centers=2)
    expected = head.loss(model[0](x).flatten(1), labels, F.cross_entropy)
    torch.testing.assert_close(grassy.classification_loss(model, x, labels).squeeze(), expected)
    model[0] = nn.AdaptiveAvgPool2d(4)
    with pytest.raises(ValueError, match=r"SoftTripleHead computes its loss from one feature per image.*map \(4, 4\)"):
        grassy.classification_loss(model, x, labels)
    assert head.loss_request is None


def swin_without_head():
    model = torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [1, 2], [7, 7], num_classes=10)
    model.head = nn.Identity()
    return model


ERRORS = {
    "not a module": (lambda: "resnet18", {}, TypeError, "model must be an nn.Module, got str"),
    "no classes in timm": (headless, {}, ValueError, "found no classifier in ResNet"),
    "no classes in a ViT": (lambda: timm.create_model("test_vit", num_classes=0), {}, ValueError, "no classifier"),
    "no classes in HF": (
        lambda: transformers.ViTModel(transformers.ViTConfig(hidden_size=24, num_hidden_layers=1)),
        {},
        ValueError,
        "no classifier in ViTModel",
    ),
    "classifier taken out": (swin_without_head, {}, ValueError, "no classifier in SwinTransformer"),
    "no Linear": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)), {}, ValueError, "no classifier"),
    "two tasks": (lambda: Wrapper(age=nn.Linear(8, 9), kind=nn.Linear(8, 3)), {}, ValueError, "classifier=: age, kind"),
    "a list of heads": (
        lambda: Wrapper(net=Wrapper(heads=nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)]))),
        {},
        ValueError,
        "classifier=: net.heads.0, net.heads.1",
    ),
    "not the same task": (
        lambda: Wrapper(head=nn.Linear(8, 3), head_dist=nn.Linear(8, 4)),
        {},
        ValueError,
        "classifier=: head, head_dist",
    ),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(5)), {}, ValueError, "'0' is a LazyLinear of unknown width"),
    "the model itself": (lambda: nn.Linear(8, 5), {}, ValueError, "wrap it in nn.Sequential"),
    "unknown name": (Chain, {"classifier": "fc4"}, ValueError, "'fc4' is not a module of Chain, did you mean"),
    "name of a ReLU": (
        lambda: nn.Sequential(nn.ReLU()),
        {"classifier": "0"},
        ValueError,
        "'0' is a ReLU, but must be an nn.Linear, a 1x1 convolution or a grassy head",
    ),
    "name of a 3x3 convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 5, 3)),
        {"classifier": "0"},
        ValueError,
        "'0' is a Conv2d, but must be",
    ),
    "not a name": (Chain, {"classifier": 3}, TypeError, "classifier must be the dotted name of a layer, got int"),
    "unknown head": (Chain, {"name": "grasmann"}, ValueError, "did you mean 'grassmann'"),
    "unknown option": (Chain, {"dimension": 3}, ValueError, "no option 'dimension'"),
    "k too large for the second of two heads": (
        lambda: Wrapper(head=nn.Linear(12, 3), head_dist=nn.Linear(4, 3)),
        {"k": 8},
        ValueError,
        "in_features = 4",
    ),
    "no classes wanted": (Chain, {"num_classes": 0}, ValueError, "num_classes must be a positive integer, got 0"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_says_what_came_and_leaves_the_model_as_it_was(case):
    build, options, error, message = ERRORS[case]
    model = build()
    before = copy.deepcopy(model)
    with pytest.raises(error, match=message):
        grassy.replace_head(model, **({"name": "grassmann"} | options))
    assert repr(model) == repr(before)


def test_a_model_wrapped_for_distributed_training_is_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Chain())
        with pytest.raises(ValueError, match="DistributedDataParallel already: replace the head before wrapping"):
            grassy.replace_head(model, "grassmann", k=2)
    finally:
        torch.distributed.destroy_process_group()
