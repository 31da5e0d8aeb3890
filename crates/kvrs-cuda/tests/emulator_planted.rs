//! Every planted bug is caught: by the emulator's own checks, by a wrong result in some order of threads, or by a
//! sanitizer when the kernels are compiled with it (`KVRS_EMU_SANITIZE`), which ends the process.
#![cfg(feature = "emulate")]
#![allow(clippy::unwrap_used, reason = "helpers of an integration test are not inside #[test] functions")]

mod emulator_common;

use emulator_common::{Array, launch};
use kvrs_core::Result;
use kvrs_cuda::Emulator;

#[repr(C)]
struct Planted {
    out: u64,
    input: u64,
    bytes: u32,
}

const INPUT_WORDS: usize = 256;

/// The first 128 results of a kernel on `seed`.
fn run(name: &'static str, threads: u32, seed: u64) -> Result<Vec<u32>> {
    let emulator = Emulator::new(seed);
    let words: Vec<u32> = (0..INPUT_WORDS as u32).collect();
    let (input, out) = (Array::of(&emulator, &words), Array::<u32>::new(&emulator, 128));
    let bytes = match name {
        "planted_division_by_zero" => 0,
        "planted_full_stack" => 10_000,
        _ => 4 * INPUT_WORDS as u32,
    };
    let blocks = if name == "planted_race_of_blocks" { 4 } else { 1 };
    launch(
        &emulator,
        name,
        threads,
        [blocks, 1, 1],
        &Planted { out: out.address, input: input.address, bytes },
    )?;
    Ok(out.read())
}

/// The emulator's message for a kernel that it stops, on every seed.
fn message(name: &'static str, threads: u32) -> String {
    let messages = [0, 1, 2, 3].map(|seed| run(name, threads, seed).unwrap_err().to_string());
    for message in &messages {
        assert!(message.contains(&format!("kernel {name}, block (0, 0, 0), thread ")), "{message}");
    }
    messages[0].clone()
}

/// Runs one kernel in a process of its own, which a sanitizer must end, and gives what it wrote.
#[cfg(any(kvrs_emu_address, kvrs_emu_thread, kvrs_emu_undefined))]
fn report(name: &str, threads: u32) -> String {
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "one_planted_kernel", "--ignored", "--nocapture", "--test-threads=1"])
        .env("KVRS_PLANTED", name)
        .env("KVRS_PLANTED_THREADS", threads.to_string())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{name} was not caught:\n{text}");
    text
}

#[test]
#[ignore = "a child of the other tests"]
fn one_planted_kernel() {
    let name: &'static str = std::env::var("KVRS_PLANTED").unwrap().leak();
    let threads = std::env::var("KVRS_PLANTED_THREADS").unwrap().parse().unwrap();
    if name == "planted_read_after_free" {
        read_after_free();
    } else {
        run(name, threads, 1).unwrap();
    }
}

fn read_after_free() -> Vec<u32> {
    let emulator = Emulator::new(0);
    let stale = Array::of(&emulator, &[7u32; 32]).address;
    let out = Array::<u32>::new(&emulator, 32);
    launch(
        &emulator,
        "planted_read_after_free",
        32,
        [1; 3],
        &Planted { out: out.address, input: stale, bytes: 128 },
    )
    .unwrap();
    out.read()
}

#[test]
fn misuse_of_barriers_is_an_error() {
    let text = message("planted_divergent_barrier", 64);
    assert!(text.contains("planted.cu:") && text.contains("other threads wait in another barrier"), "{text}");
    let text = message("planted_exit_before_barrier", 128);
    assert!(text.contains("__syncthreads") && text.contains("exit"), "{text}");
    let text = message("planted_deadlock", 64);
    assert!(text.contains("no thread can go on; threads 0..15 wait in __syncwarp at line"), "{text}");
    assert!(text.contains("threads 16..31 wait in __syncthreads"), "{text}");
}

#[test]
fn misuse_of_a_collective_is_an_error() {
    let text = message("planted_lane_outside_its_mask", 32);
    let or = text.contains("reads lane 31, which is not in mask");
    assert!(text.contains("lane 31 calls it, and is not in mask 7fffffff") || or, "{text}");
    let text = message("planted_source_outside_the_mask", 32);
    assert!(text.contains("which is not in mask 0000ffff"), "{text}");
    let text = message("planted_lane_that_never_comes", 32);
    assert!(text.contains("lane 7 exits without coming") || text.contains("lanes 00000080"), "{text}");
    let text = message("planted_divergent_collective", 32);
    assert!(text.contains("of the same mask ffffffff wait in __shfl_xor_sync at line"), "{text}");
    let text = message("planted_width_of_12", 32);
    assert!(text.contains("width 12; allowed: 1, 2, 4, 8, 16, 32"), "{text}");
}

#[test]
fn misaligned_access_and_too_much_shared_memory_are_errors() {
    let text = message("planted_misaligned_load", 32);
    assert!(text.contains("planted.cu:") && text.contains("is not aligned to 16 bytes"), "{text}");
    let text = message("planted_misaligned_matrix", 32);
    assert!(text.contains("ldmatrix.x4") && text.contains("is not aligned to 16 bytes"), "{text}");
    let text = message("planted_too_much_shared_memory", 32);
    assert!(text.contains("49156 bytes of shared memory; allowed: 49152"), "{text}");
}

#[test]
fn an_asynchronous_copy_that_nobody_waits_for_is_an_error() {
    let text = message("planted_copy_never_waited_for", 32);
    assert!(text.contains("1 cp.async were not waited for"), "{text}");
}

