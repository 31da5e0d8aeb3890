//! Codebooks as vectors search them: channels of unit variance to codes, and codes to values.

use super::encode::SimdEncode;
use kvrs_codec::codebook::Book;
use std::ops::Deref;
use std::sync::LazyLock;

/// Most bits of a book of levels; the others are uniform.
const MAX_STEPS: u32 = 6;

/// A codebook in the order of a search: step k compares with entry `index` of `2^k`, the bits that are known by then.
#[derive(Debug, Clone, Default)]
pub(crate) struct Search {
    step_0: f32,
    step_1: [f32; 4],
    step_2: [f32; 4],
    step_3: [f32; 8],
    step_4: [[f32; 8]; 2],
    step_5: [[[f32; 8]; 2]; 2],
    /// Levels less that of code 0.
    levels: [[u8; 16]; 4],
    /// The level of code 0.
    first: f32,
    step: f32,
    inverse_step: f32,
}

/// The search of a book: one of the gaussian books', or its own.
#[derive(Debug)]
pub(crate) enum Found {
    Shared(&'static Search),
    Own(Box<Search>),
}

impl Deref for Found {
    type Target = Search;

    fn deref(&self) -> &Search {
        match self {
            Self::Shared(search) => search,
            Self::Own(search) => search,
        }
    }
}

impl Search {
    /// As [`Self::new`], without work for the gaussian books.
    pub(crate) fn of(book: &Book) -> Option<Found> {
        static GAUSSIAN: LazyLock<[Search; 8]> = LazyLock::new(|| {
            std::array::from_fn(|i| {
                Search::new(Book::gaussian(i as u32 + 1)).expect("the gaussian books are searched")
            })
        });
        let width = book.width.clamp(1, 8);
        let gaussian = Book::gaussian(width);
        let same = std::ptr::eq(book.thresholds, gaussian.thresholds)
            && std::ptr::eq(book.levels, gaussian.levels)
            && book.step == gaussian.step;
        if same && book.width == width {
            return Some(Found::Shared(&GAUSSIAN[width as usize - 1]));
        }
        Self::new(book).map(|search| Found::Own(Box::new(search)))
    }

    /// `None` for a book that kernels have no search for: levels out of order, or in a table exactly if there are more
    /// than 6 bits.
    pub(crate) fn new(book: &Book) -> Option<Self> {
        let mut search =
            Self { first: book.zero(), step: book.step, inverse_step: 1.0 / book.step, ..Self::default() };
        if book.width > MAX_STEPS {
            return (book.width <= 8 && book.levels.is_empty()).then_some(search);
        }
        let count = 1usize << book.width;
        let sorted = book.thresholds.is_sorted() && book.levels.is_sorted();
        if !sorted || book.levels.len() != count || book.thresholds.len() != count - 1 {
            return None;
        }
        search.first = f32::from(book.levels[0]);
        let levels = search.levels.as_flattened_mut().iter_mut();
        levels
            .zip(book.levels)
            .for_each(|(to, level)| *to = level.wrapping_sub(book.levels[0]).cast_unsigned());
        for step in 0..book.width {
            let distance = count >> (step + 1);
            let entries = book.thresholds[distance - 1..].iter().step_by(2 * distance);
            search.entries(step).iter_mut().zip(entries).for_each(|(to, t)| *to = *t);
        }
        Some(search)
    }

    fn entries(&mut self, step: u32) -> &mut [f32] {
        match step {
            0 => std::slice::from_mut(&mut self.step_0),
            1 => &mut self.step_1,
            2 => &mut self.step_2,
            3 => &mut self.step_3,
            4 => self.step_4.as_flattened_mut(),
            _ => self.step_5.as_flattened_mut().as_flattened_mut(),
        }
    }

    /// The codes of four vectors by a book of `W` bits.
    ///
    /// Step by step for all four: a search is one long chain, and the window in which a CPU finds other work is short.
    #[inline(always)]
    pub(crate) fn codes<S: SimdEncode, const W: u32>(&self, s: S, u: [S::F; 4]) -> [S::I; 4] {
        if W > MAX_STEPS {
            let [a, b, c, d] = u;
            let (a, b) = (self.uniform_codes::<S, W>(s, a), self.uniform_codes::<S, W>(s, b));
            return [a, b, self.uniform_codes::<S, W>(s, c), self.uniform_codes::<S, W>(s, d)];
        }
        let mut index = [s.splat_i(0); 4];
        for step in 0..W {
            let mut t = [s.splat_f(self.step_0); 4];
            for i in 0..4 {
                if step > 0 {
                    t[i] = self.threshold(s, step, index[i]);
                }
            }
            for i in 0..4 {
                index[i] = s.refine(index[i], u[i], t[i]);
            }
        }
        index
    }

    /// The threshold of a step from the second on.
    #[inline(always)]
    fn threshold<S: SimdEncode>(&self, s: S, step: u32, index: S::I) -> S::F {
        match step {
            1 => s.pick4(&self.step_1, index),
            2 => s.pick4(&self.step_2, index),
            3 => s.pick8(&self.step_3, index),
            4 => s.pick16(&self.step_4, index),
            _ => s.choose::<4>(index, s.pick16(&self.step_5[1], index), s.pick16(&self.step_5[0], index)),
        }
    }

    /// Both bounds are integers, so clamping first and adding 2^23 rounds to an integer, ties to even.
    #[inline(always)]
    fn uniform_codes<S: SimdEncode, const W: u32>(&self, s: S, u: S::F) -> S::I {
        let top = ((1u32 << W) - 1) as f32;
        let level = s.sub(s.mul(u, s.splat_f(self.inverse_step)), s.splat_f(self.first));
        let clamped = s.min(s.max(level, s.splat_f(0.0)), s.splat_f(top));
        s.and(s.bits(s.add(clamped, s.splat_f(8_388_608.0))), s.splat_i(0xff))
    }

    /// The values of codes of `W` bits: `f32(level * step)`.
    #[inline(always)]
    pub(crate) fn values<S: SimdEncode, const W: u32>(&self, s: S, codes: [S::I; 4]) -> [S::F; 4] {
        let (first, step) = (s.splat_f(self.first), s.splat_f(self.step));
        let mut values = [first; 4];
        for i in 0..4 {
            values[i] = s.to_f(self.levels::<S, W>(s, codes[i]));
        }
        for value in &mut values {
            *value = s.mul(s.add(*value, first), step);
        }
        values
    }

    /// The levels of codes less that of code 0.
    #[inline(always)]
    fn levels<S: SimdEncode, const W: u32>(&self, s: S, codes: S::I) -> S::I {
        let [low, second, third, fourth] = &self.levels;
        // The bytes above a code are 0 and look up the level of code 0, which is stored as 0; further tables have
        // others there.
        match W {
            1..=4 => s.lookup16(s.table16(low), codes),
            5 => s.and(s.lookup32([low, second], codes), s.splat_i(0xff)),
            6 => {
                let (low, high) = (s.lookup32([low, second], codes), s.lookup32([third, fourth], codes));
                s.and(s.choose_i::<5>(codes, high, low), s.splat_i(0xff))
            }
            _ => codes,
        }
    }
}
