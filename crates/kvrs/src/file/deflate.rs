//! The cold tier: pages of a section as one DEFLATE stream (RFC 1950), written and read piece by piece.

use kvrs_core::{Error, Result};
use miniz_oxide::deflate::core::{CompressorOxide, create_comp_flags_from_zip_params};
use miniz_oxide::deflate::stream::deflate;
use miniz_oxide::inflate::stream::{InflateState, inflate};
use miniz_oxide::{DataFormat, MZError, MZFlush, MZStatus};
use std::io::Read;

/// Trade of time for size: 6 of 0 to 10, as the tools default to.
const LEVEL: i32 = 6;
/// Bytes that go through at once.
const PIECE: usize = 64 << 10;

/// A stream that is being written into memory.
pub(super) struct Deflater {
    state: Box<CompressorOxide>,
    out: Vec<u8>,
    taken: usize,
}

impl Deflater {
    pub(super) fn new() -> Self {
        let flags = create_comp_flags_from_zip_params(LEVEL, 15, 0);
        Self { state: Box::new(CompressorOxide::new(flags)), out: Vec::new(), taken: 0 }
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.taken += bytes.len();
        self.run(bytes, MZFlush::None);
    }

    /// The stream, filled up with zeros to half of what went in: a file never unpacks to more than twice its size.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.run(&[], MZFlush::Finish);
        let least = self.taken.div_ceil(2);
        if self.out.len() < least {
            self.out.resize(least, 0);
        }
        self.out
    }

    fn run(&mut self, mut bytes: &[u8], flush: MZFlush) {
        loop {
            let at = self.out.len();
            self.out.resize(at + PIECE, 0);
            let result = deflate(&mut self.state, bytes, &mut self.out[at..], flush);
            self.out.truncate(at + result.bytes_written);
            bytes = &bytes[result.bytes_consumed..];
            let full = result.bytes_written == PIECE;
            match result.status {
                Ok(MZStatus::StreamEnd) => return,
                Ok(_) | Err(MZError::Buf) if !full && bytes.is_empty() => return,
                Ok(_) | Err(MZError::Buf) => {}
                Err(e) => panic!("internal error: deflate: {e:?}"),
            }
        }
    }
}

/// A stream that is being read.
pub(super) struct Inflater {
    state: Box<InflateState>,
    input: Vec<u8>,
    at: usize,
    ended: bool,
}

impl Inflater {
    pub(super) fn new() -> Self {
        let state = InflateState::new_boxed(DataFormat::Zlib);
        Self { state, input: Vec::with_capacity(PIECE), at: 0, ended: false }
    }

    /// The next bytes of the stream; `what` names it in errors.
    pub(super) fn fill(&mut self, what: &str, source: &mut impl Read, out: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < out.len() {
            match self.step(what, source, &mut out[done..])? {
                0 if self.ended => {
                    return Err(Error::format(what, "fewer bytes", "the bytes of all its pages"));
                }
                n => done += n,
            }
        }
        Ok(())
    }

    /// Checks that the stream ends here, with nothing but zeros behind it.
    pub(super) fn end(mut self, what: &str, source: &mut impl Read) -> Result<()> {
        let behind = || Error::format(what, "more bytes", "the end of its pages, then zeros");
        while !self.ended {
            if self.step(what, source, &mut [0])? > 0 {
                return Err(behind());
            }
        }
        while self.at < self.input.len() || self.refill(what, source)? {
            if self.input[self.at..].iter().any(|byte| *byte != 0) {
                return Err(behind());
            }
            self.at = self.input.len();
        }
        Ok(())
    }

    fn step(&mut self, what: &str, source: &mut impl Read, out: &mut [u8]) -> Result<usize> {
        if self.at == self.input.len() && !self.ended {
            self.refill(what, source)?;
        }
        let input = &self.input[self.at..];
        let result = inflate(&mut self.state, input, out, MZFlush::None);
        self.at += result.bytes_consumed;
        match result.status {
            Ok(MZStatus::StreamEnd) => self.ended = true,
            Ok(_) if result.bytes_written + result.bytes_consumed > 0 => {}
            status => return Err(Error::format(what, format!("{status:?}"), "a whole DEFLATE stream")),
        }
        Ok(result.bytes_written)
    }

    /// Reads on; false at the end of the section.
    fn refill(&mut self, what: &str, source: &mut impl Read) -> Result<bool> {
        self.input.resize(PIECE, 0);
        let n = source.read(&mut self.input);
        let n = n.map_err(|e| Error::Io { what: format!("reading {what}"), got: e.to_string() })?;
        self.input.truncate(n);
        self.at = 0;
        Ok(n > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stream(bytes: &[u8], piece: usize) -> Vec<u8> {
        let mut deflater = Deflater::new();
        bytes.chunks(piece).for_each(|piece| deflater.push(piece));
        deflater.finish()
    }

    fn samples() -> Vec<Vec<u8>> {
        let noise = {
            let mut state = 1u64;
            let step = |_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (state >> 56) as u8
            };
            (0..300_000).map(step).collect()
        };
        vec![vec![], vec![7], vec![0; 200_000], noise, (0..100_000u32).map(|i| (i / 100) as u8).collect()]
    }

    #[test]
    fn a_stream_comes_back_whatever_the_pieces_and_is_at_least_half_as_long() {
        for bytes in samples() {
            let packed = stream(&bytes, 4096);
            assert_eq!(packed, stream(&bytes, 1 << 20));
            assert!(packed.len() * 2 >= bytes.len());
            let (mut source, mut inflater) = (&packed[..], Inflater::new());
            let mut out = vec![1; bytes.len()];
            out.chunks_mut(1000).for_each(|out| inflater.fill("x", &mut source, out).unwrap());
            inflater.end("x", &mut source).unwrap();
            assert_eq!(out, bytes);
        }
    }

    #[test]
    fn streams_that_are_cut_or_go_on_are_refused() {
        let bytes = samples().swap_remove(3);
        let packed = stream(&bytes, 4096);
        let read = |packed: &[u8], n: usize| {
            let (mut source, mut inflater) = (packed, Inflater::new());
            inflater.fill("x", &mut source, &mut vec![0; n]).and_then(|()| inflater.end("x", &mut source))
        };
        assert_eq!(read(&packed, bytes.len()), Ok(()));
        assert!(read(&packed[..packed.len() / 2], bytes.len()).is_err());
        assert!(read(&packed[..packed.len() - 1], bytes.len()).is_err());
        assert!(read(&packed, bytes.len() - 1).is_err());
        assert!(read(&packed, bytes.len() + 1).is_err());
        assert!(read(&[&packed[..], &[0, 0, 1]].concat(), bytes.len()).is_err());
        assert_eq!(read(&[&packed[..], &[0, 0]].concat(), bytes.len()), Ok(()));
        assert!(read(b"not a stream at all", 5).is_err());
    }
}
