//! One store from birth to death, beside plain vectors.

use crate::model::{Call, MOST, Turn, turn};
use crate::rng;
use kvrs::{CodecSpec, Compress, Error, LayerShape, ModelShape, Plan, PlanSpec, Rope, SeqId};
use kvrs_testkit::faults::{Faulty, FullDisk, Luck};
use kvrs_testkit::pair::Step;
use kvrs_testkit::sharing::{Frozen, Saved};
use kvrs_testkit::{Noise, Pair, hostile};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, TestRunner};

/// Sequences longer than this are freed at their next step.
const LONG: usize = 260;
/// Calls between two comparisons of everything.
const OFTEN: u64 = 250;

pub(crate) struct Life {
    seed: u64,
    pair: Pair<Faulty>,
    luck: Luck,
    live: Vec<SeqId>,
    frozen: Vec<Frozen>,
    files: Vec<Saved>,
}

/// Full attention, a sliding window that is encoded, and one that stays raw; tiny heads.
fn plan(seed: u64) -> Plan {
    let rope = Some(Rope::new(1e4));
    let full = LayerShape { query_heads: 2, kv_heads: 1, key_dim: 16, value_dim: 16, rope, sliding: None };
    let sliding = |window| LayerShape { query_heads: 1, sliding: Some(window), ..full.clone() };
    let shape = ModelShape { layers: vec![full.clone(), sliding(70), sliding(20)] };
    let codecs = [CodecSpec::turboquant(4.0), CodecSpec::turboquant(3.0), CodecSpec::raw16()];
    let at = |i: u64| codecs[(i % 3) as usize].clone();
    let [sinks, recent] = [[0, 4, 19][(seed % 3) as usize], [0, 16, 24][(seed / 3 % 3) as usize]];
    let spec = PlanSpec::uniform(shape, at(seed), at(seed / 2));
    Plan::new(PlanSpec { sinks, recent, ..spec }).unwrap()
}

impl Life {
    pub(crate) fn new(seed: u64) -> Self {
        let luck = Luck::default();
        let capacity = if seed.is_multiple_of(4) { Some(768 << 10) } else { None };
        let pair = Pair::on(&plan(seed), capacity, seed, |cpu| Faulty::new(cpu, &luck));
        Self { seed, pair, luck, live: Vec::new(), frozen: Vec::new(), files: Vec::new() }
    }

    /// Lives for `steps` random calls, and dies.
    pub(crate) fn live(mut self, steps: u64) {
        let mut runner = TestRunner::new_with_rng(Config::default(), rng(self.seed));
        let turns = turn();
        for step in 0..steps {
            let turn = turns.new_tree(&mut runner).unwrap().current();
            self.turn(&turn).unwrap_or_else(|e| panic!("seed {}, call {step}, {turn:?}: {e}", self.seed));
            if step % OFTEN == 0 {
                self.pair.verify();
            }
        }
        self.die();
    }

    /// Frees everything: no page is left.
    pub(crate) fn die(mut self) {
        self.pair.verify();
        for id in self.live {
            self.pair.free(id);
        }
        drop(self.frozen);
        self.pair.verify();
        let stats = self.pair.store.stats().unwrap();
        assert_eq!((stats.bytes_total, stats.pages_total, stats.pages_free), (0, 0, 0), "seed {}", self.seed);
    }

    /// One call with its fault; what it touched is compared, and the invariants are checked.
    pub(crate) fn turn(&mut self, turn: &Turn) -> kvrs::Result<()> {
        self.luck.fail_after(turn.chunks.unwrap_or(u64::MAX));
        let answer = self.call(&turn.call);
        self.luck.heal();
        match answer {
            Ok(Some(id)) => self.pair.verify_sequence(id),
            Ok(None) | Err(Error::Capacity { .. }) => {}
            Err(other) => return Err(other),
        }
        self.pair.store.check()?;
        let stats = self.pair.store.stats()?;
        let within = stats.bytes_capacity.is_none_or(|capacity| stats.bytes_total <= capacity);
        assert!(within && stats.sequences == self.live.len(), "{stats:?}");
        Ok(())
    }

