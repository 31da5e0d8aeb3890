"""Stores whose device is emulated: kernels, queue and memory of a GPU, beside the same store on the CPU."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import DIGITS, expected, shape, tensors

ERROR = 2e-3
"""Of attention on a device, relative to the largest output: 16-bit products and fast exponentials."""
DEVICE_DIGITS = 0.05
"""What the integer digits of a device add to it where tokens are encoded."""


def plan(codec: Any = None, fields: Any = None, **settings: Any) -> kvrs.Plan:
    codec = codec or kvrs.TurboQuant(4)
    return kvrs.Plan(shape(**(fields or {})), codec, codec, **({"sinks": 2, "recent": 8} | settings))


def is_built() -> bool:
    try:
        kvrs.KVStore(plan(), device="emulated")
    except kvrs.DeviceError:
        return False
    return True


pytestmark = pytest.mark.skipif(
    not is_built(), reason="this kvrs was built without the emulator (cargo feature `emulate`)"
)
CODECS = [
    kvrs.Raw16(),
    kvrs.TurboQuant(4),
    kvrs.TurboQuant(2.5),
    kvrs.TurboQuant(3, variant="prod"),
    kvrs.RaBitQ(4),
    kvrs.KIVI(2),
    kvrs.Int8(),
    kvrs.FP8(),
]


class Both:
    """The same store on the emulated device and on the CPU."""

    def __init__(self, plan: kvrs.Plan, **settings: Any) -> None:
        self.stores = [kvrs.KVStore(plan, device=device, **settings) for device in ("emulated", "cpu")]

    def __getattr__(self, name: str) -> Any:
        """Return the method of that name, called on both; the answers must be equal and are returned once."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            device, cpu = (getattr(store, name)(*arguments, **keywords) for store in self.stores)
            assert device == cpu
            return device

        return call

    def attend(self, layer: int, *arguments: Any, call: str = "attend", **keywords: Any) -> None:
        answers = [
            getattr(store, call)(layer, *arguments, return_lse=True, **keywords) for store in self.stores
        ]
        (out, lse), (want, want_lse) = ([np.asarray(part) for part in answer] for answer in answers)
        assert np.abs(out - want).max() <= (ERROR + DEVICE_DIGITS + DIGITS) * np.abs(want).max()
        np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(want_lse))
        seen = np.isfinite(want_lse)
        assert np.abs(lse[seen] - want_lse[seen]).max(initial=0.0) <= ERROR + DEVICE_DIGITS + DIGITS

    def extend(self, layer: int, *arguments: Any, **keywords: Any) -> None:
        self.attend(layer, *arguments, call="extend", **keywords)

    def same(self, seqs: list[int], folder: Path, statistics: bool = True) -> None:
        """Compare everything that is stored, to the bit; files hold the statistics of policies too."""
        for store in self.stores:
            store.check()
        assert stats(self.stores[0]) == stats(self.stores[1])
        for seq in seqs:
            files = [folder / f"{seq}.{store.device}" for store in self.stores]
            for store, file in zip(self.stores, files, strict=True):
                store.save(file, seq)
            if statistics:
                assert files[0].read_bytes() == files[1].read_bytes()
            for layer, fields in enumerate(self.stores[0].plan.shape.spec()):
                for head in range(fields["kv_heads"]):
                    decoded = [store.decode(layer, seq, head) for store in self.stores]
                    for ours, theirs in zip(*decoded, strict=True):
                        assert ours.tobytes() == theirs.tobytes()


def stats(store: kvrs.KVStore) -> dict[str, Any]:
    fields = store.stats().to_dict()
    del fields["huge_pages"]
    return fields


def feed(both: Both, rng: np.random.Generator, seqs: list[int], tokens: int, **keywords: Any) -> None:
    for layer in range(2):
        q, k, v = (tensors(rng, len(seqs), tokens, heads) for heads in (4, 2, 2))
        both.extend(layer, q, k, v, seqs, **keywords)


def filled(
    rng: np.random.Generator, codec: Any = None, rows: int = 2, tokens: int = 90
) -> tuple[Both, list[int]]:
    both = Both(plan(codec))
    seqs = both.new(rows)
    for layer in range(2):
        both.append(layer, tensors(rng, rows, tokens), tensors(rng, rows, tokens), seqs)
    return both, seqs


