"""Training curves, whoever wrote them."""

import pytest

from grassy.report.curves import MOST_POINTS, curves_of, read_curves, read_events


def test_curves_skip_what_is_empty_or_not_a_number(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch,train_loss,eval_loss\n0,1.5,\n1,nan,\n")
    assert read_curves(tmp_path / "summary.csv") == {"epoch": [0, 1], "train_loss": [1.5, None]}
    assert read_curves(tmp_path / "missing.csv") == {}
    (tmp_path / "summary.csv").write_text("epoch,train_loss\n0,1.5,7,8\n1\n")  # lines too long and too short
    assert curves_of(tmp_path) == {"epoch": [0, 1], "train_loss": [1.5, None]}


def test_a_loop_of_ones_own_may_name_its_columns_as_it_likes(tmp_path):
    (tmp_path / "summary.csv").write_text("epoch, my loss,note\n1,2.0,good\n2,1.0,better\n")
    assert curves_of(tmp_path) == {"epoch": [1, 2], "my loss": [2, 1]}
    (tmp_path / "summary.csv").write_text("my loss\n2.0\n1.0\n")
    assert curves_of(tmp_path) == {"step": [0, 1], "my loss": [2, 1]}


def test_lightning_writes_several_rows_per_epoch_and_steps(tmp_path):
    (tmp_path / "metrics.csv").write_text("epoch,step,train_loss,val_acc\n0,9,2.0,\n0,19,1.5,\n0,19,,0.4\n1,29,1.0,\n")
    expected = {"step": [9, 19, 29], "train_loss": [2, 1.5, 1], "val_acc": [None, 0.4, None]}
    assert curves_of(tmp_path) == expected


def test_long_curves_are_thinned_and_keep_their_end_and_their_sparse_columns(tmp_path):
    steps = range(5 * MOST_POINTS)
    lines = [f"{step},{step / 2},{step if step % 1000 == 999 else ''}" for step in steps]
    (tmp_path / "summary.csv").write_text("\n".join(["step,loss,accuracy", *lines]))
    curves = curves_of(tmp_path)
    loss = [value for value in curves["loss"] if value is not None]
    assert MOST_POINTS / 2 <= len(loss) <= MOST_POINTS
    assert loss[-1] == steps[-1] / 2
    assert [value for value in curves["accuracy"] if value is not None] == [999, 1999, 2999, 3999, 4999]
    assert curves["step"] == sorted(curves["step"])


def test_without_a_table_tensorboard_is_read(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        for step in (0, 10, 20):
            writer.add_scalar("loss/train", 1 / (1 + step), step)
        writer.add_scalar("accuracy", 0.5, 20)
    curves = curves_of(tmp_path)
    assert curves["step"] == [0, 10, 20]
    assert curves["loss/train"] == pytest.approx([1, 1 / 11, 1 / 21], rel=1e-5)
    assert curves["accuracy"] == [None, None, 0.5]
    (tmp_path / "summary.csv").write_text("epoch,train_loss\n0,1.5\n")  # a table is preferred
    assert curves_of(tmp_path) == {"epoch": [0], "train_loss": [1.5]}


def test_of_damaged_events_what_can_be_read_is_shown(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 5)
    (file,) = tmp_path.glob("events*")
    file.write_bytes(file.read_bytes() + b"\x07" * 200)
    assert read_events(tmp_path) == {"step": [5], "loss": [1]}
    file.write_bytes(b"\x07" * 200)
    assert read_events(tmp_path) == {}
