"""Pictures: what they show is what was measured."""

import itertools
import json

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from grassy import paper
from grassy.report import pictures
from grassy.report.packing import pack_angles, unpack_angles


@pytest.fixture
def subspaces(random_run):
    names = ["$x_1$", "b", "c", "d", "e", "a very long name of a class"]
    return random_run("a", 6, k=3, width=12, names=names).analysis


@pytest.fixture
def vectors(random_run):
    return random_run("b", 6, width=12, head="linear").analysis


def shown(figure, panel=0):
    return figure.axes[panel].images[0].get_array()


def test_a_heatmap_shows_the_chosen_angle_in_the_chosen_order(subspaces, vectors):
    degrees = unpack_angles(subspaces["angles"])
    for order in ("index", "name", "cluster", [5, 4, 3, 2, 1, 0]):
        places = order if isinstance(order, list) else subspaces["orders"][order]
        picture = shown(pictures.angle_heatmap(subspaces, angle=2, order=order))
        for row, i in enumerate(places):
            for column, j in enumerate(places):
                assert picture.mask[row, column] if i == j else picture[row, column] == degrees[i, j, 1]
    together = pictures.angle_heatmaps(subspaces)
    assert [len(axes.images) for axes in together.axes[:3]] == [1, 1, 1]
    assert shown(pictures.angle_heatmap(vectors)).max() > 90


