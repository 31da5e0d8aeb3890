"""The tools that compile the kernels and hold them against the committed table."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kernels_cu.tools import archive, gate, occupancy, report, sass, toolkit
from kernels_cu.tools import compile as compiling

PTX = """.version 8.7
.target sm_90
.visible .entry first(
    .param .align 8 .b8 first_param_0[24]
)
.maxntid 128, 1, 1
.minnctapersm 4
{
    ret;
}
.visible .entry second(
)
{
    ret;
}
"""
LOG = """ptxas warning : Value of threads per SM for entry first is out of range
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     280 bytes stack frame, 488 bytes spill stores, 492 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 280 bytes cumulative stack size, 376 bytes cmem[0]
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 1 barriers, 512 bytes smem, 376 bytes cmem[0]
"""
LISTING = """
		Function : first
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;             /* 0x00000a00ff017b82 */
                                                                      /* 0x000fe20000000800 */
        /*0010*/              @!P0 LDG.E.128.CONSTANT R4, [R2.64] ;   /* 0x0 */
        /*0020*/                   LDG.E.NA.U8.CONSTANT R4, [R2.64] ; /* 0x0 */
        /*0030*/              @UP1 LDGSTS.E.BYPASS.128 [R9], [R2] ;   /* 0x0 */
        /*0040*/                   IDP.4A.S8.S8 R0, R4, R5, R0 ;      /* 0x0 */
        /*0050*/                   PRMT R7, R6, 0x5140, R7 ;          /* 0x0 */
		Function : second
        /*0000*/                   IMMA.16832.S8.S8 R8, R4, R6, R8 ;  /* 0x0 */
        /*0010*/                   HMMA.16816.F32.BF16 R8, R4, R6 ;   /* 0x0 */
        /*0020*/                   STL.64 [R1+0x10], R60 ;            /* 0x0 */
        /*0030*/                   LD.E R3, [R4.64] ;                 /* 0x0 */
        /*0040*/                   RED.E.ADD.F32.FTZ.RN [R4], R6 ;    /* 0x0 */
        /*0050*/                   REDG.E.ADD.64 [R4.64], R6 ;        /* 0x0 */
        /*0060*/                   DFMA R8, R4, R6, R8 ;              /* 0x0 */
