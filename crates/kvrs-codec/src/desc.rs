//! The page descriptor: plain data that says what the bytes of a page mean, and all a kernel knows of a codec.
//!
//! A stored channel has the value `(elem(code) + zero) * step * token_scale[scale] * inner_s + inner_m`, plus
//! sparse differences. Scores are `dot + base(position)`, outputs `B acc + mean * l`
//! (the preparation of the query and of the output is [`crate::SideCodec`]'s).

mod validate;

/// Most runs of a side.
pub const MAX_RUNS: usize = 40;
/// Most stored channels of a side.
pub const MAX_CHANNELS: usize = 1024;
/// Tokens of a tile.
pub const TILE: usize = 16;
/// Marks an absent index.
pub const NONE: u32 = u32::MAX;

/// Keys or values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Side {
    /// Summed over channels: tokens stand in lanes.
    Key = 0,
    /// Summed over tokens: channels stand in lanes.
    Value = 1,
}

/// How scores and sums are taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Path {
    /// On the packed codes.
    Dot = 0,
    /// On tiles of 16 tokens that are rebuilt in cache.
    Tile = 1,
}

/// What a code stands for before zero, step and scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Elem {
    /// An entry of the run's look-up table of 8-bit levels.
    Lut8 = 0,
    /// The code itself as an unsigned integer.
    Int = 1,
    /// IEEE half bits.
    F16 = 2,
    /// bfloat16 bits.
    Bf16 = 3,
    /// 8-bit float, 4 exponent bits.
    E4m3 = 4,
    /// 8-bit float, 5 exponent bits.
    E5m2 = 5,
    /// An entry of the run's look-up table of f32 values.
    Lut32 = 6,
}

/// How the vector side (query, softmax weights) is held by integer kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Arith {
    /// One int8 digit.
    I8 = 0,
    /// Two int8 digits.
    I8x2 = 1,
    /// f32.
    F32 = 2,
}

/// Scales on the summed axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Inner {
    /// None.
    None = 0,
    /// Keys: (scale, minimum) per channel and group of `block` tokens.
    GroupChannel = 1,
    /// Values: (scale, minimum) per token and block of `block` channels.
    TokenBlock = 2,
}

/// What a rebuilt tile goes through, as bits.
pub mod tile_ops {
    /// Add the sparse differences.
    pub const SPARSE: u32 = 1;
    /// Multiply with the synthesis matrix.
    pub const MATRIX: u32 = 2;
    /// Add the mean, then turn by the rotary embedding.
    pub const ROPE: u32 = 4;
}

/// A run: neighbouring stored channels of equal width.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub struct RunDesc {
    /// Bits of a code: 1..=8 or 16.
    pub width: u32,
    /// What a code stands for.
    pub elem: Elem,
    /// Arithmetic of integer kernels.
    pub arith: Arith,
    /// Index of the per-token scale, or [`NONE`].
    pub scale: u32,
    /// Channels, a multiple of 16.
    pub channels: u32,
    /// First element in the prepared vector.
    pub vec_at: u32,
    /// Byte offset inside a tile, a multiple of 32.
    pub at: u32,
    /// First entry in the side's look-up tables, or [`NONE`].
    pub lut_at: u32,
    /// Factor of a level.
    pub step: f32,
    /// Added to a level before the factor.
    pub zero: f32,
}

/// One side of a page.
#[derive(Debug, Clone, PartialEq)]
pub struct SideDesc {
    /// Dot or Tile.
    pub path: Path,
    /// Heads rebuilt from one latent (Tile); 1 otherwise.
    pub parts: u32,
    /// Channels rebuilt per part: the head dimension.
    pub d: u32,
    /// Stored channels, a multiple of 16: the sum of the runs.
    pub n: u32,
    /// Length of the prepared vector per query head.
    pub vec_len: u32,
    /// Scales on the summed axis.
    pub inner: Inner,
    /// Tokens (keys) or channels (values) that share an inner scale.
    pub block: u32,
    /// Frequency pairs of the base score; 0: none.
    pub base_pairs: u32,
    /// Sparse differences per tile.
    pub sparse_per_tile: u32,
    /// Bits of [`tile_ops`].
    pub tile_ops: u32,
    /// Bytes of a tile's codes.
    pub tile_bytes: u32,
    /// Byte offset of the first tile in the page.
    pub codes_at: u32,
    /// Per-token scales: `[scale index][slots]` f16.
    pub scales_at: u32,
    /// Number of per-token scales.
    pub scales: u32,
    /// Inner (scale, minimum) f16 pairs: keys `[group][n]`, values `[slots][blocks]`.
    pub inner_at: u32,
    /// Sparse entries `[tile][sparse_per_tile]`: u16 token * 0x400 + channel (0xffff: absent), f16 difference.
    pub sparse_at: u32,
    /// The runs, widths not rising, sketches last.
    pub runs: Vec<RunDesc>,
}

/// A page of one layer, head group and class.
#[derive(Debug, Clone, PartialEq)]
pub struct PageDesc {
    /// Tokens of a page: 16 (raw) or 64.
    pub slots: u32,
    /// Tokens that are encoded together: 16, 32 or 64.
    pub group: u32,
    /// Key-value heads that share the page.
    pub heads: u32,
    /// Bytes of a page.
    pub page_bytes: u32,
    /// Keys.
    pub key: SideDesc,
    /// Values.
    pub value: SideDesc,
}

impl PageDesc {
    /// The side's descriptor.
    #[must_use]
    pub fn side(&self, side: Side) -> &SideDesc {
        match side {
            Side::Key => &self.key,
            Side::Value => &self.value,
        }
    }

    /// Tiles of a page.
    #[must_use]
    pub fn tiles(&self) -> usize {
        self.slots as usize / TILE
    }
}
