"""Networks with the structure, the names and the forward of mmpretrain's.

They are written from its description and independent of timm: importing their weights must give a timm model with the
same logits.
"""

import torch
from torch import nn
from torch.nn import functional as F

from grassy import geometry


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