"""


def row(**changes: int) -> gate.Row:
    """Return a row of the table that no fault is found with, changed."""
    instructions = sass.instructions(LISTING)["first"]
    kernel = asdict(report.Kernel(128, 4, registers=30, shared=512))
    return gate.row("sm_90", kernel, instructions) | changes


def test_the_report_has_bounds_registers_and_spills_of_each_kernel() -> None:
    found = report.kernels(PTX, LOG)
    assert found["first"] == report.Kernel(128, 4, registers=30, shared=512)
    assert found["second"] == report.Kernel(
        0, 0, registers=32, stack=280, spill_stores=488, spill_loads=492, shared=0
    )
    assert [*report.kernels(PTX)] == ["first", "second"]
    assert report.warnings(LOG) == [LOG.splitlines()[0]]


def test_instructions_are_counted_by_kind() -> None:
    found = sass.instructions(LISTING)
    first, second = sass.count(found["first"]), sass.count(found["second"])
    assert first["instructions"] == 6
    for kind in ("load128", "async128", "dot4", "permute", "narrow"):
        assert first[kind] == 1, kind
    for kind in ("mma_int8", "mma_half", "local", "generic", "float_atomic", "double"):
        assert second[kind] == 1, kind
        assert first[kind] == 0, kind


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared", "expected"),
    [
        ("sm_80", 128, 128, 0, (4, "registers")),
        ("sm_80", 128, 40, 39296, (4, "shared memory")),
        ("sm_90", 128, 79, 39296, (5, "shared memory")),
        ("sm_120", 128, 87, 39296, (2, "shared memory")),
        ("sm_80", 32, 20, 0, (32, "blocks")),
        ("sm_89", 1024, 64, 0, (1, "warps")),
        ("sm_90", 1024, 32, 0, (2, "warps")),
        ("sm_90", 256, 33, 0, (6, "registers")),
        ("sm_120", 1024, 255, 0, (0, "registers")),
    ],
)
def test_occupancy_is_what_nvidias_calculator_says(
    arch: str, threads: int, registers: int, shared: int, expected: tuple[int, str]
) -> None:
    assert occupancy.blocks(arch, threads, registers, shared) == expected


def test_a_kernel_like_its_row_passes_and_a_better_one_too() -> None:
    assert [*gate.faults(row(), row(), hot=True)] == []
    assert [*gate.faults(row(), row(spills=8, local=2, narrow=9, blocks=1, load128=0), hot=True)] == []
    assert [*gate.faults(row(registers=99), row(), hot=True)] == []


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"spills": 8}, "spills 8 bytes; allowed: 0 in a hot kernel"),
        ({"local": 2}, "has 2 local-memory instructions; allowed: 0 in a hot kernel"),
        ({"shared": 50000}, "takes 50000 bytes of shared memory; allowed: 49152"),
        ({"float_atomic": 1}, "adds floats by 1 atomics; allowed: 0, their order is not fixed"),
        ({"blocks": 15}, "blocks: 15, was 16"),
        ({"load128": 0}, "load128: 0, was 1"),
        ({"dot4": 0}, "dot4: 0, was 1"),
        ({"narrow": 2}, "narrow: 2, was 1"),
        ({"double": 1}, "double: 1, was 0"),
        ({"instructions": 7}, "instructions: 7, was 6"),
    ],
)
def test_a_kernel_that_gets_worse_fails_with_what_it_had_and_has(changes: gate.Row, line: str) -> None:
    assert line in [*gate.faults(row(**changes), row(), hot=True)]


def test_a_cold_kernel_may_spill_but_not_more_than_it_did() -> None:
    assert [*gate.faults(row(spills=8), row(spills=8), hot=False)] == []
    assert [*gate.faults(row(spills=12), row(spills=8), hot=False)] == ["spills: 12, was 8"]


def test_architectures_that_are_reported_do_not_fail_the_gate() -> None:
    worse = {"first": {"sm_100": row(blocks=1), "sm_90": row()}}
    table = {"kernels": {"first": {"sm_100": row(), "sm_90": row()}}, "cold": []}
    assert gate.check(worse, table) == ([], ["first on sm_100: blocks: 1, was 16"])
    failed, _ = gate.check({"first": {"sm_90": row(blocks=1)}}, table)
    assert failed == ["first on sm_90: blocks: 1, was 16"]


def test_new_and_vanished_kernels_fail_until_the_table_is_written_again() -> None:
    table = {"kernels": {"old": {"sm_90": row()}}, "cold": []}
    failed, _ = gate.check({"new": {"sm_90": row()}}, table)
    assert failed == [
        "new on sm_90: is not in the table; --update puts it there",
        "old: in the table, not compiled; --update takes it out",
    ]


def test_the_table_is_written_with_one_line_for_each_kernel_and_architecture() -> None:
    rows = {"first": {"sm_80": row(), "sm_90": row(blocks=1)}}
    text = gate.text(rows, ["first"])
    assert json.loads(text)["kernels"] == rows
    assert json.loads(text)["cold"] == ["first"]
    assert sum("sm_" in line for line in text.splitlines()) == 2


def read_archive(packed: bytes) -> tuple[list[str], dict[tuple[str, str], bytes]]:
    """Return the lines of an archive's index, and the code in it, by an own reading of the format."""
    assert packed[:8] == b"KVCUDA01"
    length = int.from_bytes(packed[8:12], "little")
    lines = packed[12 : 12 + length].decode().splitlines()
    parts = packed[12 + length :]
    code = {}
    for line in lines:
        if line.startswith("module "):
            _, file, target, at, size, whole, _ = line.split(" ")
            code[file, target] = zlib.decompress(parts[int(at) : int(at) + int(size)], -15)
            assert len(code[file, target]) == int(whole)
    return lines, code


def test_the_archive_holds_every_part_by_file_and_target() -> None:
    parts = [
        archive.Part("a", "sm_80", b"x" * 1000, ("k", "l")),
        archive.Part("a", "compute_120", b"y" * 10, ("k",)),
    ]
    lines, code = read_archive(archive.pack(parts, "NVRTC 12.8.93", "0123456789abcdef"))
    assert lines[:2] == ["source 0123456789abcdef", "compiler NVRTC 12.8.93"]
    assert lines[2].endswith(" 1000 k,l")
    assert code == {("a", "sm_80"): b"x" * 1000, ("a", "compute_120"): b"y" * 10}


