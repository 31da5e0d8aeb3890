"""Calibration on small models with random weights: moments, transforms, sensitivities, plans, resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

import kvrs  # noqa: E402
from kvrs.calibration import calibrate, check, fingerprint, sensitivity, size  # noqa: E402
from kvrs.calibration import measure as measuring  # noqa: E402
from kvrs.calibration.allocate import Share, allocate  # noqa: E402
from kvrs.calibration.codebooks import key_book, kmeans, largest, value_book  # noqa: E402
from kvrs.calibration.coding import SideCoder, coded, packed_mask  # noqa: E402
from kvrs.calibration.distortion import measure, noise_covariance  # noqa: E402
from kvrs.calibration.hooks import Call, attention_calls  # noqa: E402
from kvrs.calibration.layers import layers_of  # noqa: E402
from kvrs.calibration.picture import bit_map  # noqa: E402
from kvrs.calibration.rope import phasors  # noqa: E402
from kvrs.calibration.statistics import SKIPPED, Moments, observe  # noqa: E402
from kvrs.calibration.transform import Channels, channels_of, output_moments, transform_of  # noqa: E402
from kvrs.calibration.widths import ranks, widths_of  # noqa: E402
from kvrs.cli import main  # noqa: E402
from kvrs.hf.compat import CACHE_ARGUMENT  # noqa: E402

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = {"sinks": 4, "recent": 32}
QUICK = {**WINDOW, "progress": False, "sensitivity_tokens": 256}


def qwen2(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SHAPE)).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                projection = getattr(layer.self_attn, name)
                projection.bias.normal_(0, 2)
                projection.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return qwen2()


@pytest.fixture(scope="module")
def rows() -> list[Any]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(2, 97, (320,), generator=generator) for _ in range(2)]


@pytest.fixture(scope="module")
def calls(model: Any, rows: list[Any]) -> list[dict[int, Call]]:
    """Return what attention is called with, by text and layer."""
    found: list[dict[int, Call]] = []
    for row in rows:
        seen: dict[int, Call] = {}

        def keep(call: Call, seen: dict[int, Call] = seen) -> None:
            seen[call.layer] = call

        with attention_calls(model, keep), torch.no_grad():
            model.model(row[None], use_cache=False)
        found.append(seen)
    return found


def measured(model: Any, rows: list[Any], codec: Any, **options: Any) -> measuring.Measured:
    shape = kvrs.ModelShape.from_config(model.config)
    codecs = {side: [codec] * shape.layers for side in ("keys", "values")}
    options = {"sensitive": False, "sensitivity_tokens": 256} | options
    return measuring.measure(model, rows, shape, codecs, WINDOW, **options)


@pytest.mark.parametrize(
    "rope",
    [
        None,
        kvrs.Rope(1e4),
        kvrs.Rope(1e4, dim=16, pairing="interleaved"),
        kvrs.Rope(1e4, dim=16, attention_factor=1.25),
    ],
)
def test_turning_back_undoes_a_rotation_and_features_make_the_turned_constant(rope: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    turn = phasors(rope, 32, 20)
    x = torch.randn(2, 20, 32, generator=generator, dtype=torch.float64)
    assert torch.allclose(turn.turn(turn.turn(x), back=True), x)
    constant = x[0, 0]
    turned = turn.turn(constant.expand(20, -1))
    assert torch.allclose(turn.features(20) @ turn.constant(constant).T, turned)


def test_the_rotation_is_the_one_of_the_model(
    model: Any, calls: list[dict[int, Call]], rows: list[Any]
) -> None:
    hidden = model.model.layers[0].input_layernorm(model.model.embed_tokens(rows[0]))
    plain = model.model.layers[0].self_attn.k_proj(hidden).detach().unflatten(1, (2, 32)).transpose(0, 1)
    (rope,) = {layer.rope for layer in layers_of(kvrs.ModelShape.from_config(model.config))}
    assert torch.allclose(phasors(rope, 32, 320).turn(plain), calls[0][0].k, atol=1e-4)


@pytest.mark.parametrize("pre_rope", [False, True])
def test_sums_of_texts_give_the_moments_of_all_tokens_together(
    model: Any, rows: list[Any], calls: list[dict[int, Call]], pre_rope: bool
) -> None:
    layer = layers_of(kvrs.ModelShape.from_config(model.config))[1]
    moments = Moments(layer, pre_rope=pre_rope, sampled=False)
    for row in rows:
        observe(model, row, {1: moments})
    found = moments.finish()
    turn = phasors(layer.rope, 32, 320)
    every = [call[1] for call in calls]
    plain = torch.cat([turn.turn(c.k.double(), back=True)[:, SKIPPED:] for c in every], 1)
    mean = plain.mean(1)
    assert np.allclose(found.key_mean, mean, atol=1e-6)
    left = torch.cat(
        [(c.k.double() - turn.turn(mean[:, None].expand(-1, 320, -1)))[:, SKIPPED:] for c in every], 1
    )
    assert np.allclose(found.keys, left.transpose(1, 2) @ left / left.shape[1], atol=1e-5)
    queries = torch.cat([c.q.double().unflatten(0, (2, 2))[:, :, SKIPPED:] for c in every], 2)
    assert np.allclose(
        found.queries, torch.einsum("hgti,hgtj->hij", queries, queries) / left.shape[1], atol=1e-4
    )
    values = torch.cat([c.v.double()[:, SKIPPED:] for c in every], 1)
    centred = values - values.mean(1, keepdim=True)
    assert np.allclose(found.values, centred.transpose(1, 2) @ centred / values.shape[1], atol=1e-5)
    if pre_rope:
        plain = plain - mean[:, None]
        assert np.allclose(found.turned_keys, plain.transpose(1, 2) @ plain / plain.shape[1], atol=1e-5)


def test_channels_are_orthonormal_sorted_by_what_they_cost_and_span_the_covariance(
    rng: np.random.Generator,
) -> None:
    root = rng.standard_normal((48, 48))
    covariance, reading = root @ root.T, np.diag(rng.random(48))
    found = channels_of(covariance, reading, "test")
    assert np.allclose(found.basis @ found.basis.T, np.eye(48))
    assert np.allclose(found.basis.T * found.variance @ found.basis, covariance)
    assert np.allclose(found.weights, [e @ reading @ e for e in found.basis])
    assert (np.diff(found.value) <= 0).all()
    assert (found.basis[np.arange(48), np.abs(found.basis).argmax(axis=1)] > 0).all()


@pytest.mark.parametrize("rotated", [False, True])
def test_a_transform_has_channels_of_unit_variance_and_its_synthesis_undoes_it(
    rng: np.random.Generator, rotated: bool
) -> None:
    root = rng.standard_normal((64, 64)) * np.logspace(0, -1, 64)
    found = channels_of(root @ root.T, None, "test")
    whole = transform_of(found, [4, 4, 2, 1], rotated=rotated)
    assert np.allclose(whole.analysis @ (root @ root.T) @ whole.analysis.T, np.eye(64), atol=1e-3)
    x = rng.standard_normal((5, 64)) @ root.T
    assert np.allclose(x @ whole.analysis.T @ whole.synthesis, x, atol=1e-4 * np.abs(x).max())
    part = transform_of(found, [3, 2, 0, 0], rotated=rotated)
    assert part.analysis.shape == (32, 64)
    assert part.widths.tolist() == [3, 2]


def test_coding_errs_as_the_codebooks_promise(rng: np.random.Generator) -> None:
    rows = torch.from_numpy(rng.standard_normal((4000, 64))).float()
    found = Channels(np.eye(64), np.ones(64), np.ones(64), 0)
    for bits, expected in ((1, 0.36338), (2, 0.11748), (3, 0.03455), (4, 0.00951)):
        back = coded(rows, transform_of(found, [bits] * 4))
        assert float((back - rows).square().mean()) == pytest.approx(expected, rel=0.05)


def test_what_is_seen_packed_follows_the_windows_of_the_store() -> None:
    sinks, recent, tokens = 4, 32, 160
    mask = packed_mask(tokens, sinks, recent).numpy()
    for query in (0, 40, 51, 52, 67, 68, 159):
        length = query // 16 * 16
        sealed = sinks + 16 * (max(0, length - sinks - recent) // 16)
        assert mask[query].nonzero()[0].tolist() == list(range(sinks, sealed))


def test_attention_with_nothing_packed_is_the_models_own(model: Any, rows: list[Any]) -> None:
    exact = model(rows[0][None], use_cache=False).logits
    with attention_calls(model, lambda call: call.attention()[0]), torch.no_grad():
        ours = model(rows[0][None], use_cache=False).logits
    assert torch.allclose(exact, ours, atol=1e-3)


def test_mixed_attention_equals_attention_written_out(calls: list[dict[int, Call]]) -> None:
    call = calls[0][0]
    mask = packed_mask(320, 4, 32)
    k, v = call.k + 0.1, call.v * 1.1
    out, _ = call.attention((k, v, mask))
    head, query = 3, 300
    keys, values = (torch.where(mask[query][:, None], a[1], b[1]) for a, b in ((k, call.k), (v, call.v)))
    scores = (keys @ call.q[head, query] * call.scale)[: query + 1]
    assert torch.allclose(out[head, query], scores.softmax(0) @ values[: query + 1], atol=1e-4)


def test_layers_before_the_quantised_one_are_not_run_again(model: Any, rows: list[Any]) -> None:
    found = measured(model, rows, kvrs.AATC(bits=2))
    widths = widths_of(found.sides, found.channels, found.rule("local", {}))
    coders = {key: coder for key, coder in coders_of(found, widths).items() if key[0] == 1}
    exact = sensitivity.exact_run(model, rows[0])
    fast = sensitivity.coded_hidden(model, exact, coders, **WINDOW)
    called: list[int] = []
    handle = model.model.layers[0].mlp.register_forward_hook(lambda *_args: called.append(0))
    again = sensitivity.coded_hidden(model, exact, coders, **WINDOW)
    handle.remove()
    assert called == []
    mask = packed_mask(320, 4, 32)

    def replaced(call: Call) -> Any:
        if call.layer != 1:
            return None
        k, v = coders[1, "keys"].decoded(call.k), coders[1, "values"].decoded(call.v)
        return call.attention((k, v, mask))[0]

    with attention_calls(model, replaced), torch.no_grad():
        slow = model.model(rows[0][None], use_cache=False).last_hidden_state[0]
    assert torch.equal(fast, again)
    assert torch.allclose(fast, slow, atol=1e-4)
    assert sensitivity.divergence(model, exact, exact.hidden) == 0.0
    assert sensitivity.divergence(model, exact, fast) > 0.0


def coders_of(found: measuring.Measured, widths: Any) -> dict[Any, SideCoder]:
    coders = {}
    for side in found.sides:
        pairs = zip(found.channels[side.key], widths[side.key], strict=True)
        plain = side.coder(found.statistics[side.layer.index])
        transforms = [transform_of(group, bits, rotated=side.rotated) for group, bits in pairs]
        coders[side.key] = SideCoder(plain.layer, plain.side, plain.mean, transforms, plain.pre_rope)
    return coders


@pytest.mark.parametrize("variant", ["post_rope", "pre_rope"])
def test_eight_bits_of_every_channel_give_keys_and_values_back(
    model: Any, rows: list[Any], calls: list[dict[int, Call]], variant: str
) -> None:
    found = measured(model, rows, kvrs.AATC(bits=8, variant=variant))
    widths = widths_of(found.sides, found.channels, found.rule("local", {}))
    for (layer, side), coder in coders_of(found, widths).items():
        x = calls[0][layer].k if side == "keys" else calls[0][layer].v
        error = (coder.decoded(x) - x).square().mean() / (x - x.mean(1, keepdim=True)).square().mean()
        assert float(error) < 1e-3, (layer, side)


def test_sensitivities_share_one_budget_and_local_allocation_keeps_the_sides_apart(
    model: Any, rows: list[Any]
) -> None:
    found = measured(model, rows, kvrs.AATC(bits=2.5), sensitive=True)
    assert set(found.sensitivities) == {(layer, side) for layer in (0, 1) for side in ("keys", "values")}
    assert all(x["sensitivity"] > 0 for x in found.sensitivities.values())
    elements = dict.fromkeys(("keys", "values"), 2 * 2 * 32)
    local, joint = (
        widths_of(found.sides, found.channels, found.rule(name, {})) for name in ("local", "sensitivity")
    )
    spent = {
        side: sum(16 * sum(map(sum, groups)) for (_, name), groups in local.items() if name == side)
        for side in elements
    }
    assert all(2.5 * elements[side] - 16 < bits <= 2.5 * elements[side] for side, bits in spent.items())
    total = 16 * sum(sum(map(sum, groups)) for groups in joint.values())
    assert 2.5 * 256 - 16 < total <= 2.5 * 256
    factors = {key: x["sensitivity"] for key, x in found.sensitivities.items()}

    def cost(widths: Any) -> float:
        shares = [Share(key[0], key[1], groups, factors[key]) for key, groups in found.channels.items()]
        return sum(share.factor * share.distortion(widths[share.layer, share.side]) for share in shares)

    assert cost(joint) <= cost(local)


def test_the_first_run_of_a_head_keeps_a_bit_and_floors_of_layers_hold(model: Any, rows: list[Any]) -> None:
    found = measured(model, rows, kvrs.AATC(bits=1))
    widths = widths_of(found.sides, found.channels, found.rule("local", {0: 1}))
    assert all(groups[0] >= 1 for each in widths.values() for groups in each)
    assert all(bits >= 1 for key, each in widths.items() if key[0] == 0 for groups in each for bits in groups)
    with pytest.raises(kvrs.PlanError, match=r"allowed: 0\.5 or more"):
        widths_of(found.sides, found.channels, found.rule("local", {}), 0.3)


def test_kvtc_is_the_optimum_of_variance_alone_and_palu_keeps_the_largest(
    model: Any, rows: list[Any]
) -> None:
    found = measured(model, rows, kvrs.KVTC(bits=2))
    assert all((group.weights == 1).all() for groups in found.channels.values() for group in groups)
    widths = widths_of(found.sides, found.channels, found.rule("local", {}))
    keys = [Share(layer, "keys", found.channels[layer, "keys"]) for layer in (0, 1)]
    greedy = allocate(keys, 2 * 128)
    ours, theirs = (sum(s.distortion(w[s.layer, "keys"]) for s in keys) for w in (widths, greedy))
    assert ours == pytest.approx(theirs)
    palu = measured(model, rows, kvrs.PALU(rank=0.5, bits=3))
    chosen = ranks([side for side in palu.sides if side.side == "keys"], palu.channels)
    assert sum(bits > 0 for each in chosen.values() for groups in each for bits in groups) == 4
    assert {bits for each in chosen.values() for groups in each for bits in groups} == {0, 3}


def test_codebooks_of_gaussian_samples_are_lloyds_and_outliers_are_left_out(rng: np.random.Generator) -> None:
    sample = rng.standard_normal(200_000)
    assert np.allclose(kmeans(sample, 2), [-1.510, -0.4528, 0.4528, 1.510], atol=0.02)
    rows = rng.standard_normal((256, 32)) * np.linspace(0.5, 2, 32)
    rows[::16, 0] = 1000.0
    assert largest(rows, 0.01).sum() == 16 * round(0.01 * 16 * 32)
    assert np.abs(value_book(rows, 3, 0.01)).max() < 1.0
    scale, book = key_book(rows[:, 1:], 3, 0.01)
    assert np.allclose(scale, np.linspace(0.5, 2, 32)[1:], rtol=0.2)
    assert (np.diff(book) > 0).all()


def test_predicted_distortion_is_near_the_measured_one_and_the_rest_falls_faster(
    model: Any, rows: list[Any]
) -> None:
    found = measured(model, rows, kvrs.AATC(bits=4, weights="variance"))
    rests = []
    for bits in (3, 6):
        widths = widths_of(found.sides, found.channels, found.rule("local", {}), bits)
        noise = {key: noise_covariance(found.channels[key], widths[key]) for key in widths}
        layers = measure(model, rows[0], coders_of(found, widths), noise, **WINDOW, first=64)
        assert [layer.layer for layer in layers] == [0, 1]
        rests.append([layer.to_dict() for layer in layers])
        if bits == 6:
            assert all(0.5 < x["ratio"] < 2.0 for x in rests[-1]), rests[-1]
    for coarse, fine in zip(*rests, strict=True):
        assert fine["measured"] < coarse["measured"]


def test_output_moments_are_those_of_the_columns_that_read_a_head(model: Any) -> None:
    layer = layers_of(kvrs.ModelShape.from_config(model.config))[0]
    weight = model.model.layers[0].self_attn.o_proj.weight.detach().double()
    error = torch.randn(32, dtype=torch.float64)
    each = [(weight[:, 32 * head : 32 * head + 32] @ error).square().sum() for head in (2, 3)]
    assert float(error @ torch.from_numpy(output_moments(model, layer)[1]) @ error) == pytest.approx(
        float(sum(each))
    )


@pytest.mark.parametrize(
    "codec",
    [
        kvrs.AATC(bits=2.5),
        kvrs.AATC(bits=2, weights="variance", run_rotation=False),
        kvrs.KVQuant(bits=3),
    ],
    ids=lambda codec: codec.name,
)
def test_calibrate_returns_a_plan_that_stores_and_attends(model: Any, rows: list[Any], codec: Any) -> None:
    plan = calibrate(model, rows, codec, codec, **QUICK)
    assert plan.calibration is not None
    assert plan.calibration.fingerprint == fingerprint(model)
    assert plan.calibration.report["tokens"] == 2 * (320 - SKIPPED)
    cache = kvrs.hf.KVCache(model, plan)
    with torch.no_grad():
        exact = model(rows[0][None, :256]).logits[0, -1]
        parts = [model(rows[0][None, at : at + 32], **{CACHE_ARGUMENT: cache}) for at in range(0, 256, 32)]
    assert torch.isfinite(parts[-1].logits).all()
    assert torch.corrcoef(torch.stack([exact, parts[-1].logits[0, -1]]))[0, 1] > 0.7


def test_a_plan_decodes_what_the_simulation_decodes(
    model: Any, rows: list[Any], calls: list[dict[int, Call]]
) -> None:
    codec = kvrs.AATC(bits=3)
    plan = calibrate(model, rows, codec, codec, allocation="local", **QUICK)
    store = kvrs.KVStore(plan)
    (seq,) = store.new()
    found = measured(model, rows, codec)
    coders = coders_of(found, widths_of(found.sides, found.channels, found.rule("local", {})))
    for layer in (0, 1):
        call = calls[0][layer]
        store.append(layer, call.k[None].numpy(), call.v[None].numpy(), [seq])
        for head in (0, 1):
            k, v, _ = store.decode(layer, seq, head)
            for side, stored, x in (("keys", k, call.k), ("values", v, call.v)):
                ours = coders[layer, side].decoded(x.half().float())[head, 4:260].numpy()
                differs = np.abs(ours - np.asarray(stored)[4:260]).max(axis=1) > 1e-2 * np.abs(ours).max()
                assert differs.mean() < 0.05, (layer, head, side)


def test_a_size_is_reached_from_below_with_everything_counted(model: Any, rows: list[Any]) -> None:
    wide = calibrate(model, rows, kvrs.AATC(bits=4), kvrs.AATC(bits=4), allocation="local", **QUICK)
    target = int(0.8 * wide.memory(tokens=size.TOKENS).bytes_total)
    codec = kvrs.AATC(bytes=target)
    plan = calibrate(model, rows, codec, codec, allocation="local", **QUICK)
    assert 0.6 * target < plan.memory(tokens=size.TOKENS).bytes_total <= target
    with pytest.raises(kvrs.PlanError, match="one size for keys and values"):
        calibrate(model, rows, codec, kvrs.AATC(bytes="1GiB"), allocation="local", **QUICK)
    with pytest.raises(kvrs.PlanError, match="allowed: about"):
        calibrate(model, rows, kvrs.AATC(bytes=100), kvrs.AATC(bytes=100), allocation="local", **QUICK)


def test_a_calibration_goes_on_where_it_was_killed(
    model: Any, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parts.safetensors"
    whole = measured(model, rows, kvrs.AATC(bits=2), sensitive=True)
    count = 0

    def killed(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    real = sensitivity.measure
    monkeypatch.setattr(sensitivity, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        measured(model, rows, kvrs.AATC(bits=2), sensitive=True, resume=path)
    monkeypatch.setattr(measuring, "observe", None)
    again = measured(model, rows, kvrs.AATC(bits=3), sensitive=True, resume=path)
    assert count == 5
    assert all(
        again.sensitivities[key]["sensitivity"] == pytest.approx(x["sensitivity"], rel=1e-3)
        for key, x in whole.sensitivities.items()
    )
    assert np.allclose(again.statistics[0].keys, whole.statistics[0].keys)
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_another_model_other_texts_or_settings_are_refused(
    model: Any, rows: list[Any], tmp_path: Path
) -> None:
    path = tmp_path / "parts.safetensors"
    measured(model, rows, kvrs.AATC(bits=2), resume=path)
    with pytest.raises(kvrs.PlanError, match="of another model"):
        measured(qwen2(seed=4), rows, kvrs.AATC(bits=2), resume=path)
    with pytest.raises(kvrs.PlanError, match="of another batches"):
        measured(model, rows[::-1], kvrs.AATC(bits=2), resume=path)
    with pytest.raises(kvrs.PlanError, match="of another settings"):
        measured(model, rows, kvrs.AATC(bits=2), resume=path, eigenvalue_floor=1e-6)
    (tmp_path / "other").write_text("no checkpoint")
    with pytest.raises(kvrs.FormatError, match="not a checkpoint"):
        measured(model, rows, kvrs.AATC(bits=2), resume=tmp_path / "other")


def test_a_plan_refuses_a_model_that_it_was_not_made_for(model: Any, rows: list[Any]) -> None:
    plan = calibrate(model, rows, kvrs.AATC(bits=2), kvrs.AATC(bits=2), allocation="local", **QUICK)
    check(model, plan)
    check(qwen2().to(torch.bfloat16).float(), plan)
    with pytest.raises(kvrs.PlanError, match=r"model has the fingerprint .*; allowed: "):
        check(qwen2(seed=4), plan)


def test_the_identity_of_a_model_does_not_depend_on_the_type_of_its_weights() -> None:
    half = qwen2().to(torch.bfloat16)
    assert fingerprint(half) == fingerprint(qwen2().to(torch.bfloat16).float()) != fingerprint(qwen2(seed=4))


def test_bad_input_is_named() -> None:
    model = qwen2()
    codec = kvrs.AATC(bits=2)

    def error(match: str, batches: Any, **options: Any) -> None:
        with pytest.raises(kvrs.PlanError, match=match):
            calibrate(model, batches, codec, codec, **{**QUICK, **options})

    long = torch.randint(2, 97, (2, 320))
    error("batches has no texts", [])
    error(r"batches\[0\] has shape \(2, 3, 4\)", [torch.zeros(2, 3, 4, dtype=torch.long)])
    error(r"batches\[1\] has shape \(320,\) and dtype float32", [long[0], torch.zeros(320)])
    error(r"batches\[0\] has 3 tokens; allowed: 5 or more", [torch.tensor([1, 2, 3])])
    error("batches have 96 tokens behind the first 4 .*: 128 or more", [torch.randint(2, 97, (100,))])
    error("allocation is 'global'; allowed: sensitivity, local", [long], allocation="global")
    error("has 100 tokens; allowed: more than 192", [long], sensitivity_tokens=100)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0] = float("inf")
    error("of layer 1 is not finite", [long], allocation="local")


def test_a_covariance_without_rank_is_named_unless_floored(rng: np.random.Generator) -> None:
    few = rng.standard_normal((20, 64))
    assert channels_of(few.T @ few, None, "keys of layer 0").floored == 44
    with pytest.raises(
        kvrs.PlanError, match="keys of layer 0 has rank 20; allowed: 64, or an eigenvalue floor"
    ):
        channels_of(few.T @ few, None, "keys of layer 0", floor=0.0)
    with pytest.raises(kvrs.PlanError, match="has rank 0; allowed: 16 or more"):
        channels_of(np.zeros((64, 64)), None, "keys of layer 0")
    with pytest.raises(kvrs.PlanError, match="is not finite"):
        channels_of(np.full((64, 64), np.nan), None, "keys of layer 0")


@pytest.fixture
def small_cli(model: Any, rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the command find a small model, and texts that it has ids for."""
    from kvrs.calibration import texts as calibration_texts
    from kvrs.eval import models, texts

    monkeypatch.setattr(models, "load", lambda *_args, **_kwargs: (model, None))
    monkeypatch.setattr(calibration_texts, "calibration_texts", lambda *_args, **_kwargs: rows)

    def documents(_model: str, _tokenizer: Any, names: list[str], tokens: int) -> dict[str, list[int]]:
        return {name: rows[0][:tokens].tolist() for name in names}

    monkeypatch.setattr(texts, "documents", documents)
    return rows


