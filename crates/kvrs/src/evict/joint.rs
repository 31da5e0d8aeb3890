//! The joint choice of tokens and rates at the end of a prompt.

use super::choose::Ended;
use super::tail::Tail;
use crate::compile::{LOW, LayerPlan, PACKED};
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_codec::transform::Transform;
use kvrs_codec::{HeadCodec, Side};
use kvrs_core::LayerShape;
use kvrs_core::alloc::{self, Choice, Curve, GONE, Rate, Stake};
use kvrs_core::page::{PACKED_SLOTS, Table};

/// The plan's own rate, as a choice.
const HIGH: Choice = 1;

impl<B: Backend> KvStore<B> {
    /// Lets every droppable token go, or stay at one of two rates, in the bytes of `picks` tokens per head at the
    /// plan's own rate.
    ///
    /// `heads` know their attention and what is droppable.
    pub(crate) fn choose_jointly(
        &self,
        layer: usize,
        plan: &LayerPlan,
        sequence: &Sequence<B::Chunk>,
        heads: &mut [Ended],
        picks: usize,
    ) {
        let rates = rates(plan);
        let mut stakes = Vec::new();
        for (h, head) in heads.iter().enumerate() {
            let of_tokens = self.stakes(layer, plan, sequence, (h, head));
            stakes.extend_from_slice(&of_tokens[head.droppable.clone()]);
        }
        let allocated = allocate(&stakes, &rates, heads.len(), picks);
        let mut rest = &allocated[..];
        for head in heads {
            let (own, others) = rest.split_at(head.droppable.len());
            rest = others;
            let chosen = head.droppable.clone().zip(own).filter(|(_, choice)| **choice != GONE);
            head.low =
                chosen.clone().filter(|(_, choice)| **choice != HIGH).map(|(place, _)| place).collect();
            head.kept = (0..head.droppable.start)
                .chain(chosen.map(|(place, _)| place))
                .chain(head.droppable.end..head.tokens.len())
                .collect();
        }
    }

    /// What hangs on each token of a head.
    fn stakes(
        &self,
        layer: usize,
        plan: &LayerPlan,
        sequence: &Sequence<B::Chunk>,
        (h, head): (usize, &Ended),
    ) -> Vec<Stake> {
        let table = &sequence.layers[layer].tables[h];
        let total: f64 = head.attention.iter().map(|a| f64::from(*a)).sum();
        let shares: Vec<f64> =
            head.attention.iter().map(|a| f64::from(*a) / total.max(f64::MIN_POSITIVE)).collect();
        let mut output = vec![0.0; plan.codec.shape.value_dim];
        let mut at = 0;
        self.each_live(plan, h, table, sequence.start(), [Side::Value], |[v]| {
            output.iter_mut().zip(v).for_each(|(o, v)| *o += shares[at] * f64::from(*v));
            at += 1;
        });
        let logit = logit_square(&plan.codec.shape, &sequence.layers[layer].evict.tail, h);
        let mut stakes = Vec::with_capacity(shares.len());
        self.each_centred(plan, h, table, sequence.start(), |k, v, value| {
            let share = shares[stakes.len()];
            let apart: f64 = output.iter().zip(value).map(|(o, v)| (o - f64::from(*v)).powi(2)).sum();
            stakes.push(Stake {
                gone: (share / (1.0 - share).max(1e-6)).powi(2) * apart,
                key: share * share * apart * logit * square(k),
                value: share * share * square(v),
            });
        });
        stakes
    }

    /// Keys and values of the live tokens without the constants of the packed class, and the plain values.
    fn each_centred(
        &self,
        plan: &LayerPlan,
        head: usize,
        table: &Table<B::Chunk>,
        start: i64,
        mut each: impl FnMut(&[f32], &[f32], &[f32]),
    ) {
        let codec = plan.class(head, PACKED);
        let mut positions = table.live_indices().into_iter().map(|index| start + index as i64);
        let (mut key, mut centred) = (Vec::new(), Vec::new());
        self.each_live(plan, head, table, start, [Side::Key, Side::Value], |[k, v]| {
            (key, centred) = (k.to_vec(), v.to_vec());
            let position = positions.next().expect("a position per live token");
            kvrs_codec::encode::EncodeContext::new(codec, Side::Key).centre(position, &mut key);
            kvrs_codec::encode::EncodeContext::new(codec, Side::Value).centre(position, &mut centred);
            each(&key, &centred, v);
        });
    }
}

