//! Working memory that starts on a cache line.

use std::ops::{Deref, DerefMut};

/// Chunks of 16 four-byte numbers, each a cache line: a vector that crosses from one line to the next costs two
/// accesses.
#[derive(Debug, Default)]
pub(crate) struct Lines<T = f32> {
    buffer: Vec<T>,
    chunks: usize,
}

/// Elements that a buffer has more than its chunks need, so that they can start on a line.
const SLACK: usize = 15;

impl<T: Copy + Default> Lines<T> {
    /// `count` chunks of any content; allocates only to grow.
    pub(crate) fn chunks(&mut self, count: usize) -> &mut [[T; 16]] {
        if self.buffer.len() < 16 * count + SLACK {
            self.buffer.resize(16 * count + SLACK, T::default());
        }
        self.chunks = count;
        self
    }

    fn start(&self) -> usize {
        self.buffer.as_ptr().align_offset(64).min(SLACK)
    }
}

impl<T: Copy + Default> Deref for Lines<T> {
    type Target = [[T; 16]];

    fn deref(&self) -> &[[T; 16]] {
        let all = self.buffer.get(self.start()..).unwrap_or_default();
        &all.as_chunks().0[..self.chunks]
    }
}

impl<T: Copy + Default> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [[T; 16]] {
        let (start, chunks) = (self.start(), self.chunks);
        let all = self.buffer.get_mut(start..).unwrap_or_default();
        &mut all.as_chunks_mut().0[..chunks]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_start_on_lines_whatever_was_asked_before() {
        let mut lines = Lines::<f32>::default();
        for count in [1, 7, 3, 128, 0, 129] {
            let chunks = lines.chunks(count);
            assert_eq!((chunks.len(), chunks.as_ptr().addr() % 64), (count, 0));
        }
    }
}
