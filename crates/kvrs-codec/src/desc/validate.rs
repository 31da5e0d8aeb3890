//! What kernels rely on: every invariant of a page descriptor, checked once when it is made.

use super::{Elem, Inner, MAX_CHANNELS, MAX_RUNS, NONE, PageDesc, Path, RunDesc, Side, SideDesc, tile_ops};
use kvrs_core::{Error, Result};

impl PageDesc {
    /// Checks every invariant that kernels rely on (widths, alignment, no overlap, bounds).
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field of the descriptor.
    pub fn validate(&self) -> Result<()> {
        if self.slots != 16 && self.slots != 64 {
            return Err(Error::plan("page.slots", self.slots, "16 or 64"));
        }
        if ![16, 32, 64].contains(&self.group) || self.group > self.slots.max(16) {
            return Err(Error::plan("page.group", self.group, "16, 32 or 64, not above the slots"));
        }
        if self.heads == 0 {
            return Err(Error::plan("page.heads", 0, "at least 1"));
        }
        self.key.validate(Side::Key, self)?;
        self.value.validate(Side::Value, self)
    }
}

/// Where a part of a page lies, for messages and overlap checks.
struct Region {
    field: &'static str,
    start: u64,
    bytes: u64,
}

impl SideDesc {
    /// Checks every invariant of this side that kernels rely on.
    ///
    /// # Errors
    /// [`Error::Plan`] naming the field, its value and what is allowed.
    pub fn validate(&self, side: Side, page: &PageDesc) -> Result<()> {
        let check = Checker(side);
        check.range("n", self.n, 1, MAX_CHANNELS as u32)?;
        check.range("d", self.d, 1, MAX_CHANNELS as u32)?;
        check.range("parts", self.parts, 1, MAX_CHANNELS as u32 / self.d)?;
        check.that("parts", self.parts == page.heads, self.parts, "the heads of the page")?;
        self.validate_path(side, &check)?;
        self.validate_inner(side, page, &check)?;
        self.validate_runs(&check)?;
        self.validate_regions(side, page, &check)
    }

    fn validate_path(&self, side: Side, check: &Checker) -> Result<()> {
        let known = tile_ops::SPARSE | tile_ops::MATRIX | tile_ops::ROPE;
        check.that("tile_ops", self.tile_ops & !known == 0, self.tile_ops, "bits 1, 2 and 4")?;
        if self.path == Path::Dot {
            check.that("parts", self.parts == 1, self.parts, "1 on the Dot path")?;
            check.that("tile_ops", self.tile_ops == 0, self.tile_ops, "0 on the Dot path")?;
            check.range("vec_len", self.vec_len, 1, MAX_CHANNELS as u32)?;
        } else {
            check.that("vec_len", self.vec_len == self.d, self.vec_len, "d on the Tile path")?;
            let sparse = self.tile_ops & tile_ops::SPARSE != 0;
            check.that(
                "tile_ops",
                sparse == (self.sparse_per_tile > 0),
                self.tile_ops,
                "bit 1 with sparse entries",
            )?;
            let full = self.tile_ops & tile_ops::MATRIX != 0 || self.n >= self.parts * self.d;
            check.that("n", full, self.n, "at least parts * d without a matrix")?;
        }
        let turns = self.tile_ops & tile_ops::ROPE != 0;
        check.that("tile_ops", !turns || side == Side::Key, self.tile_ops, "no rotation of values")?;
        let base = self.base_pairs == 0
            || side == Side::Key && self.path == Path::Dot && self.base_pairs <= self.d.div_ceil(2);
        check.that("base_pairs", base, self.base_pairs, "0, or up to d / 2 for keys of the Dot path")
    }

    fn validate_inner(&self, side: Side, page: &PageDesc, check: &Checker) -> Result<()> {
        let fits = match (self.inner, side) {
            (Inner::None, _) => return Ok(()),
            (Inner::GroupChannel, Side::Key) => {
                [16, 32, 64].contains(&self.block) && self.block <= page.group
            }
            (Inner::TokenBlock, Side::Value) => self.block > 0 && self.block.is_multiple_of(16),
            _ => false,
        };
        let allowed = "keys: 16, 32 or 64 tokens, not above the group; values: channels, a multiple of 16";
        check.that("inner", fits, format!("{:?} of {}", self.inner, self.block), allowed)
    }

