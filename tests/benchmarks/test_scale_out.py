"""The benchmark of one process of many, at a small size."""

import json

import pytest
from benchmarks.scale_out import Case

from benchmarks import scale_out


@pytest.mark.parametrize("case", [Case(8, 100, 4, 2, 16), Case(8, 100, 4, 2, 16, sample=0.2)], ids=["all", "sampled"])
def test_one_process_of_eight_sends_six_times_as_many_bytes_as_the_formula_says(case):
    found = scale_out.measure(case, "cpu", 1)
    assert len(found["collectives"]) == 6
    assert found["bytes"] == pytest.approx(found["bytes by formula"])


def test_the_tables_of_the_docs_are_those_of_the_model_and_of_the_results():
    page = (scale_out.Path(scale_out.__file__).parents[1] / "docs" / "scale-out.md").read_text(encoding="utf-8")
    assert scale_out.weak_scaling() in page
    assert scale_out.what_fits() in page
    assert scale_out.measured(json.loads(scale_out.RESULTS.read_text(encoding="utf-8"))) in page