def boxes(figure, texts):
    """Where texts stand once the figure is drawn, in pixels."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [text.get_window_extent(canvas.get_renderer()) for text in texts if text.get_text()]


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "angles", "long"), [(40, [1], True), (20, None, True), (28, None, False)])
def test_the_names_of_classes_differ_and_do_not_overlap(random_run, classes, angles, long):
    names = [f"{i} is the number of a class" for i in range(classes // 2)]
    names += [f"class of the number {i}" for i in range(classes - len(names))]
    names = names if long else None
    run = random_run("a", classes, k=5, width=12, names=names).analysis
    axes = pictures.angle_heatmaps(run, angles).axes[0]
    labels = [text.get_text() for text in axes.get_yticklabels()]
    assert len(set(labels)) == len(labels) == classes
    assert all(len(label) <= 16 for label in labels)
    for labels, side in ((axes.get_yticklabels(), "y"), (axes.get_xticklabels(), "x")):
        spans = sorted((getattr(b, f"{side}0"), getattr(b, f"{side}1")) for b in boxes(axes.figure, labels))
        assert all(end <= start + 1 for (_, end), (start, _) in itertools.pairwise(spans))


def test_too_many_names_to_be_legible_are_left_out(random_run):
    axes = pictures.angle_heatmaps(random_run("a", 70, k=2, width=12).analysis, [1]).axes[0]
    assert not axes.get_yticklabels()
    assert axes.get_xlabel() == "70 classes"


def test_one_class_alone_has_a_picture_without_a_scale(random_run):
    for classes, bars in ((1, 0), (2, 1)):
        axes = pictures.angle_heatmap(random_run("a", classes, k=2, width=12).analysis).axes[0]
        assert len(axes.child_axes) == bars  # for one class it would go from -0.1 to 0.1 degrees


def test_every_class_is_seen_where_cells_are_smaller_than_pixels(random_run):
    """In a picture of 400 classes on some 130 pixels a dark class among 399 light ones leaves a trace."""
    degrees = np.full((400, 400, 1), 80.0, np.float32)
    degrees[201] = degrees[:, 201] = 10.0
    run = {**random_run("a", 400, k=1, width=4).analysis, "angles": pack_angles(degrees, 90.0)}
    for place in (201, 202, 203, 204):
        order = list(range(400))
        order.remove(201)
        order.insert(place, 201)
        figure = pictures.angle_heatmap(run, order=order)
        canvas = FigureCanvasAgg(figure)
        figure.set_dpi(30)
        canvas.draw()
        box = figure.axes[0].get_window_extent()
        pixels = np.asarray(canvas.buffer_rgba())[::-1, :, :3].astype(int)
        column = pixels[int(box.y0 + 0.25 * box.height), int(box.x0) + 2 : int(box.x1) - 2]
        assert np.abs(column - np.median(column, axis=0)).max() > 20


@pytest.mark.slow
def test_every_picture_can_be_written_for_print_and_for_the_screen(subspaces, vectors, tmp_path):
    figures = {
        "heatmaps": pictures.angle_heatmaps(subspaces),
        "vectors": pictures.angle_heatmap(vectors),
        "k": pictures.against_dimension(pictures.points_of_paper(), {"accuracy": 78.0}, "title"),
        "strategies": pictures.strategy_bars(),
        "time": pictures.iteration_time(),
    }
    for name, figure in figures.items():
        figure.savefig(tmp_path / f"{name}.pdf")
        figure.savefig(tmp_path / f"{name}.png", dpi=40)
        assert (tmp_path / f"{name}.pdf").read_bytes().startswith(b"%PDF")


def test_measures_against_k_are_those_of_the_paper_or_of_runs(subspaces, vectors, tmp_path):
    points = pictures.points_of_paper()
    assert sorted(points) == [1, 4, 8, 16, 32]
    assert points[8]["accuracy"] == paper.figures("resnet50d-grassmann")["top1"]
    results = [{"method": "svm", "accuracy": a} for a in (70, 80)] + [{"method": "knn", "accuracy": 10}]
    (tmp_path / "transfer.json").write_text(json.dumps({"results": results}))
    runs = pictures.points_of_runs([subspaces, subspaces, vectors], [tmp_path / "transfer.json"])
    assert runs == {3: {"transfer": 75.0, **runs[3]}}
    assert runs[3]["variability"] == pytest.approx(subspaces["scalars"]["variability"])
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.against_dimension({})


def test_bars_have_the_heights_of_their_source(tmp_path):
    heights = [bar.get_height() for bar in pictures.strategy_bars().axes[0].patches]
    assert heights == [79.36, 80.29, 80.53, 79.64, 80.74, 81.0, 80.2, 81.04, 81.29]  # 79.64: the paper's was corrected
    (tmp_path / "times.json").write_text('{"medians": {"linear": {"epoch": 2.0}, "grassmann": {"epoch": 2.1}}}')
    for source in (tmp_path / "times.json", {"epoch": {"linear": 2.0, "grassmann": 2.1}}):
        heights = [bar.get_height() for bar in pictures.iteration_time(source).axes[0].patches]
        assert heights == pytest.approx([100, 105])
    own = pictures.strategy_bars({"ours": {"linear": 91.0, "grassmann": 92.5}, "longer": {"grassmann": 93.0}}).axes[0]
    assert [bar.get_height() for bar in own.patches] == [91.0, 92.5, 93.0]
    assert own.get_ylim()[0] < 91.0
    with pytest.raises(ValueError, match="nothing to draw"):
        pictures.strategy_bars({"ours": {}})
    (tmp_path / "times.json").write_text("{}")
    with pytest.raises(ValueError, match="no medians"):
        pictures.iteration_time(tmp_path / "times.json")


def test_long_names_of_what_was_timed_do_not_run_together():
    times = {f"ResNet-50 in bfloat16, batch {2**i}": {"linear": 1.0, "grassmann": 1.1} for i in range(4, 8)}
    axes = pictures.iteration_time(times).axes[0]
    spans = [(box.x0, box.x1) for box in boxes(axes.figure, axes.get_xticklabels())]
    assert all(end < start for (_, end), (start, _) in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((4,), "between 1 and 3"), ((1, "size"), "index, name, cluster"), ((1, [0, 0, 1, 2, 3, 4]), "each of the 6")],
)
def test_a_wrong_angle_or_order_is_one_sentence(subspaces, arguments, message):
    with pytest.raises(ValueError, match=message):
        pictures.angle_heatmap(subspaces, *arguments)


def test_pictures_of_runs_are_saved_under_their_names(subspaces, vectors, tmp_path):
    written = pictures.save_pictures({"x/a": subspaces, "b": vectors}, tmp_path / "out", ".png")
    assert [path.name for path in written] == ["angles-x-a.png", "angles-b.png"]
    assert all(path.stat().st_size > 1000 for path in written)
    written = pictures.save_pictures({"x/a": subspaces, "x-a": vectors}, tmp_path / "same", ".png")
    assert [path.name for path in written] == ["angles-x-a.png", "angles-x-a-2.png"]
