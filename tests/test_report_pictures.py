"""Pictures: what they show is what was measured, and the toy does what it says."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from grassy import paper
from grassy.report import pictures, toy
from grassy.report.packing import unpack_angles
from report_cases import random_run

SUBSPACES = random_run(
    "a", 6, k=3, width=12, names=["$x_1$", "b", "c", "d", "e", "a very long name of a class"]
).analysis
VECTORS = random_run("b", 6, width=12, head="linear").analysis


def shown(figure, panel=0):
    return figure.axes[panel].images[0].get_array()


def test_a_heatmap_shows_the_chosen_angle_in_the_chosen_order():
    degrees = unpack_angles(SUBSPACES["angles"])
    for order in ("index", "name", "cluster", [5, 4, 3, 2, 1, 0]):
        places = order if isinstance(order, list) else SUBSPACES["orders"][order]
        picture = shown(pictures.angle_heatmap(SUBSPACES, angle=2, order=order))
        for row, i in enumerate(places):
            for column, j in enumerate(places):
                assert picture.mask[row, column] if i == j else picture[row, column] == degrees[i, j, 1]
    together = pictures.angle_heatmaps(SUBSPACES)
    assert [len(axes.images) for axes in together.axes[:3]] == [1, 1, 1]
    assert shown(pictures.angle_heatmap(VECTORS)).max() > 90


def test_every_picture_can_be_written_for_print_and_for_the_screen(tmp_path):
    figures = {
        "heatmaps": pictures.angle_heatmaps(SUBSPACES),
        "vectors": pictures.angle_heatmap(VECTORS),
        "k": pictures.against_dimension(pictures.points_of_paper(), {"accuracy": 78.0}, "title"),
        "strategies": pictures.strategy_bars(),
        "time": pictures.iteration_time(),
        "toy": toy.draw_toy(steps=3),
    }
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.pdf")
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_measures_against_k_are_those_of_the_paper_or_of_runs(tmp_path):
    points = pictures.points_of_paper()
    assert sorted(points) == [1, 4, 8, 16, 32]
    assert points[8]["accuracy"] == paper.figures("resnet50d-grassmann")["top1"]
    results = [{"method": "svm", "accuracy": a} for a in (70, 80)] + [{"method": "knn", "accuracy": 10}]
    (tmp_path / "transfer.json").write_text(json.dumps({"results": results}))
    runs = pictures.points_of_runs([SUBSPACES, SUBSPACES, VECTORS], [tmp_path / "transfer.json"])
    assert runs == {3: {"transfer": 75.0, **runs[3]}}
    assert runs[3]["variability"] == pytest.approx(SUBSPACES["scalars"]["variability"])
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.against_dimension({})


def test_bars_have_the_heights_of_their_source(tmp_path):
    heights = [bar.get_height() for bar in pictures.strategy_bars().axes[0].patches]
    assert heights == [79.36, 80.29, 80.53, 79.64, 80.74, 81.0, 80.2, 81.04, 81.29]  # 79.64: the paper's was corrected
    (tmp_path / "times.json").write_text('{"medians": {"linear": {"epoch": 2.0}, "grassmann": {"epoch": 2.1}}}')
    for source in (tmp_path / "times.json", {"epoch": {"linear": 2.0, "grassmann": 2.1}}):
        heights = [bar.get_height() for bar in pictures.iteration_time(source).axes[0].patches]
        assert heights == pytest.approx([100, 105])
    (tmp_path / "times.json").write_text("{}")
    with pytest.raises(ValueError, match="no medians"):
        pictures.iteration_time(tmp_path / "times.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4,), "between 1 and 3"), ((1, "size"), "index, name, cluster"), ((1, [0, 0, 1, 2, 3, 4]), "each of the 6")],
)
def test_a_wrong_angle_or_order_is_one_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        pictures.angle_heatmap(SUBSPACES, *arguments)


def test_pictures_of_runs_are_saved_under_their_names(tmp_path):
    written = pictures.save_pictures({"x/a": SUBSPACES, "b": VECTORS}, tmp_path / "out", ".png")
    assert [path.name for path in written] == ["angles-x-a.png", "angles-b.png"]
    assert all(path.stat().st_size > 1000 for path in written)


def test_riemannian_steps_stay_on_the_circle_and_plain_ones_do_not():
    example = toy.make_toy()
    lengths = [torch.linalg.vector_norm(toy.descend(example, riemannian=r), dim=-1) for r in (True, False)]
    assert (lengths[0] - 1).abs().max() < 1e-12
    assert (lengths[1] - 1).abs().max() > 0.05
    for riemannian in (True, False):
        end = toy.descend(example, riemannian=riemannian)[-1]
        cosine = (example.features @ end).abs() / torch.linalg.vector_norm(end)
        assert cosine.mean() > 0.95 > (example.features @ example.start[0]).abs().mean()


def test_the_animation_moves(tmp_path):
    toy.animate_toy(tmp_path / "toy.gif", steps=4, frames_per_second=2)
    with Image.open(tmp_path / "toy.gif") as film:
        assert film.n_frames >= 5
        first = np.asarray(film.convert("RGB")).copy()
        film.seek(4)
        assert (np.asarray(film.convert("RGB")) != first).any()