/// Mean square of the factor between a key's error and the error of its logit, per channel.
fn logit_square(shape: &LayerShape, tail: &Tail, head: usize) -> f64 {
    let Some((q, scale, ..)) = tail.view() else { return 0.0 };
    let [_, _, tokens, dim] = q.shape();
    let (mut row, mut sum) = (vec![0.0; dim], 0.0);
    for query in head * shape.group()..(head + 1) * shape.group() {
        for token in 0..tokens {
            q.read_row([0, query, token], &mut row);
            sum += square(&row);
        }
    }
    f64::from(scale).powi(2) * sum / (shape.group() * tokens * dim) as f64
}

fn square(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(*x).powi(2)).sum()
}

/// The low and the plan's own rate, by page bytes; errors are means over the heads.
fn rates(plan: &LayerPlan) -> [Rate; 2] {
    [PACKED, LOW].map(|class| {
        let heads = plan.codec.classes.len();
        let error = |side: Side| {
            let codecs = (0..heads).map(|head| [PACKED, LOW].map(|class| plan.class(head, class)));
            codecs.map(|both| relative_error(plan_class(&both, class), &both, side)).sum::<f64>()
                / heads as f64
        };
        let bytes = plan.class(0, class).desc.page_bytes / PACKED_SLOTS as u32;
        Rate { bytes, key: error(Side::Key), value: error(Side::Value) }
    })
}

fn plan_class<'a>(both: &[&'a HeadCodec; 2], class: u8) -> &'a HeadCodec {
    both[usize::from(class - PACKED)]
}

/// Square error of a side as a share of what the class that stores most of it holds.
fn relative_error(codec: &HeadCodec, both: &[&HeadCodec; 2], side: Side) -> f64 {
    let (stored, error) = energy(codec, side);
    let most = both.iter().map(|codec| energy(codec, side).0).fold(stored, f64::max);
    (error + most - stored) / most.max(f64::MIN_POSITIVE)
}

/// Mean square of what a class stores, and of its error; channels count alike unless a calibrated matrix says more.
fn energy(codec: &HeadCodec, side: Side) -> (f64, f64) {
    let (desc, constants) = codec.side(side);
    let (mut first, mut sums) = (0, (0.0, 0.0));
    for run in &desc.runs {
        let channels = first..first + run.channels as usize;
        first = channels.end;
        let error = if run.width > 8 { 0.0 } else { Curve::GAUSSIAN.at(run.width as u8) };
        let energy: f64 = match &constants.transform {
            Transform::Pair { synthesis, d, .. } => square(&synthesis[channels.start * d..channels.end * d]),
            _ => channels.len() as f64,
        };
        sums = (sums.0 + energy, sums.1 + energy * error);
    }
    sums
}

/// The choice for the tokens of all heads, in whole pages of both rates.
fn allocate(stakes: &[Stake], rates: &[Rate; 2], heads: usize, picks: usize) -> Vec<Choice> {
    let page = rates.map(|rate| u64::from(rate.bytes) * PACKED_SLOTS as u64);
    let pages = (heads * picks.div_ceil(PACKED_SLOTS)) as u64 * page[0];
    // Each head may end with a page of either rate that is nearly empty.
    let partial = heads as u64 * (page[0] + page[1]);
    let mixed = alloc::joint(stakes, rates, pages.saturating_sub(partial));
    let alone = alloc::one_rate(stakes, rates, HIGH, (heads * picks) as u64 * u64::from(rates[0].bytes));
    let low = pages.saturating_sub(heads as u64 * page[1]);
    let low = alloc::one_rate(stakes, rates, HIGH + 1, low);
    let predicted = |choices: &Vec<Choice>| alloc::distortion(stakes, rates, choices);
    let best =
        [mixed, alone, low].into_iter().reduce(|a, b| if predicted(&b) < predicted(&a) { b } else { a });
    best.expect("three choices")
}