@pytest.mark.usefixtures("small_cli")
def test_the_command_writes_a_plan_file_in_one_step(model: Any, tmp_path: Path) -> None:
    out, parts = tmp_path / "small.kvplan", tmp_path / "parts.safetensors"
    codecs = ["--keys", "aatc:2.5", "--values", "aatc:bits=3:weights=variance"]
    picture = tmp_path / "small.png"
    options = [
        "--out",
        str(out),
        "--resume",
        str(parts),
        "--recent",
        "32",
        "--picture",
        str(picture),
        "--quiet",
    ]
    assert main(["calibrate", "--model", "small", *codecs, *options]) == 0
    plan = kvrs.Plan.load(out)
    assert plan.keys[0] == kvrs.AATC(bits=2.5)
    assert plan.recent == 32
    check(model, plan)
    assert {path.name for path in tmp_path.iterdir()} == {"parts.safetensors", "small.kvplan", "small.png"}
    report = plan.calibration.report
    assert [bits for group in report["widths"]["keys.0"] for bits in group] == bit_map(report, "keys")[
        0
    ].tolist()
    assert main(["calibrate", *codecs, *options, "--sinks", "8"]) == 2


@pytest.mark.usefixtures("small_cli")
def test_rates_and_distortions_are_measured_filed_and_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, picture, parts = (tmp_path / name for name in ("rate.json", "rate.png", "parts.safetensors"))
    common = ["--resume", str(parts), "--quiet"]
    rates = ["--plans", "turboquant:4,recent=32", "aatc:3,recent=32", "aatc:2,recent=32", "--texts", "wiki"]
    files = ["--out", str(out), "--picture", str(picture)]
    assert main(["eval", "rate-distortion", *rates, "--tokens", "160", *files, *common]) == 0
    found = json.loads(out.read_text())["rows"]
    assert [row["method"] for row in found] == ["turboquant", "aatc", "aatc"]
    assert found[1]["bits_per_element"] > found[2]["bits_per_element"] > 2.0
    assert all(0.5 < row["mean_ratio"] < 2.0 for row in found)
    assert picture.stat().st_size > 0
    capsys.readouterr()
    assert main(["eval", "distortion", "--bits", "3", "--tokens", "320", "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert "attention" in shown
    assert "variance" in shown


def test_plans_of_other_codecs_share_a_file_and_keep_what_was_measured(
    model: Any, rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "parts.safetensors"
    measured(model, rows, kvrs.AATC(bits=2), sensitive=True, resume=path)
    books = measured(model, rows, kvrs.KVQuant(bits=3), resume=path)
    assert books.statistics[0].key_sample.shape == (2, 512, 32)
    monkeypatch.setattr(sensitivity, "measure", None)
    again = measured(model, rows, kvrs.AATC(bits=2), sensitive=True, resume=path)
    assert len(again.sensitivities) == 4
