//! Parking: the pages of idle sequences leave the store's memory for the host's, and come back as they were.
//!
//! A parked sequence is what [`KvStore::save`] would write, checksums included, kept in host memory: the same code
//! writes and reads it, so that no token is encoded again and a page that was damaged there is found.

use crate::file::Compress;
use crate::sequence::Sequence;
use crate::store::KvStore;
use kvrs_codec::backend::Backend;
use kvrs_core::{Error, Result, SeqId};
use std::io::Cursor;

/// A sequence in host memory.
#[derive(Debug)]
pub(crate) struct Parked(Vec<u8>);

impl Parked {
    /// Bytes of host memory.
    pub(crate) fn bytes(&self) -> u64 {
        self.0.capacity() as u64
    }

    /// What a file of the sequence would hold.
    pub(crate) fn file(&self) -> &[u8] {
        &self.0
    }
}

impl<B: Backend> KvStore<B> {
    /// Moves sequences into host memory; their pages go back to the store at once, those that others share when the
    /// others let go of them. Ids and lengths stay; whatever needs the pages is refused until
    /// [`KvStore::to_device`]. What [`KvStore::reserve`] took for them goes back too. Parked ones stay as they are.
    ///
    /// On a GPU this frees device memory. On the CPU it makes room under the capacity, and the bytes take plain memory.
    ///
    /// # Errors
    /// [`Error::Sequence`] for unknown or doubled ids, open prompts and sequences in the middle of a step,
    /// [`Error::Capacity`] if the host's memory is refused; nothing has moved then.
    pub fn to_host(&self, seqs: &[SeqId]) -> Result<()> {
        let rows = self.rows(seqs)?;
        let mut rows = rows.write_parked()?;
        let awake = || rows.iter().zip(seqs).filter(|(row, _)| row.parked.is_none());
        awake().try_for_each(|(row, id)| row.check_closed(*id))?;
        let parked = awake().map(|(row, id)| self.park(row, *id)).collect::<Result<Vec<_>>>()?;
        for (row, parked) in rows.iter_mut().filter(|row| row.parked.is_none()).zip(parked) {
            **row = parked;
        }
        Ok(())
    }

    /// Brings sequences back from host memory: they go on bit for bit as if they had never left. Those that are not
    /// parked stay as they are.
    ///
    /// # Errors
    /// [`Error::Sequence`] for unknown or doubled ids, [`Error::Capacity`] if the pages do not fit,
    /// [`Error::Format`] if host memory was damaged; nothing has moved then.
    pub fn to_device(&self, seqs: &[SeqId]) -> Result<()> {
        let rows = self.rows(seqs)?;
        let mut rows = rows.write_parked()?;
        let parked = rows.iter().zip(seqs).filter_map(|(row, id)| Some((row.parked.as_ref()?, id)));
        let read = |(parked, id): (&Parked, &SeqId)| {
            Ok(self.read_sequence(&format!("sequence {id} in host memory"), Cursor::new(parked.file()))?.0)
        };
        let sequences = parked.map(read).collect::<Result<Vec<_>>>()?;
        for (row, sequence) in rows.iter_mut().filter(|row| row.parked.is_some()).zip(sequences) {
            **row = sequence;
        }
        Ok(())
    }

    /// What is left of a sequence in the store, with its bytes.
    fn park(&self, sequence: &Sequence<B::Chunk>, id: SeqId) -> Result<Sequence<B::Chunk>> {
        let what = format!("parking sequence {id} in host memory");
        let draft = self.draft(sequence, Compress::None)?;
        let needed = draft.bytes as u64;
        let refused = |_| Error::Capacity { what: what.clone(), needed, free: 0, capacity: needed };
        let mut file = Vec::new();
        file.try_reserve_exact(draft.bytes).map_err(refused)?;
        self.write(&what, &mut file, &draft)?;
        debug_assert_eq!(file.len(), draft.bytes, "a draft knows the bytes of its file");
        let mut left = self.empty();
        (left.start, left.parked) = (sequence.start, Some(Parked(file)));
        for (left, state) in left.layers.iter_mut().zip(&sequence.layers) {
            (left.length, left.origin, left.longest) = (state.length, state.origin, state.longest);
        }
        Ok(left)
    }
}
