"""Sequences on disk: saved, loaded, killed in the middle, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import kvrs
import numpy as np
import pytest
from conftest import contents, make_store, tensors
from kvrs import cli


def feed(store: kvrs.KVStore, seq: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Feed random tokens to both layers and return what `extend` gave."""
    rng, outs = np.random.default_rng(seed), []
    for layer in range(2):
        q, k, v = (tensors(rng, 1, tokens, heads) for heads in (4, 2, 2))
        outs.append(np.asarray(store.extend(layer, q, k, v, [seq])))
    return outs


def filled(codec: Any, tokens: int, **settings: Any) -> tuple[kvrs.KVStore, int]:
    store = make_store(codec, **settings)
    (seq,) = store.new()
    if tokens:
        feed(store, seq, tokens, 1)
    return store, seq


def held(store: kvrs.KVStore, seq: int) -> list[Any]:
    """Return all that one sequence holds."""
    return [value for name, value in contents(store, [seq]).items() if name != "stats"]


@pytest.mark.parametrize("compress", [None, "deflate"])
@pytest.mark.parametrize("evict", [None, kvrs.SnapKV(160), kvrs.H2O(160)], ids=["all", "snapkv", "h2o"])
@pytest.mark.parametrize("tokens", [0, 1, 284])
def test_case_b39_a_loaded_sequence_goes_on_as_the_saved_one(
    tokens: int, evict: Any, compress: str | None, tmp_path: Path
) -> None:
    settings = {"recent": 128, "evict": evict}
    store, seq = filled(kvrs.TurboQuant(4), tokens, **settings)
    other = make_store(kvrs.TurboQuant(4), **settings)
    feed(other, other.new()[0], 50, 8)
    store.save(tmp_path / "one", seq, compress)
    copy = other.load(tmp_path / "one")
    assert held(other, copy) == held(store, seq)
    assert other.length(copy) == tokens
    for step in range(50):
        assert all(map(np.array_equal, feed(store, seq, 1, step), feed(other, copy, 1, step)))
    assert held(other, copy) == held(store, seq)
    assert [head.kept for head in other.selection_report(copy)] == [
        head.kept for head in store.selection_report(seq)
    ]
    other.check()


def test_case_b39_a_missing_file_raises_and_changes_nothing(tmp_path: Path) -> None:
    store, seq = filled(kvrs.TurboQuant(4), 284)
    before = contents(store, [seq])
    with pytest.raises(kvrs.FormatError, match="nowhere") as caught:
        store.load(tmp_path / "nowhere")
    assert isinstance(caught.value, OSError)
    assert contents(store, [seq]) == before


def test_case_b31_a_saved_sequence_of_twenty_pages_is_loaded_between_others(tmp_path: Path) -> None:
    store = make_store(kvrs.TurboQuant(4))
    seqs = store.new(12)
    for seq in seqs:
        feed(store, seq, 4 * 64, seq)
    (long,) = store.new()
    feed(store, long, 20 * 64, 77)
    store.save(tmp_path / "long", long)
    before, whole = {seq: held(store, seq) for seq in seqs[1::2]}, held(store, long)
    for seq in [*seqs[::2], long]:
        store.free(seq)
    assert held(store, store.load(tmp_path / "long")) == whole
    assert {seq: held(store, seq) for seq in seqs[1::2]} == before
    store.check()


def test_another_number_of_threads_loads_the_same(codec: Any, tmp_path: Path) -> None:
    store, seq = filled(codec, 500)
    store.save(tmp_path / "one", seq)
    threads = kvrs.get_num_threads()
    try:
        kvrs.set_num_threads(1 if threads > 1 else 2)
        other = make_store(codec)
        copy = other.load(tmp_path / "one")
        assert held(other, copy) == held(store, seq)
        assert all(map(np.array_equal, feed(store, seq, 60, 3), feed(other, copy, 60, 3)))
    finally:
        kvrs.set_num_threads(threads)


def test_forks_of_a_loaded_sequence_and_saves_of_a_fork(codec: Any, tmp_path: Path) -> None:
    store, seq = filled(codec, 203)
    fork = store.fork(seq)
    store.save(tmp_path / "fork", fork)
    copy = store.load(tmp_path / "fork")
    store.free(seq)
    outs = [feed(store, one, 40, 5) for one in (fork, copy, store.fork(copy))]
    assert all(np.array_equal(a, b) for out in outs[1:] for a, b in zip(outs[0], out, strict=True))


