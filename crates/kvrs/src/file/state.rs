//! A sequence without its pages, and the small arrays of a file that say it.

use super::header::{Section, wrong};
use crate::evict::Outcome;
use crate::sequence::Sequence;
use kvrs_core::page::{Entry, EntryParts, Slots, Zone};
use kvrs_core::policy::History;
use kvrs_core::{Error, Result};
use safetensors::Dtype;

/// Columns of `layers`: length, origin, longest, budget, outcome.
pub(super) const LAYER_COLUMNS: usize = 5;
/// Columns of `heads`: evicted, seen queries of the history.
pub(super) const HEAD_COLUMNS: usize = 2;
/// Columns of `entries`: zone, class, count, closed, live bits (low, high), gathered, first.
pub(super) const ENTRY_COLUMNS: usize = 8;
/// Stands for a number that is not known.
const UNKNOWN: u64 = u64::MAX;

/// One layer.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LayerImage {
    pub(super) length: usize,
    pub(super) origin: usize,
    pub(super) longest: usize,
    pub(super) budget: Option<usize>,
    pub(super) outcome: Outcome,
    pub(super) heads: Vec<HeadImage>,
}

/// One head group of a layer.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct HeadImage {
    pub(super) entries: Vec<(Zone, EntryParts)>,
    pub(super) evicted: usize,
    pub(super) attention: Vec<f32>,
    pub(super) norms: Vec<f32>,
    /// Queries of the running half, and both counts of each token.
    pub(super) history: Option<(usize, Vec<[u16; 2]>)>,
}

/// A section that is written as it is.
pub(super) struct Array {
    pub(super) section: Section,
    pub(super) bytes: Vec<u8>,
}

impl Array {
    fn new<const N: usize>(
        name: &str,
        dtype: Dtype,
        shape: &[usize],
        numbers: impl IntoIterator<Item = [u8; N]>,
    ) -> Self {
        let bytes = numbers.into_iter().flatten().collect();
        Self { section: Section::new(name, dtype, shape), bytes }
    }
}

/// Each layer of a sequence.
pub(super) fn images<C>(sequence: &Sequence<C>) -> Vec<LayerImage> {
    let layer = |state: &crate::sequence::LayerState<C>| LayerImage {
        length: state.length,
        origin: state.origin,
        longest: state.longest,
        budget: state.evict.budget,
        outcome: state.evict.outcome,
        heads: state
            .tables
            .iter()
            .zip(&state.evict.heads)
            .map(|(table, facts)| {
                let zone = |zone| move |entry: &Entry<C>| (zone, entry.parts());
                let entries = table.sinks().iter().map(zone(Zone::Sinks));
                let entries = entries.chain(table.sealed().iter().map(zone(Zone::Sealed)));
                let history = facts.history.as_ref().map(History::parts);
                HeadImage {
                    entries: entries.chain(table.window().iter().map(zone(Zone::Window))).collect(),
                    evicted: facts.evicted,
                    attention: facts.attention.clone(),
                    norms: facts.norms.clone(),
                    history: history.map(|(_, seen, counts)| (seen, counts.to_vec())),
                }
            })
            .collect(),
    };
    sequence.layers.iter().map(layer).collect()
}

/// The arrays that say all of it but the pages, in the order of the file.
pub(super) fn arrays(layers: &[LayerImage]) -> Vec<Array> {
    let numbers = layers.iter().flat_map(|layer| {
        let budget = layer.budget.map_or(UNKNOWN, |budget| budget as u64);
        let outcome = match layer.outcome {
            Outcome::Waiting => 0,
            Outcome::KeptAll => 1,
            Outcome::Evicted => 2,
        };
        [layer.length as u64, layer.origin as u64, layer.longest as u64, budget, outcome]
    });
    let heads: Vec<&HeadImage> = layers.iter().flat_map(|layer| &layer.heads).collect();
    let of_heads = heads.iter().flat_map(|head| {
        [head.evicted as u64, head.history.as_ref().map_or(UNKNOWN, |(seen, _)| *seen as u64)]
    });
    let mut arrays = vec![
        Array::new("layers", Dtype::U64, &[layers.len(), LAYER_COLUMNS], numbers.map(u64::to_le_bytes)),
        Array::new("heads", Dtype::U64, &[heads.len(), HEAD_COLUMNS], of_heads.map(u64::to_le_bytes)),
    ];
    for (layer, image) in layers.iter().enumerate() {
        for (head, image) in image.heads.iter().enumerate() {
            arrays.extend(image.arrays(layer, head).into_iter().filter(|array| !array.bytes.is_empty()));
        }
    }
    arrays
}

/// Name of a section of a head.
pub(super) fn name(kind: &str, layer: usize, head: usize) -> String {
    format!("{kind}.{layer}.{head}")
}

