"""classification_loss: the target reaches the head inside the model's forward, and nothing stays behind."""

import pytest
import torch
from torch import nn

import grassy
from grassy.heads import HEADS, Head
from grassy.models import import_timm

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


@pytest.mark.parametrize("fuse_loss", [False, True])
def test_every_token_of_a_sequence_has_its_label(fuse_loss):
    model = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2, fuse_loss=fuse_loss))
    x, y = torch.randn(5, 7, 4), torch.randint(0, 3, (5, 7))
    y[0, 3:] = -100  # padding
    expected = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
    assert torch.allclose(grassy.classification_loss(model, x, y), expected)


HEADS_AND_OPTIONS = [*((name, {}) for name in sorted(HEADS)), ("grassmann", {"fuse_loss": True})]
every_head = pytest.mark.parametrize(("name", "options"), HEADS_AND_OPTIONS)


@every_head
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("tokens", [C, C + 2, 1])
def test_the_loss_of_tokens_is_that_of_all_of_them_also_if_there_are_as_many_as_classes(
    name, options, training, tokens
):
    head = grassy.create_head(name, N, C, **options).train(training)
    x, y = torch.randn(3, tokens, N), torch.randint(0, C, (3, tokens))
    y[0, 0] = -100  # padding
    expected = head.loss(x.flatten(0, 1), y.flatten(), nn.functional.cross_entropy)
    for found in (head.loss(x, y, nn.functional.cross_entropy), grassy.classification_loss(nn.Sequential(head), x, y)):
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "options"), [each for each in HEADS_AND_OPTIONS if HEADS[each[0]].takes_soft_targets])
def test_soft_targets_of_tokens_have_their_classes_last_too(name, options, training):
    head = grassy.create_head(name, N, C, **options).train(training)
    x, y = torch.randn(3, C, N), torch.randn(3, C, C).softmax(-1)
    expected = head.loss(x.flatten(0, 1), y.flatten(0, 1), nn.functional.cross_entropy)
    for found in (head.loss(x, y, nn.functional.cross_entropy), grassy.classification_loss(nn.Sequential(head), x, y)):
        assert torch.allclose(found, expected, atol=1e-5)


