//! A slab: 64, 128 or 256 KiB (more for larger pages) cut in pages of one size.

use super::space::UNIT;

/// The slab orders (2^n units) that pages of up to 256 KiB use.
const ORDERS: u32 = 3;

/// Pages of one size, side by side, with a bit for each free one.
#[derive(Debug)]
pub(super) struct Slab {
    pub(super) page_bytes: u32,
    pub(super) order: u32,
    pub(super) pages: u32,
    pub(super) free: u32,
    bits: Vec<u64>,
}

/// Whole pages in a slab of 2^order units.
pub(super) fn capacity(page_bytes: u32, order: u32) -> u32 {
    ((UNIT << order) / u64::from(page_bytes)) as u32
}

/// Slab order for pages of that size: the smallest that wastes less than 2 %, else the least wasting.
pub(super) fn order_for(page_bytes: u32) -> u32 {
    let units = u64::from(page_bytes).div_ceil(UNIT);
    if units > 1 << (ORDERS - 1) {
        return units.next_power_of_two().trailing_zeros();
    }
    // Scaled to the largest slab, so that slabs of different sizes compare.
    let waste = |order: u32| {
        let bytes = UNIT << order;
        (bytes - u64::from(capacity(page_bytes, order)) * u64::from(page_bytes)) << (ORDERS - 1 - order)
    };
    let limit = (UNIT << (ORDERS - 1)) / 50;
    (0..ORDERS)
        .find(|&order| waste(order) < limit)
        .unwrap_or_else(|| (0..ORDERS).min_by_key(|&order| waste(order)).unwrap_or(0))
}

impl Slab {
    pub(super) fn new(page_bytes: u32, order: u32) -> Self {
        let pages = capacity(page_bytes, order);
        let mut bits = vec![u64::MAX; pages.div_ceil(64) as usize];
        if let (Some(last), 1..) = (bits.last_mut(), pages % 64) {
            *last = (1 << (pages % 64)) - 1;
        }
        Self { page_bytes, order, pages, free: pages, bits }
    }

    /// The first free page by address.
    pub(super) fn take(&mut self) -> Option<u32> {
        let word = self.bits.iter().position(|&bits| bits != 0)?;
        let bit = self.bits[word].trailing_zeros();
        self.bits[word] &= self.bits[word] - 1;
        self.free -= 1;
        Some(word as u32 * 64 + bit)
    }

    /// Frees a page.
    pub(super) fn put(&mut self, index: u32) {
        let mask = 1 << (index % 64);
        let bits = &mut self.bits[index as usize / 64];
        debug_assert_eq!(*bits & mask, 0, "a page is freed once");
        *bits |= mask;
        self.free += 1;
    }

    /// Whether the free count is the number of free bits.
    pub(super) fn is_consistent(&self) -> bool {
        self.free == self.bits.iter().map(|bits| bits.count_ones()).sum::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_waste_little() {
        assert_eq!((order_for(8 << 10), capacity(8 << 10, 0)), (0, 8));
        assert_eq!((order_for(8448), capacity(8448, 2)), (2, 31), "4 bits at 128 channels");
        assert_eq!(order_for(64), 0);
        assert_eq!(order_for(3136), 1, "64 KiB would waste 4 %");
        assert_eq!(order_for(80 << 10), 2, "240 of 256 KiB: nothing wastes less than 2 %");
        assert_eq!(order_for(96 << 10), 1, "the smaller of two that waste alike");
        assert_eq!(order_for(256 << 10), 2);
        assert_eq!(order_for((256 << 10) + 64), 3);
    }

    #[test]
    fn pages_come_in_address_order() {
        let mut slab = Slab::new(64, 0);
        assert_eq!(
            (0..1024).map(|_| slab.take()).collect::<Vec<_>>(),
            (0..1024).map(Some).collect::<Vec<_>>()
        );
        assert_eq!(slab.take(), None);
        slab.put(700);
        slab.put(3);
        assert_eq!((slab.take(), slab.take()), (Some(3), Some(700)));
    }
}