    fn id(&self, row: usize) -> Option<SeqId> {
        self.live.get(row % self.live.len().max(1)).copied()
    }

    fn length(&self, id: SeqId) -> usize {
        self.pair.store.length(id, None).unwrap()
    }

    /// The sequence that is to be compared.
    fn call(&mut self, call: &Call) -> kvrs::Result<Option<SeqId>> {
        match call {
            Call::Step { rows, tokens, padding, extend } => self.step(*rows, *tokens, *padding, *extend),
            Call::Create { .. } | Call::Fork { .. } | Call::Thaw { .. } | Call::Load { .. } => {
                self.born(call)
            }
            Call::Reorder { index } => self.reorder(index),
            Call::Select { index } => self.select(index),
            Call::Freeze { .. } | Call::Forget { .. } => self.freeze(call),
            Call::Save { .. } | Call::FullDisk { .. } | Call::Lie { .. } => self.file(call),
            Call::Park { row } => self.park(*row),
            Call::Truncate { row, .. }
            | Call::Empty { row }
            | Call::Remove { row, .. }
            | Call::Keep { row, .. }
            | Call::Attend { row } => {
                self.id(*row).map_or(Ok(None), |id| self.change(id, call).map(|()| Some(id)))
            }
            Call::Free { row } => {
                if !self.live.is_empty() {
                    let id = self.live.swap_remove(row % self.live.len());
                    self.pair.free(id);
                }
                Ok(None)
            }
        }
    }

    fn step(&mut self, rows: u8, tokens: usize, padding: u64, extend: bool) -> kvrs::Result<Option<SeqId>> {
        let (long, short): (Vec<_>, Vec<_>) = self.live.iter().partition(|id| self.length(**id) > LONG);
        for id in long {
            self.pair.free(id);
        }
        self.live = short;
        let chosen = self.live.iter().enumerate().filter(|(i, _)| rows >> i & 1 == 1);
        let seqs: Vec<SeqId> = chosen.map(|(_, id)| *id).collect();
        let (last, mut noise) = (seqs.last().copied(), Noise::new(padding));
        let whole = padding.is_multiple_of(2);
        let mask = (0..seqs.len() * tokens).map(|_| whole || noise.below(5) > 0).collect();
        self.pair.step(&Step { seqs, tokens, mask, extend })?;
        Ok(last)
    }

    fn born(&mut self, call: &Call) -> kvrs::Result<Option<SeqId>> {
        if self.live.len() >= MOST {
            return Ok(None);
        }
        let id = match *call {
            Call::Create { start } => self.pair.create(start),
            Call::Fork { row } => match self.id(row) {
                Some(id) => self.pair.fork(id)?,
                None => return Ok(None),
            },
            Call::Thaw { which } if !self.frozen.is_empty() => {
                let frozen = self.frozen[which % self.frozen.len()].clone();
                self.pair.create_from(&frozen)?
            }
            Call::Load { which } if !self.files.is_empty() => {
                let file = self.files[which % self.files.len()].clone();
                self.pair.load(&file)?
            }
            _ => return Ok(None),
        };
        self.live.push(id);
        Ok(Some(id))
    }

