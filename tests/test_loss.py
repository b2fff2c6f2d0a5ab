"""classification_loss: the target reaches the head inside the model's forward, and nothing stays behind."""

import pytest
import torch
from torch import nn

import grassy
from grassy.heads import Head

N, C, B = 12, 5, 7


class LossInHead(Head):
    """A head whose loss is more than a criterion on its logits."""

    def __init__(self):
        super().__init__(N, C)
        self.fc = nn.Linear(N, C)

    def logits(self, features, target=None):
        return self.fc(features)

    def loss(self, features, target, criterion):
        return criterion(self.logits(features), target) + features.square().mean()


class MarginHead(LossInHead):
    loss = Head.loss

    def logits(self, features, target=None):
        logits = self.fc(features)
        return logits if target is None else logits - nn.functional.one_hot(target, C)


def model(head):
    return nn.Sequential(nn.Linear(3, N), head)


def batch():
    return torch.randn(B, 3), torch.randint(0, C, (B,))


def test_for_a_plain_head_it_is_the_criterion_on_the_logits():
    net, (x, y) = model(grassy.GrassmannHead(N, C)), batch()
    assert torch.equal(grassy.classification_loss(net, x, y), nn.functional.cross_entropy(net(x), y))
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert torch.equal(grassy.classification_loss(net, x, y, smooth), smooth(net(x), y))
    soft = torch.rand(B, C).softmax(-1)
    assert torch.equal(grassy.classification_loss(net, x, soft), nn.functional.cross_entropy(net(x), soft))


def test_a_model_without_a_head_of_grassys_is_served_too():
    net, (x, y) = model(nn.Linear(N, C)), batch()
    assert torch.equal(grassy.classification_loss(net, x, y), nn.functional.cross_entropy(net(x), y))


def test_a_head_with_a_loss_of_its_own_computes_it_in_its_forward():
    head, (x, y) = LossInHead(), batch()
    net = model(head)
    features = net[0](x)
    expected = nn.functional.cross_entropy(head.fc(features), y) + features.square().mean()
    assert torch.allclose(grassy.classification_loss(net, x, y), expected)
    assert net(x).shape == (B, C)


def test_a_margin_head_gets_the_target():
    head, (x, y) = MarginHead(), batch()
    net = model(head)
    expected = nn.functional.cross_entropy(net(x) - nn.functional.one_hot(y, C), y)
    assert torch.allclose(grassy.classification_loss(net, x, y), expected)


def test_the_model_is_called_once_and_the_target_is_gone_afterwards_even_after_an_error():
    head, (x, y) = LossInHead(), batch()
    net, calls = model(head), []
    net.register_forward_hook(lambda *_: calls.append(1))
    grassy.classification_loss(net, x, y)
    assert len(calls) == 1
    assert head.loss_request is None
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        grassy.classification_loss(net, x[:, :2], y)
    assert head.loss_request is None
    assert net(x).shape == (B, C)


@pytest.mark.parametrize(
    "head", [grassy.GrassmannHead(N, C), LossInHead(), MarginHead()], ids=lambda h: type(h).__name__
)
def test_it_works_through_torch_compile_without_recompiling_for_new_targets(head):
    torch._dynamo.reset()
    net = model(head)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x, y = batch()
    expected = grassy.classification_loss(net, x, y)
    assert torch.allclose(grassy.classification_loss(compiled, x, y), expected, atol=1e-6)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for _ in range(3):
        x, y = batch()
        assert torch.allclose(
            grassy.classification_loss(compiled, x, y), grassy.classification_loss(net, x, y), atol=1e-6
        )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == frames
    assert torch.allclose(compiled(x), net(x), atol=1e-6)


def test_labels_out_of_range_and_soft_targets_of_the_wrong_width_are_refused():
    net, (x, y) = model(grassy.GrassmannHead(N, C)), batch()
    for wrong in (C, -1):
        with pytest.raises(ValueError, match=f"labels must lie between 0 and 4, got {wrong}"):
            grassy.classification_loss(net, x, torch.full((B,), wrong))
    with pytest.raises(ValueError, match=r"shape \(B, 5\)"):
        grassy.classification_loss(net, x, torch.rand(B, C + 1))
    y[0] = -100  # what cross-entropy ignores by default
    assert grassy.classification_loss(net, x, y).isfinite()


def test_an_output_without_logits_is_refused():
    class Strange(nn.Module):
        def forward(self, x):
            return {"scores": x}

    with pytest.raises(TypeError, match="cannot find logits"):
        grassy.classification_loss(Strange(), torch.randn(2, 3), torch.zeros(2, dtype=torch.int64))
