"""Allocation of bits, against references in NumPy that try everything."""

from __future__ import annotations

from typing import Any

import kvrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvrs import _kvrs

from tests.reference import alloc

RUN = 16
WEIGHTS = st.lists(st.floats(1e-4, 1e3), min_size=1, max_size=12)


def test_the_distortion_of_gaussian_channels_is_the_one_that_the_reference_states() -> None:
    assert tuple(_kvrs.gaussian_distortion()) == alloc.GAUSSIAN


@given(WEIGHTS, st.integers(0, 110), st.lists(st.integers(0, 2), min_size=12, max_size=12))
def test_marginal_gain_gives_the_same_bits_as_the_reference(
    weights: list[float], runs: int, floors: list[int]
) -> None:
    floors = floors[: len(weights)]
    budget = RUN * (sum(floors) + runs)
    items = (weights, [RUN] * len(weights), floors, budget)
    assert _kvrs.allocate_greedy(*items) == alloc.greedy(*items)


@given(WEIGHTS, st.integers(0, 110))
def test_water_filling_reaches_the_distortion_of_the_reference(weights: list[float], runs: int) -> None:
    items = (weights, [RUN] * len(weights), [0] * len(weights), RUN * runs)
    ours, theirs = _kvrs.allocate_waterfill(*items), alloc.waterfill(*items)
    assert alloc.bits_of(items[1], ours) == alloc.bits_of(items[1], theirs) <= items[3]
    assert np.isclose(alloc.distortion(weights, ours), alloc.distortion(weights, theirs), rtol=1e-9)


@given(WEIGHTS, st.integers(0, 110))
def test_marginal_gain_is_never_worse_than_water_filling(weights: list[float], runs: int) -> None:
    items = (weights, [RUN] * len(weights), [0] * len(weights), RUN * runs)
    greedy, water = (
        alloc.distortion(weights, f(*items)) for f in (_kvrs.allocate_greedy, _kvrs.allocate_waterfill)
    )
    assert greedy <= water * (1 + 1e-12)


@given(
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 4), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(0, 40),
    st.lists(st.floats(0, 1), min_size=9, max_size=9),
)
def test_dynamic_programming_equals_trying_everything(items: Any, spare: int, curve: list[float]) -> None:
    weights, channels, floors = (list(x) for x in zip(*items, strict=True))
    curve = sorted(curve, reverse=True)
    budget = alloc.bits_of(channels, floors) + spare
    widths = _kvrs.allocate_exact(weights, channels, floors, budget, curve)
    assert alloc.bits_of(channels, widths) <= budget
    best = alloc.brute_force(weights, channels, floors, budget, curve)
    assert np.isclose(alloc.distortion(weights, widths, curve), best, rtol=1e-12, atol=1e-300)


def test_a_model_fitted_to_a_quantiser_is_the_least_squares_line_and_allocates() -> None:
    bits, measured = [1, 2, 3, 4, 5], [0.40, 0.13, 0.036, 0.0105, 0.0029]
    alpha, beta, curve = _kvrs.fit_rate(bits, measured)
    assert np.allclose((alpha, beta), alloc.fit_rate(bits, measured))
    assert np.allclose(curve[1:], [min(1.0, alpha * beta**-b) for b in range(1, 9)])
    widths = _kvrs.allocate_greedy([8.0, 1.0, 0.1], [16] * 3, [0] * 3, 96, curve)
    assert widths == alloc.greedy([8.0, 1.0, 0.1], [16] * 3, [0] * 3, 96, curve)


def test_arrays_of_numpy_are_taken_as_they_are() -> None:
    weights = np.array([4.0, 1.0])
    runs = np.full(2, RUN)
    assert _kvrs.allocate_greedy(weights, runs, np.zeros(2, int), 4 * RUN) == [3, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], [], 16), "weights is empty"),
        (([-1.0], [16], [0], 16), r"weights\[0\] is -1; allowed: a finite number from 0 on"),
        (([float("inf")], [16], [0], 16), r"weights\[0\] is inf"),
        (([1.0], [16], [2], 16), "budget is 16 bits a token; allowed: 32 bits a token or more"),
        (([1.0], [16], [9], 256), r"floors\[0\] is 9; allowed: 0 to 8"),
        (([1.0], [0], [0], 16), r"channels\[0\] is 0; allowed: 1 or more"),
        (([1.0], [16], [0], -1), "budget is -1; allowed: an int from 0 on"),
    ],
)
@pytest.mark.parametrize("name", ["allocate_greedy", "allocate_waterfill", "allocate_exact"])
def test_what_cannot_be_allocated_names_argument_value_and_what_is_allowed(
    name: str, arguments: Any, message: str
) -> None:
    with pytest.raises(kvrs.ArgumentError, match=message):
        getattr(_kvrs, name)(*arguments)


def test_slices_of_different_lengths_and_wrong_types_are_refused() -> None:
    with pytest.raises(kvrs.ShapeError, match=r"channels has shape \[2\]"):
        _kvrs.allocate_greedy([1.0], [16, 16], [0], 16)
    with pytest.raises(TypeError, match="weights is 'abc'"):
        _kvrs.allocate_greedy("abc", [16], [0], 16)  # type: ignore[arg-type]
    with pytest.raises(kvrs.ArgumentError, match=r"curve\[1\] is 2; allowed: at most curve\[0\]"):
        _kvrs.allocate_greedy([1.0], [16], [0], 16, [1.0, 2.0, *[0.0] * 7])