@every_head
def test_criteria_of_timm_and_grassy_take_tokens_as_well(name, options):
    import_timm()
    from timm import loss as timm_loss

    head = grassy.create_head(name, N, C, **options)
    x, y = torch.randn(3, C, N), torch.randint(0, C, (3, C))
    for criterion in (
        timm_loss.LabelSmoothingCrossEntropy(0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        grassy.create_criterion("bce"),
    ):
        expected = head.loss(x.flatten(0, 1), y.flatten(), criterion)
        assert torch.allclose(head.loss(x, y, criterion), expected, atol=1e-5)
        assert torch.allclose(grassy.classification_loss(nn.Sequential(head), x, y, criterion), expected, atol=1e-5)


@every_head
def test_labels_that_are_not_one_for_each_token_are_refused(name, options):
    head = grassy.create_head(name, N, C, **options)
    x, y = torch.randn(3, 4, N), torch.randint(0, 3, (3, C))  # torch would take the 4 tokens for classes
    for loss in (
        lambda: head.loss(x, y, nn.functional.cross_entropy),
        lambda: grassy.classification_loss(nn.Sequential(head), x, y),
    ):
        with pytest.raises(ValueError, match=r"target (must have|of) shape \(3, 4\).* got \(3, 5\)"):
            loss()


@pytest.mark.parametrize("name", ["grassmann", "arcface", "multi"])
def test_a_head_on_a_map_takes_a_label_for_each_location_with_its_classes_second(name):
    net = nn.Sequential(nn.Conv2d(3, N, 1), nn.Conv2d(N, C, 1))
    head = grassy.replace_head(net, name)
    x, y = torch.randn(2, 3, C, C), torch.randint(0, C, (2, C, C))  # as high and wide as there are classes
    rows = net[0](x).movedim(1, -1).flatten(0, 2)
    expected = head.loss(rows, y.flatten(), nn.functional.cross_entropy)
    assert torch.allclose(grassy.classification_loss(net, x, y), expected, atol=1e-5)


def test_a_model_may_move_the_classes_of_its_head_to_the_second_axis():
    head, x, y = grassy.GrassmannHead(N, C), torch.randn(2, 4, 6, N), torch.randint(0, C, (2, 4, 6))
    expected = nn.functional.cross_entropy(head(x).movedim(-1, 1), y)
    moved = Returning([head], lambda x, logits: logits.movedim(-1, 1))
    assert torch.allclose(grassy.classification_loss(moved, x, y), expected)


def test_what_could_be_maps_of_logits_is_left_to_the_criterion():
    """(B, C, H, W) of a model of its own, criteria that know tokens themselves, and losses token by token."""
    maps, images = nn.Conv2d(3, 8, 1), torch.randn(2, 3, 8, 8)
    labels = torch.randint(0, 8, (2, 8, 8))
    assert torch.equal(
        grassy.classification_loss(maps, images, labels), nn.functional.cross_entropy(maps(images), labels)
    )
    net = nn.Sequential(nn.Linear(4, 8), grassy.GrassmannHead(8, 3, k=2))
    x, y = torch.randn(5, 7, 4), torch.randint(0, 3, (5, 7))
    each = nn.functional.cross_entropy(net(x).transpose(1, 2), y, reduction="none")
    own = lambda logits, target: nn.functional.cross_entropy(logits.transpose(1, 2), target)
    assert torch.allclose(grassy.classification_loss(net, x, y, own), each.mean())
    assert torch.allclose(grassy.classification_loss(net, x, y, nn.CrossEntropyLoss(reduction="none")), each)


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


@pytest.mark.parametrize("name", ["multi", "softtriple", "arcface", "grassmann"])
@pytest.mark.parametrize("batch", [1, 3])
def test_without_reduction_there_is_one_loss_per_label(name, batch):
    model = nn.Sequential(nn.Linear(8, 8), grassy.create_head(name, 8, 5))
    x, target = torch.randn(batch, 8), torch.randint(5, (batch,))
    each = grassy.classification_loss(model, x, target, nn.CrossEntropyLoss(reduction="none"))
    assert each.shape == (batch,)
    torch.testing.assert_close(each.mean(), grassy.classification_loss(model, x, target))


@pytest.mark.parametrize("locations", [True, False])
def test_without_reduction_a_head_on_a_map_gives_one_loss_per_label_too(locations):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Identity() if locations else nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 5, 1)
    )
    grassy.replace_head(model, "multi")
    shape = (2, 4, 6) if locations else (2,)
    x, target = torch.randn(2, 3, 4, 6), torch.randint(5, shape)
    model = model if locations else nn.Sequential(model, nn.Flatten())
    each = grassy.classification_loss(model, x, target, nn.CrossEntropyLoss(reduction="none"))
    assert each.shape == shape
    torch.testing.assert_close(each.mean(), grassy.classification_loss(model, x, target))


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


class Returning(nn.Module):
    """A model that returns what a function makes of its features and logits."""

    def __init__(self, heads, make):
        super().__init__()
        self.heads, self.make = nn.ModuleList(heads), make

    def forward(self, x):
        return self.make(x, *(head(x) for head in self.heads))


def test_an_output_in_which_logits_cannot_be_told_is_refused():
    x, y = torch.randn(B, N), torch.zeros(B, dtype=torch.int64)
    head = grassy.GrassmannHead(N, C)
    for make in (
        lambda x, logits: {"scores": logits},
        lambda x, logits: (logits, x),
        lambda x, logits: [logits, None],
    ):
        with pytest.raises(TypeError, match="cannot find logits in the model's output"):
            grassy.classification_loss(Returning([head], make), x, y)
    expected = nn.functional.cross_entropy(head(x), y)
    for make in (lambda x, logits: {"logits": logits}, lambda x, logits: (logits,)):
        assert torch.equal(grassy.classification_loss(Returning([head], make), x, y), expected)


