"""The NumPy reference states what the documents say and reaches the published errors."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import safetensors.numpy

from tests.reference import (
    attention,
    codebook,
    codebook_design,
    golden,
    layout,
    minmax,
    phasor,
    rng,
    scale,
    transform,
    turboquant,
    window,
)
from tests.reference.offset import KeyOffset, subtract_key_offset

SIDES = (rng.KEY, rng.VALUE)
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16)
PLAN_SEED = 11

# MSE of unit vectors under the exact book of the sphere, d -> bits -> error.
MSE = {
    64: {1: 0.3584, 2: 0.1145, 3: 0.0334, 4: 0.00913, 5: 0.0024},
    128: {1: 0.3609, 2: 0.1160, 3: 0.0340, 4: 0.00931, 5: 0.00245},
    256: {1: 0.3621, 2: 0.1167, 3: 0.0343, 4: 0.00941, 5: 0.00248},
}
# RMSE * sqrt(d) of <q, k>, d = 128, unit vectors of cosine 1/2. The raw scale feels the size of the book:
# these are the values of the gaussian one (.737, .284, .125 with the exact book of the sphere).
RMSE = {
    2: {"raw": 0.7325, "norm": 0.450, "unbiased": 0.313},
    3: {"raw": 0.2788, "norm": 0.186, "unbiased": 0.161},
    4: {"raw": 0.1244, "norm": 0.087, "unbiased": 0.083},
}


def unit_vectors(d: int, count: int = 4000, seed: int = 5) -> np.ndarray:
    """Return `count` random unit vectors, f32, from numbers no rotation is made of."""
    x = np.random.default_rng(seed).standard_normal((count, d))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def round_trip(x, bits, rule, side=rng.KEY, rotation="hadamard", seed=PLAN_SEED):
    codes, scales = turboquant.encode(x, bits, side, seed, rule, rotation)
    return turboquant.decode(codes, scales, bits, x.shape[1], side, seed, rotation)


# --- random numbers -------------------------------------------------------------------------------


def test_the_words_are_those_of_splitmix64():
    # First outputs of the published generator at seed 1234567.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert rng.words(1234567, 3).tolist() == expected
    assert rng.words(1234567, 1, start=2).tolist() == expected[2:]


def test_streams_differ_by_purpose_side_and_dimension():
    keys = {
        rng.stream_key(seed, p, s, d)
        for seed in (0, 1)
        for p in (rng.ROTATION_SIGNS, rng.DENSE_ROTATION)
        for s in SIDES
        for d in (64, 128)
    }
    assert len(keys) == 16


def test_sign_bits_are_read_least_significant_first():
    word = int(rng.words(9, 2)[1])
    signs = rng.signs(9, 32, 4)
    assert signs[2, 5] == (-1 if word >> 5 & 1 else 1)
    assert signs[3, 31] == (-1 if word >> 63 else 1)


def test_gaussians_have_unit_variance():
    x = rng.gaussians(3, 100_000)
    assert abs(x.mean()) < 0.02
    assert x.var() == pytest.approx(1, abs=0.02)
    assert np.array_equal(x * 65536, np.rint(x * 65536))


# --- rotations ------------------------------------------------------------------------------------


@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
def test_three_hadamard_rounds_are_orthonormal(d):
    u = transform.unit_variance(np.eye(d, dtype=np.float32), np.ones(d, np.float32), 0, 3, "hadamard")
    gram = u.astype(np.float64) @ u.T / d
    assert np.abs(gram - np.eye(d)).max() < 1e-6
    back = transform.inverse(u.astype(np.float64) / np.sqrt(d), 0, 3, "hadamard")
    assert np.abs(back - np.eye(d)).max() < 1e-6


@pytest.mark.parametrize("d", [3, 80, 96, 128])
def test_the_dense_rotation_is_orthonormal_and_spreads_every_axis(d):
    a = rng.dense_rotation(1, rng.KEY, d).astype(np.float64)
    assert np.abs(a @ a.T - np.eye(d)).max() < 2e-7
    if d >= 80:
        assert np.abs(a).max() < 6 / np.sqrt(d)
        assert (a**4).sum() / d == pytest.approx(3 / (d + 2), rel=0.1)


def test_reflections_follow_the_written_operation_order():
    d, key = 5, rng.stream_key(2, rng.DENSE_ROTATION, rng.VALUE, 5)
    draws = [float(g) for g in rng.gaussians(key, 14)]
    a = [[float(r == c) for c in range(d)] for r in range(d)]
    for r in range(d - 2, -1, -1):
        at = sum(d - j for j in range(r))
        w = draws[at : at + d - r]
        q = 0.0
        for x in w:
            q += x * x
        w[0] = w[0] + float(np.sqrt(q)) if w[0] >= 0 else w[0] - float(np.sqrt(q))
        q = 0.0
        for x in w:
            q += x * x
        beta = 2.0 / q
        for c in range(r, d):
            t = 0.0
            for i, x in enumerate(w):
                t += x * a[r + i][c]
            t = beta * t
            for i, x in enumerate(w):
                a[r + i][c] -= x * t
    assert np.array_equal(np.array(a).astype(np.float32), rng.dense_rotation(2, rng.VALUE, d))


def test_dimensions_that_are_no_power_of_two_take_the_dense_rotation():
    assert transform.uses_hadamard(64, "hadamard")
    assert not transform.uses_hadamard(80, "hadamard")
    assert not transform.uses_hadamard(8, "hadamard")
    assert not transform.uses_hadamard(64, "dense")


# --- phasors --------------------------------------------------------------------------------------


def test_phasor_errors_stay_below_2e_13_up_to_position_2_to_20():
    mpmath.mp.prec = 160
    inv_freq = (1e6 ** (-np.arange(0, 128, 2) / 128)).astype(np.float32)[[0, 1, 2, 5, 11, 23, 40, 63]]
    steps = np.array([phasor.phase_step(t) for t in inv_freq], np.uint64)
    positions = np.concatenate([[0, 1, (1 << 20) - 1], np.random.default_rng(1).integers(0, 1 << 20, 60)])
    cosine, sine = phasor.phasor64(positions, steps)
    for i, p in enumerate(positions):
        for j, theta in enumerate(inv_freq):
            angle = mpmath.mpf(float(theta)) * int(p)
            assert abs(float(mpmath.cos(angle) - mpmath.mpf(cosine[i, j]))) < 2e-13
            assert abs(float(mpmath.sin(angle) - mpmath.mpf(sine[i, j]))) < 2e-13


def test_the_phase_step_is_the_rounded_share_of_a_turn():
    mpmath.mp.prec = 200
    assert int(mpmath.nint(mpmath.mpf(2) ** 128 / (2 * mpmath.pi))) == phasor.INVERSE_TWO_PI
    for theta in np.float32([1.0, 0.1, 1e-6, 3.14159]):
        exact = mpmath.nint(mpmath.mpf(float(theta)) / (2 * mpmath.pi) * 2**64)
        assert phasor.phase_step(theta) == int(exact)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary", [16, 8])
def test_rope_turns_its_pairs_and_leaves_the_rest(pairing, rotary):
    inv_freq = (1e4 ** (-np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    rope = phasor.Rope(16, inv_freq, pairing)
    x = np.random.default_rng(0).standard_normal(16).astype(np.float32)
    out = phasor.rotate(rope, x, [5])[0].astype(np.float64)
    expected = x.astype(np.float64)
    for j, theta in enumerate(inv_freq.astype(np.float64)):
        a, b = (j, j + rotary // 2) if pairing == "half" else (2 * j, 2 * j + 1)
        turned = (x[a] + 1j * x[b]) * np.exp(5j * theta)
        expected[a], expected[b] = turned.real, turned.imag
    assert np.abs(out - expected).max() < 1e-6
    assert np.array_equal(out[rotary:], x[rotary:])


def test_the_attention_factor_reaches_only_turning_channels():
    rope = phasor.Rope(8, np.float32([1, 0.1]), attention_factor=1.5)
    assert rope.constant(np.ones(8)).tolist() == [1.5] * 4 + [1.0] * 4


def test_pairs_that_are_not_kept_are_not_subtracted():
    rope = phasor.Rope(8, np.float32([1, 0.5, 0.25, 0.125]))
    keep = np.array([True, False, True, True])
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    y = subtract_key_offset(x, KeyOffset(rope, np.full(8, 2, np.float32), keep), [7, 8, 9])
    assert np.array_equal(y[:, [1, 5]], x[:, [1, 5]])
    assert (y[:, [0, 2, 3, 4, 6, 7]] != x[:, [0, 2, 3, 4, 6, 7]]).all()


# --- codebooks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "loss"), [(1, 1e-9), (2, 1e-6), (3, 4.5e-4), (4, 2.25e-3), (5, 6.8e-3), (6, 2.05e-2)]
)
def test_the_typed_levels_are_what_the_generator_derives(bits, loss):
    typed = np.array(codebook.LEVELS[bits]) * codebook.STEPS[bits]
    best = codebook_design.distortion(codebook_design.lloyd_max(bits))
    derived, step = codebook_design.int_levels(bits)
    typed_loss = codebook_design.distortion(typed) / best - 1
    assert typed_loss < loss
    assert typed_loss <= codebook_design.distortion(np.array(derived) * step) / best - 1 + 1.1e-3
    if bits != 5:  # at 5 bits the descent ends .1 % lower, with levels up to 97
        assert derived == codebook.LEVELS[bits]
        assert step == pytest.approx(codebook.STEPS[bits], rel=5e-4)
    assert derived[-1] <= codebook_design.MAX_LEVEL[bits]


@pytest.mark.parametrize(("bits", "error"), [(7, 3.04e-4), (8, 8.8e-5)])
def test_the_uniform_steps_are_the_best_to_their_digits(bits, error):
    half = (np.arange(2 ** (bits - 1)) + 0.5) * codebook.STEPS[bits]
    assert codebook_design.distortion(half) == pytest.approx(error, rel=5e-3)
    assert codebook_design.best_uniform_step(bits) == pytest.approx(codebook.STEPS[bits], rel=5e-3)


@pytest.mark.parametrize("bits", range(1, 7))
def test_codes_are_the_nearest_levels_and_thresholds_go_up(bits):
    book = codebook.codebook(bits)
    assert book.thresholds[2 ** (bits - 1) - 1] == 0
    assert (np.diff(book.thresholds) > 0).all()
    assert np.array_equal(book.encode(book.values), np.arange(2**bits))
    assert np.array_equal(book.encode(book.thresholds), np.arange(1, 2**bits))
    below = np.nextafter(book.thresholds, np.float32(-np.inf))
    assert np.array_equal(book.encode(below), np.arange(2**bits - 1))


@pytest.mark.parametrize("bits", [7, 8])
def test_uniform_codes_clamp_and_round_ties_to_even(bits):
    book = codebook.codebook(bits)
    assert np.array_equal(book.encode(book.values), np.arange(2**bits))
    u = np.float32([-1e9, 1e9, 0.0])
    assert book.encode(u).tolist() == [0, 2**bits - 1, 2 ** (bits - 1)]


@pytest.mark.parametrize("d", MSE)
def test_lloyd_max_on_the_sphere_gives_the_published_errors(d):
    for bits, expected in MSE[d].items():
        error = codebook_design.distortion(codebook_design.lloyd_max(bits, d), d)
        last_digit = 1e-4 if bits < 4 or (d, bits) == (64, 5) else 1e-5
        assert error == pytest.approx(expected, abs=0.6 * last_digit), bits


# --- sums, scales, quality ------------------------------------------------------------------------


def test_red16_adds_in_the_written_order():
    v = np.random.default_rng(3).standard_normal(88).astype(np.float32) * np.float32(1e3)
    p = [np.float32(0)] * 16
    for c, x in enumerate(v):
        p[c % 16] = p[c % 16] + x
    for half in (8, 4, 2, 1):
        p = [p[i] + p[i + half] for i in range(half)]
    assert scale.red16(v[None])[0] == p[0]


@pytest.mark.parametrize("rotation", ["hadamard", "dense"])
@pytest.mark.parametrize("d", MSE)
def test_the_mean_squared_error_is_within_two_percent_of_the_exact_book(d, rotation):
    x = unit_vectors(d)
    for bits, expected in MSE[d].items():
        error = ((round_trip(x, bits, "raw", rotation=rotation) - x) ** 2).sum(axis=1).mean()
        assert error == pytest.approx(expected, rel=0.02), bits


@pytest.mark.parametrize("bits", RMSE)
def test_inner_product_errors_match_the_table_for_each_scale_rule(bits):
    d = 128
    k = unit_vectors(d).astype(np.float64)
    draws = np.random.default_rng(8).standard_normal((16, *k.shape))
    side = draws - (draws * k).sum(axis=2, keepdims=True) * k
    side /= np.linalg.norm(side, axis=2, keepdims=True)
    q = 0.5 * k + np.sqrt(0.75) * side
    for rule, expected in RMSE[bits].items():
        gap = round_trip(k.astype(np.float32), bits, rule) - k
        error = np.sqrt(((q * gap).sum(axis=2) ** 2).mean() * d)
        assert error == pytest.approx(expected, rel=0.02), rule


def test_the_unbiased_scale_has_no_slope_and_lsq_has_the_least_error():
    x = unit_vectors(64)
    slope = {r: (round_trip(x, 2, r) * x).sum(axis=1).mean() for r in scale.RULES}
    error = {r: ((round_trip(x, 2, r) - x) ** 2).sum(axis=1).mean() for r in scale.RULES}
    assert slope["unbiased"] == pytest.approx(1, abs=2e-4)
    assert slope["lsq"] < 0.9
    assert min(error, key=error.__getitem__) == "lsq"


@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0, 1e3])
def test_the_relative_error_does_not_depend_on_the_size_of_the_input(factor):
    x = (unit_vectors(128, 500) * np.sqrt(128) * factor).astype(np.float32)
    for bits in (2, 4):
        gap = round_trip(x, bits, "norm") - x
        relative = ((gap**2).sum(axis=1) / (x.astype(np.float64) ** 2).sum(axis=1)).mean()
        assert relative == pytest.approx(MSE[128][bits], rel=0.035)


def test_powers_of_two_move_only_the_scale():
    x = unit_vectors(80, 50)
    codes, scales = turboquant.encode(x, 3, rng.VALUE, 4, "norm")
    codes_2, scales_2 = turboquant.encode(x * np.float32(256), 3, rng.VALUE, 4, "norm")
    assert np.array_equal(codes, codes_2)
    assert np.array_equal(scales * np.float16(256), scales_2)


@pytest.mark.parametrize("d", [64, 80])
@pytest.mark.parametrize("rule", scale.RULES)
def test_a_zero_vector_has_scale_zero_and_decodes_to_zero(d, rule):
    x = np.zeros((2, d), np.float32)
    x[1] = -0.0
    for bits in (1, 2.5, 4, 8):
        codes, scales = turboquant.encode(x, bits, rng.KEY, 0, rule)
        assert (scales == 0).all()
        assert not turboquant.decode(codes, scales, bits, d).any()


def test_vectors_without_finite_length_are_refused():
    x = np.ones((3, 64), np.float32)
    x[1, 7] = np.inf
    with pytest.raises(ValueError, match="token 1"):
        turboquant.encode(x, 4, rng.KEY, 0, "norm")


def test_scales_saturate_at_the_largest_f16():
    x = np.full((1, 64), 3e7, np.float32)
    _, scales = turboquant.encode(x, 4, rng.KEY, 0, "unbiased")
    assert scales[0] == np.float16(65504)


def test_pad_channels_have_code_zero_and_change_nothing():
    x = unit_vectors(72, 20)
    codes, scales = turboquant.encode(x, 4, rng.KEY, 1, "unbiased")
    assert codes.shape == (20, 80)
    assert not codes[:, 72:].any()
    gap = turboquant.decode(codes, scales, 4, 72, rng.KEY, 1) - x
    assert (gap**2).sum(axis=1).mean() < 0.011


def test_fractional_rates_split_the_channels():
    assert turboquant.runs(2.5, 128) == [(3, 64), (2, 64)]
    assert turboquant.runs(2.25, 128) == [(3, 32), (2, 96)]
    assert turboquant.runs(3.5, 80) == [(4, 48), (3, 32)]
    assert turboquant.runs(4, 80) == [(4, 80)]
    for bits in (0.5, 8.5, 2.05):
        with pytest.raises(ValueError, match="bits is"):
            turboquant.runs(bits, 64)


def test_a_fractional_rate_lies_between_its_neighbours():
    x = unit_vectors(128)
    errors = [((round_trip(x, b, "raw") - x) ** 2).sum(axis=1).mean() for b in (2, 2.5, 3)]
    assert errors[1] == pytest.approx((errors[0] + errors[2]) / 2, rel=0.02)


def test_taking_out_the_offset_saves_keys_that_are_mostly_constant():
    rope = golden.ropes()[64]
    draws = np.random.default_rng(2)
    offset = KeyOffset(rope, (100 * draws.standard_normal(64)).astype(np.float32))
    positions = np.arange(500, 756)
    delta = draws.standard_normal((256, 64))
    x = (offset.at(positions) + delta).astype(np.float16).astype(np.float32)
    with_offset = turboquant.encode(x, 4, 0, 1, "unbiased", offset=offset, positions=positions)
    back = turboquant.decode(*with_offset, 4, 64, 0, 1, offset=offset, positions=positions)
    plain = turboquant.decode(*turboquant.encode(x, 4, 0, 1, "unbiased"), 4, 64, 0, 1)
    assert ((back - x) ** 2).mean() < 0.012
    assert ((plain - x) ** 2).mean() > 10


# --- min/max books --------------------------------------------------------------------------------


def test_minmax_codes_reach_both_ends_and_dead_groups_keep_their_value():
    x = np.stack([np.linspace(-2, 3, 32), np.full(32, 0.75)]).astype(np.float32)
    codes, low, step = minmax.encode(x, 4)
    assert (codes[0].min(), codes[0].max()) == (0, 15)
    assert step[1] == 0
    assert not codes[1].any()
    back = minmax.decode(codes, low, step)
    assert np.array_equal(back[1], x[1])
    assert np.abs(back[0] - x[0]).max() <= 0.51 * float(step[0])


def test_fp8_codes_are_nearest_even_and_saturate():
    values = minmax.e4m3_values()
    assert values[[1, -1]].tolist() == [2.0**-9, 448]
    x = np.float32([[448, 1, -17, 17, 19, -1e-9, 448, 0]])
    codes, s = minmax.encode_fp8(x)
    assert s[0] == 1
    back = values[codes[0] & 127] * np.where(codes[0] & 128, -1, 1)
    assert back.tolist() == [448, 1, -16, 16, 20, -0.0, 448, 0]


def test_int8_codes_stay_within_127():
    x = np.float32([[-5, 5, 0.01, 2]])
    codes, s = minmax.encode_int8(x)
    assert codes[0, :2].tolist() == [-127, 127]
    assert np.abs(codes[0] * float(s[0]) - x[0]).max() <= 0.51 * float(s[0])


# --- layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("channels", [16, 32, 48, 80])
@pytest.mark.parametrize("width", WIDTHS)
def test_every_bit_of_a_run_has_exactly_one_place_and_comes_back(width, channels, side):
    byte, bit = layout.bit_places(width, channels, side)
    places = np.sort((byte * 8 + bit).ravel())
    assert np.array_equal(places, np.arange(16 * channels * width))
    codes = np.random.default_rng(width).integers(0, 2**width, (16, channels))
    packed = layout.pack_run(codes, width, side)
    assert np.array_equal(layout.unpack_run(packed, width, channels, side), codes)


@pytest.mark.parametrize(
    ("width", "channels", "side", "token", "channel", "code", "places"),
    [
        (3, 48, rng.KEY, 5, 37, 0b110, {213: 0b1000, 277: 0b1}),
        (3, 32, rng.KEY, 5, 22, 0b101, {64 + 22: 0b100, 128 + 22: 0b10000}),
        (3, 32, rng.VALUE, 11, 3, 0b111, {15: 0b110000, 128 + 15: 0b1000}),
        (1, 16, rng.KEY, 9, 13, 1, {5: 0b10000000}),
        (4, 32, rng.VALUE, 14, 17, 0b1001, {128 + 64 + 6: 0b10010000}),
        (5, 16, rng.KEY, 15, 0, 0b10011, {60: 0b0011, 128 + 28: 0b10000}),
        (6, 32, rng.KEY, 0, 16, 0b110001, {128: 1, 256 + 64: 0b11}),
        (7, 32, rng.KEY, 2, 24, 0b1010010, {128 + 64 + 8: 0b10, 256 + 64 + 8: 0b010000, 384 + 8: 0b1000000}),
        (8, 32, rng.VALUE, 7, 18, 0xA5, {256 + 64 + 8 + 3: 0xA5}),
        (16, 32, rng.VALUE, 1, 2, 0x1234, {68: 0x34, 69: 0x12}),
    ],
)
def test_single_codes_lie_where_the_pictures_say(width, channels, side, token, channel, code, places):
    codes = np.zeros((16, channels), int)
    codes[token, channel] = code
    packed = layout.pack_run(codes, width, side)
    assert {int(i): int(packed[i]) for i in np.flatnonzero(packed)} == places


def test_three_bit_nibbles_hold_a_whole_code_after_masking():
    codes = np.random.default_rng(1).integers(0, 8, (16, 32))
    packed = layout.pack_run(codes, 3, rng.KEY).astype(int)
    for block in range(2):
        low, high = packed[64 * block :][:64], packed[128:192] >> 4 * block
        nibbles = (
            (low & 3) | (high & 4),
            (low & 12) | (high & 1),
            (low >> 4 & 3) | (high & 8),
            (low >> 4 & 12) | (high & 2),
        )
        shifts = ((0, 2), (2, 0), (0, 3), (2, 1))
        for z, (nibble, (at, top)) in enumerate(zip(nibbles, shifts, strict=True)):
            got = (nibble >> at & 3) | (nibble >> top & 1) << 2
            channels = 16 * block + 4 * z
            assert np.array_equal(got.reshape(16, 4), codes[:, channels : channels + 4])


def test_a_page_places_tiles_and_scales_one_side_after_the_other():
    page = layout.Page(layout.Side(((3, 48), (2, 32))), layout.Side(((4, 16),)))
    assert (page.key.tile_bytes, page.value.tile_bytes) == (416, 128)
    assert (page.values_at, page.key_scales_at, page.value_scales_at) == (1664, 2176, 2304)
    assert page.page_bytes == 2432
    draws = np.random.default_rng(4)
    codes = (draws.integers(0, 4, (40, 80)), draws.integers(0, 16, (40, 16)))
    scales = tuple(draws.random((1, 40)).astype(np.float16) for _ in SIDES)
    data = layout.pack_page(page, codes, scales)
    got_codes, got_scales = layout.unpack_page(page, data)
    for side in SIDES:
        assert np.array_equal(got_codes[side][:40], codes[side])
        assert np.array_equal(got_scales[side][:, :40], scales[side])
    tile = layout.pack_tile(codes[1][16:32], page.value, rng.VALUE)
    assert np.array_equal(data[1664 + 128 : 1664 + 256], tile)


def test_a_raw_page_holds_key_rows_then_value_rows():
    page = layout.raw16_page(64, 32)
    assert page.page_bytes == 16 * 96 * 2
    k = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    v = np.arange(16 * 32, dtype=np.uint16).reshape(16, 32) + 7
    data = layout.pack_page(page, (k, v), ([], []))
    assert np.array_equal(data.view("<u2"), np.concatenate([k.ravel(), v.ravel()]))


# --- attention and window -------------------------------------------------------------------------


def test_attention_equals_a_plain_softmax_per_query():
    draws = np.random.default_rng(6)
    q, k, v = (draws.standard_normal(s) for s in ((4, 3, 8), (2, 10, 8), (2, 10, 5)))
    out, lse = attention.attention(q, k, v, sliding=4, softcap=2.0, sink_logits=[0.3, -1, 0, 2])
    for h in range(4):
        for r in range(3):
            i = 7 + r
            keys = range(max(0, i - 3), i + 1)
            s = [2 * np.tanh(q[h, r] @ k[h // 2, j] / np.sqrt(8) / 2) for j in keys]
            total = np.exp(s).sum() + np.exp([0.3, -1, 0, 2][h])
            expected = sum(np.exp(x) * v[h // 2, j] for x, j in zip(s, keys, strict=True)) / total
            assert np.allclose(out[h, r], expected, atol=1e-12)
            assert lse[h, r] == pytest.approx(np.log(total))


def test_masked_queries_and_unseen_garbage_leave_no_trace():
    draws = np.random.default_rng(7)
    q, k, v = (draws.standard_normal(s) for s in ((2, 3, 8), (1, 6, 8), (1, 6, 8)))
    k[0, 0], v[0, 0] = np.nan, np.inf
    mask = np.array([True, False, True])
    out, lse = attention.attention(q, k, v, mask=mask, sliding=3)
    assert not out[:, 1].any()
    assert np.isneginf(lse[:, 1]).all()
    assert np.isfinite(out).all()
    pair, _ = attention.attention(q[:, [0, 2]], k, v, sliding=3)
    assert np.array_equal(out[:, [0, 2]], pair)


def test_partial_results_merge_to_the_whole():
    draws = np.random.default_rng(9)
    q, k, v = (draws.standard_normal(s) for s in ((2, 1, 8), (2, 9, 8), (2, 9, 8)))
    whole = attention.attention(q, k, v)
    cuts = [slice(0, 4), slice(4, 9), slice(0, 0)]
    parts = [attention.attention(q, k[:, c], v[:, c], length=9, key_index=np.arange(9)[c]) for c in cuts]
    out, lse = attention.merge([p[0] for p in parts], [p[1] for p in parts])
    assert np.allclose(out, whole[0], atol=1e-13)
    assert np.allclose(lse, whole[1], atol=1e-13)


def test_tokens_leave_the_window_in_groups_whatever_the_append_sizes():
    for recent, group in ((128, 16), (0, 16), (20, 64)):
        for length in range(400):
            end = window.sealed_end(length, 4, recent, group)
            raw = window.raw_tokens(length, 4, 4, recent, group)
            assert (end - 4) % group == 0
            assert raw == length - max(0, end - 4)
            if length >= 4 + recent:
                assert recent <= raw - 4 <= recent + group - 1


def test_truncation_into_a_sealed_group_moves_the_grid_to_the_cut():
    sealed = window.sealed_end(300, 4, 128, 16)
    assert sealed == 164
    assert window.truncated_origin(100, 4, sealed, 4) == 100
    assert window.truncated_origin(200, 4, sealed, 4) == 4
    assert window.truncated_origin(2, 4, sealed, 4) == 4
    assert window.sealed_end(100 + 128 + 16, 100, 128, 16) == 116


def test_sliding_layers_free_pages_behind_the_margin():
    assert window.sliding_page_is_free(99, 676, 512)
    assert not window.sliding_page_is_free(100, 676, 512)
    assert window.sliding_layer_stays_raw(144, 128, 16)
    assert not window.sliding_layer_stays_raw(145, 128, 16)


# --- golden files ---------------------------------------------------------------------------------


def test_golden_files_are_current():
    assert golden.stale() == []


def test_golden_files_are_valid_safetensors_below_two_megabytes():
    paths = sorted(golden.FOLDER.glob("*.safetensors"))
    assert sum(p.stat().st_size for p in paths) < 2_000_000
    tensors = safetensors.numpy.load_file(golden.FOLDER / "turboquant_d80.safetensors")
    page = layout.Page(*[layout.Side(tuple(turboquant.runs(2.5, 80)))] * 2)
    codes, scales = layout.unpack_page(page, tensors["plain.b2.5.page64"])
    assert np.array_equal(codes[0], tensors["plain.b2.5.key.codes"])
    assert np.array_equal(scales[1][0].view(np.uint16), tensors["plain.b2.5.value.scales"])


def test_a_changed_golden_file_is_noticed(tmp_path):
    for path in golden.FOLDER.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    data = bytearray((tmp_path / "rng.safetensors").read_bytes())
    data[-1] ^= 1
    (tmp_path / "rng.safetensors").write_bytes(data)
    assert golden.stale(tmp_path) == ["rng"]
