"""The memory plan equals what is laid out; regions never overlap. No GPU is needed."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds4.cuda.memory import ALIGNMENT, Arena, MemoryLayout, Regions
from ds4.errors import DeviceError, OutOfDeviceMemory

SHAPES = st.lists(
    st.tuples(
        st.sampled_from(["weights", "workspace", "sessions"]),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.sampled_from([np.uint8, np.float32, np.int64]),
    ),
    max_size=20,
)


class HostDevice:
    """A device whose memory is NumPy's."""

    ordinal = 0

    def __init__(self, free):
        self.free = free

    def memory(self):
        return self.free, self.free

    def allocate(self, n_bytes):
        return np.zeros(n_bytes, np.uint8)


@given(SHAPES)
def test_reservations_are_aligned_disjoint_and_add_up_to_the_plan(items):
    layout = MemoryLayout()
    places = [layout.reserve(kind, f"a{i}", s, d) for i, (kind, s, d) in enumerate(items)]
    end = 0
    for place in places:
        assert place.offset % ALIGNMENT == 0
        assert place.offset >= end
        end = place.offset + place.n_bytes
    assert layout.total_bytes >= end
    assert sum(layout.by_class.values()) == layout.total_bytes
    again = MemoryLayout()
    assert [again.reserve(k, f"a{i}", s, d) for i, (k, s, d) in enumerate(items)] == places


@given(SHAPES)
def test_views_share_the_one_allocation_without_touching_each_other(items):
    layout = MemoryLayout()
    places = [layout.reserve(kind, f"a{i}", s, d) for i, (kind, s, d) in enumerate(items)]
    arena = Arena(HostDevice(1 << 30), layout)
    views = [arena.view(place) for place in places]
    for i, view in enumerate(views):
        view[...] = i + 1
    for i, (view, place) in enumerate(zip(views, places, strict=True)):
        assert view.shape == place.shape
        assert (view == i + 1).all()


def test_a_plan_that_does_not_fit_is_refused_with_its_arithmetic():
    layout = MemoryLayout()
    layout.reserve("weights", "w", 3 << 30, np.uint8)
    layout.reserve("sessions", "s", 1 << 30, np.uint8)
    with pytest.raises(OutOfDeviceMemory) as caught:
        Arena(HostDevice(2 << 30), layout)
    for part in ("4.00 GiB", "weights 3.00", "sessions 1.00", "2.00 GiB"):
        assert part in str(caught.value)


def test_a_place_beyond_the_arena_is_refused():
    small, large = MemoryLayout(), MemoryLayout()
    small.reserve("weights", "w", 8, np.uint8)
    large.reserve("weights", "w", 8, np.uint8)
    place = large.reserve("weights", "v", 8, np.uint8)
    with pytest.raises(DeviceError, match="v ends at byte"):
        Arena(HostDevice(1 << 20), small).view(place)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60))
def test_regions_taken_and_returned_never_overlap_and_merge_again(actions):
    capacity = 100
    regions, taken = Regions(capacity), []
    for gives_back, number in actions:
        if gives_back and taken:
            regions.give_back(*taken.pop(number % len(taken)))
        else:
            offset = regions.take(number)
            if offset is not None:
                taken.append((offset, number))
        spans = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        assert all(a >= 0 and a + n <= capacity for a, n in spans)
        assert regions.free_elements == capacity - sum(n for _, n in taken)
    for region in taken:
        regions.give_back(*region)
    assert regions.take(capacity) == 0