impl HeadImage {
    fn arrays(&self, layer: usize, head: usize) -> [Array; 5] {
        let named = |kind| name(kind, layer, head);
        let mut indices: Vec<u32> = Vec::new();
        let rows: Vec<[u32; ENTRY_COLUMNS]> =
            self.entries.iter().map(|(zone, parts)| row(*zone, parts, &mut indices)).collect();
        let counts = self.history.as_ref().map_or(&[][..], |(_, counts)| counts);
        let floats = |kind, numbers: &[f32]| {
            Array::new(&named(kind), Dtype::F32, &[numbers.len()], numbers.iter().map(|x| x.to_le_bytes()))
        };
        [
            Array::new(
                &named("entries"),
                Dtype::U32,
                &[rows.len(), ENTRY_COLUMNS],
                rows.iter().flatten().map(|x| x.to_le_bytes()),
            ),
            Array::new(
                &named("indices"),
                Dtype::U32,
                &[indices.len()],
                indices.iter().map(|x| x.to_le_bytes()),
            ),
            floats("attention", &self.attention),
            floats("norms", &self.norms),
            Array::new(
                &named("history"),
                Dtype::U16,
                &[counts.len(), 2],
                counts.iter().flatten().map(|x| x.to_le_bytes()),
            ),
        ]
    }
}

fn row(zone: Zone, parts: &EntryParts, indices: &mut Vec<u32>) -> [u32; ENTRY_COLUMNS] {
    let zone = match zone {
        Zone::Sinks => 0,
        Zone::Sealed => 1,
        Zone::Window => 2,
    };
    let (gathered, first) = match &parts.slots {
        Slots::Run { first } => (0, *first),
        Slots::Gathered(own) => {
            let first = indices.len() as u32;
            indices.extend_from_slice(own);
            (1, first)
        }
    };
    let (low, high) = (parts.live as u32, (parts.live >> 32) as u32);
    [zone, parts.class.into(), parts.count.into(), parts.closed.into(), low, high, gathered, first]
}

/// The entries that `rows` and `indices` say; whether they make sense is checked later.
pub(super) fn entries(
    what: &str,
    rows: &[[u32; ENTRY_COLUMNS]],
    mut indices: &[u32],
) -> Result<Vec<(Zone, EntryParts)>> {
    let total = indices.len();
    let entry = |(i, &row): (usize, &[u32; ENTRY_COLUMNS])| {
        let wrong =
            |field: &str, got: u32, allowed: &str| wrong(what, &format!("entry {i}: {field}"), got, allowed);
        let [zone, class, count, closed, low, high, gathered, first] = row;
        let zones = [Zone::Sinks, Zone::Sealed, Zone::Window];
        let zone = zones.get(zone as usize).ok_or_else(|| wrong("zone", zone, "0, 1 or 2"))?;
        let class = u8::try_from(class).map_err(|_| wrong("class", class, "a class of the plan"))?;
        let filled = u8::try_from(count).ok().filter(|count| (1..=64).contains(count));
        let count = filled.ok_or_else(|| wrong("count", count, "1..=64"))?;
        let flag = |field, x: u32| if x < 2 { Ok(x == 1) } else { Err(wrong(field, x, "0 or 1")) };
        let slots = if flag("gathered", gathered)? {
            let at = total - indices.len();
            let own = indices.split_at_checked(count.into()).filter(|_| first as usize == at);
            let (own, rest) = own.ok_or_else(|| {
                wrong("first", first, &format!("{at}, followed by {count} of {total} indices"))
            })?;
            indices = rest;
            Slots::Gathered(own.into())
        } else {
            Slots::Run { first }
        };
        let (closed, live) = (flag("closed", closed)?, u64::from(high) << 32 | u64::from(low));
        Ok((*zone, EntryParts { class, count, closed, live, slots }))
    };
    let entries = rows.iter().enumerate().map(entry).collect::<Result<Vec<_>>>()?;
    match indices.len() {
        0 => Ok(entries),
        left => Err(wrong(what, "indices", format!("{left} more"), "as many as entries use")),
    }
}

/// A layer without its heads, from its row of `layers`.
pub(super) fn layer(what: &str, row: [u64; LAYER_COLUMNS]) -> Result<LayerImage> {
    let count = |field: &str, x: u64| {
        let count = u32::try_from(x).ok().map(|x| x as usize);
        count.ok_or_else(|| wrong(what, field, x, "below 2^32"))
    };
    let [length, origin, longest, budget, outcome] = row;
    let outcome = match outcome {
        0 => Outcome::Waiting,
        1 => Outcome::KeptAll,
        2 => Outcome::Evicted,
        _ => return Err(wrong(what, "outcome", outcome, "0, 1 or 2")),
    };
    Ok(LayerImage {
        length: count("length", length)?,
        origin: count("origin", origin)?,
        longest: count("longest", longest)?,
        budget: if budget == UNKNOWN { None } else { Some(count("budget", budget)?) },
        outcome,
        heads: Vec::new(),
    })
}

/// Evicted tokens and history of a head without its counts, from its row of `heads`.
pub(super) fn head(what: &str, [evicted, seen]: [u64; HEAD_COLUMNS]) -> Result<HeadImage> {
    let error = |field: &str, x: u64| -> Error { wrong(what, field, x, "below 2^32") };
    let small = |field: &str, x: u64| u32::try_from(x).map(|x| x as usize).map_err(|_| error(field, x));
    let seen = if seen == UNKNOWN { None } else { Some(small("seen", seen)?) };
    Ok(HeadImage {
        evicted: small("evicted", evicted)?,
        history: seen.map(|seen| (seen, Vec::new())),
        ..HeadImage::default()
    })
}
