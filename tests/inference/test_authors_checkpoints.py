"""Checkpoints of the paper's authors are imported with the logits that they have where they come from.

The networks below have the structure, the names and the forward of mmpretrain's, written from its description and
independent of timm: importing their weights must give a timm model with the same logits.
"""

import re
import sys
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import grassy
from grassy import geometry, paper
from grassy.cli import main
from grassy.inference.authors_checkpoints import CLASSES, convert, import_checkpoint
from grassy.inference.validate import paper_figures
from grassy.models import import_timm
from grassy.runs.inert_pickle import read_tensors
from grassy.runs.paper_row import paper_row
from grassy.runs.weights import read_description
from grassy.surgery import replace_head

timm = import_timm()


# ---------------------------------------------------------------------- networks with mmpretrain's names


class ConvModule(nn.Module):
    def __init__(self, width, out, kernel, stride=1, bias=False, act=True):
        super().__init__()
        self.conv = nn.Conv2d(width, out, kernel, stride, kernel // 2, bias=bias)
        self.bn = nn.BatchNorm2d(out)
        self.act = act

    def forward(self, x):
        x = self.bn(self.conv(x))
        return F.relu(x) if self.act else x


class Bottleneck(nn.Module):
    def __init__(self, width, inner, stride):
        super().__init__()
        out = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        if width != out or stride != 1:
            pool = [nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)] if stride != 1 else []
            self.downsample = nn.Sequential(*pool, nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = self.downsample(x) if hasattr(self, "downsample") else x
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + identity)