    fn validate_runs(&self, check: &Checker) -> Result<()> {
        let count = self.runs.len();
        check.that("runs", (1..=MAX_RUNS).contains(&count), count, "1..=40 runs")?;
        let (mut channels, mut end, mut width) = (0u64, 0u64, u32::MAX);
        for (i, run) in self.runs.iter().enumerate() {
            run.validate(i, self, check)?;
            check.that(
                "runs",
                run.width <= width,
                format!("{} bits after {width}", run.width),
                "widths not rising",
            )?;
            check.that(
                "runs",
                u64::from(run.at) >= end,
                format!("at {}", run.at),
                "runs that do not overlap",
            )?;
            width = run.width;
            channels += u64::from(run.channels);
            end = u64::from(run.at) + 2 * u64::from(run.channels) * u64::from(run.width);
        }
        check.that("n", channels == u64::from(self.n), self.n, "the channels of the runs")?;
        check.that(
            "tile_bytes",
            end <= u64::from(self.tile_bytes),
            self.tile_bytes,
            "at least the bytes of the runs",
        )
    }

    fn regions(&self, page: &PageDesc) -> [Region; 4] {
        let [slots, tiles] = [page.slots, page.slots / 16].map(u64::from);
        let inner = match self.inner {
            Inner::None => 0,
            Inner::GroupChannel => slots.div_ceil(u64::from(self.block)) * u64::from(self.n),
            Inner::TokenBlock => slots * u64::from(self.n.div_ceil(self.block)),
        };
        let region = |field, at: u32, bytes| Region { field, start: at.into(), bytes };
        [
            region("codes_at", self.codes_at, tiles * u64::from(self.tile_bytes)),
            region("scales_at", self.scales_at, 2 * slots * u64::from(self.scales)),
            region("inner_at", self.inner_at, 4 * inner),
            region("sparse_at", self.sparse_at, 4 * tiles * u64::from(self.sparse_per_tile)),
        ]
    }

    fn validate_regions(&self, side: Side, page: &PageDesc, check: &Checker) -> Result<()> {
        let mut all: Vec<Region> = self.regions(page).into();
        for region in &all {
            let step = if region.field == "codes_at" { 32 } else { 2 };
            let inside = region.bytes == 0 || region.start + region.bytes <= u64::from(page.page_bytes);
            check.that(region.field, inside, region.start, "a place inside the page")?;
            let aligned = region.bytes == 0 || region.start % step == 0;
            check.that(region.field, aligned, region.start, format!("a multiple of {step}"))?;
        }
        check.that("tile_bytes", self.tile_bytes.is_multiple_of(32), self.tile_bytes, "a multiple of 32")?;
        if side == Side::Value {
            all.extend(page.key.regions(page));
        }
        all.retain(|region| region.bytes > 0);
        all.sort_by_key(|region| region.start);
        all.windows(2).try_for_each(|pair| {
            let apart = pair[0].start + pair[0].bytes <= pair[1].start;
            check.that(pair[1].field, apart, pair[1].start, format!("a place behind {}", pair[0].field))
        })
    }
}

impl RunDesc {
    fn validate(&self, index: usize, side: &SideDesc, check: &Checker) -> Result<()> {
        let name = |field: &str| format!("runs[{index}].{field}");
        let width = (1..=8).contains(&self.width) || self.width == 16;
        check.that(name("width"), width, self.width, "1..=8 or 16")?;
        let fits = match self.elem {
            Elem::Lut8 | Elem::Lut32 => self.width <= 8 && self.lut_at != NONE,
            Elem::Int => self.width <= 8,
            Elem::F16 | Elem::Bf16 => self.width == 16,
            Elem::E4m3 | Elem::E5m2 => self.width == 8,
        };
        let got = format!("{:?} of {} bits", self.elem, self.width);
        check.that(name("elem"), fits, got, "a table, integer or float of that width")?;
        let channels = self.channels > 0 && self.channels.is_multiple_of(16) && self.channels <= side.n;
        check.that(name("channels"), channels, self.channels, "a multiple of 16, not above n")?;
        check.that(name("at"), self.at.is_multiple_of(32), self.at, "a multiple of 32")?;
        let scale = self.scale == NONE || self.scale < side.scales;
        check.that(name("scale"), scale, self.scale, format!("below {} or none", side.scales))?;
        let end = u64::from(self.vec_at) + u64::from(self.channels);
        let inside = side.path == Path::Tile || end <= u64::from(side.vec_len);
        check.that(name("vec_at"), inside, self.vec_at, "a place inside the prepared vector")?;
        let plain = self.width != 16 || (self.step, self.zero) == (1.0, 0.0);
        let got = format!("step {} and zero {}", self.step, self.zero);
        check.that(name("step"), plain, got, "1 and 0 for 16-bit rows")?;
        check.that(name("step"), self.step.is_finite(), self.step, "a finite number")?;
        check.that(name("zero"), self.zero.is_finite(), self.zero, "a finite number")
    }
}

/// Builds errors that name a field of one side.
struct Checker(Side);

impl Checker {
    fn that(
        &self,
        field: impl AsRef<str>,
        ok: bool,
        got: impl ToString,
        allowed: impl ToString,
    ) -> Result<()> {
        let side = if self.0 == Side::Key { "key" } else { "value" };
        if ok { Ok(()) } else { Err(Error::plan(format!("page.{side}.{}", field.as_ref()), got, allowed)) }
    }

