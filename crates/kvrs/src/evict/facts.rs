//! What is known of the kept tokens of a head: one number each, in ascending order of index.

use kvrs_core::policy::{Fold, History};

/// Running statistics of one head. Arrays may be longer than what the head keeps by the tokens of the running call.
#[derive(Debug, Clone, Default)]
pub(crate) struct HeadFacts {
    /// Attention: a sum, or that of the last query.
    pub(crate) attention: Vec<f32>,
    /// Counts of queries that looked at a token more than average, in place of sums.
    pub(crate) history: Option<History>,
    /// Norms of keys.
    pub(crate) norms: Vec<f32>,
    /// Tokens that the layer had when the policy last dropped some; 0 if it never did.
    pub(crate) evicted: usize,
}

impl HeadFacts {
    /// Bytes that they take.
    pub(crate) fn bytes(&self) -> usize {
        let floats = self.attention.capacity() + self.norms.capacity();
        floats * size_of::<f32>() + self.history.as_ref().map_or(0, History::bytes)
    }

    /// Keeps the numbers at the ascending places `kept` of the first `n` tokens, and those behind.
    pub(crate) fn keep(&mut self, kept: &[usize], n: usize) {
        let places = |len: usize| kept.iter().copied().chain(n..len).filter(move |i| *i < len);
        let pick = |x: &mut Vec<f32>| {
            let mut to = 0;
            for from in places(x.len()) {
                x[to] = x[from];
                to += 1;
            }
            x.truncate(to);
            // Room for the next tokens stays, that of a whole prompt does not.
            x.shrink_to(to + to / 4);
        };
        pick(&mut self.attention);
        pick(&mut self.norms);
        if let Some(history) = &mut self.history {
            let places: Vec<usize> = places(history.len()).collect();
            history.keep(&places);
        }
    }

    /// Keeps the numbers of the first `n` tokens.
    pub(crate) fn truncate(&mut self, n: usize) {
        self.attention.truncate(n);
        self.norms.truncate(n);
        if let Some(history) = &mut self.history {
            history.truncate(n);
        }
    }

    /// Whether there are at most as many numbers as the head has tokens.
    pub(crate) fn fits(&self, kept: usize) -> bool {
        let counted = self.history.as_ref().map_or(0, History::len);
        [self.attention.len(), self.norms.len(), counted].iter().all(|n| *n <= kept)
    }

    /// Where the sums of a call start that brings `tokens` tokens to `kept` ones.
    pub(crate) fn start(&self, fold: Fold, kept: usize, tokens: usize) -> Vec<f32> {
        let mut sums = Vec::with_capacity(kept + tokens);
        if fold == Fold::Sum {
            sums.extend_from_slice(&self.attention);
        }
        sums.resize(kept + tokens, 0.0);
        sums
    }

    /// Takes in what `queries` queries gave, as [`HeadFacts::start`] began it.
    pub(crate) fn add(&mut self, fold: Fold, queries: usize, sums: Vec<f32>) {
        let Some(history) = self.history.as_mut().filter(|_| fold == Fold::Above) else {
            self.attention = sums;
            return;
        };
        history.push(sums.len().saturating_sub(history.len()));
        let first = queries.min(history.room());
        history.add(first, &sums);
        // A call that reaches over a turn counts in the half in which it began.
        let mut rest = queries - first;
        while rest > 0 {
            let next = rest.min(history.room());
            history.add(next, &[]);
            rest -= next;
        }
    }

    /// The attention of the first `n` tokens, as policies read it.
    pub(crate) fn attention(&self, n: usize) -> Vec<f32> {
        let mut attention = self.history.as_ref().map_or_else(|| self.attention.clone(), History::totals);
        attention.resize(n, 0.0);
        attention
    }
}