#[test]
fn after_an_error_the_next_kernel_runs() {
    for _ in 0..10 {
        message("planted_deadlock", 64);
        message("planted_copy_never_waited_for", 32);
        assert_eq!(run("emu_halves", 32, 0).map(|out| out[0]), Ok(9));
    }
}

#[cfg(not(any(kvrs_emu_address, kvrs_emu_thread, kvrs_emu_undefined)))]
mod plain {
    use super::*;

    /// Results over seeds of a kernel whose bug shows in some orders of threads.
    fn wrong(name: &'static str, threads: u32, expected: impl Fn(u32) -> u32) -> usize {
        let is_wrong = |seed: &u64| {
            let out = run(name, threads, *seed).unwrap();
            (0..threads).any(|t| out[t as usize] != expected(t))
        };
        (1..=20).filter(is_wrong).count()
    }

    #[test]
    fn a_missing_barrier_gives_wrong_results_in_most_orders() {
        assert!(wrong("planted_missing_barrier", 128, |t| 127 - t) >= 15);
        let sum = |t: u32| 4 * (127 - t) + 6;
        assert!(wrong("planted_missing_second_barrier", 128, sum) >= 15);
        assert!(wrong("planted_copy_read_without_barrier", 64, |t| 4 * (63 - t)) >= 15);
    }

    #[test]
    fn what_was_never_written_or_has_not_landed_is_no_number() {
        for seed in 0..4 {
            assert_eq!(run("planted_unwritten_shared_memory", 32, seed).unwrap()[30..32], [30, u32::MAX]);
            assert_eq!(run("planted_copy_read_before_its_wait", 32, seed).unwrap()[..32], [u32::MAX; 32]);
        }
    }

    #[test]
    fn freed_memory_is_no_number() {
        assert_eq!(read_after_free(), vec![u32::MAX; 32]);
    }

    #[test]
    fn a_read_behind_a_page_gives_no_number_and_a_write_is_an_error() {
        let sums = run("planted_read_behind_a_page", 32, 1).unwrap();
        let sum = |t: u32| (0..INPUT_WORDS as u32).filter(|i| i % 32 == t).sum::<u32>();
        assert_eq!(sums[0], sum(0).wrapping_add(u32::MAX));
        assert_eq!(sums[1], sum(1));
        let text = run("planted_write_behind_a_page", 32, 1).unwrap_err().to_string();
        assert!(
            text.contains("kernel planted_write_behind_a_page wrote outside of an allocation of 1024 bytes"),
            "{text}"
        );
    }

    #[test]
    fn faults_are_errors() {
        let text = message("planted_null", 32);
        assert!(text.contains("thread 5: fault: null was read or written"), "{text}");
        let text = message("planted_misaligned_store", 32);
        assert!(
            text.contains("fault: null was read or written, or memory through a misaligned pointer"),
            "{text}"
        );
        let text = message("planted_full_stack", 32);
        assert!(text.contains("the stack of the thread is full"), "{text}");
        let text = message("planted_division_by_zero", 32);
        assert!(text.contains("an integer was divided by zero"), "{text}");
    }
}

#[cfg(kvrs_emu_address)]
#[test]
fn address_sanitizer_reports_every_access_outside_of_memory() {
    let report_of = |name, kind: &str| {
        let text = report(name, 32);
        assert!(
            text.contains("AddressSanitizer") && text.contains(kind) && text.contains("planted.cu"),
            "{name}: {text}"
        );
    };
    report_of("planted_read_behind_a_page", "heap-buffer-overflow");
    report_of("planted_write_behind_a_page", "heap-buffer-overflow");
    report_of("planted_read_after_free", "heap-use-after-free");
    report_of("planted_copy_read_before_its_wait", "use-after-poison");
}

#[cfg(kvrs_emu_undefined)]
#[test]
fn undefined_behaviour_sanitizer_reports_indices_and_alignment() {
    let report_of = |name, kind: &str| {
        let text = report(name, 32);
        assert!(
            text.contains("runtime error") && text.contains(kind) && text.contains("planted.cu"),
            "{name}: {text}"
        );
    };
    report_of("planted_index_outside_shared_memory", "out of bounds");
    report_of("planted_misaligned_store", "misaligned address");
    report_of("planted_null", "null pointer");
    report_of("planted_division_by_zero", "division by zero");
}

#[cfg(kvrs_emu_thread)]
#[test]
fn thread_sanitizer_reports_every_race() {
    for (name, threads) in [
        ("planted_missing_barrier", 128),
        ("planted_missing_second_barrier", 128),
        ("planted_missing_syncwarp", 32),
        ("planted_race_of_blocks", 32),
        ("planted_copy_read_without_barrier", 64),
    ] {
        let text = report(name, threads);
        assert!(text.contains("ThreadSanitizer: data race") && text.contains("planted.cu"), "{name}: {text}");
    }
}

#[cfg(not(any(kvrs_emu_address, kvrs_emu_thread, kvrs_emu_undefined)))]
#[test]
fn bugs_that_only_sanitizers_see_are_left_to_them() {
    let right = (0..32).map(|t| 2 * (31 - t)).collect::<Vec<u32>>();
    assert_eq!(run("planted_missing_syncwarp", 32, 1).unwrap()[..32], right);
    println!("planted_missing_syncwarp: only ThreadSanitizer catches it (make sanitize-emu)");
}
