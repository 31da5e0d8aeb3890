"""Generating with an assistant on packed pages, where tokens are taken back after most steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import kvrs  # noqa: E402
from test_hf import batch, llama  # noqa: E402
from test_hf_beams import generate, packed  # noqa: E402


def assistant() -> Any:
    """Return a model that often guesses what `llama` says, and often not."""
    model = llama()
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Keep torch's threads, which spin while they wait, out of the way of tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("evict", [None, kvrs.SnapKV(budget=48, window=8)], ids=["all", "snapkv"])
@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_assisted_decoding_on_a_packed_cache_is_finite_and_gives_the_same_text_twice(
    sample: bool, evict: Any
) -> None:
    model, inputs, helper = llama(), batch([90]), assistant()
    options = {
        "assistant_model": helper,
        "do_sample": sample,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    cropped: list[int] = []
    runs = []
    for _ in range(2):
        cache = packed(model, evict=evict)
        crop = cache.crop
        cache.crop = lambda n, crop=crop: (cropped.append(n), crop(n))[1]
        runs.append(generate(model, inputs, cache, **options))
        assert cache.store.length(cache.seqs[0]) == runs[-1].sequences.shape[1] - 1
        assert cache.store.stats().tokens_encoded > 0
        cache.store.check()
    assert all(bool(torch.isfinite(step).all()) for run in runs for step in run.logits)
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    assert runs[0].sequences.shape[1] == 90 + 24
    assert min(cropped) < 0, "guesses were taken back"
