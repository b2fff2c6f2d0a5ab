"""The page in a real browser: what a reader sees and does."""

import dataclasses

import pytest

from grassy.report.page import of_paper, report, write_page

from .report_page_actions import HOSTILE, NAMES, analysis_of, click_on_pair, table

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_page_opens_from_disk_and_shows_metrics_and_curves(page, runs):
    table = page.text("#metrics")
    scalars = analysis_of(runs[0])["scalars"]
    assert f"{scalars['variability']:.2f}" in table
    assert f"{scalars['class_separation']:.4f}" in table
    assert page.run("return document.querySelectorAll('#curves figure').length") == 3
    assert page.run("return document.querySelectorAll('#curves figure:first-child polyline').length") == 3
    assert page.run("return location.protocol") == "file:"


def test_the_papers_figures_stand_beside_the_measures_of_its_recipes(random_run, window, tmp_path):
    figures = of_paper("resnet50d-grassmann")
    assert figures == {"top1": 79.26, "top5": 94.44, "variability": 63.49, "class_separation": 0.43}
    assert of_paper("") == of_paper("none-of-its-rows") == {}
    run = dataclasses.replace(random_run("ours", 4), paper=figures)
    window.open(write_page([run, random_run("another", 4)], tmp_path / "report.html"))
    rows = window.run("return [...document.querySelectorAll('#metrics tbody tr')].map((row) => row.innerText)")
    (row,) = [row for row in rows if row.startswith("Variability")]
    assert row.count("the paper: 63.49") == 1
    assert window.errors() == []


def test_it_opens_on_the_worst_class_and_says_how_good_the_run_is(page, runs):
    analysis = analysis_of(runs[0])
    accuracy = analysis["per_class"]["accuracy"]
    worst = accuracy.index(min(accuracy))
    assert page.text("#class-panel h3") == f"class {NAMES[worst]}"
    answers = page.text("#answers")
    assert f"{analysis['scalars']['top1']:.1f}" in answers
    assert NAMES[worst] in answers
    wrong = sum(count for row in analysis["per_class"]["confusions"] for _, count in row)
    assert f"{wrong}\nof 60 images" in answers
    assert page.run("return document.querySelector('#class-table tr[aria-current] th').textContent") == NAMES[worst]


def test_the_table_of_classes_is_that_of_analysis_json_and_can_be_sorted(page, runs):
    own = analysis_of(runs[0])["per_class"]
    rows = table(page)
    shown = [float(row[2]) for row in rows]
    assert shown == sorted(shown)
    for name, images, accuracy, rank, nearest in rows:
        i = NAMES.index(name)
        assert int(images) == own["images"][i]
        assert float(accuracy) == pytest.approx(own["accuracy"][i], abs=0.051)
        assert float(rank) == pytest.approx(own["effective_rank"][i], abs=0.0051)
        other, degrees = own["nearest"][i][0]
        assert nearest == f"{NAMES[other]}{degrees:.1f}°"
    for down in (False, True):
        page.click("#class-table th.of-rank button")
        ranks = [float(row[3]) for row in table(page)]
        assert ranks == sorted(ranks, reverse=down)
        state = page.run("return document.querySelector('#class-table th.of-rank').getAttribute('aria-sort')")
        assert state == ("descending" if down else "ascending")


def test_search_filters_the_table_and_opens_the_class_with_its_images(page, runs):
    page.type("#search", "OWL")
    assert [row[0] for row in table(page)] == ["snowy owl"]
    page.click("#search-form button")
    own = analysis_of(runs[0])["per_class"]
    text = page.text("#class-panel")
    assert text.startswith("class snowy owl")
    for other, count in own["confusions"][3]:
        assert NAMES[other] in text
        assert str(count) in text
    loaded = (
        "[...document.querySelectorAll('#class-panel img')].filter(i => i.complete && i.naturalWidth === 8).length > 3"
    )
    page.wait(loaded)
    page.run("document.getElementById('search').value = 'unicorn'")
    page.click("#search-form button")
    assert "unicorn" in page.text("#class-count")
    page.click("#class-reset")
    assert len(table(page)) == 5


def test_a_hostile_name_is_shown_as_text(page):
    page.type("#search", "<img")
    page.click("#search-form button")
    assert page.text("#class-panel h3") == f"class {HOSTILE}"
    for tile in ("#class-panel .tile", "#confused .tile", "#outliers .tile"):
        page.run("document.querySelector(arguments[0]).click()", tile)
        page.click("#picture-close")
    assert page.run("return document.querySelectorAll('img[src=x], img[onerror]').length") == 0
    assert page.alert() is None


def test_hostile_names_of_files_runs_settings_and_curves_are_shown_as_text(random_run, window, tmp_path):
    evil = "</script><script>alert(2)</script>"
    runs = [random_run(f"{n} {HOSTILE}", 4, k=2, files=HOSTILE, settings={evil: f"{n} {HOSTILE}"}) for n in (1, 2)]
    runs = [dataclasses.replace(run, curves={"epoch": [0, 1], HOSTILE: [1.0, 2.0]}) for run in runs]
    window.open(write_page(runs, tmp_path / "evil.html", title=evil))
    window.click("#outliers .tile")
    assert HOSTILE in window.text("#picture-body")
    window.click("#picture-close")
    assert evil in window.text("#differences")
    assert HOSTILE in window.text("#curves")
    assert window.run("return document.querySelectorAll('img[src=x], img[onerror]').length") == 0
    assert window.alert() is None
    assert window.errors() == []