    fn change(&mut self, id: SeqId, call: &Call) -> kvrs::Result<()> {
        let length = self.length(id);
        match *call {
            Call::Truncate { back, .. } => self.pair.truncate(id, length.saturating_sub(back)),
            Call::Empty { .. } => self.pair.truncate(id, 0),
            Call::Remove { from, percent, .. } => {
                let start = length * from / 100;
                self.pair.remove(id, start..start + (length - start) * percent / 100);
            }
            Call::Keep { layer, every, .. } => {
                // Moving takes pages: a call that keeps everything shows whether they are there.
                let all = |head| self.pair.store.kept_positions(id, layer, head);
                let heads = self.pair.naive.shape(layer).kv_heads;
                let all = (0..heads).map(all).collect::<kvrs::Result<Vec<_>>>()?;
                self.pair.store.keep(id, layer, &all)?;
                self.luck.heal();
                if self.pair.store.stats()?.bytes_capacity.is_none() {
                    self.pair.keep(id, layer, every);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn reorder(&mut self, index: &[usize]) -> kvrs::Result<Option<SeqId>> {
        let n = self.live.len();
        let index: Vec<usize> = index[..n].iter().map(|row| row % n).collect();
        self.pair.reorder(&self.live.clone(), &index)?;
        Ok(self.id(index.first().copied().unwrap_or(0)))
    }

    fn select(&mut self, index: &[usize]) -> kvrs::Result<Option<SeqId>> {
        if self.live.is_empty() {
            return Ok(None);
        }
        let index: Vec<usize> = index.iter().map(|row| row % self.live.len()).collect();
        self.live = self.pair.select_rows(&self.live.clone(), &index)?;
        Ok(self.id(0))
    }

    fn freeze(&mut self, call: &Call) -> kvrs::Result<Option<SeqId>> {
        match *call {
            Call::Freeze { row } if self.frozen.len() < MOST => {
                if let Some(id) = self.id(row) {
                    self.frozen.push(self.pair.snapshot(id)?);
                }
            }
            Call::Forget { which } if !self.frozen.is_empty() => {
                self.frozen.swap_remove(which % self.frozen.len());
            }
            _ => {}
        }
        Ok(None)
    }

    /// Moves a sequence to the host and back; where memory runs out on the way back, it is there once more.
    fn park(&mut self, row: usize) -> kvrs::Result<Option<SeqId>> {
        let Some(id) = self.id(row) else { return Ok(None) };
        let length = self.length(id);
        self.pair.store.to_host(&[id])?;
        assert_eq!(self.length(id), length);
        assert!(matches!(self.pair.store.decode(0, id, 0), Err(Error::Sequence { .. })));
        if let Err(error) = self.pair.store.to_device(&[id]) {
            assert!(matches!(error, Error::Capacity { .. }), "{error}");
            self.luck.heal();
            self.pair.store.to_device(&[id])?;
        }
        Ok(Some(id))
    }

    fn file(&mut self, call: &Call) -> kvrs::Result<Option<SeqId>> {
        match *call {
            Call::Save { row, deflate } => {
                let Some(id) = self.id(row) else { return Ok(None) };
                let compress = if deflate { Compress::Deflate } else { Compress::None };
                self.files.insert(0, self.pair.save(id, compress)?);
                self.files.truncate(MOST);
            }
            Call::FullDisk { row, percent } => {
                let Some(id) = self.id(row) else { return Ok(None) };
                let room = self.pair.save(id, Compress::None)?.bytes.len() * percent / 100;
                let mut disk = FullDisk { room, ..FullDisk::default() };
                let answer = self.pair.store.save_to("a full disk", &mut disk, id, Compress::None);
                assert!(matches!(answer, Err(Error::Io { .. })), "{answer:?}");
                return Ok(Some(id));
            }
            Call::Lie { which, seed } if !self.files.is_empty() => {
                let file = &self.files[which % self.files.len()].bytes;
                let lie = hostile::mutant(file, &mut Noise::new(seed));
                match self.pair.store.load_from("a lie", std::io::Cursor::new(&lie)) {
                    Ok(id) => self.pair.store.free(id)?,
                    Err(error) => assert!(
                        matches!(error, Error::Format { .. } | Error::Io { .. } | Error::Capacity { .. }),
                        "{error}"
                    ),
                }
            }
            _ => {}
        }
        Ok(None)
    }
}
