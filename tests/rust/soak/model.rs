//! What may happen to a store, and how often.

use proptest::prelude::*;

/// Most sequences, snapshots and files at a time.
pub(crate) const MOST: usize = 4;

/// One call. Rows and files are counted modulo what there is.
#[derive(Debug, Clone)]
pub(crate) enum Call {
    Step { rows: u8, tokens: usize, padding: u64, extend: bool },
    Create { start: i64 },
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
    Save { row: usize, deflate: bool },
    FullDisk { row: usize, percent: usize },
    Park { row: usize },
    Load { which: usize },
    Lie { which: usize, seed: u64 },
    Attend { row: usize },
    Free { row: usize },
}

/// A call, and the chunks of memory after which it runs out meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct Turn {
    pub(crate) call: Call,
    pub(crate) chunks: Option<u64>,
}

pub(crate) fn turn() -> impl Strategy<Value = Turn> {
    let chunks = prop_oneof![5 => Just(None), 1 => (0u64..3).prop_map(Some)];
    (call(), chunks).prop_map(|(call, chunks)| Turn { call, chunks })
}

fn call() -> impl Strategy<Value = Call> {
    let (row, which) = (0usize..MOST, 0usize..MOST);
    let tokens = prop_oneof![6 => 1usize..4, 2 => 4usize..40, 1 => 40usize..100];
    let rows = prop::collection::vec(0usize..MOST, MOST);
    let selected = prop::collection::vec(0usize..MOST, 1..=MOST);
    prop_oneof![
        12 => (1u8..16, tokens, any::<u64>(), any::<bool>())
            .prop_map(|(rows, tokens, padding, extend)| Call::Step { rows, tokens, padding, extend }),
        2 => (0i64..5000).prop_map(|start| Call::Create { start }),
        2 => row.clone().prop_map(|row| Call::Fork { row }),
        2 => (row.clone(), 0usize..80).prop_map(|(row, back)| Call::Truncate { row, back }),
        1 => row.clone().prop_map(|row| Call::Empty { row }),
        1 => (row.clone(), 0usize..100, 0usize..101)
            .prop_map(|(row, from, percent)| Call::Remove { row, from, percent }),
        1 => (row.clone(), 0usize..3, 1usize..6).prop_map(|(row, layer, every)| Call::Keep { row, layer, every }),
        1 => rows.prop_map(|index| Call::Reorder { index }),
        1 => selected.prop_map(|index| Call::Select { index }),
        1 => row.clone().prop_map(|row| Call::Freeze { row }),
        1 => which.clone().prop_map(|which| Call::Thaw { which }),
        1 => which.clone().prop_map(|which| Call::Forget { which }),
        1 => (row.clone(), any::<bool>()).prop_map(|(row, deflate)| Call::Save { row, deflate }),
        1 => (row.clone(), 0usize..100).prop_map(|(row, percent)| Call::FullDisk { row, percent }),
        2 => which.clone().prop_map(|which| Call::Load { which }),
        1 => row.clone().prop_map(|row| Call::Park { row }),
        1 => (which, any::<u64>()).prop_map(|(which, seed)| Call::Lie { which, seed }),
        2 => row.clone().prop_map(|row| Call::Attend { row }),
        3 => row.prop_map(|row| Call::Free { row }),
    ]
}
