//! Numbered jobs on the threads of a backend, with a start that waits for nobody.
//!
//! A call often lasts less than a sleeping thread takes to wake up. The caller therefore works through the jobs at
//! once; other threads join when they are awake, and one that comes after the end finds nothing and leaves. The
//! caller waits only for threads that are in the middle of a job.

use crate::memory::Cpu;
use rayon::ThreadPool;
use std::any::Any;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};

/// Set in [`Batch::helpers`] once no more helpers may join.
const CLOSED: usize = 1 << (usize::BITS - 1);
/// Looks at the helpers before the caller sleeps until the last of them has left: some tens of microseconds.
const SPINS: usize = 2000;

/// The closure of a call, without its lifetime.
struct Work(*const (dyn Fn(usize) + Sync));

// SAFETY: the closure is `Sync`, so any thread may call it; `Batch` sees to it that it is alive then.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

/// A call's jobs, shared with its helpers.
struct Batch {
    work: Work,
    jobs: usize,
    next: AtomicUsize,
    /// Threads besides the caller that may be inside `work`, and [`CLOSED`].
    helpers: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

impl Cpu {
    /// Runs `work(0)` to `work(jobs - 1)`, handed out in this order to the calling thread and those of the backend;
    /// returns when all are done. Calls from inside a pool, and nested ones, are fine.
    ///
    /// # Panics
    /// With the first panic of a job, after which no further job is started.
    pub(crate) fn for_each_job(&self, jobs: usize, work: impl Fn(usize) + Sync) {
        let helpers = self.threads().min(jobs).saturating_sub(1);
        match if helpers > 0 { self.pool() } else { None } {
            Some(pool) => share(&pool, helpers, jobs, &work),
            None => (0..jobs).for_each(work),
        }
    }
}

fn share<'a>(pool: &ThreadPool, helpers: usize, jobs: usize, work: &'a (dyn Fn(usize) + Sync + 'a)) {
    type Borrowed<'b> = &'b (dyn Fn(usize) + Sync + 'b);
    // SAFETY: only the lifetime changes. `Batch::help` calls the closure between a successful `join` and its `leave`,
    // and `Closing` does not let this function end, by return or by panic, while a helper is between the two.
    let work = unsafe { std::mem::transmute::<Borrowed<'a>, Borrowed<'static>>(work) };
    let (next, helping, panic) = Default::default();
    let batch =
        Arc::new(Batch { work: Work(work), jobs, next, helpers: helping, panic, caller: thread::current() });
    let closing = Closing(&batch);
    for _ in 0..helpers {
        let batch = Arc::clone(&batch);
        pool.spawn(move || batch.help());
    }
    batch.run();
    drop(closing);
    let panic = batch.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(panic) = panic {
        resume_unwind(panic);
    }
}

impl Batch {
    /// What a helper does; it may come long after the end of the call.
    fn help(&self) {
        if self.join() {
            self.run();
            self.leave();
        }
    }

    fn join(&self) -> bool {
        let open = |n| (n & CLOSED == 0).then_some(n + 1);
        self.helpers.fetch_update(Ordering::Acquire, Ordering::Relaxed, open).is_ok()
    }

    fn leave(&self) {
        if self.helpers.fetch_sub(1, Ordering::Release) == CLOSED + 1 {
            self.caller.unpark();
        }
    }

    /// Takes jobs until none is left; keeps the first panic.
    fn run(&self) {
        // SAFETY: the caller runs this inside `share`, helpers between `join` and `leave`: the closure is alive.
        let work = unsafe { &*self.work.0 };
        let jobs = || {
            loop {
                let job = self.next.fetch_add(1, Ordering::Relaxed);
                if job >= self.jobs {
                    break;
                }
                work(job);
            }
        };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(jobs)) {
            self.next.fetch_max(self.jobs, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
}

/// Dropped, it lets no more helpers join and waits for those that have.
struct Closing<'a>(&'a Batch);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut helpers = self.0.helpers.fetch_or(CLOSED, Ordering::Acquire) & !CLOSED;
        for look in 0.. {
            if helpers == 0 {
                return;
            }
            if look < SPINS {
                spin_loop();
            } else {
                thread::park();
            }
            helpers = self.0.helpers.load(Ordering::Acquire) & !CLOSED;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;
    use std::time::Duration;

    fn cpu(threads: usize) -> Cpu {
        Cpu::new(Some(threads)).unwrap()
    }

    fn assert_each_runs_once(cpu: &Cpu, jobs: usize) {
        let runs: Vec<AtomicUsize> = (0..jobs).map(|_| AtomicUsize::new(0)).collect();
        cpu.for_each_job(jobs, |job| {
            runs[job].fetch_add(1, Ordering::Relaxed);
        });
        assert!(runs.iter().all(|n| n.load(Ordering::Relaxed) == 1), "{runs:?}");
    }

    #[test]
    fn every_job_runs_exactly_once_for_any_number_of_jobs_and_threads() {
        for threads in [1, 2, 4] {
            let cpu = cpu(threads);
            for jobs in [0, 1, 2, 3, 100, 5000] {
                assert_each_runs_once(&cpu, jobs);
            }
        }
        assert_each_runs_once(&Cpu::shared(), 50);
    }

    #[test]
    fn thousands_of_short_calls_lose_and_repeat_no_job() {
        let cpu = cpu(3);
        let sum = AtomicUsize::new(0);
        for round in 0..20_000 {
            let jobs = round % 5;
            cpu.for_each_job(jobs, |job| {
                sum.fetch_add(job + 1, Ordering::Relaxed);
            });
        }
        assert_eq!(sum.into_inner(), 20_000 / 5 * (1 + 3 + 6 + 10));
    }

    #[test]
    fn one_thread_runs_the_jobs_in_order_on_the_caller() {
        let order = Mutex::new(Vec::new());
        cpu(1).for_each_job(10, |job| order.lock().unwrap().push((job, thread::current().id())));
        let here = thread::current().id();
        assert_eq!(*order.lock().unwrap(), (0..10).map(|job| (job, here)).collect::<Vec<_>>());
    }

    #[test]
    fn other_threads_help() {
        let both = Barrier::new(2);
        cpu(2).for_each_job(2, |_| {
            both.wait();
        });
    }

    #[test]
    fn the_caller_waits_for_a_job_that_another_thread_still_runs() {
        let (both, done) = (Barrier::new(2), AtomicUsize::new(0));
        let here = thread::current().id();
        cpu(2).for_each_job(2, |_| {
            both.wait();
            if thread::current().id() != here {
                thread::sleep(Duration::from_millis(50));
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
        assert_eq!(done.into_inner(), 1);
    }

    #[test]
    fn nobody_waits_for_a_pool_that_is_busy() {
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let gate = Arc::new(Barrier::new(3));
        for _ in 0..2 {
            let gate = Arc::clone(&gate);
            pool.spawn(move || {
                gate.wait();
            });
        }
        assert_each_runs_once(&Cpu::with_pool(Arc::clone(&pool)), 100);
        gate.wait();
    }

    #[test]
    fn calls_from_inside_the_pool_and_nested_calls_end() {
        let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap());
        let cpu = Cpu::with_pool(Arc::clone(&pool));
        pool.install(|| assert_each_runs_once(&cpu, 100));
        let runs = AtomicUsize::new(0);
        let inner = |_| {
            runs.fetch_add(1, Ordering::Relaxed);
        };
        pool.install(|| rayon::join(|| cpu.for_each_job(50, inner), || cpu.for_each_job(50, inner)));
        cpu.for_each_job(20, |_| cpu.for_each_job(20, |_| cpu.for_each_job(2, inner)));
        assert_eq!(runs.into_inner(), 100 + 800);
    }

    #[test]
    fn a_panic_reaches_the_caller_on_whatever_thread_it_happens() {
        for threads in [1, 2, 4] {
            let cpu = cpu(threads);
            for bad in [0, 1, 17, 99] {
                let call = || cpu.for_each_job(100, |job| assert_ne!(job, bad, "job {job} fails"));
                let panic = catch_unwind(AssertUnwindSafe(call)).unwrap_err();
                assert!(panic.downcast_ref::<String>().unwrap().contains(&format!("job {bad} fails")));
            }
            assert_each_runs_once(&cpu, 100);
        }
    }

    #[test]
    fn what_a_job_borrows_outlives_helpers_that_come_late() {
        let cpu = cpu(4);
        for round in 0..2000usize {
            let own = vec![round; 64];
            let sum = AtomicUsize::new(0);
            cpu.for_each_job(4, |job| {
                sum.fetch_add(own[job], Ordering::Relaxed);
            });
            assert_eq!(sum.into_inner(), 4 * round);
        }
    }
}
