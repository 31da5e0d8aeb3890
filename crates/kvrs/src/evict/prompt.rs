//! The frame of a prompt, and what happens at its end.

use super::choose::Ended;
use super::{Prompt, ScoreFn};
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::page::Supply;
use kvrs_core::{Error, Result, SeqId};
use std::sync::Arc;

impl<B: Backend> KvStore<B> {
    /// Says that the next tokens of these sequences are a prompt, however many calls bring them.
    ///
    /// Policies that choose at the end of a prompt leave its tokens raw until [`KvStore::end_prompt`]. A single call with
    /// more than one token on an empty sequence is a whole prompt and needs no frame.
    ///
    /// # Errors
    /// [`Error::Sequence`] for a sequence whose prompt is open already, or that is in the middle of a step.
    pub fn begin_prompt(&self, seqs: &[SeqId]) -> Result<()> {
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        for (sequence, id) in rows.iter().zip(seqs) {
            if sequence.prompt != Prompt::Closed {
                return Err(Error::sequence(
                    "seqs",
                    format!("{id}, whose prompt is open"),
                    "a prompt begins once",
                ));
            }
            sequence.check_even(*id)?;
        }
        for sequence in &mut rows {
            sequence.prompt = Prompt::Open { from: sequence.length() };
            sequence.release();
            sequence.target = 0;
        }
        Ok(())
    }

    /// Ends the prompts of these sequences: policies choose, what they keep is encoded, everything else is freed.
    ///
    /// # Errors
    /// [`Error::Sequence`] for a sequence whose prompt is not open or that is in the middle of a step, and the errors of
    /// the caller's own scores; [`Error::Capacity`] if there is no room to move what stays. Nothing has changed then.
    pub fn end_prompt(&self, seqs: &[SeqId]) -> Result<()> {
        let rows = self.rows(seqs)?;
        let mut rows = rows.write()?;
        for (sequence, id) in rows.iter().zip(seqs) {
            if !matches!(sequence.prompt, Prompt::Open { .. }) {
                let got = format!("{id}, whose prompt is not open");
                return Err(Error::sequence("seqs", got, "sequences after begin_prompt"));
            }
            sequence.check_even(*id)?;
        }
        // What has been reserved may have gone back in a truncation since.
        let targets: Vec<usize> = rows.iter().map(|sequence| sequence.length()).collect();
        let prompts: Vec<Prompt> = rows.iter().map(|sequence| sequence.prompt).collect();
        self.reserve_to(&mut rows, &targets, &prompts)?;
        let layers = 0..self.compiled()?.layers.len();
        let choose = |sequence: &Sequence<B::Chunk>| {
            layers.clone().map(|layer| self.choose_layer(layer, sequence)).collect::<Result<Vec<_>>>()
        };
        let chosen = rows.iter().map(|sequence| choose(sequence)).collect::<Result<Vec<_>>>()?;
        for (sequence, chosen) in rows.iter_mut().zip(chosen) {
            for (layer, chosen) in chosen.into_iter().enumerate() {
                self.settle(layer, sequence, chosen)?;
            }
            sequence.prompt = Prompt::Closed;
            sequence.release();
        }
        Ok(())
    }

    /// The caller's scores for plans with [`kvrs_core::policy::Custom`] policies.
    pub fn set_score(&mut self, score: Arc<ScoreFn>) {
        self.score.0 = Some(score);
    }

    pub(crate) fn score(&self) -> Option<&ScoreFn> {
        self.score.0.as_deref()
    }

    /// Ends the prompt of a layer that has all of a whole prompt.
    pub(crate) fn end_whole(&self, layer: usize, sequence: &mut Sequence<B::Chunk>) -> Result<()> {
        let Prompt::Whole { to } = sequence.prompt else { return Ok(()) };
        if sequence.layers[layer].length < to {
            return Ok(());
        }
        let chosen = self.choose_layer(layer, sequence)?;
        self.settle(layer, sequence, chosen)?;
        if sequence.length() >= to {
            sequence.prompt = Prompt::Closed;
            sequence.shared = Supply::default();
        }
        Ok(())
    }

    /// Budget and choice of a layer; `None` if no policy waits for the end of the prompt there.
    fn choose_layer(
        &self,
        layer: usize,
        sequence: &Sequence<B::Chunk>,
    ) -> Result<Option<(usize, Vec<Ended>)>> {
        let layers = &self.compiled()?.layers;
        let plan = &layers[layer];
        let Some(evict) = plan.evict.as_ref().filter(|evict| evict.holds()) else { return Ok(None) };
        self.check_score(plan)?;
        let budget = evict.resolve(layers, sequence.layers[layer].length)?;
        self.choose(layer, plan, evict, sequence, budget).map(|ended| Some((budget, ended)))
    }
}