def test_the_confusion_matrix_leads_to_the_confused_images(page, runs):
    analysis = analysis_of(runs[0])
    pairs = [(count, i, j) for i, row in enumerate(analysis["per_class"]["confusions"]) for j, count in row]
    count, i, j = max(pairs, key=lambda pair: (pair[0], -pair[1]))
    heading = f"{NAMES[i]} taken for {NAMES[j]}"
    assert page.text("#confused h3") == heading  # it opens on the most frequent one
    assert page.text("#confused .small").startswith(f"{count} of {analysis['per_class']['images'][i]} images")
    count, i, j = min(pairs)
    click_on_pair(page, i, j, analysis["orders"]["cluster"], "confusion-matrix")
    assert page.text("#confused h3") == f"{NAMES[i]} taken for {NAMES[j]}"
    assert page.run("return document.querySelectorAll('#confused .tile').length") == min(count, 12)
    page.click("#confused .tile")
    examples = analysis["examples"]
    found = page.text("#picture-body")
    ours = [n for n in examples["mistakes"] if (examples["label"][n], examples["predicted"][n]) == (i, j)]
    assert examples["name"][ours[0]] in found
    assert f"{100 * examples['confidence'][ours[0]]:.1f}" in found
    page.click("#picture-close")


def test_what_differs_between_recipes_is_listed_and_the_rest_is_not(page):
    rows = page.run("return [...document.querySelectorAll('#differences tbody th')].map((cell) => cell.textContent)")
    assert "head.name" in rows
    assert "head.k" in rows
    assert "img_size" not in rows
    page.click("#settings summary")
    assert "img_size" in page.text("#all-settings")


def test_a_setting_that_a_run_does_not_record_does_not_differ(random_run, window, tmp_path):
    full = {"model": "vit", "head.name": "grassmann", "head.k": "2", "opt": "sgd", "epochs": "9", "lr": "0.1"}
    saved = {"model": "vit", "head.name": "linear", "opt_kwargs.momentum": "0.9"}
    runs = [random_run(f"run {n}", 4, k=2, settings=settings) for n, settings in enumerate((full, saved))]
    window.open(write_page(runs, tmp_path / "report.html"))
    rows = window.run("return [...document.querySelectorAll('#differences tbody tr')].map((row) => row.innerText)")
    assert [row.split() for row in rows] == [
        ["head.name", "grassmann", "linear"],
        ["head.k", "2", "–"],
        ["opt_kwargs.momentum", "–", "0.9"],
    ]
    assert "No recipe is recorded with \u2068run 1\u2069" in window.text("#settings-note")
    window.click("#settings summary")
    assert "lr 0.1 –" in window.text("#all-settings")
    assert window.errors() == []


def test_the_sections_come_in_the_order_of_the_questions(page):
    titles = page.run("return [...document.querySelectorAll('main h2')].map((title) => title.textContent)")
    assert titles == [
        "Overview",
        "Classes",
        "Confusions",
        "Images that stand out",
        "Training",
        "What differs between the recipes",
        "Angles between classes",
        "All measures",
    ]


def test_the_keyboard_moves_through_the_table(page):
    names = [row[0] for row in table(page)]
    page.run("document.querySelector('#class-table tr[aria-current] button').focus()")
    for expected in (names[1], names[2]):
        page.run(
            "document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowDown', bubbles: true }))"
        )
        assert page.text("#class-panel h3") == f"class {expected}"
        assert page.run("return document.activeElement.textContent") == expected
    assert page.run("return document.querySelectorAll('#class-table tbody [tabindex=\"0\"]').length") == 1


def test_weights_alone_give_a_page_that_says_what_is_missing(make_run, window, tmp_path):
    report([make_run(tmp_path / "run", {"name": "grassmann", "k": 2}, names=NAMES)], tmp_path / "report.html")
    window.open(tmp_path / "report.html")
    assert "--data-dir" in window.text("#answers")
    hidden = "return ['confusions', 'notable'].map((id) => document.getElementById(id).hidden)"
    assert window.run(hidden) == [True, True]
    assert [len(row) for row in table(window)] == [2] * 5  # name and nearest class
    assert window.errors() == []


def test_numbers_along_a_curve_tell_its_values_apart(odd_page):
    ticks = odd_page.run(
        "return [...document.querySelectorAll('#curves svg')[0].querySelectorAll('text[text-anchor=end]')]"
        ".map((text) => text.textContent)"
    )
    assert len(set(ticks)) == len(ticks) >= 3
    assert "99.981" in odd_page.text("#curves .readout")


def find(window, text):
    window.run("document.getElementById('search').value = arguments[0]", text)
    window.click("#search-form button")


def test_the_same_search_again_finds_the_next_class(odd_page):
    found = []
    for _ in range(3):
        find(odd_page, "crane")
        found.append(odd_page.text("#class-panel h3"))
    assert found == ["class crane (0)", "class crane (2)", "class crane (0)"]  # two classes of one name
    assert odd_page.text("#class-count").startswith("1 of 2")
    find(odd_page, "two of")
    assert odd_page.text("#class-panel h3") == "class number two of a long row"
    assert odd_page.text("#class-count") == "1 of 6 classes"
