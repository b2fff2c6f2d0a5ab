"""Finding and replacing the classifier of models from timm, torchvision and Hugging Face, and of anyone's own."""

import copy

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

import grassy
from grassy.heads import Head, heads_of
from grassy.surgery import HeadOnMap

CLASSES = 7


def images(size=32, batch=2):
    return torch.randn(batch, 3, size, size)


def paths_of(model):
    return [path for path, module in model.named_modules() if isinstance(module, Head)]


def all_modules(classifiers):
    return [m for c in (classifiers if isinstance(classifiers, tuple) else (classifiers,)) for m in c.modules()]


def check_replacement(model, paths, call):
    """What everyone may expect of `replace_head`, whatever the model."""
    old_keys = set(model.state_dict())
    head = grassy.replace_head(model, "grassmann", num_classes=CLASSES, k=2)

    heads = heads_of(model)
    assert head is model.get_submodule(paths[0])
    assert paths_of(model) == paths
    assert [model.get_submodule(path) for path in paths] == heads
    assert set(dict(grassy.subspaces.named_subspaces(model))) == {f"{path}.weight" for path in paths}
    # Only the keys of the classifier have changed: the head of a map lies one level deeper than the convolution.
    layers = tuple(f"{path.removesuffix('.head')}." for path in paths) + tuple(f"{path}." for path in paths)
    assert {k for k in old_keys if not k.startswith(layers)} == {
        k for k in model.state_dict() if not k.startswith(layers)
    }

    logits = call(model)
    assert logits.shape == (2, CLASSES)
    assert (logits >= 0).all()
    F.cross_entropy(logits, torch.tensor([0, CLASSES - 1])).backward()
    assert all(head.weight.grad.abs().sum() > 0 for head in heads)

    # Twice is possible, and keeps the number of classes.
    grassy.replace_head(model, "linear")
    assert paths_of(model) == paths
    assert call(model).shape == (2, CLASSES)