def test_the_hash_of_the_sources_changes_with_every_name_and_byte(tmp_path: Path) -> None:
    (tmp_path / "include" / "kvrs").mkdir(parents=True)
    (tmp_path / "a.cu").write_text("a")
    assert archive.source_hash(tmp_path) == fnv(b"a.cu\0a\0")
    (tmp_path / "include" / "kvrs" / "a.cuh").write_text("b")
    (tmp_path / "z.cu").write_text("c")
    (tmp_path / "note.txt").write_text("not a source")
    assert archive.source_hash(tmp_path) == fnv(b"a.cu\0a\0z.cu\0c\0a.cuh\0b\0")


def fnv(data: bytes) -> str:
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


def folder_of_sources(folder: Path) -> Path:
    (folder / "include" / "kvrs").mkdir(parents=True)
    (folder / "include" / "kvrs" / "a.cuh").write_text("// header")
    for name in ("one", "two"):
        (folder / f"{name}.cu").write_text(f"// {name}")
    return folder


def keys(folder: Path) -> dict[tuple[str, str], str]:
    made = compiling.jobs(folder, Path("nvidia"), Path("out"))
    return {(job.source.stem, job.target): job.key for job in made}


def test_what_has_not_changed_is_not_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of_sources(tmp_path)
    before = keys(folder)
    assert len(set(before.values())) == 2 * len(compiling.TARGETS)
    (folder / "one.cu").write_text("// one, changed")
    changed = {place for place, key in keys(folder).items() if key != before[place]}
    assert changed == {("one", target) for target in compiling.TARGETS}
    (folder / "include" / "kvrs" / "a.cuh").write_text("// header, changed")
    assert not set(keys(folder).values()) & set(before.values())
    before = keys(folder)
    monkeypatch.setattr(toolkit, "COMPILER", ("nvidia-cuda-nvrtc-cu12==12.9.0",))
    assert not set(keys(folder).values()) & set(before.values())


def test_results_of_kernel_files_that_are_gone_are_removed(tmp_path: Path) -> None:
    sources, out = folder_of_sources(tmp_path / "sources"), tmp_path / "out"
    out.mkdir()
    todo = compiling.jobs(sources, Path("nvidia"), out, ("sm_80",))
    for name in ("one.sm_80.cubin", "one.sm_80.json", "gone.sm_80.cubin", "gone.sm_80.json"):
        (out / name).write_text("")
    compiling.remove_others(out, todo)
    assert sorted(path.name for path in out.iterdir()) == ["one.sm_80.cubin", "one.sm_80.json"]


def test_the_kernels_that_try_single_operations_go_to_their_own_folder(tmp_path: Path) -> None:
    trials = toolkit.SOURCES / compiling.TRIALS
    made = compiling.jobs_of([trials], toolkit.SOURCES / "include", Path("nvidia"), tmp_path)
    assert [job.code_path.name.split(".")[:2] for job in made] == [
        ["intrinsics", target] for target in compiling.TARGETS
    ]
    assert trials not in {job.source for job in compiling.jobs(toolkit.SOURCES, Path("nvidia"), tmp_path)}
    assert "KV_KERNEL(try_dp4a" in trials.read_text()


def test_wheels_that_are_there_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str], **_: Any) -> Any:
        calls.append(command)
        return type("Done", (), {"returncode": 1})()

    monkeypatch.setattr(toolkit.subprocess, "run", run)
    (tmp_path / "a_b-1.0.dist-info").mkdir()
    assert toolkit.fetch(("a-b==1.0",), tmp_path) == tmp_path / "nvidia"
    assert calls == []
    with pytest.raises(SystemExit, match=r"a-b==1\.1 could not be fetched"):
        toolkit.fetch(("a-b==1.1",), tmp_path)
    assert calls[0][-1] == "a-b==1.1"
    assert "--no-deps" in calls[0]


def test_the_committed_table_is_of_the_pinned_compiler_and_all_architectures() -> None:
    if not gate.TABLE.is_file():
        pytest.fail(f"{gate.TABLE} is missing; `python -m kernels_cu.tools.gate --update` writes it")
    table = json.loads(gate.TABLE.read_text())
    assert table["compiler"] == toolkit.COMPILER[0]
    for name, by_arch in table["kernels"].items():
        assert [*by_arch] == [*occupancy.MULTIPROCESSORS], name
        for arch, committed in by_arch.items():
            hot = name not in table["cold"]
            wrong = [*gate.faults(committed, committed, hot)]
            assert arch not in gate.GATED or not wrong, (name, arch, wrong)