@pytest.mark.parametrize("cut", [0, 1, 8, 64, 0.5, -8, -1])
@pytest.mark.parametrize("compress", [None, "deflate"])
def test_case_b41_a_cut_file_is_an_error(cut: float, compress: str | None, tmp_path: Path) -> None:
    store, seq = filled(kvrs.TurboQuant(4), 284)
    path = tmp_path / "one"
    store.save(path, seq, compress)
    whole = path.read_bytes()
    before = contents(store, [seq])
    path.write_bytes(whole[: int(len(whole) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(kvrs.FormatError, match=str(path)):
        store.load(path)
    assert contents(store, [seq]) == before


SAVER = """
import sys, numpy as np, kvrs
sys.path.insert(0, sys.argv[2])
from test_save import filled
store, seq = filled(kvrs.Raw16(), 3000)
(other,) = store.new()
print("ready", flush=True)
while True:
    store.save(sys.argv[1], seq)
    store.save(sys.argv[1], other)
"""


def test_case_b41_a_killed_save_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    path, store = tmp_path / "one", make_store(kvrs.Raw16())
    chance, lengths = random.Random(3), []
    for _ in range(20):
        command = [sys.executable, "-c", SAVER, str(path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            assert saver.stdout.readline() == "ready\n"
            time.sleep(chance.random() * 0.05 + 0.001)
            saver.send_signal(signal.SIGKILL)
        if path.exists():
            lengths.append(store.length(store.load(path)))
    assert lengths
    assert set(lengths) <= {0, 3000}
    left = [file.name for file in tmp_path.iterdir() if file != path]
    assert left in ([], ["one.0.tmp"]), "one temporary file at most, which the next save uses again"
    saver_store, seq = filled(kvrs.Raw16(), 10)
    saver_store.save(path, seq)
    assert [file.name for file in tmp_path.iterdir()] == ["one"]


def test_case_b41_a_full_disk_keeps_the_old_file(tmp_path: Path) -> None:
    store, seq = filled(kvrs.Raw16(), 500)
    (small,) = store.new()
    path = tmp_path / "one"
    store.save(path, small)
    old = path.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 1000, 100_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            with pytest.raises(kvrs.FormatError, match=f"writing {path}"):
                store.save(path, seq)
            assert path.read_bytes() == old
            assert [file.name for file in tmp_path.iterdir()] == ["one"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    feed(store, seq, 5, 2)
    store.save(path, seq)
    assert held(store, store.load(path)) == held(store, seq)


def test_case_b41_saves_while_other_threads_load_never_mix(tmp_path: Path) -> None:
    store, first = filled(kvrs.TurboQuant(4), 400)
    second = store.fork(first)
    feed(store, second, 300, 4)
    wanted = {store.length(seq): held(store, seq) for seq in (first, second)}
    path, stop, faults = tmp_path / "one", threading.Event(), []
    store.save(path, first)

    def save(seq: int) -> None:
        while not stop.is_set():
            store.save(path, seq)

    def load() -> None:
        for _ in range(40):
            copy = store.load(path)
            if held(store, copy) != wanted[store.length(copy)]:
                faults.append(copy)
            store.free(copy)

    savers = [threading.Thread(target=save, args=(seq,)) for seq in (first, second)]
    loaders = [threading.Thread(target=load) for _ in range(2)]
    for thread in savers + loaders:
        thread.start()
    for thread in loaders:
        thread.join()
    stop.set()
    for thread in savers:
        thread.join()
    assert not faults
    assert [file.name for file in tmp_path.iterdir()] == ["one"]
    store.check()


def test_a_folder_a_read_only_folder_and_no_folder_are_errors_that_name_the_path(tmp_path: Path) -> None:
    store, seq = filled(kvrs.Raw16(), 20)
    for path in (tmp_path, tmp_path / "no" / "one"):
        with pytest.raises(kvrs.FormatError, match=str(path)):
            store.save(path, seq)
        with pytest.raises(kvrs.FormatError, match=str(path)):
            store.load(path)
    if os.geteuid() != 0:
        tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
        with pytest.raises(kvrs.FormatError, match=str(tmp_path)):
            store.save(tmp_path / "one", seq)
        tmp_path.chmod(stat.S_IRWXU)
    assert list(tmp_path.iterdir()) == []


def with_field(path: Path, name: str, value: str) -> None:
    """Change a field of a file's metadata."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"][name] = value
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def test_files_of_another_plan_version_or_kind_name_the_field_and_both_values(tmp_path: Path) -> None:
    store, seq = filled(kvrs.TurboQuant(4), 100)
    other = make_store(kvrs.TurboQuant(3))
    path = tmp_path / "one"
    store.save(path, seq)
    with pytest.raises(kvrs.FormatError) as caught:
        other.load(path)
    assert store.plan.hash in str(caught.value)
    assert other.plan.hash in str(caught.value)
    with_field(path, "version", "2")
    with pytest.raises(kvrs.FormatError, match="version: found 2; expected 1"):
        store.load(path)
    store.plan.save(path)
    with pytest.raises(kvrs.FormatError, match="format: found kvrs-plan; expected kvrs-sequence"):
        store.load(path)
    path.write_bytes(os.urandom(4000))
    with pytest.raises(kvrs.FormatError, match=str(path)):
        store.load(path)
    assert other.stats().sequences == 0


def test_bad_arguments_of_save_and_load_name_them(tmp_path: Path) -> None:
    store, seq = filled(kvrs.Raw16(), 20)
    with pytest.raises(kvrs.ArgumentError, match='compress is "zip"; allowed: None or "deflate"'):
        store.save(tmp_path / "one", seq, "zip")
    with pytest.raises(TypeError, match="compress is 3"):
        store.save(tmp_path / "one", seq, 3)  # type: ignore[arg-type]
    with pytest.raises(kvrs.SequenceError, match="999"):
        store.save(tmp_path / "one", 999)
    with pytest.raises(TypeError):
        store.save(7, seq)  # type: ignore[arg-type]
    with pytest.raises(kvrs.FormatError):
        store.load(tmp_path / "one\0two")
    store.begin_prompt([seq])
    with pytest.raises(kvrs.SequenceError, match="whose prompt is open"):
        store.save(tmp_path / "one", seq)
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_that_a_file_does_not_fit_is_a_capacity_error(tmp_path: Path) -> None:
    store, seq = filled(kvrs.Raw16(), 3000)
    store.save(tmp_path / "one", seq)
    small = make_store(kvrs.Raw16(), capacity="1MiB")
    with pytest.raises(kvrs.CapacityError, match="loading"):
        small.load(tmp_path / "one")
    assert small.stats().bytes_total == 0


def test_deflate_makes_smooth_rows_smaller_and_loses_nothing(tmp_path: Path) -> None:
    store = make_store(kvrs.Raw16())
    (seq,) = store.new()
    wave = np.sin(np.arange(2000) / 50).astype(np.float16).astype(np.float32)
    k = np.broadcast_to(wave[None, None, :, None], (1, 2, 2000, 64))
    for layer in range(2):
        store.append(layer, k, k, [seq])
    store.save(tmp_path / "plain", seq)
    store.save(tmp_path / "cold", seq, compress="deflate")
    plain, cold = ((tmp_path / name).stat().st_size for name in ("plain", "cold"))
    assert plain / 2 < cold < plain * 0.6
    assert held(store, store.load(tmp_path / "cold")) == held(store, seq)


def test_files_are_safetensors_and_inspect_tells_what_is_in_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors import safe_open

    store, seq = filled(kvrs.TurboQuant(4), 284)
    path = tmp_path / "one"
    store.save(path, seq)
    with safe_open(path, framework="np") as file:
        fields = file.metadata()
        names = set(file.keys())
        layers = file.get_tensor("layers")
    assert (fields["plan"], fields["tokens"]) == (store.plan.hash, "284")
    assert {"layers", "heads", "entries.0.0", "pages.1.1.1", "checksums"} <= names
    assert layers[:, 0].tolist() == [284, 284]
    found = kvrs.inspect(path)
    assert (found.plan, found.tokens, found.start, found.compress) == (store.plan.hash, 284, 0, "none")
    assert found.bytes == path.stat().st_size
    assert 0 < sum(found.sections.values()) < found.bytes
    assert cli.main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out
    assert store.plan.hash in out
    assert "284 tokens in 2 layers" in out
    assert "pages.1" in out
    store.plan.save(path)
    assert cli.main(["inspect", str(path)]) == 0
    assert store.plan.hash in capsys.readouterr().out
    path.write_bytes(b"nothing of the kind")
    assert cli.main(["inspect", str(path)]) == 2
    assert "header" in capsys.readouterr().err
