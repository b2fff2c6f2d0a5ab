"""Lists in buffers: they hold what lists hold, and a part of one is pickled alone."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grassy.data.compact_lists import Place, Places, Strings

names = st.lists(st.text(st.characters()))  # with halves of characters
paths, sizes = st.sampled_from(["a", "b/é", "c\udce9"]), st.integers(0, 9)
places = st.lists(st.builds(Place, paths, sizes, st.none() | sizes))


@pytest.mark.parametrize(("kind", "values"), [(Strings, names), (Places, places)], ids=["strings", "places"])
def test_they_hold_what_a_list_holds_in_parts_and_pickles_too(kind, values):
    @given(values, st.data())
    def check(items, data):
        indices = data.draw(st.lists(st.integers(0, max(0, len(items) - 1)), max_size=5)) if items else []
        held = kind(items)
        for found, expected in (
            (held, items),
            (pickle.loads(pickle.dumps(held)), items),
            (held.some(indices), [items[i] for i in indices]),
            (pickle.loads(pickle.dumps(held.some(indices))), [items[i] for i in indices]),
        ):
            assert len(found) == len(expected)
            assert list(found) == expected
            assert [found[i] for i in range(len(found))] == expected

    check()


def test_a_part_is_pickled_without_the_rest():
    """Worker processes that are not forked get a copy of their images."""
    long = [f"{number:0100}" for number in range(1000)]
    for part in (Strings(long).some([7]), Places(map(Place, long)).some([7])):
        assert len(pickle.dumps(part)) < 2000