@pytest.mark.parametrize("name", ["grassmann", "multi"])
def test_two_heads_of_a_distilled_model_in_training_count_the_same(name):
    x, y = torch.randn(B, N), torch.randint(0, C, (B,))
    heads = [grassy.create_head(name, N, C) for _ in range(2)]
    losses = [head.loss(x, y, nn.functional.cross_entropy) for head in heads]
    assert losses[0] != losses[1]
    model = Returning(heads, lambda x, *outputs: outputs)
    assert torch.allclose(grassy.classification_loss(model, x, y), sum(losses) / 2)


@pytest.mark.parametrize(("name", "options"), [("grassmann", {"fuse_loss": True}), ("multi", {}), ("softtriple", {})])
def test_where_a_model_averages_the_logits_of_its_heads_the_loss_is_that_of_the_average(name, options):
    x, y = torch.randn(B, N), torch.randint(0, C, (B,))
    heads = [grassy.create_head(name, N, C, **options) for _ in range(2)]
    averaged = Returning(heads, lambda x, *outputs: sum(outputs) / len(outputs)).eval()
    expected = nn.functional.cross_entropy(sum(head.scores(x) for head in heads) / 2, y)
    assert torch.allclose(grassy.classification_loss(averaged, x, y), expected)
    if name == "grassmann":  # in training, too
        assert torch.allclose(grassy.classification_loss(averaged.train(), x, y), expected)
    changed = Returning(heads[:1], lambda x, logits: logits / 2).eval()  # one head, with something behind it
    assert torch.allclose(
        grassy.classification_loss(changed, x, y), nn.functional.cross_entropy(heads[0].scores(x) / 2, y)
    )


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(reduction="none"), lambda x, y: (x.sum(-1) - y).square()])
def test_a_criterion_that_cannot_be_fused_gets_the_logits(criterion):
    x, y = torch.randn(B, N), torch.randint(0, C, (B,))
    head = grassy.GrassmannHead(N, C, fuse_loss=True)
    found = grassy.classification_loss(nn.Sequential(head), x, y, criterion)
    assert found.shape == (B,)
    assert torch.equal(found, criterion(head(x), y))


def test_a_head_with_a_loss_of_its_own_whose_result_the_model_changes_is_refused():
    x, y = torch.randn(B, N), torch.randint(0, C, (B,))
    changed = Returning([grassy.create_head("multi", N, C)], lambda x, loss: loss + x)
    with pytest.raises(TypeError, match="MultiHead computes its loss itself"):
        grassy.classification_loss(changed, x, y)
    softmax_after = nn.Sequential(nn.Linear(3, N), nn.Linear(N, C), nn.LogSoftmax(-1))
    with pytest.raises(ValueError, match="LogSoftmax follows the classifier '1'"):
        grassy.replace_head(softmax_after, "multi")
    grassy.replace_head(softmax_after, "grassmann")  # which gives logits


def test_a_criterion_may_be_given_by_name_and_a_target_must_be_a_tensor():
    net, (x, y) = model(grassy.GrassmannHead(N, C)), batch()
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert torch.equal(grassy.classification_loss(net, x, y, "label-smoothing"), smooth(net(x), y))
    with pytest.raises(TypeError, match="target must be a tensor"):
        grassy.classification_loss(net, x, y.tolist())


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head_gets_its_target_through_a_hugging_face_model_and_labels_among_the_inputs_do_no_harm(name):
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=16,
        patch_size=8,
        num_labels=C,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = transformers.ViTForImageClassification(config).train()
    head = grassy.replace_head(net, name)
    seen = []
    head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    x, y = torch.randn(B, 3, 16, 16), torch.randint(0, C, (B,))
    loss = grassy.classification_loss(net, {"pixel_values": x, "labels": y}, y)
    assert torch.allclose(loss, head.loss(seen[0], y, nn.functional.cross_entropy), atol=1e-5)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_every_head_gets_its_target_through_a_compiled_model(name):
    torch._dynamo.reset()
    net = model(grassy.create_head(name, N, C))
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x, y = batch()
    expected = net[1].loss(net[0](x), y, nn.functional.cross_entropy)
    assert torch.allclose(grassy.classification_loss(compiled, x, y), expected, atol=1e-5)