SMALL_SWIN = {"img_size": 56, "embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8)}
TIMM = {
    "test_resnet": ({}, ["fc"], 32),
    "resnet18": ({}, ["fc"], 32),
    "test_vit": ({}, ["head"], 160),
    "test_efficientnet": ({}, ["classifier"], 32),
    "test_convnext": ({}, ["head.fc"], 32),
    "test_byobnet": ({}, ["head.fc"], 32),
    "mobilenetv3_small_050": ({}, ["classifier"], 32),
    "swin_tiny_patch4_window7_224": (SMALL_SWIN, ["head.fc"], 56),
    "inception_next_atto": ({}, ["head.fc2"], 32),
    "resnetv2_18": ({}, ["head.fc.head"], 32),  # 1x1 convolutions, from here
    "dla34": ({}, ["fc.head"], 32),
    "dpn68": ({}, ["classifier.head"], 32),
    "deit_tiny_distilled_patch16_224": ({"img_size": 32, "depth": 1}, ["head", "head_dist"], 32),  # several heads
    "levit_128s": ({}, ["head.linear", "head_dist.linear"], 224),
    "levit_384_s8": ({"embed_dim": (32, 48, 64), "key_dim": 16}, ["head.linear", "head_dist.linear"], 224),
    "repvit_m0_9": ({"depth": (1, 1, 1, 1)}, ["head.head.l", "head.head_dist.l"], 32),
    "crossvit_9_240": ({}, ["head.0", "head.1"], 240),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TIMM)
def test_the_classifier_of_a_timm_model_is_replaced(name):
    options, paths, size = TIMM[name]
    model = timm.create_model(name, num_classes=10, **options).eval()
    check_replacement(model, paths, lambda model: model(images(size)))
    assert model.num_classes == CLASSES
    assert all(model.get_submodule(path) in all_modules(model.get_classifier()) for path in paths)
    assert all(vars(m).get("num_classes", CLASSES) == CLASSES for m in model.modules())
    model.reset_classifier(3)  # timm's own surgery still works afterwards
    assert paths_of(model) == []
    assert model.num_classes == 3


def small_vision_transformer():
    return torchvision.models.VisionTransformer(32, 16, 1, 2, 24, 48, num_classes=10, representation_size=20)


def small_torchvision_swin():
    return torchvision.models.SwinTransformer([4, 4], 24, [1, 1], [1, 2], [7, 7], num_classes=10)


def small_torchvision_convnext():
    block = torchvision.models.convnext.CNBlockConfig
    return torchvision.models.ConvNeXt([block(8, 16, 1), block(16, None, 1)], num_classes=10)


def torchvision_inception():
    return torchvision.models.inception_v3(weights=None, init_weights=False, num_classes=10)


def torchvision_googlenet():
    return torchvision.models.googlenet(weights=None, init_weights=False, num_classes=10)


def torchvision_model(name, **options):
    return lambda: torchvision.models.get_model(name, weights=None, num_classes=10, **options)


TORCHVISION = {
    "resnet18": (torchvision_model("resnet18"), "fc", 32),
    "densenet121": (torchvision_model("densenet121"), "classifier", 32),
    "efficientnet_b0": (torchvision_model("efficientnet_b0"), "classifier.1", 32),
    "mobilenet_v3_small": (torchvision_model("mobilenet_v3_small"), "classifier.3", 32),
    "regnet_y_400mf": (torchvision_model("regnet_y_400mf"), "fc", 32),
    "squeezenet1_1": (torchvision_model("squeezenet1_1"), "classifier.1.head", 64),
    "vision_transformer": (small_vision_transformer, "heads.head", 32),
    "swin": (small_torchvision_swin, "head", 32),
    "convnext": (small_torchvision_convnext, "classifier.2", 32),
    "inception_v3": (torchvision_inception, "fc", 96),  # has an auxiliary classifier
    "googlenet": (torchvision_googlenet, "fc", 64),  # has two
}


@pytest.mark.parametrize("name", TORCHVISION)
def test_the_classifier_of_a_torchvision_model_is_replaced(name):
    build, path, size = TORCHVISION[name]
    model = build().eval()
    check_replacement(model, [path], lambda model: model(images(size)))
    assert vars(model).get("num_classes", CLASSES) == CLASSES


def test_auxiliary_classifiers_stay_and_do_not_disturb_training():
    model = torchvision_googlenet().train()
    head = grassy.replace_head(model, "grassmann", k=2)
    assert isinstance(model.aux1.fc2, nn.Linear)
    assert isinstance(model.aux2.fc2, nn.Linear)
    grassy.classification_loss(model, images(64), torch.tensor([0, 1])).backward()
    assert head.weight.grad.abs().sum() > 0


HF = {
    "ViTForImageClassification": (
        {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        ["classifier"],
    ),
    "ResNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"},
        ["classifier.1"],
    ),
    "RegNetForImageClassification": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 8},
        ["classifier.1"],
    ),
    "SwinForImageClassification": ({"embed_dim": 12, "depths": [1, 1], "num_heads": [1, 2]}, ["classifier"]),
    "ConvNextForImageClassification": (
        {"num_stages": 2, "hidden_sizes": [8, 16], "depths": [1, 1]},
        ["classifier"],
    ),
    "MobileNetV2ForImageClassification": ({"depth_multiplier": 0.35, "initializer_range": 0.2}, ["classifier"]),
    "SwiftFormerForImageClassification": ({}, ["head", "dist_head"]),
    "DeiTForImageClassificationWithTeacher": (
        {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32},
        ["cls_classifier", "distillation_classifier"],
    ),
    "LevitForImageClassificationWithTeacher": (
        {"hidden_sizes": [32, 48, 64], "num_attention_heads": [2, 2, 2], "depths": [1, 1, 1], "key_dim": [8, 8, 8]},
        ["classifier.linear", "classifier_distill.linear"],
    ),
}


HF_SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def hugging_face_model(name, **options):
    cls = getattr(transformers, name)
    return cls(cls.config_class(**({"image_size": 64, "num_labels": 10} | options)))


@pytest.mark.parametrize("name", HF)
def test_the_classifier_of_a_hugging_face_model_is_replaced(name):
    options, paths = HF[name]
    size = 224 if "Levit" in name or "SwiftFormer" in name else 64
    model = hugging_face_model(name, image_size=size, **options).eval()
    check_replacement(model, paths, lambda model: model(pixel_values=images(size)).logits)
    assert model.config.num_labels == CLASSES == len(model.config.id2label)
    assert vars(model).get("num_labels", CLASSES) == CLASSES


