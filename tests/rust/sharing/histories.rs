//! Any history of forks, cuts, removals and moves of rows: the store answers as the naive one, and loses no page.

use crate::common::{codec, plan};
use kvrs::{Error, SeqId};
use kvrs_testkit::Pair;
use kvrs_testkit::pair::Step;
use kvrs_testkit::sharing::Frozen;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Step { rows: u8, tokens: usize, extend: bool },
    Fork { row: usize },
    Truncate { row: usize, back: usize },
    Empty { row: usize },
    Remove { row: usize, from: usize, percent: usize },
    Keep { row: usize, layer: usize, every: usize },
    Reorder { index: Vec<usize> },
    Select { index: Vec<usize> },
    Freeze { row: usize },
    Thaw { which: usize },
    Forget { which: usize },
    Reserve { row: usize, tokens: usize },
    Free { row: usize },
}

const MOST: usize = 6;

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let tokens = prop_oneof![4 => 1usize..4, 3 => 4usize..70, 1 => 70usize..200];
    let (row, which) = (0usize..MOST, 0usize..4);
    let rows = prop::collection::vec(0usize..MOST, MOST);
    let selected = prop::collection::vec(0usize..MOST, 1..MOST);
    let op = prop_oneof![
        8 => (1u8..64, tokens, any::<bool>()).prop_map(|(rows, tokens, extend)| Op::Step { rows, tokens, extend }),
        4 => row.clone().prop_map(|row| Op::Fork { row }),
        3 => (row.clone(), 0usize..80).prop_map(|(row, back)| Op::Truncate { row, back }),
        1 => row.clone().prop_map(|row| Op::Empty { row }),
        2 => (row.clone(), 0usize..100, 0usize..101).prop_map(|(row, from, percent)| Op::Remove { row, from, percent }),
        2 => (row.clone(), 0usize..3, 1usize..6).prop_map(|(row, layer, every)| Op::Keep { row, layer, every }),
        2 => rows.prop_map(|index| Op::Reorder { index }),
        1 => selected.prop_map(|index| Op::Select { index }),
        1 => row.clone().prop_map(|row| Op::Freeze { row }),
        2 => which.clone().prop_map(|which| Op::Thaw { which }),
        1 => which.prop_map(|which| Op::Forget { which }),
        1 => (row.clone(), 0usize..90).prop_map(|(row, tokens)| Op::Reserve { row, tokens }),
        2 => row.prop_map(|row| Op::Free { row }),
    ];
    prop::collection::vec(op, 1..20)
}

struct World {
    pair: Pair,
    live: Vec<SeqId>,
    frozen: Vec<Frozen>,
}

impl World {
    fn id(&self, row: usize) -> SeqId {
        self.live[row % self.live.len()]
    }

    fn length(&self, id: SeqId) -> usize {
        self.pair.store.length(id, None).unwrap()
    }

    fn apply(&mut self, op: &Op) -> kvrs::Result<()> {
        if self.live.is_empty() {
            self.live.push(self.pair.create(0));
        }
        let most = |live: &[SeqId]| live.len() < MOST;
        match op {
            Op::Step { rows, tokens, extend } => {
                let seqs: Vec<SeqId> = self
                    .live
                    .iter()
                    .enumerate()
                    .filter(|(i, _)| rows >> i & 1 == 1)
                    .map(|(_, id)| *id)
                    .collect();
                let mask = vec![true; seqs.len() * tokens];
                return self.pair.step(&Step { seqs, tokens: *tokens, mask, extend: *extend });
            }
            Op::Fork { row } if most(&self.live) => self.live.push(self.pair.fork(self.id(*row))?),
            Op::Truncate { row, back } => {
                let id = self.id(*row);
                self.pair.truncate(id, self.length(id).saturating_sub(*back));
            }
            Op::Empty { row } => self.pair.truncate(self.id(*row), 0),
            Op::Remove { row, from, percent } => {
                let id = self.id(*row);
                let length = self.length(id);
                let start = length * from / 100;
                self.pair.remove(id, start..start + (length - start) * percent / 100);
            }
            Op::Keep { row, layer, every } => self.keep(self.id(*row), *layer, *every)?,
            Op::Reorder { index } => {
                let index: Vec<usize> =
                    index[..self.live.len()].iter().map(|i| i % self.live.len()).collect();
                self.pair.reorder(&self.live.clone(), &index)?;
            }
            Op::Select { index } => {
                let index: Vec<usize> = index.iter().map(|i| i % self.live.len()).collect();
                self.live = self.pair.select_rows(&self.live.clone(), &index)?;
            }
            Op::Freeze { row } => self.frozen.push(self.pair.snapshot(self.id(*row))?),
            Op::Thaw { which } if most(&self.live) && !self.frozen.is_empty() => {
                let frozen = self.frozen[which % self.frozen.len()].clone();
                self.live.push(self.pair.create_from(&frozen)?);
            }
            Op::Forget { which } if !self.frozen.is_empty() => {
                self.frozen.swap_remove(which % self.frozen.len());
            }
            Op::Reserve { row, tokens } => self.pair.store.reserve(&[self.id(*row)], *tokens)?,
            Op::Free { row } => {
                let id = self.live.swap_remove(row % self.live.len());
                self.pair.free(id);
            }
            _ => {}
        }
        Ok(())
    }

    fn keep(&mut self, id: SeqId, layer: usize, every: usize) -> kvrs::Result<()> {
        // The room that moving needs may be lacking; a try on a fork shows it.
        let fork = self.pair.fork(id)?;
        let all = |head| self.pair.store.kept_positions(fork, layer, head);
        let heads = self.pair.naive.shape(layer).kv_heads;
        let all = (0..heads).map(all).collect::<kvrs::Result<Vec<_>>>()?;
        let tried = self.pair.store.keep(fork, layer, &all);
        if tried.is_ok() {
            self.pair.keep(fork, layer, every);
        }
        self.pair.verify();
        self.pair.free(fork);
        tried
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn the_store_answers_as_the_naive_one_whatever_is_shared(
        bits in prop::sample::select(vec![0.0, 2.5, 4.0]),
        (sinks, recent) in (prop::sample::select(vec![0usize, 4, 19]), prop::sample::select(vec![0usize, 16, 40])),
        capacity in prop::sample::select(vec![None, None, Some(1u64 << 20), Some(3 << 19)]),
        ops in ops(), seed in any::<u64>(),
    ) {
        let pair = Pair::new(&plan(&codec(bits), sinks, recent), capacity, seed);
        let mut world = World { pair, live: Vec::new(), frozen: Vec::new() };
        for op in &ops {
            let answer = world.apply(op);
            let refused = matches!(answer, Err(Error::Capacity { .. })) && capacity.is_some();
            prop_assert!(answer.is_ok() || refused, "{:?}: {:?}", op, answer);
            world.pair.verify();
        }
        for id in world.live {
            world.pair.free(id);
        }
        world.frozen.clear();
        world.pair.verify();
        prop_assert_eq!(world.pair.store.stats().unwrap().bytes_total, 0);
    }
}