class ResNetV1d(nn.Module):
    def __init__(self, depths=(3, 4, 6, 3), base=64):
        super().__init__()
        self.stem = nn.Sequential(
            ConvModule(3, base // 2, 3, 2), ConvModule(base // 2, base // 2, 3), ConvModule(base // 2, base, 3)
        )
        width = base
        for stage, depth in enumerate(depths):
            inner, blocks = base * 2**stage, []
            for block in range(depth):
                blocks.append(Bottleneck(width, inner, 2 if stage and not block else 1))
                width = 4 * inner
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.out = width

    def forward(self, x):
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        for stage in range(4):
            x = getattr(self, f"layer{stage + 1}")(x)
        return x.mean((2, 3))


class VGG(nn.Module):
    def __init__(self, widths=(64, 128, 256, 512, 512), hidden=4096, classes=None):
        super().__init__()
        layers, width = [], 3
        for each in widths:
            layers += [ConvModule(width, each, 3, bias=True), ConvModule(each, each, 3, bias=True), nn.MaxPool2d(2, 2)]
            width = each
        self.features = nn.Sequential(*layers)
        last = [] if classes is None else [nn.Dropout(), nn.Linear(hidden, classes)]
        first = [nn.Linear(width * 49, hidden), nn.ReLU(), nn.Dropout(), nn.Linear(hidden, hidden), nn.ReLU()]
        self.classifier = nn.Sequential(*first, *last)
        self.out = hidden

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class WindowMSA(nn.Module):
    def __init__(self, width, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))
        rows, columns = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        rows, columns = rows.flatten(), columns.flatten()
        index = (rows[:, None] - rows + window - 1) * (2 * window - 1) + columns[:, None] - columns + window - 1
        self.register_buffer("relative_position_index", index)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, mask):
        windows, places, width = x.shape
        q, k, v = self.qkv(x).reshape(windows, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index].permute(2, 0, 1)
        attention = q @ k.mT * (width // self.heads) ** -0.5 + bias
        if mask is not None:
            attention = attention.unflatten(0, (-1, len(mask))) + mask[:, None]
            attention = attention.flatten(0, 1)
        return self.proj((attention.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ShiftWindowMSA(nn.Module):
    def __init__(self, width, heads, window, shift):
        super().__init__()
        self.w_msa, self.window, self.shift = WindowMSA(width, heads, window), window, shift

    def divided(self, x):
        b, h, w, c = x.shape
        n = self.window
        return x.reshape(b, h // n, n, w // n, n, c).transpose(2, 3).reshape(-1, n * n, c)

    def forward(self, x):  # (B, H, W, C)
        b, h, w, c = x.shape
        shift, mask = (self.shift if h > self.window else 0), None
        if shift:
            x = x.roll((-shift, -shift), (1, 2))
            region = torch.zeros(1, h, w, 1)
            parts = (slice(0, -self.window), slice(-self.window, -shift), slice(-shift, None))
            for number, (rows, columns) in enumerate((r, s) for r in parts for s in parts):
                region[:, rows, columns] = number
            region = self.divided(region).squeeze(-1)
            mask = torch.where(region[:, None] == region[:, :, None], 0.0, -100.0)
        y = self.w_msa(self.divided(x), mask)
        n = self.window
        y = y.reshape(b, h // n, w // n, n, n, c).transpose(2, 3).reshape(b, h, w, c)
        return y.roll((shift, shift), (1, 2)) if shift else y


class FFN(nn.Module):
    def __init__(self, width, hidden, scaled=False):
        super().__init__()
        first = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Dropout(0.0))
        self.layers = nn.Sequential(first, nn.Linear(hidden, width), nn.Dropout(0.0))
        if scaled:
            self.gamma2 = LayerScale(width)

    def forward(self, x):
        x = self.layers(x)
        return self.gamma2(x) if hasattr(self, "gamma2") else x


class SwinBlock(nn.Module):
    def __init__(self, width, heads, window, shift):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), ShiftWindowMSA(width, heads, window, shift)
        self.norm2, self.ffn = nn.LayerNorm(width), FFN(width, 4 * width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.ffn(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x):
        b, h, w, _ = x.shape
        merged = F.unfold(x.permute(0, 3, 1, 2), 2, stride=2).transpose(1, 2)  # channels, then the places of a patch
        return self.reduction(self.norm(merged)).reshape(b, h // 2, w // 2, -1)


class PatchEmbed(nn.Module):
    def __init__(self, width, patch, norm):
        super().__init__()
        self.projection = nn.Conv2d(3, width, patch, patch)
        if norm:
            self.norm = nn.LayerNorm(width)

    def forward(self, x):
        x = self.projection(x).permute(0, 2, 3, 1)
        return self.norm(x) if hasattr(self, "norm") else x


class Swin(nn.Module):
    def __init__(self, width=96, depths=(2, 2, 6, 2), heads=(3, 6, 12, 24), window=7):
        super().__init__()
        self.patch_embed = PatchEmbed(width, 4, norm=True)
        self.stages = nn.ModuleList()
        for number, (depth, count) in enumerate(zip(depths, heads, strict=True)):
            stage = nn.Module()
            stage.blocks = nn.ModuleList(
                SwinBlock(width, count, window, window // 2 if block % 2 else 0) for block in range(depth)
            )
            if number < len(depths) - 1:
                stage.downsample = PatchMerging(width)
                width *= 2
            self.stages.append(stage)
        self.norm3 = nn.LayerNorm(width)
        self.out = width

    def forward(self, x):
        x = self.patch_embed(x)
        for stage in self.stages:
            for block in stage.blocks:
                x = block(x)
            x = stage.downsample(x) if hasattr(stage, "downsample") else x
        return self.norm3(x).mean((1, 2))


class LayerScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x):
        return x * self.weight


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj, self.gamma1 = nn.Linear(width, 3 * width), nn.Linear(width, width), LayerScale(width)

    def forward(self, x):
        b, places, width = x.shape
        q, k, v = self.qkv(x).reshape(b, places, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.mT * (width // self.heads) ** -0.5).softmax(-1)
        return self.gamma1(self.proj((attention @ v).transpose(1, 2).flatten(2)))


class DeiT3(nn.Module):
    """first_norm_twice: as mmpretrain has it since March 2023; the second norm is then never trained."""

    def __init__(self, width=384, depth=12, heads=6, patch=16, size=224, first_norm_twice=True):
        super().__init__()
        self.patch_embed, self.twice = PatchEmbed(width, patch, norm=False), first_norm_twice
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2, width))
        self.layers = nn.ModuleList()
        for _ in range(depth):
            layer = nn.Module()
            layer.ln1, layer.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
            layer.ln2, layer.ffn = nn.LayerNorm(width, eps=1e-6), FFN(width, 4 * width, scaled=True)
            self.layers.append(layer)
        self.ln1 = nn.LayerNorm(width, eps=1e-6)
        self.out = width

    def forward(self, x):
        x = self.patch_embed(x).flatten(1, 2) + self.pos_embed
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for layer in self.layers:
            x = x + layer.attn(layer.ln1(x))
            x = x + layer.ffn((layer.ln1 if self.twice else layer.ln2)(x))
        return self.ln1(x)[:, 0]


class Classifier(nn.Module):
    """k: None for a linear classifier, which VGG has in its backbone, and DeiT3 under another name."""

    def __init__(self, backbone, classes, k):
        super().__init__()
        self.backbone, self.classes, self.k = backbone, classes, k
        self.head = nn.Module()
        if k is not None:
            self.head.fc = nn.Linear(backbone.out, classes * k, bias=False)
        elif isinstance(backbone, DeiT3):
            self.head.layers = nn.Sequential()
            self.head.layers.add_module("head", nn.Linear(backbone.out, classes))
        elif not isinstance(backbone, VGG):
            self.head.fc = nn.Linear(backbone.out, classes)

    def forward(self, x):
        features = self.backbone(x)
        if self.k is not None:  # the authors' head
            logits = 25.0 * self.head.fc(F.normalize(features, dim=-1))
            return logits.reshape(-1, self.classes, self.k).norm(dim=-1)
        if isinstance(self.backbone, DeiT3):
            return self.head.layers.head(features)
        return features if isinstance(self.backbone, VGG) else self.head.fc(features)


@torch.no_grad()
def randomised(model: Classifier) -> Classifier:
    """Weights of which none is what it begins as, batch statistics included, and subspaces where they belong."""
    torch.manual_seed(0)
    untrained = isinstance(model.backbone, DeiT3) and model.backbone.twice
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point() or (untrained and ".ln2." in name):
            continue
        if name.endswith(("running_var", "gamma1.weight", "gamma2.weight")) or (tensor.ndim == 1 and "weight" in name):
            tensor.uniform_(0.5, 1.5)
        else:
            tensor.normal_(std=max(0.02, (tensor[0].numel() if tensor.ndim > 1 else 100) ** -0.5))
    if model.k is not None:
        shape = model.classes, model.k, model.backbone.out
        model.head.fc.weight.copy_(geometry.random_subspace(*shape).flatten(0, 1))
    return model.eval()


# ---------------------------------------------------------------------- small ones of each kind

C = 5


def small(kind, k):
    classes = C if k is None else None
    return {
        "resnet": lambda: ResNetV1d((1, 2, 1, 2), 8),
        "vgg": lambda: VGG((4, 4, 8, 8, 8), 12, classes),
        "swin": lambda: Swin(8, (2, 2), (2, 4), 4),
        "deit3": lambda: DeiT3(16, 2, 2, 8, 32),
        "deit3, both norms": lambda: DeiT3(16, 2, 2, 8, 32, first_norm_twice=False),
    }[kind]()


def timm_twin(kind):
    from timm.models.resnet import Bottleneck as TimmBottleneck
    from timm.models.resnet import ResNet
    from timm.models.swin_transformer import SwinTransformer
    from timm.models.vgg import VGG as TimmVGG

    if kind == "resnet":
        options = {"stem_width": 4, "stem_type": "deep", "avg_down": True, "channels": (8, 16, 32, 64)}
        return ResNet(TimmBottleneck, (1, 2, 1, 2), num_classes=C, **options)
    if kind == "vgg":
        model = TimmVGG([4, 4, "M", 4, 4, "M", 8, 8, "M", 8, 8, "M", 8, 8, "M"], C, norm_layer=nn.BatchNorm2d)
        model.pre_logits.fc1, model.pre_logits.fc2 = nn.Conv2d(8, 12, 7), nn.Conv2d(12, 12, 1)
        model.head.fc = nn.Linear(12, C)
        return model
    if kind == "swin":
        sizes = {"embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
        return SwinTransformer(img_size=64, num_classes=C, **sizes)
    sizes = {"embed_dim": 16, "depth": 2, "num_heads": 2, "patch_size": 8, "img_size": 32}
    return timm.create_model("deit3_small_patch16_224", num_classes=C, **sizes)


SIZES = {"resnet": 64, "vgg": 224, "swin": 64, "deit3": 32, "deit3, both norms": 32}


@pytest.mark.parametrize("k", [None, 1, 3])
@pytest.mark.parametrize("kind", SIZES)
def test_an_imported_network_has_the_logits_of_the_original(kind, k):
    original = randomised(Classifier(small(kind, k), C, k))
    state = {**original.state_dict(), "data_preprocessor.mean": torch.zeros(3)}
    if kind == "swin":  # a buffer of an earlier version, and the norm after the last of two stages
        state["backbone.stages.0.blocks.1.attn.attn_mask"] = torch.zeros(1)
        state = {name.replace("backbone.norm3.", "backbone.norm1."): each for name, each in state.items()}
    found = convert(state, C)
    assert found.k == k
    model = timm_twin(kind)
    if k is not None:
        replace_head(model, "grassmann", k=k)
    model.load_state_dict(found.weights)
    images = torch.randn(2, 3, SIZES[kind], SIZES[kind])
    with torch.no_grad():
        expected, logits = original(images), model.eval()(images)
    assert expected.std() > 1e-3
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


FULL = {
    "resnet50d-linear": lambda: (ResNetV1d((3, 4, 6, 3)), None),
    "resnet50d-grassmann-k32": lambda: (ResNetV1d((3, 4, 6, 3)), 32),
    "resnet101d-grassmann": lambda: (ResNetV1d((3, 4, 23, 3)), 8),
    "resnet152d-grassmann": lambda: (ResNetV1d((3, 8, 36, 3)), 8),
    "vgg13bn-linear": lambda: (VGG(classes=CLASSES), None),
    "vgg13bn-grassmann": lambda: (VGG(), 8),
    "swin-t-grassmann": lambda: (Swin(), 8),
}


@pytest.mark.parametrize("recipe", FULL)
def test_the_released_networks_are_told_apart_and_fit_timms(recipe):
    with torch.device("meta"):
        backbone, k = FULL[recipe]()
        found = convert(Classifier(backbone, CLASSES, k).state_dict())
        about = grassy.runs.recipe_files.load_recipe(recipe)
        model = grassy.models.create_model(about.model, CLASSES, about.head, about.model_kwargs)
    assert recipe.startswith(found.architecture)
    assert found.k == k == about.head.get("k")
    own = {name: tensor.shape for name, tensor in model.state_dict().items() if not name.endswith("_extra_state")}
    assert {name: tensor.shape for name, tensor in found.weights.items()} == own


# ---------------------------------------------------------------------- files


def stranger(trap):
    """What mmengine keeps beside the weights: objects of its own, NumPy scalars, and here one that would run code."""
    import numpy

    module = types.ModuleType("mmengine_like")

    class HistoryBuffer:
        def __init__(self):
            self.values, self.methods = numpy.arange(3.0), {"max": numpy.max}

    class Intruder:
        def __reduce__(self):
            return exec, (f"open({str(trap)!r}, 'w').close()",)

    HistoryBuffer.__module__ = "mmengine_like"
    HistoryBuffer.__qualname__ = "HistoryBuffer"
    module.HistoryBuffer = HistoryBuffer
    sys.modules["mmengine_like"] = module
    return {"loss": HistoryBuffer(), "lr": numpy.float64(0.1), "trap": Intruder()}


@pytest.fixture
def checkpoint(tmp_path):
    def write(model: nn.Module):
        trap = tmp_path / "trap"
        content = {"meta": {"epoch": 100}, "state_dict": model.state_dict(), "message_hub": stranger(trap)}
        torch.save(content, tmp_path / "authors.pth")
        del sys.modules["mmengine_like"]  # whoever reads it does not have the package
        return tmp_path / "authors.pth"

    return write


def test_tensors_are_read_beside_objects_whose_code_is_not_run(checkpoint, tmp_path):
    model = nn.Linear(2, 3)
    file = checkpoint(model)
    with pytest.raises(Exception, match=r"mmengine_like|GLOBAL|Unsupported"):
        torch.load(file, weights_only=True)
    found = read_tensors(file)
    assert found.keys() == {"weight", "bias"}
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert not (tmp_path / "trap").exists()


@pytest.mark.slow
def test_a_released_file_becomes_a_folder_that_every_command_opens(checkpoint, tmp_path, capsys):
    original = randomised(Classifier(DeiT3(), CLASSES, 8))
    file = checkpoint(original)
    assert main(["import", str(file), "--output", str(tmp_path / "deit3")]) == 0
    said = capsys.readouterr().out
    top1 = paper.figures("deit3-s-grassmann")["top1"]
    assert "deit3-s-grassmann" in said
    assert f"the paper reports top-1 {top1:.2f}" in said
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        logits = grassy.load(tmp_path / "deit3")(images)
        torch.testing.assert_close(logits, original(images), rtol=1e-4, atol=1e-4)
    about = read_description(tmp_path / "deit3" / "model.safetensors")
    assert (about.img_size, about.crop_pct, about.interpolation) == (224, 1.0, "bicubic")
    assert (about.class_names[0], len(about.class_names)) == ("n01440764", 1000)
    assert paper_row(about) == "deit3-s-grassmann"
    assert paper_figures(tmp_path / "deit3")["top1"] == top1
    assert not (tmp_path / "trap").exists()
    with pytest.raises(
        ValueError, match="deit3-s with k = 8, which is not what recipe 'resnet50d-grassmann' describes"
    ):
        import_checkpoint(file, tmp_path / "other", "resnet50d-grassmann")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(("k", "rows"), [pytest.param(8, 14, marks=pytest.mark.slow), (1, 2), (None, 7)])
def test_weights_that_fit_several_rows_of_the_paper_need_its_name(k, rows, checkpoint, tmp_path, capsys):
    """The authors' ResNet50-D by RSB-A1 has the tensors of that of 100 epochs, but other test images and figures."""
    file = checkpoint(randomised(Classifier(ResNetV1d((3, 4, 6, 3)), CLASSES, k)))
    folder = tmp_path / "out"
    assert main(["import", str(file), "--output", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "say which row it is by --recipe, of " in error
    names = error.split("by --recipe, of ")[1].strip().split(", ")
    assert len(names) == rows
    if k == 8:
        assert {"resnet50d-grassmann", "resnet50d-rsb-a1-grassmann", "resnet50d-rsb-a3-grassmann-fixres"} < set(names)
    assert not folder.exists()
    with pytest.raises(ValueError, match="which is not what recipe 'resnet50d-cosine' describes"):
        import_checkpoint(file, folder, "resnet50d-cosine")
    row = next(name for name in names if "rsb-a1" in name or "unnormalized" in name)
    assert main(["import", str(file), "--output", str(folder), "--recipe", row]) == 0
    about, recipe = read_description(folder / "model.safetensors"), grassy.runs.recipe_files.load_recipe(row)
    assert (about.crop_pct, about.interpolation, paper_row(about)) == (recipe.crop_pct, recipe.interpolation, row)


def test_an_import_does_not_write_over_other_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds other files: name a new folder"):
        import_checkpoint(tmp_path / "missing.pth", tmp_path)


def test_the_test_sizes_are_those_of_the_authors_configurations():
    recipes = {"resnet50d-grassmann": 256, "vgg13bn-grassmann": 256, "swin-t-grassmann": 256, "deit3-s-grassmann": 224}
    recipes |= {"resnet50d-rsb-a1-grassmann": 236, "resnet50d-rsb-a2-linear": 236}
    recipes |= {"resnet50d-rsb-a3-grassmann-fixres": 232}
    for name, resized in recipes.items():
        recipe = grassy.runs.recipe_files.load_recipe(name)
        assert round((recipe.test_size or recipe.img_size) / recipe.crop_pct) == resized, name
        bicubic = "rsb" in name or name.startswith(("swin", "deit3"))
        assert recipe.interpolation == ("bicubic" if bicubic else "bilinear")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"fc.weight": torch.zeros(2, 2)}, "has not the names of mmpretrain"),
        ({"backbone.blocks.0.weight": torch.zeros(2), "head.fc.weight": torch.zeros(2)}, "holds another network than"),
        (
            {"backbone.stem.0.conv.weight": torch.zeros(2), "head.fc.weight": torch.zeros(7, 2)},
            r"head\.fc\.weight must have 1000 times k rows, got shape \(7, 2\)",
        ),
    ],
)
def test_other_weights_are_refused_and_nothing_is_written(state, said, tmp_path, capsys):
    torch.save({"state_dict": state}, tmp_path / "file.pth")
    assert main(["import", str(tmp_path / "file.pth"), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [b"", b"no checkpoint", b"PK\x03\x04 half a zip"])
def test_files_that_are_none_are_refused(content, tmp_path, capsys):
    (tmp_path / "file.pth").write_bytes(content)
    for name in ("file.pth", "missing.pth"):
        assert main(["import", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
        assert capsys.readouterr().err.count("\n") == 1