def test_a_timm_model_inside_a_hugging_face_model_is_found():
    config = transformers.TimmWrapperConfig(architecture="dla34", num_labels=10)
    model = transformers.TimmWrapperForImageClassification(config)
    grassy.replace_head(model, "grassmann", num_classes=CLASSES, k=2)
    assert paths_of(model) == ["timm_model.fc.head"]
    assert model.config.num_labels == model.timm_model.num_classes == model.num_labels == CLASSES
    assert model(pixel_values=images(64)).logits.shape == (2, CLASSES)


def test_the_labels_of_a_hugging_face_model_stay_if_their_number_does():
    model = hugging_face_model("ViTForImageClassification", num_labels=2, id2label={0: "cat", 1: "dog"})
    grassy.replace_head(model, "grassmann", k=2)
    assert model.config.id2label == {0: "cat", 1: "dog"}


def test_adapters_come_after_the_head():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"], r=2)
    wrapped = peft.get_peft_model(hugging_face_model("ViTForImageClassification", **HF_SMALL), config)
    before = {name: type(module) for name, module in wrapped.named_modules()}
    for model in (wrapped, wrapped.get_base_model()):
        with pytest.raises(ValueError, match=r"has PEFT adapters already.*call grassy\.replace_head first, then get_"):
            grassy.replace_head(model, "grassmann", k=2)
    assert {name: type(module) for name, module in wrapped.named_modules()} == before
    model = hugging_face_model("ViTForImageClassification", **HF_SMALL)
    grassy.replace_head(model, "grassmann", k=2)
    right = peft.get_peft_model(model, config)
    optimizer = grassy.make_optimizer(right, "adamw", lr=1e-2, head_lr=0.1)
    active = right.base_model.model.classifier.modules_to_save["default"]
    start = active.weight.detach().clone()
    right(pixel_values=images(64), labels=torch.tensor([0, 1])).loss.backward()
    optimizer.step()
    assert not torch.equal(active.weight, start)
    assert torch.equal(right.base_model.model.classifier.original_module.weight, start)
    grassy.replace_head(right.merge_and_unload(), "grassmann", k=3)  # no adapters any more


@pytest.mark.parametrize("build", [timm.create_model, torchvision.models.get_model])
def test_the_width_is_that_of_the_layer_not_of_the_model(build):
    with torch.device("meta"):
        model = build("vgg11_bn")  # timm says num_features = 512
    assert grassy.replace_head(model, "grassmann").in_features == 4096


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


OWN = {
    "sequence": (lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5), nn.Softmax(-1)), "2"),
    "nested sequence": (lambda: nn.Sequential(nn.Linear(12, 8), nn.Sequential(nn.Linear(8, 5), nn.Dropout())), "1.0"),
    "all-convolutional": (lambda: nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 5, 1), nn.Flatten()), "1.head"),
    "chain": (Chain, "fc3"),
    "wrapped chain": (lambda: Wrapper(network=Chain(), loss=nn.CrossEntropyLoss()), "network.fc3"),
    "wrapped timm model": (lambda: Wrapper(net=timm.create_model("test_resnet", num_classes=5)), "net.fc"),
    "on a backbone": (lambda: Wrapper(net=headless(), out=nn.Linear(64, 5)), "out"),
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


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (lambda: timm.create_model("test_resnet"), images()),
        (lambda: timm.create_model("dla46_c"), images()),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224", img_size=32, depth=1), images()),
        (torchvision_model("squeezenet1_1"), images(64)),  # logits of a map of features, averaged afterwards
        (torchvision_model("mobilenet_v3_small"), images()),
        (lambda: hugging_face_model("ViTForImageClassification", hidden_size=24), {"pixel_values": images(64)}),
    ],
)
def test_the_loss_of_the_whole_model_is_cross_entropy_of_its_logits(model, inputs):
    model, labels = model().eval(), torch.tensor([1, 6])
    grassy.replace_head(model, "grassmann", num_classes=CLASSES, k=2)
    logits = model(**inputs).logits if isinstance(inputs, dict) else model(inputs)
    loss = grassy.classification_loss(model, inputs, labels)
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels))


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
    model = small_torchvision_swin()
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
