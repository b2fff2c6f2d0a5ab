"""Finding and replacing the classifier of models from timm, torchvision and Hugging Face."""

import copy
import gc
import weakref

import pytest
import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F

import grassy
from grassy.heads import Head, heads_of

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


HF_CONFIGS = {
    "ViTForImageClassification": {"image_size": 64},
    "DeiTForImageClassificationWithTeacher": {"image_size": 64},
    "BertForSequenceClassification": {"vocab_size": 50},
    "RobertaForSequenceClassification": {"vocab_size": 50},
}


def configs_in(model):
    return {name: module.config for name, module in model.named_modules() if "config" in vars(module)}


@pytest.mark.parametrize("name", HF_CONFIGS)
def test_a_hugging_face_model_gets_a_config_of_its_own_in_all_its_modules(name):
    cls = getattr(transformers, name)
    config = cls.config_class(**HF_SMALL, **HF_CONFIGS[name], num_labels=10)
    model, other = cls(config), cls(config)
    before = configs_in(model)
    assert len(before) > 2
    grassy.replace_head(model, "grassmann", num_classes=CLASSES, k=2)
    for each in (model, copy.deepcopy(model)):
        after = configs_in(each)
        assert before.keys() == after.keys()
        for module, own in after.items():
            assert (own is each.config) == (before[module] is config), module
    assert other.config is config
    assert (config.num_labels, hasattr(config, "grassy_head")) == (10, False)
    model.set_attn_implementation("eager")  # the backbone reads it from its config
    assert {each._attn_implementation for each in configs_in(model).values()} == {"eager"}


def test_parts_of_a_hugging_face_config_stay_shared_too():
    cls = transformers.SiglipForImageClassification
    config = transformers.SiglipConfig(
        vision_config={**HF_SMALL, "image_size": 64}, text_config={**HF_SMALL, "vocab_size": 50}, num_labels=10
    )
    model = cls(config)
    before = configs_in(model)
    assert any(part is config.vision_config for part in before.values())
    grassy.replace_head(model, "grassmann", k=2)
    assert model.config is not config
    for module, own in configs_in(model).items():
        assert (own is model.config.vision_config) == (before[module] is config.vision_config), module


def test_a_hugging_face_model_is_freed_as_soon_as_nothing_refers_to_it():
    model = hugging_face_model("ViTForImageClassification", **HF_SMALL)
    grassy.replace_head(model, "grassmann", k=2)
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert alive() is None
    finally:
        gc.enable()


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


def test_a_head_that_peft_leaves_frozen_is_mentioned(recwarn):
    peft = pytest.importorskip("peft")

    def with_adapters(**options):
        model = hugging_face_model("ViTForImageClassification", **HF_SMALL)
        grassy.replace_head(model, "grassmann", k=2)
        return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2, **options))

    grassy.make_optimizer(with_adapters(modules_to_save=["classifier"]), "adamw", lr=1e-3)
    assert not [warning for warning in recwarn if "frozen" in str(warning.message)]
    with pytest.warns(UserWarning, match=r"the head is frozen.*modules_to_save=\['classifier'\]"):
        grassy.make_optimizer(with_adapters(), "adamw", lr=1e-3)


@pytest.mark.parametrize("build", [timm.create_model, torchvision.models.get_model])
def test_the_width_is_that_of_the_layer_not_of_the_model(build):
    with torch.device("meta"):
        model = build("vgg11_bn")  # timm says num_features = 512
    assert grassy.replace_head(model, "grassmann").in_features == 4096


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