def test_the_store_says_where_it_lies() -> None:
    store = kvrs.KVStore(plan(), device="emulated")
    assert store.device == "emulated"
    assert repr(store).endswith("device=emulated)")


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"{codec.name}{getattr(codec, 'bits', '')}")
def test_codes_are_the_cpus_to_the_bit_and_attention_is_near(
    codec: Any, rng: np.random.Generator, tmp_path: Path
) -> None:
    both, seqs = filled(rng, codec)
    feed(both, rng, seqs, 21)
    feed(both, rng, seqs, 1)
    q = tensors(rng, 2, 3, 4)
    both.attend(1, q, seqs)
    both.same(seqs, tmp_path)
    out = both.stores[0].attend(1, q, seqs)
    want, _ = expected(both.stores[1], 1, seqs[0], q[0])
    allowed = ERROR + (0.0 if codec == kvrs.Raw16() else DEVICE_DIGITS)
    assert np.abs(np.asarray(out)[0] - want).max() <= allowed * np.abs(want).max()


@pytest.mark.parametrize(
    "keywords",
    [{"causal": False}, {"scale": 0.3, "softcap": 5.0}, {"sink_logits": [0.0, 1.0, -1.0, 3.0]}],
    ids=str,
)
def test_ways_of_scoring_reach_the_kernels(keywords: Any, rng: np.random.Generator) -> None:
    both, seqs = filled(rng)
    both.attend(0, tensors(rng, 2, 2, 4), seqs, **keywords)


def test_a_sliding_window_and_masked_rows(rng: np.random.Generator, tmp_path: Path) -> None:
    both = Both(plan(fields={"sliding": 40}))
    seqs = both.new(2)
    mask = np.arange(70)[None] >= np.array([[0], [25]])
    feed(both, rng, seqs, 70, mask=mask)
    feed(both, rng, seqs, 2, mask=np.array([[True, True], [False, True]]))
    both.attend(0, tensors(rng, 2, 2, 4), seqs, mask=np.array([[False, True], [True, True]]))
    both.same(seqs, tmp_path)


def test_every_element_of_the_callers_output_is_written(rng: np.random.Generator) -> None:
    both, seqs = filled(rng)
    seqs = [seqs[0], *both.new(1)]
    for store in both.stores:
        out = np.full((2, 4, 3, 64), np.nan, np.float32)
        mask = np.array([[False, True, True], [True, True, False]])
        got, lse = store.attend(
            0, tensors(rng, 2, 3, 4), seqs, causal=False, mask=mask, out=out, return_lse=True
        )
        assert got is out
        assert np.isfinite(out).all()
        assert out[0, :, 1:].any()
        assert not out[0, :, 0].any()
        assert not out[1].any(), "a sequence without tokens gives zeros"
        assert np.isneginf(np.asarray(lse)[1]).all()


