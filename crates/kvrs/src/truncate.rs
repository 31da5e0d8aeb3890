//! Taking back the newest tokens: rewinding speculation, and the repair after a step that failed in the middle.

use crate::compile::LayerPlan;
use crate::evict::Prompt;
use crate::sequence::{LayerState, Sequence};
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::Supply;
use kvrs_core::{Error, Result, SeqId};

impl<B: Backend> KvStore<B> {
    /// Brings every layer of a sequence to `n` tokens; the repair after a step that failed in the middle.
    ///
    /// Codes before `n` stay bit for bit, the slots of later tokens die, and a packed page that is cut is closed: the
    /// next group starts at `n`. Nothing becomes 16-bit again. A sequence can always be truncated to 0 and to its own
    /// length, the least of its layers.
    ///
    /// # Errors
    /// [`Error::Sequence`] if `n` is above the length, if pages that a query at `n` would see have gone behind a
    /// sliding window, if a policy that acts whenever a group leaves the window has evicted behind `n`, or, other
    /// than for 0, while layers still lack a part of the first prompt.
    pub fn truncate(&self, seq: SeqId, n: usize) -> Result<()> {
        self.cut(seq, n, |length| if n <= length { Some(n) } else { None })
    }

    /// Takes back the newest `n` tokens of every layer.
    ///
    /// # Errors
    /// As [`KvStore::truncate`] to what is left.
    pub fn drop_last(&self, seq: SeqId, n: usize) -> Result<()> {
        self.cut(seq, n, |length| length.checked_sub(n))
    }

    /// Truncates to `left(length)`; `n` is what the caller asked for.
    fn cut(&self, seq: SeqId, n: usize, left: impl Fn(usize) -> Option<usize>) -> Result<()> {
        let row = self.row(seq)?;
        let mut sequence = row.write()?;
        let length = sequence.length();
        let left = left(length)
            .ok_or_else(|| Error::sequence("n", n, format!("0..={length}, the length of sequence {seq}")))?;
        self.check_cut(&sequence, left)?;
        sequence.truncate(left, self.plan.spec().sinks);
        Ok(())
    }

    /// Whether a sequence can be truncated to `n`, at most its length.
    pub(crate) fn check_cut(&self, sequence: &Sequence<B::Chunk>, n: usize) -> Result<()> {
        if let (Prompt::Whole { to }, 1..) = (sequence.prompt, n) {
            let allowed = format!("0: layers are still to get the prompt of {to} tokens");
            return Err(Error::sequence("n", n, allowed));
        }
        let length = sequence.length();
        let layers = sequence.layers.iter().zip(&self.compiled()?.layers).enumerate();
        layers.filter(|(_, (state, _))| n > 0 && state.length > n).try_for_each(|(layer, (state, plan))| {
            state.check_window(plan, layer, n, length)?;
            if n < length { state.check_evicted(plan, layer, n, length) } else { Ok(()) }
        })
    }
}

impl<C> Sequence<C> {
    pub(crate) fn truncate(&mut self, n: usize, sinks: usize) {
        self.layers.iter_mut().for_each(|layer| layer.truncate(n, sinks));
        self.target = n;
        self.shared = Supply::default();
        self.prompt = match self.prompt {
            Prompt::Open { from } => {
                self.target = 0;
                Prompt::Open { from: from.min(n) }
            }
            Prompt::Closed | Prompt::Whole { .. } => Prompt::Closed,
        };
        if n == 0 {
            self.start = None;
        }
    }
}

impl<C> LayerState<C> {
    fn truncate(&mut self, n: usize, sinks: usize) {
        let length = self.length;
        self.length = length.min(n);
        self.origin = self.origin.min(n).max(sinks);
        self.longest = if n == 0 { 0 } else { self.longest };
        for table in &mut self.tables {
            table.truncate(n);
        }
        self.evict.truncate(n, length, |head| self.tables[head].kept());
        self.evict.borrowed = 0;
        let supplies = self.supplies.iter_mut().chain([&mut self.kept]);
        supplies.for_each(|supply| drop(std::mem::take(supply)));
    }

    /// Whether all that a query at `n` sees is still there.
    fn check_window(&self, plan: &LayerPlan, layer: usize, n: usize, length: usize) -> Result<()> {
        let exact = |n: usize| plan.rule.can_truncate(self.longest, n);
        if exact(n) {
            return Ok(());
        }
        let least = (n..=length).find(|n| exact(*n)).unwrap_or(length);
        let allowed =
            format!("0 or {least}..={length}: layer {layer} has dropped what lies behind its window");
        Err(Error::sequence("n", n, allowed))
    }

    /// Whether no policy has acted on tokens from `n` on, other than at the end of a prompt.
    fn check_evicted(&self, plan: &LayerPlan, layer: usize, n: usize, length: usize) -> Result<()> {
        let Some(evict) = plan.evict.as_ref().filter(|evict| evict.acts_later()) else { return Ok(()) };
        let evicted = self.evict.heads.iter().map(|head| head.evicted).max().unwrap_or(0);
        if n >= evicted {
            return Ok(());
        }
        let (name, least) = (evict.name(), evicted.min(length));
        let allowed = format!(
            "0 or {least}..={length}: {name} in layer {layer} dropped tokens when there were {evicted}, and what it \
             would have kept at {n} is not known"
        );
        Err(Error::sequence("n", n, allowed))
    }
}
