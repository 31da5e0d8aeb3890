"""Long use: memory that stays flat over rounds of everything, and memory that the system refuses.

`KVRS_SOAK_ROUNDS` says how many rounds there are (120).
"""

from __future__ import annotations

import os

from test_memory import needs_proc, run

ROUNDS = int(os.environ.get("KVRS_SOAK_ROUNDS", "120"))


@needs_proc
def test_case_b29_rounds_of_append_evict_fork_save_load_and_free_leave_memory_flat() -> None:
    run(f"""
import ctypes, tempfile, os
rounds = {ROUNDS}
libc = ctypes.CDLL(None)
assert libc.prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE: no huge pages, which come by chance.
kvrs.set_num_threads(1)  # Each thread more has a heap of its own, which grows when the system lets it run.
folder = tempfile.TemporaryDirectory()
path = os.path.join(folder.name, "one")
shape = kvrs.ModelShape(2, query_heads=4, kv_heads=2, head_dim=64, sliding=[None, 100], rope=kvrs.Rope(1e4))
codec = kvrs.TurboQuant(4)
policies = [None, kvrs.SnapKV(96, window=16), kvrs.H2O(96), kvrs.TOVA(96)]
stores = [
    kvrs.KVStore(kvrs.Plan(shape, codec, codec, evict=policy and [policy, None], sinks=2, recent=16))
    for policy in policies
]
k = rng.standard_normal((2, 2, 260, 64), dtype=np.float32)
q = rng.standard_normal((2, 4, 260, 64), dtype=np.float32)

def step(store, seqs, n):
    rows = len(seqs)
    for layer in range(2):
        store.extend(layer, q[:rows, :, :n], k[:rows, :, :n], k[:rows, :, :n], seqs)

def round_of(store, seed):
    seqs = store.new(2)
    step(store, seqs, 200 + seed % 60)
    seqs.append(store.fork(seqs[0]))
    for _ in range(5):
        step(store, seqs[:2], 1)
    store.reorder(seqs, [1, 1, 0])
    seqs = store.select_rows(seqs, [2, 0])
    store.save(path, seqs[0], "deflate" if seed % 2 else None)
    seqs.append(store.load(path))
    snapshot = store.snapshot(seqs[1])
    seqs += store.new(from_=snapshot)
    store.remove(seqs[0], 20, 40)
    found = None
    try:
        ids = list(range(store.length(seqs[1])))
        found = store.match(ids) if store.publish(seqs[1], ids) else None
        store.truncate(seqs[0], 100)
    except kvrs.SequenceError:
        pass  # Policies that act as tokens come refuse both.
    wrong = lambda: store.append(7, k, k, seqs)
    for bad in (lambda: store.load(path + "x"), wrong, lambda: store.free(10**9)):
        try:
            bad()
            raise AssertionError("this must raise")
        except kvrs.KVError:
            pass
    for seq in seqs:
        store.free(seq)
    store.reset()
    del snapshot, found
    store.check()
    assert store.stats().bytes_total == 0

levels = []
for i in range(rounds):
    for store in stores:
        round_of(store, i)
    libc.malloc_trim(0)  # What the allocator keeps for the next round is not held by the store.
    levels.append(rss())
quarter = rounds // 4
early, late = (float(np.median(levels[n * quarter : (n + 1) * quarter])) for n in (1, 3))
print("resident", levels[0], "first,", early, "in the second quarter,", late, "in the last")
assert abs(late - early) <= 2**20, (early, late)
""")


@needs_proc
def test_memory_that_the_system_refuses_is_a_capacity_error_and_the_store_goes_on() -> None:
    run("""
kvrs.set_num_threads(1)
shape = kvrs.ModelShape(1, query_heads=4, kv_heads=4, head_dim=128)
store = kvrs.KVStore(kvrs.Plan(shape, kvrs.Raw16(), kvrs.Raw16()))
(seq,) = store.new()
k = rng.standard_normal((1, 4, 4096, 128), dtype=np.float32).astype(np.float16)
store.append(0, k, k, seq)
with open("/proc/self/status") as status:
    mapped = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (mapped + 100 * 2**20, resource.RLIM_INFINITY))
steps = 0
try:
    while True:
        store.append(0, k, k, seq)
        steps += 1
except kvrs.CapacityError as error:
    refused = error
assert isinstance(refused, MemoryError)
print(steps, "steps, then:", refused)
assert "bytes" in str(refused) and "the system refused" in str(refused)
assert 0 < steps < 20
assert store.length(seq) == 4096 * (steps + 1)
store.check()
store.truncate(seq, 4096)
store.append(0, k, k, seq)
assert np.array_equal(store.decode(0, seq, 0)[0][4096:], k[0, 0].astype(np.float32))
""")