def test_tensors_of_torch_come_back_as_such_in_their_type(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    both = Both(plan())
    seqs = both.new(1)
    k = torch.from_numpy(tensors(rng, 1, 40)).bfloat16()
    q = torch.from_numpy(tensors(rng, 1, 40, 4)).bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
    outs = [store.extend(0, q, k, k, seqs) for store in both.stores]
    assert all(isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16 for out in outs)
    torch.testing.assert_close(outs[0], outs[1], atol=0.05, rtol=0.02)


def test_lives_of_sequences_are_the_same(rng: np.random.Generator, tmp_path: Path) -> None:
    both, seqs = filled(rng, rows=3)
    both.truncate(seqs[0], 61)
    both.drop_last(seqs[1], 3)
    both.remove(seqs[2], 20, 36)
    fork = both.fork(seqs[0])
    feed(both, rng, [seqs[0]], 20)
    feed(both, rng, [fork], 3)
    both.reorder(seqs[:2], [1, 1])
    seqs = [*both.select_rows([*seqs, fork], [3, 0, 2]), *both.new()]
    feed(both, rng, seqs, 2)
    both.keep(seqs[1], 0, [list(range(40, 60))] * 2)
    both.attend(0, tensors(rng, 4, 1, 4), seqs)
    both.same(seqs, tmp_path)
    both.free(seqs[0])
    both.reset()
    assert [store.stats().sequences for store in both.stores] == [0, 0]


def test_sequences_travel_between_the_cpu_and_the_device(rng: np.random.Generator, tmp_path: Path) -> None:
    both, seqs = filled(rng)
    for source, target in (both.stores, both.stores[::-1]):
        source.save(tmp_path / "sequence", seqs[0], compress="deflate")
        loaded = target.load(tmp_path / "sequence")
        for ours, theirs in zip(source.decode(1, seqs[0], 0), target.decode(1, loaded, 0), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_snapshots_and_prefixes_belong_to_their_store(rng: np.random.Generator, tmp_path: Path) -> None:
    both, seqs = filled(rng)
    device, cpu = both.stores
    snapshots = [store.snapshot(seqs[0]) for store in both.stores]
    rows = [store.new(2, from_=snapshot) for store, snapshot in zip(both.stores, snapshots, strict=True)]
    assert rows[0] == rows[1]
    for store, snapshot in ((cpu, snapshots[0]), (device, snapshots[1])):
        with pytest.raises(kvrs.KVError, match=r"^from_ is a snapshot of another store; allowed: "):
            store.new(from_=snapshot)
    with pytest.raises(kvrs.KVError, match=r"^from_ is a snapshot of another store; allowed: "):
        kvrs.KVStore(plan(), device="emulated").new(from_=snapshots[0])
    feed(both, rng, rows[0], 5)
    assert both.publish(seqs[1], list(range(90))) == 64
    found = [store.match(list(range(80))) for store in both.stores]
    assert [(snapshot.length, n) for snapshot, n in found] == [(64, 64)] * 2
    both.same([*seqs, *rows[0]], tmp_path)


POLICIES = [
    kvrs.SnapKV(48, window=16),
    kvrs.H2O(48),
    kvrs.TOVA(48),
    kvrs.KNorm(48),
    kvrs.CAOTE(kvrs.SnapKV(48, window=16)),
    kvrs.AdaKV(kvrs.SnapKV(48, window=16)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_policies_keep_the_same_tokens(policy: Any, rng: np.random.Generator, tmp_path: Path) -> None:
    both = Both(plan(evict=policy))
    seqs = both.new(2)
    both.begin_prompt(seqs)
    feed(both, rng, seqs, 70)
    feed(both, rng, seqs, 60)
    both.end_prompt(seqs)
    for seq in seqs:
        for layer in range(2):
            for head in range(2):
                kept = [store.kept_positions(seq, layer, head) for store in both.stores]
                np.testing.assert_array_equal(*kept)
                assert len(kept[0]) < 130
    counted = isinstance(policy, kvrs.H2O | kvrs.TOVA)
    both.same(seqs, tmp_path, statistics=not counted)
    feed(both, rng, seqs, 1)


def test_the_callers_own_scores_are_asked_for(rng: np.random.Generator, tmp_path: Path) -> None:
    def score(facts: kvrs.Facts) -> Any:
        return -np.asarray(facts.tokens, np.float32)

    both = Both(plan(evict=kvrs.Custom(score, budget=48)))
    seqs = both.new()
    feed(both, rng, seqs, 100)
    both.same(seqs, tmp_path)


def test_a_sequence_that_was_parked_on_the_host_goes_on(rng: np.random.Generator, tmp_path: Path) -> None:
    both, seqs = filled(rng)
    both.to_host(seqs[:1])
    assert {store.stats().bytes_parked > 0 for store in both.stores} == {True}
    feed(both, rng, seqs[1:], 20)
    both.to_device(seqs)
    feed(both, rng, seqs, 40)
    both.same(seqs, tmp_path)


def test_decoding_into_tensors(rng: np.random.Generator) -> None:
    both, seqs = filled(rng)
    outs = []
    for store in both.stores:
        k, v = (np.full((2, 2, 95, 64), np.nan, np.float16) for _ in range(2))
        assert store.decode_into(0, seqs, k, v) == [90, 90]
        outs.append((k, v))
    np.testing.assert_array_equal(outs[0], outs[1])


def test_what_is_refused_leaves_the_store_as_it_was(rng: np.random.Generator, tmp_path: Path) -> None:
    both, seqs = filled(rng)
    k = tensors(rng, 2, 5)
    bad = k.copy()
    bad[1, 0, 2, 3] = np.inf
    for store in both.stores:
        with pytest.raises(kvrs.KVError, match=r"^v at row 1, head 0, token 2 is inf"):
            store.append(0, k, bad, seqs)
        with pytest.raises(kvrs.DTypeError):
            store.append(0, k.astype(np.float16), k.astype(np.float16), seqs)
        with pytest.raises(TypeError):
            pickle.dumps(store)
    both.same(seqs, tmp_path)
    small = Both(plan(), capacity="1MiB")
    row = small.new()
    with pytest.raises(kvrs.CapacityError):
        small.stores[0].append(0, tensors(rng, 1, 20000), tensors(rng, 1, 20000), row)
    assert small.length(row[0]) == 0


def test_a_model_generates_the_same_text() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from kvrs.hf import KVCache
    from kvrs.hf.compat import CACHE_ARGUMENT

    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 97, (2, 30))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    settings = kvrs.Plan.for_model(
        model, keys=kvrs.TurboQuant(4), values=kvrs.TurboQuant(4), sinks=2, recent=8
    )
    texts, logits = [], []
    for device in ("emulated", "cpu"):
        cache = KVCache(model, settings, store=kvrs.KVStore(settings, device=device))
        done = model.generate(
            ids, attention_mask=mask, **{CACHE_ARGUMENT: cache}, max_new_tokens=6, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        texts.append(done.sequences.tolist())
        logits.append(torch.stack(done.logits))
    assert (logits[0][0] - logits[1][0]).abs().max() < 1e-3
    assert texts[0] == texts[1]