    fn range(&self, field: &str, got: u32, low: u32, high: u32) -> Result<()> {
        self.that(field, (low..=high).contains(&got), got, format!("{low}..={high}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desc::Arith;

    fn side(codes_at: u32, scales_at: u32) -> SideDesc {
        let run = |width, elem, at, vec_at| RunDesc {
            width,
            elem,
            arith: Arith::F32,
            scale: 0,
            channels: 32,
            vec_at,
            at,
            lut_at: 0,
            step: 1.0,
            zero: 0.0,
        };
        SideDesc {
            path: Path::Dot,
            parts: 1,
            d: 64,
            n: 64,
            vec_len: 64,
            inner: Inner::None,
            block: 0,
            base_pairs: 0,
            sparse_per_tile: 0,
            tile_ops: 0,
            tile_bytes: 448,
            codes_at,
            scales_at,
            scales: 1,
            inner_at: 0,
            sparse_at: 0,
            runs: vec![run(4, Elem::Lut8, 0, 0), run(3, Elem::Int, 256, 32)],
        }
    }

    fn page() -> PageDesc {
        let (key, value) = (side(0, 3584), side(1792, 3712));
        PageDesc { slots: 64, group: 16, heads: 1, page_bytes: 3840, key, value }
    }

    fn refused(change: impl FnOnce(&mut PageDesc), expected: &str) {
        let mut page = page();
        change(&mut page);
        let message = page.validate().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }

    #[test]
    fn a_sound_page_is_accepted() {
        page().validate().unwrap();
    }

    #[test]
    fn every_broken_field_is_refused_by_name() {
        refused(|p| p.slots = 32, "page.slots is 32");
        refused(|p| p.group = 128, "page.group is 128");
        refused(|p| p.heads = 2, "page.key.parts is 1");
        refused(|p| p.key.n = 48, "page.key.n is 48; allowed: the channels of the runs");
        refused(|p| p.key.n = 4096, "page.key.n is 4096; allowed: 1..=1024");
        refused(|p| p.key.runs.clear(), "page.key.runs is 0");
        refused(|p| p.value.runs[0].width = 9, "page.value.runs[0].width is 9");
        refused(|p| p.value.runs[0].width = 2, "3 bits after 2");
        refused(|p| p.key.runs[1].at = 224, "page.key.runs is at 224");
        refused(|p| p.key.runs[1].at = 250, "page.key.runs[1].at is 250");
        refused(|p| p.key.runs[0].elem = Elem::F16, "F16 of 4 bits");
        refused(|p| p.key.runs[0].lut_at = NONE, "page.key.runs[0].elem");
        refused(|p| p.key.runs[0].scale = 1, "page.key.runs[0].scale is 1");
        refused(|p| p.key.runs[0].vec_at = 48, "page.key.runs[0].vec_at is 48");
        refused(|p| p.key.runs[0].step = f32::NAN, "page.key.runs[0].step is NaN");
        refused(|p| p.key.tile_bytes = 416, "page.key.tile_bytes is 416");
        refused(|p| p.key.tile_ops = 8, "page.key.tile_ops is 8");
        refused(|p| p.value.base_pairs = 1, "page.value.base_pairs is 1");
    }

    #[test]
    fn parts_of_a_page_may_not_overlap_or_leave_it() {
        refused(|p| p.page_bytes = 3839, "page.value.scales_at is 3712; allowed: a place inside the page");
        refused(|p| p.value.codes_at = 1760, "page.value.codes_at is 1760; allowed: a place behind codes_at");
        refused(|p| p.value.scales_at = 3600, "scales_at is 3600; allowed: a place behind scales_at");
        refused(|p| p.key.codes_at = u32::MAX - 31, "page.key.codes_at");
    }

    #[test]
    fn scales_on_the_summed_axis_belong_to_their_side() {
        let inner = |inner, block| move |s: &mut SideDesc| (s.inner, s.block) = (inner, block);
        refused(|p| inner(Inner::TokenBlock, 32)(&mut p.key), "page.key.inner is TokenBlock of 32");
        refused(|p| inner(Inner::GroupChannel, 32)(&mut p.key), "page.key.inner is GroupChannel of 32");
        refused(|p| inner(Inner::TokenBlock, 24)(&mut p.value), "page.value.inner is TokenBlock of 24");
    }

    #[test]
    fn the_tile_path_needs_a_matrix_or_all_channels() {
        let tile = |s: &mut SideDesc| (s.path, s.d, s.vec_len) = (Path::Tile, 80, 80);
        refused(|p| tile(&mut p.key), "page.key.n is 64; allowed: at least parts * d");
        let mut page = page();
        tile(&mut page.key);
        page.key.tile_ops = tile_ops::MATRIX | tile_ops::ROPE;
        page.validate().unwrap();
    }
}
